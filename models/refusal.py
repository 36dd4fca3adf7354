"""The error for a class of transformers that is not built, with the workload to write instead."""

from collections.abc import Iterator

from ..base.errors import WorkloadError


def refused(class_name: str, name: str, why: str) -> WorkloadError:
    """Error for a class that is not built, with the workload to write."""
    return WorkloadError(f"{name}: {class_name} is not trained here: {why}.\n" + "\n".join(sketch(class_name)))


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
