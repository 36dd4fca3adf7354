"""FlagScale: a YAML of its runner with `experiment.auto_tuner.space`.

The meaning of `auto` and of missing dimensions, and valid combinations, follow `Searcher` in
flagscale/runner/auto_tuner/search/searcher.py.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..base.errors import UsageError
from . import megatron
from .framework import Framework, KnobSettings, KnobTable, Settings
from .stated_space import (
    Draft,
    Format,
    declare_degrees,
    declare_micro_batch,
    divisors,
    listed,
    read_document,
    section,
    share,
    whole_numbers,
    whole_range,
)

_DIMENSIONS = (
    *("data_parallel_size", "use_distributed_optimizer", "tensor_model_parallel_size", "sequence_parallel"),
    *("pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "use_recompute", "recompute_method"),
    *("recompute_granularity", "recompute_num_layers", "micro_batch_size", "context_parallel_size"),
    "expert_model_parallel_size",
)
_BESIDE = {
    "space": "",
    "control": "its limits have other names: --trial-timeout for max_time_per_task, --time for max_time; steps run until their "
    "times are steady, not train_iters; the winner is not trained afterwards, as run_best has it",
    "memory_model": "what fits is measured; --memory-limit SIZE bounds it",
    "algo": "redline's own sampler proposes; --sampler grid tries all",
}
_PLAIN_NAME = re.compile(r"[\w.-]+")


def _recognises(document: Any) -> bool:
    return isinstance(_within(document, "experiment", "auto_tuner"), Mapping)


def _within(document: Any, *keys: str) -> Any:
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document


def _read(document: Any, draft: Draft) -> None:
    tuner = document["experiment"]["auto_tuner"]
    space = section(tuner.get("space"), "experiment.auto_tuner.space")
    draft.leave_all(tuner, _BESIDE, "auto_tuner.")
    sizes = _sizes(document, draft)
    per_host = _per_host(document, draft)
    # Tuners of serving and of heterogeneous devices have other dimensions, and no ranges for these.
    whole = _within(document, "experiment", "task", "type") != "serve" and not any("hetero" in key for key in space)
    given = {**dict.fromkeys(_DIMENSIONS if whole else (), "auto"), **space}
    replicas = _degrees(draft, given, sizes, per_host)
    _sharding(draft, given, sizes)
    _batches(draft, given, sizes, replicas)
    _stages(draft, given, sizes)
    _recomputation(draft, given, sizes)
    for key in given:
        if key in _DIMENSIONS:
            continue
        if given[key] == "auto":
            draft.leave(key, "what its tuner takes for auto is not known here; --set gives its values")
        else:
            draft.knob(key, listed(given[key], ()))


def _sizes(document: Any, draft: Draft) -> dict[str, int]:
    """Sizes of the model, from the document or the file that its `defaults` name, like hydra."""
    model = dict(section(_within(document, "train", "model"), "train.model"))
    defaults = document.get("defaults")
    for each in defaults if isinstance(defaults, list) else ():
        name = each.get("train") if isinstance(each, Mapping) else None
        if draft.path is None or not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            continue
        file = draft.path.parent / "train" / f"{name}.yaml"
        if file.is_file():
            model = {**section(_within(read_document(file), "model"), f"{file}: model"), **model}
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "global_batch_size")
    sizes = {name: model[name] for name in names if type(model.get(name)) is int and model[name] > 0}
    if missing := [name for name in names if name not in sizes]:
        draft.say(f"{', '.join(missing)} of the model are not in the file: rules that need them are not applied")
    return sizes


def _per_host(document: Any, draft: Draft) -> int:
    """Devices of a host according to the file; adds a note if the file is for another number of devices."""
    runner = _within(document, "experiment", "runner")
    nodes, each = _within(runner, "nnodes") or 1, _within(runner, "nproc_per_node") or 8
    if type(nodes) is not int or type(each) is not int:
        return draft.devices
    if nodes * each != draft.devices:
        draft.say(
            f"the file is for {nodes * each} devices (nnodes {nodes}, nproc_per_node {each}), here are {draft.devices}"
        )
    return each


def _degrees(draft: Draft, given: Mapping[str, Any], sizes: Mapping[str, int], per_host: int) -> str:
    """Declares the degrees; returns an expression for the number of replicas."""
    every = divisors(draft.devices)
    ranges = {
        "tp": (
            "tensor_model_parallel_size",
            [each for each in every if each <= per_host],
            ("hidden_size", "num_attention_heads"),
        ),
        "pp": ("pipeline_model_parallel_size", every, ("num_layers",)),
        "cp": ("context_parallel_size", every, ("seq_length",)),
    }
    found = {}
    for name, (shown, auto, divided) in ranges.items():
        if shown not in given:
            continue
        values = whole_numbers(listed(given[shown], auto), shown)
        for size in (sizes[each] for each in divided if each in sizes):
            values = divisors(size, values)
        if not values:
            raise UsageError(f"{shown} {given[shown]}: none of them divides {' and '.join(divided)} of the model")
        found[name] = (shown, values)
    factors = declare_degrees(draft, found)
    replicas = whole_numbers(listed(given.get("data_parallel_size", "auto"), every), "data_parallel_size")
    if not factors:
        _experts(draft, given, str(draft.devices))
        return str(draft.devices)
    draft.space.derive("dp", f"{draft.devices} // ({factors})", help="data-parallel replicas")
    draft.space.require(f"{factors} * dp == {draft.devices}", f"there are {draft.devices} devices")
    _experts(draft, given, "dp")
    if set(replicas) != set(every):
        draft.require(f"dp in {divisors(draft.devices, replicas) or replicas}", "data_parallel_size")
    return "dp"


def _experts(draft: Draft, given: Mapping[str, Any], replicas: str) -> None:
    """Declares `ep`, whose ranks are replicas and so are not a factor of the devices."""
    shown = "expert_model_parallel_size"
    if shown not in given:
        return
    values = whole_numbers(listed(given[shown], [1]), shown)
    fitting = divisors(draft.devices, values)
    if not fitting:
        raise UsageError(f"{shown} {given[shown]}: none of them divides {draft.devices} devices; see --devices")
    if fitting == [1]:
        draft.off(f"{shown}=1")
    elif draft.knob(shown, fitting, name="ep"):
        draft.require(f"{replicas} % ep == 0", "ranks that share experts are replicas")


def _sharding(draft: Draft, given: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Declares ZeRO 1 (Megatron's distributed optimizer) and sequence parallelism, which needs tensor parallelism."""
    if "use_distributed_optimizer" in given:
        shown = "use_distributed_optimizer"
        stages = [int(each) if isinstance(each, bool) else each for each in listed(given[shown], [True, False])]
        if stages == [0] or draft.devices == 1:
            draft.off(f"{shown}=false")
        else:
            draft.knob(shown, stages, name="zero", when="dp > 1" if "dp" in draft.space.by_name else None)
    if "sequence_parallel" in given:
        values = listed(given["sequence_parallel"], [True, False])
        if values == [False] or "tp" not in draft.space.by_name:
            draft.off("sequence_parallel=false")
        elif draft.knob("sequence_parallel", values, when="tp > 1") and "seq_length" in sizes:
            draft.require(f"~sequence_parallel | ({sizes['seq_length']} % tp == 0)", "seq_length is shared")


def _batches(draft: Draft, given: Mapping[str, Any], sizes: Mapping[str, int], replicas: str) -> None:
    if "micro_batch_size" not in given:
        return
    given_total = draft.global_batch is not None
    total = draft.global_batch if given_total else sizes.get("global_batch_size")
    if (
        declare_micro_batch(draft, "micro_batch_size", given["micro_batch_size"], total, given_total)
        and total is not None
    ):
        share(draft, total, replicas)


def _stages(draft: Draft, given: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Declares interleaved stages by the layers of a model chunk."""
    name, layers = "num_layers_per_virtual_pipeline_stage", sizes.get("num_layers")
    if name not in given:
        return
    if given[name] == "auto" and layers is None and "pp" in draft.space.by_name:
        draft.leave(name, "its range ends at num_layers of the model; --set gives its values")
        return
    values = listed(given[name], [0, *divisors(layers)] if layers else [0])
    if values == [0] or "pp" not in draft.space.by_name:
        draft.off(f"{name}=0")
        return
    if not draft.knob(name, values):
        return
    draft.require(f"({name} == 0) | (pp > 2)", "stages are interleaved where there are more than two")
    if layers:
        draft.require(f"({name} == 0) | ({layers} // pp % {name} == 0)", f"{layers} layers")
    if "micro_batch" in draft.space.by_name:
        draft.require(f"({name} == 0) | (micro_batch % {name} == 0)", "as FlagScale's tuner has it")


def _recomputation(draft: Draft, given: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Declares recomputation: all blocks or none if the file fixes the rest, otherwise by the names of the file."""
    if "use_recompute" not in given:
        return
    use = listed(given["use_recompute"], [True, False])
    if use == [False]:
        draft.off("use_recompute=false")
        return
    granularity = listed(given.get("recompute_granularity", "auto"), ["full", "selective"])
    method = listed(given.get("recompute_method", "auto"), ["uniform", "block"])
    if granularity == ["full"] and method == ["uniform"]:
        ratios = [float(each) if isinstance(each, bool) else each for each in use]
        draft.knob("use_recompute (full, uniform)", ratios, name="checkpoint_ratio")
        return
    if not (
        draft.knob("use_recompute", use) and draft.knob("recompute_granularity", granularity, when="use_recompute")
    ):
        return
    if "full" not in granularity:
        return
    draft.knob("recompute_method", method, when="recompute_granularity == 'full'")
    _recomputed_layers(draft, given, sizes.get("num_layers"))


def _recomputed_layers(draft: Draft, given: Mapping[str, Any], layers: int | None) -> None:
    name = "recompute_num_layers"
    if given.get(name, "auto") == "auto" and layers is None:
        draft.leave(name, "its range ends at num_layers of the model; --set gives its values")
        return
    auto = str(given.get(name, "auto")).lower() == "auto"
    values = whole_range(1, layers or 1, name) if auto else listed(given[name], ())
    if not draft.knob(name, values, when="recompute_granularity == 'full'") or layers is None:
        return
    stage = f"{layers} // pp" if "pp" in draft.space.by_name else str(layers)
    draft.require(f"{name} <= {stage}", "layers of a stage")
    draft.require(f"(recompute_method != 'uniform') | ({name} == {stage})", "uniform is by stages")


FORMAT = Format(
    name="FlagScale's auto-tuner",
    holds="experiment.auto_tuner",
    recognises=_recognises,
    read=_read,
)


def _under(settings: KnobSettings) -> KnobSettings:
    """Converts Megatron's settings of a knob to underscores, as in its YAML, without sections."""

    def spell(settings: Settings) -> dict[str, Any]:
        return {name.replace("-", "_"): value for name, value in settings.items()}

    keys = tuple(key.replace("-", "_") for key in settings.keys)
    ways = tuple({value: spell(each) for value, each in way.items()} for way in settings.ways)
    return KnobSettings(knob=settings.knob, keys=keys, ways=ways)


KNOBS = KnobTable(*map(_under, megatron.KNOBS.values()))
"""Megatron-LM's names in the sections `system`, `model` and `data` of a YAML."""
FRAMEWORK = Framework(
    name="flagscale",
    title="FlagScale",
    knobs=KNOBS,
    partly=frozenset({"checkpoint_ratio"}),
    signs=(
        "*system.tensor_model_parallel_size",
        "*system.pipeline_model_parallel_size",
        "*model.micro_batch_size",
        "*system.use_distributed_optimizer",
        "*model.num_attention_heads",
        "*system.precision.bf16",
        "experiment.*",
    ),
    programs=("flagscale", "run.py --config-path*"),
    seq_len=("seq_length",),
    defaults=megatron.DEFAULTS,
    ignored=megatron.IGNORED,
    conventions=megatron.conventions,
    by_last=True,
    prepare=megatron.prepare,
    read=megatron.read,
    write=lambda strategy, stated: {
        name.replace("-", "_"): value for name, value in megatron.write(strategy, stated).items()
    },
)
