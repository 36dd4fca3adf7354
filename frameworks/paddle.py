"""PaddlePaddle's auto-tuner: the JSON of `paddle.distributed.launch --auto_tuner_json`.

The meaning of `auto` and of missing settings, and their form in `run_cmd`, follow
python/paddle/distributed/auto_tuner/utils.py.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..base.errors import UsageError
from .deepspeed import conventions
from .framework import Framework, KnobSettings, KnobTable, Stated
from .stated_space import (
    Draft,
    Format,
    declare_degrees,
    declare_micro_batch,
    divisors,
    identifiers,
    listed,
    section,
    share,
    whole_numbers,
    whole_range,
)

_DEGREES = {"mp_degree": "tp", "pp_degree": "pp", "sharding_degree": "sharding_degree"}
_GRANULARITIES = ("full", "full_attn", "core_attn")
_READ = (
    *("dp_degree", *_DEGREES, "vpp_degree", "sharding_stage", "micro_batch_size", "use_recompute"),
    *("recompute_granularity", "model_cfg", "run_cmd", "num_gpus", "nodes", "gpus_per_node", "custom_search_dim"),
    "metric_cfg",
)
_BESIDE = {
    "refined_recompute": "there is no knob for the number of layers of each operator that are recomputed; --set gives it values",
    "max_time_per_task": "--trial-timeout TIME bounds a trial",
    "max_search_time": "--time TIME bounds the search",
    "task_limit": "--trials N bounds the search",
    "search_algo": "redline's own sampler proposes; --sampler grid tries all",
    "mode": "redline's own sampler proposes; --sampler grid tries all",
    "schedule_mode": "redline's own sampler orders what is tried",
    "schedule_prior": "redline's own sampler orders what is tried",
}
_RATES = ("tokens_per_second", "samples_per_second")


def _recognises(document: Any) -> bool:
    return isinstance(document, Mapping) and any(
        name in document for name in ("dp_degree", "mp_degree", "pp_degree", "sharding_degree")
    )


def _read(document: Any, draft: Draft) -> None:
    model = section(document.get("model_cfg"), "model_cfg")
    draft.leave_all((key for key in document if key not in _READ), _BESIDE)
    devices = document.get("num_gpus")
    if type(devices) is int and devices != draft.devices:
        draft.say(f"the file is for {devices} devices (num_gpus), here are {draft.devices}")
    replicas = _degrees(document, model, draft)
    layers = _size(model, "num_layers")
    _stages(document, layers, draft)
    if draft.global_batch is None:
        total, given_total = _size(model, "global_batch_size"), False
    else:
        total, given_total = draft.global_batch, True
    given = _range(document.get("micro_batch_size", 1), "micro_batch_size")
    if declare_micro_batch(draft, "micro_batch_size", given, total, given_total) and total:
        share(draft, total, replicas)
        if "virtual_stages" in draft.space.by_name:
            draft.require("(virtual_stages == 1) | (grad_accum % pp == 0)", "interleaved stages go round")
    _recomputation(document, draft)
    for key, values in section(document.get("custom_search_dim"), "custom_search_dim").items():
        draft.knob(key, listed(values["value"] if isinstance(values, Mapping) and "value" in values else values, ()))
    _metric(document.get("metric_cfg"), draft)
    _read_run_cmd(section(document.get("run_cmd"), "run_cmd"), draft, replicas, total)


def _size(model: Mapping[str, Any], name: str) -> int | None:
    value = model.get(name)
    return value if type(value) is int and value > 0 else None


def _range(given: Any, shown: str) -> Any:
    """Parses Paddle's ranges: `auto`, a list, a number, or `min` and `max`."""
    if isinstance(given, Mapping):
        low, high = given.get("min"), given.get("max")
        if type(low) is not int or type(high) is not int or not 0 < low <= high:
            raise UsageError(f"{shown} must have min and max, whole numbers of at least 1, but is {dict(given)}")
        return whole_range(low, high, shown)
    return "auto" if isinstance(given, str) and "auto" in given.lower() else given


def _degrees(document: Mapping[str, Any], model: Mapping[str, Any], draft: Draft) -> str:
    """Declares the degrees; returns an expression for the number of replicas, including sharded ones."""
    every, found = divisors(draft.devices), {}
    for shown, name in _DEGREES.items():
        values = whole_numbers(listed(_range(document.get(shown, 1), shown), every), shown)
        divided = {"tp": ("hidden_size", "vocab_size", "num_attention_heads"), "pp": ("num_layers",)}.get(name, ())
        for size in filter(None, (_size(model, each) for each in divided)):
            values = divisors(size, values)
        if not values:
            raise UsageError(f"{shown} {document[shown]}: none of them divides {' and '.join(divided)} of model_cfg")
        found[name] = (shown, values)
    factors = declare_degrees(draft, found)
    space, devices = draft.space, draft.devices
    if not factors:
        return str(devices)
    ways = [name for name in ("tp", "pp") if name in space.by_name]
    space.derive("dp", f"{devices} // ({' * '.join(ways)})", help="replicas, sharded ones among them") if ways else None
    space.derive("dp_degree", f"{devices} // ({factors})", help="replicas of what is sharded")
    space.require(f"{factors} * dp_degree == {devices}", f"there are {devices} devices")
    replicas = whole_numbers(listed(_range(document.get("dp_degree", 1), "dp_degree"), every), "dp_degree")
    if set(replicas) != set(every):
        draft.require(f"dp_degree in {divisors(devices, replicas) or replicas}", "dp_degree")
    stages = listed(_range(document.get("sharding_stage", 1), "sharding_stage"), [1, 2, 3])
    if "sharding_degree" in space.by_name:
        draft.knob("sharding_stage", stages, name="zero", when="sharding_degree > 1")
    else:
        draft.off("sharding_stage")
    return "dp" if ways else str(devices)


def _stages(document: Mapping[str, Any], layers: int | None, draft: Draft) -> None:
    given = _range(document.get("vpp_degree", 1), "vpp_degree")
    if given == "auto" and layers is None:
        draft.leave("vpp_degree", "its range ends at num_layers of model_cfg; --set virtual_stages=1,2 gives values")
        return
    values = listed(given, divisors(layers or 1))
    if values == [1] or "pp" not in draft.space.by_name:
        draft.off("vpp_degree=1")
    elif draft.knob("vpp_degree", values, name="virtual_stages") and layers:
        draft.require(f"{layers} % (pp * virtual_stages) == 0", f"{layers} layers")


def _recomputation(document: Mapping[str, Any], draft: Draft) -> None:
    use = listed(document.get("use_recompute"), [True, False])
    if use in ([None], [False], []):
        draft.off("use_recompute=false")
        return
    granularity = listed(document.get("recompute_granularity"), _GRANULARITIES)
    if granularity in ([None], [], ["full"]):
        ratios = [float(each) if isinstance(each, bool) else each for each in use]
        draft.knob("use_recompute", ratios, name="checkpoint_ratio")
    elif draft.knob("use_recompute", use):
        draft.knob("recompute_granularity", granularity, when="use_recompute")


def _metric(metric: Any, draft: Draft) -> None:
    """Declares a metric that is printed after its name, as Paddle's tuner reads it."""
    if not isinstance(metric, Mapping) or not isinstance(metric.get("name"), str):
        return
    name = metric["name"]
    group = next((each for each in _RATES if name.endswith(each)), identifiers([name])[name])
    draft.metric = rf"{re.escape(name)}:* *(?P<{group}>\d+(?:\.\d*)?)"
    if group not in _RATES:
        draft.direction = "min" if str(metric.get("OptimizationDirection", "Maximize")).lower() == "minimize" else "max"


def _read_run_cmd(run: Mapping[str, Any], draft: Draft, replicas: str, total: int | None) -> None:
    """Passes the knobs of `run_cmd` to the script: by an option, by `-o KEY=VALUE`, or in a file that it reads."""
    known = draft.space.by_name
    ways = {shown: name if name in known else "1" for shown, name in _DEGREES.items()}
    values = {
        **ways,
        "dp_degree": "dp_degree" if "dp_degree" in known else str(draft.devices),
        "vpp_degree": "virtual_stages" if "virtual_stages" in known else "1",
        "sharding_stage": "zero" if "zero" in known else "1",
        "micro_batch_size": "micro_batch",
        "local_batch_size": "micro_batch * grad_accum",
        "gradient_accumulation_steps": "grad_accum",
        "global_batch_size": str(total) if total else "",
        "sequence_parallel": "min(tp - 1, 1)" if "tp" in known else "0",
        "use_recompute": "checkpoint_ratio == 1" if "checkpoint_ratio" in known else "use_recompute",
        "recompute_granularity": "recompute_granularity",
    }
    for key, place in run.items():
        if key in ("search_stage", "run_best_stage") and isinstance(place, Mapping):
            if key == "search_stage":
                for words in place.values():
                    _place(words, "", key, draft)
            continue
        if isinstance(place, bool):  # generate_launch_cfg
            continue
        value = values.get(key, identifiers([key])[key])
        names = re.findall(r"[a-z_]\w*", value.replace("min(", ""))
        if not value or any(name not in known for name in names):
            draft.leave(f"run_cmd.{key}", "there is no such knob here")
            continue
        _place(place, value, key, draft)


def _place(place: Any, value: str, key: str, draft: Draft) -> None:
    if not isinstance(place, list) or len(place) < 2 or not all(isinstance(each, str) for each in place[:2]):
        draft.leave(f"run_cmd.{key}", f"it must be a list of an option or a file and what follows, but is {place!r}")
        return
    written = f"{{{value}!s}}" if value else ""
    where, what, *more = place
    if where.endswith((".json", ".yaml")):
        text = f"{more[0]}{written}" if more and value else f"{{{value}}}" if value else str(more[0] if more else "")
        draft.render.append(f"{where}:{what}={text}")
    elif "--" in where:
        draft.options.append((where, f"{what}{written}"))
    else:
        draft.options.append((f"{where} {what}=", written) if value else (where, what))


FORMAT = Format(
    name="PaddlePaddle's auto-tuner",
    holds="dp_degree, mp_degree, pp_degree or sharding_degree",
    recognises=_recognises,
    read=_read,
)


KNOBS = KnobTable(
    KnobSettings(knob="tp", keys=("tensor_parallel_degree",)),
    KnobSettings(knob="pp", keys=("pipeline_parallel_degree",)),
    KnobSettings(knob="sp", keys=("sep_parallel_degree",)),
    KnobSettings(knob="micro_batch", keys=("per_device_train_batch_size",)),
    KnobSettings(knob="grad_accum", keys=("gradient_accumulation_steps",)),
    KnobSettings(knob="sequence_parallel", ways=({value: {"sequence_parallel": value} for value in (False, True)},)),
    KnobSettings(knob="zero", ways=({stage: {"sharding": f"stage{stage}"} for stage in (1, 2, 3)},)),
    KnobSettings(knob="checkpoint_ratio", ways=({0: {"recompute": False}, 1: {"recompute": True}},)),
    KnobSettings(
        knob="precision",
        ways=({"bf16": {"bf16": True}, "fp16": {"fp16": True}, "fp32": {"bf16": False}},),
    ),
    KnobSettings(
        knob="attention",
        ways=({"flash_attention_2": {"use_flash_attention": True}, "eager": {"use_flash_attention": False}},),
    ),
    KnobSettings(knob="virtual_stages", keys=("virtual_pp_degree",)),
)
"""PaddleNLP's names of the knobs in its training arguments."""


def _replicas_of(stated: Stated) -> None:
    """Reads settings of a pipeline, and recomputation policies of less than whole blocks."""
    if stated.knobs.get("virtual_stages", 1) > 1:
        stated.knobs["pipeline_schedule"] = "interleaved"
    if str(stated.get("recompute_granularity") or "full") in ("core_attn", "full_attn") and stated.flag("recompute"):
        stated.knobs["checkpoint_ratio"] = 0
        stated.conventions["recompute_attention"] = True


FRAMEWORK = Framework(
    name="paddle",
    title="PaddleNLP",
    knobs=KNOBS,
    signs=(
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "sharding_parallel_degree",
        "sep_parallel_degree",
        "sharding",
        "fp16_opt_level",
        "virtual_pp_degree",
        "recompute_granularity",
        "use_flash_attention",
    ),
    programs=("paddle.distributed.launch", "run_pretrain.py", "run_finetune.py"),
    model=("model_name_or_path",),
    seq_len=("max_seq_length", "max_length"),
    defaults={"micro_batch": 8, "grad_accum": 1, "precision": "fp32", "checkpoint_ratio": 0},
    read=_replicas_of,
    conventions=conventions,  # level O2
)
