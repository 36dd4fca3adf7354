"""Errors for a type or a class that is not built, the latter with the workload to write instead."""

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from ..base._transformers import listed_names
from ..base.errors import WorkloadError, nearest, unknown


def refused(class_name: str, name: str, why: str) -> WorkloadError:
    """Error for a class that is not built, with the workload to write."""
    end = "" if why.endswith(("?", ".")) else "."
    return WorkloadError(f"{name}: {class_name} is not trained here: {why}{end}\n" + "\n".join(sketch(class_name)))


def unknown_type(model_type: str, where: str, known: Iterable[str]) -> WorkloadError:
    """Error for a type that transformers does not have."""
    hint = unknown("model type", model_type, known).partition(" Known:")[0]
    return WorkloadError(
        f"{where}: {hint} in transformers {version('transformers')}; code that comes with a model is not run: describe the "
        "model by a redline.Workload of your own (FILE.py:NAME)"
    )


def refuse_unlisted(content: Any, where: str) -> None:
    """Refuses a config.json whose type or class transformers does not list, before it is imported, which takes seconds.

    Raises:
        WorkloadError: transformers does not list it.
    """
    model_type = content.get("model_type") if isinstance(content, Mapping) else None
    if not isinstance(model_type, str):
        return
    names = listed_names()
    if model_type not in names:
        raise unknown_type(model_type, where, filter(str.islower, names))
    classes = content.get("architectures")
    if isinstance(classes, list) and classes and classes[0] not in names:
        why = f"transformers does not list a class of this name{nearest(classes[0], names)}"
        raise refused(str(classes[0]), where, why)


def sketch(class_name: str) -> Iterator[str]:
    """Yields the lines of a `rl.Workload` for a class of transformers."""
    yield "Describe its training in a file, train.py, and give --workload train.py:workload:"
    yield ""
    yield "    import redline as rl"
    yield f"    from transformers import AutoConfig, {class_name}"
    yield ""
    yield "    config = AutoConfig.from_pretrained('FOLDER')"
    yield "    workload = rl.Workload("
    yield f"        model=lambda: {class_name}(config),"
    yield "        batch=...,  # batch(size, seed): a dict of CPU tensors by the arguments of forward, targets included"
    yield "        loss=lambda output, batch: ...,  # the mean over the batch; None for output.loss"
    yield "    )"
