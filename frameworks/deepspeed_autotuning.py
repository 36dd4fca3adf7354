"""DeepSpeed: a configuration with choices for its autotuner.

A list of values outside `optimizer` is a choice (`get_all_configs` in deepspeed/autotuning/utils.py). The ZeRO stage
and the micro-batch are tuned according to deepspeed/autotuning/README.md. `auto` elsewhere is filled in by the
Trainer, and not changed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..base.errors import UsageError
from .stated_space import Draft, Format, identifiers, section

_MICRO_BATCH, _ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_STAGES = (0, 1, 2, 3)
_LARGEST_MICRO_BATCH = 1024
"""Default of its autotuner."""
_BUCKETS = (5e7, 5e8, 1e9)
_NOT_CHOICES = ("elasticity", "curriculum_learning", "data_efficiency", "compression_training", "sparse_attention")
"""Sections whose lists belong together, such as the batch sizes of an elastic training."""
_OWN_CHOICES: dict[str, tuple[tuple[Any, ...], str | None]] = {
    "overlap_comm": ((True, False), "zero >= 2"),
    "reduce_scatter": ((False, True), "zero >= 2"),
    "reduce_bucket_size": (_BUCKETS, "zero >= 1"),
    "allgather_partitions": ((True, False), "zero == 3"),
    "allgather_bucket_size": (_BUCKETS, "zero >= 1"),
    "contiguous_gradients": ((False, True), "zero >= 2"),
}
"""Further choices if `fast` is false, from DEFAULT_TUNING_SPACE_ZERO_n in its constants.py."""
_BESIDE = {
    **dict.fromkeys(("enabled", "fast", "arg_mappings", "max_train_batch_size", "mp_size"), ""),
    **dict.fromkeys(("min_train_micro_batch_size_per_gpu", "max_train_micro_batch_size_per_gpu"), ""),
    **dict.fromkeys(("results_dir", "exps_dir", "overwrite", "metric_path"), "--out DIR holds the results"),
    **dict.fromkeys(("model_info", "model_info_path"), "memory is measured, not estimated from the model's size"),
    **dict.fromkeys(
        ("start_step", "end_step", "start_profile_step", "end_profile_step"), "steps are taken until they are steady"
    ),
    "tuner_type": "redline's own sampler proposes; --sampler grid or random for others",
    "tuner_num_trials": "--trials N bounds the search",
    "tuner_early_stopping": "--patience N says when further trials are not worth it",
    "num_tuning_micro_batch_sizes": "powers of two are tried; --set micro_batch=A,B,C gives others",
    "min_train_batch_size": "DeepSpeed's autotuner makes no use of it either",
}


def _recognises(document: Any) -> bool:
    names = ("autotuning", "zero_optimization", _MICRO_BATCH, "train_batch_size")
    return isinstance(document, Mapping) and any(name in document for name in names)


def _read(document: Any, draft: Draft) -> None:
    tuner = section(document.get("autotuning"), "autotuning")
    draft.leave_all((key for key in tuner if key != "metric"), _BESIDE, "autotuning.")
    if tuner.get("metric", "throughput") != "throughput":
        draft.leave("autotuning.metric", f"it is {tuner['metric']}, and throughput counts here; --metric for another")
    options = {
        str(key).strip(): str(option).strip()
        for key, option in section(tuner.get("arg_mappings"), "arg_mappings").items()
    }
    paths: dict[str, str] = {}
    _zero(document, tuner, draft, paths)
    _batches(document, tuner, draft, paths)
    _lists(document, draft, paths)
    _pass_to_command(document, draft, paths, options)


def _zero(document: Mapping[str, Any], tuner: Mapping[str, Any], draft: Draft, paths: dict[str, str]) -> None:
    """Declares the stage; `paths` maps each knob to its place in the file."""
    zero = document.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise UsageError(f"zero_optimization must be a mapping, such as {{'stage': 'all'}}, but is {zero!r}")
    given = zero.get("stage")
    stages = given if isinstance(given, list) else [given]
    if "all" in stages:
        stages = list(_STAGES)
    if invalid := [each for each in stages if each not in (*_STAGES, None) or isinstance(each, bool)]:
        raise UsageError(f"zero_optimization.stage must be of 0, 1, 2, 3 or 'all', but is {invalid[0]!r}")
    if isinstance(given, list) or given == "all":
        draft.knob("stage", stages, name="zero")
        paths["zero"] = "zero_optimization.stage"
    if tuner.get("fast", True):
        return
    for name, (values, when) in _OWN_CHOICES.items():
        if name in zero:
            continue
        if "zero" not in draft.space.by_name:
            if not _holds(when, stages[0] or 0):
                continue
            when = None
        if draft.knob(name, values, when=when):
            paths[name] = f"zero_optimization.{name}"


def _holds(condition: str | None, stage: int) -> bool:
    """True if one of the conditions above holds for a stage that does not vary."""
    _, sign, bound = (condition or "").split()
    return stage == int(bound) if sign == "==" else stage >= int(bound)


def _batches(document: Mapping[str, Any], tuner: Mapping[str, Any], draft: Draft, paths: dict[str, str]) -> None:
    given = document.get(_MICRO_BATCH, "auto")
    replicas = draft.devices // _count(tuner, "mp_size", 1) or 1
    total = draft.global_batch or tuner.get("max_train_batch_size")
    share = total // replicas if type(total) is int and total > 0 else None
    if isinstance(given, list):
        values = given
    elif not tuner:
        values = []
    else:
        low = given if type(given) is int else _count(tuner, f"min_{_MICRO_BATCH}", 1)
        high = _count(tuner, f"max_{_MICRO_BATCH}", _LARGEST_MICRO_BATCH)
        high = min(high, share) if share else high
        if low > high:
            raise UsageError(f"micro-batches from {low} to {high}: there are none; see autotuning.max_{_MICRO_BATCH}")
        values = sorted({low, *(1 << bit for bit in range(high.bit_length()) if low < 1 << bit < high), high})
        draft.say(f"{_MICRO_BATCH}: {', '.join(map(str, values))} are tried; DeepSpeed asks the memory how far to go")
    if not values or not draft.knob(_MICRO_BATCH, values, name="micro_batch"):
        return
    paths["micro_batch"] = _MICRO_BATCH
    if isinstance(document.get(_ACCUMULATION), list):
        draft.leave(_ACCUMULATION, "a list of it is not tuned by DeepSpeed either, which takes 1")
        draft.render.append(f"{_ACCUMULATION}={{1}}")
    elif share:
        draft.space.derive("grad_accum", f"max(1, {share} // micro_batch)", help="micro-batches per optimizer step")
        paths["grad_accum"] = _ACCUMULATION
    if document.get("train_batch_size", "auto") != "auto":
        draft.say("train_batch_size follows from the micro-batch and is left to DeepSpeed")


def _count(tuner: Mapping[str, Any], name: str, default: int) -> int:
    value = tuner.get(name, default)
    if type(value) is not int or value < 1:
        raise UsageError(f"autotuning.{name} must be a whole number of at least 1, but is {value!r}")
    return value


def _lists(document: Mapping[str, Any], draft: Draft, paths: dict[str, str]) -> None:
    """Declares every other list of values as a choice."""
    found = {".".join(path): values for path, values in _choices(document)}
    for name in _NOT_CHOICES:
        if lists := [text for text in found if text.partition(".")[0] == name]:
            draft.leave(name, "its lists belong together, and are not choices")
            for text in lists:
                del found[text]
    short = {text: text.removeprefix("zero_optimization.") for text in found}
    names = identifiers(short.values())
    for text, values in found.items():
        if draft.knob(text, values, name=names[short[text]]):
            paths[names[short[text]]] = text


def _choices(section: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    for key, value in section.items():
        if not path and key in ("optimizer", "autotuning", _MICRO_BATCH, _ACCUMULATION):
            continue
        if str(key).startswith("_"):  # a comment, such as those of exports
            continue
        if (*path, key) == ("zero_optimization", "stage"):
            continue
        if isinstance(value, Mapping):
            yield from _choices(value, (*path, key))
        elif isinstance(value, list):
            yield (*path, key), value


def _pass_to_command(
    document: Mapping[str, Any], draft: Draft, paths: Mapping[str, str], options: Mapping[str, str]
) -> None:
    """Passes the knobs to a command: in the file, and by the options that `arg_mappings` has for the script's own
    arguments.
    """
    places = {path.rpartition(".")[2]: name for name, path in paths.items()}
    for key, option in options.items():
        if key in places:
            draft.options.append((option, f"{{{places[key]}}}"))
        else:
            draft.leave(f"autotuning.arg_mappings.{key}", "it does not vary")
    if draft.path is None:
        draft.say("the rest of the configuration stays in the program; only what varies is a knob")
        return
    file = str(draft.path)
    rendered = [file]
    for name, path in paths.items():
        key = path.rpartition(".")[2]
        # The Trainer compares what is not `auto` there with its own arguments.
        if key not in options or document.get(key) != "auto":
            rendered.append(f"{file}:{path}={{{name}}}")
    rendered += [f"{file}:{each}" for each in draft.render]
    if "autotuning" in document:
        rendered.append(f"{file}:autotuning.enabled={{false}}")
    if "micro_batch" in paths and document.get("train_batch_size", "auto") != "auto":
        rendered.append(f"{file}:train_batch_size={{None}}")
    draft.render[:] = rendered


FORMAT = Format(
    name="a DeepSpeed configuration",
    holds="autotuning, zero_optimization or train_micro_batch_size_per_gpu",
    recognises=_recognises,
    read=_read,
)
