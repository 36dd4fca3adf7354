"""A look at a workload of somebody's own before anything is tuned."""

from ..base.errors import WorkloadError
from .batches import entries, make_batch
from .flops import flops_of
from .skeleton import skeleton
from .user_code import user_code_errors
from .workload import Workload


def check_workload(workload: Workload) -> None:
    """Builds the model without weights, makes a small batch twice and traces a step as far as that goes.

    Raises:
        WorkloadError: the batch is not made of tensors of its size, is not the same for the same seed, or the
            model or the loss is not what it must be.
    """
    if workload.identity is not None:  # made here
        return
    import torch

    skeleton(workload)
    with user_code_errors(f"{workload.name}: batch(2, 0)"):
        first, second = (entries(make_batch(workload, 2, 0)) for _ in range(2))
    for key in {**first, **second}:
        value, other = first.get(key), second.get(key)
        if (
            value is None
            or other is None
            or value.shape != other.shape
            or not torch.equal(value.nan_to_num(), other.nan_to_num())
        ):
            raise WorkloadError(
                f"{workload.name}: batch(2, 0) differs from one call to the next in entry {key!r}; losses of "
                "configurations are compared, so draw from a generator that is seeded by the second argument"
            )
    flops_of(workload)  # checks the loss on the way
