"""Memory of each rank of a search's trials."""

from collections.abc import Callable

from ..base.device import SHARE_OF_HOST, available_memory_mib, share_of_host
from ..base.errors import UsageError
from ..base.gpus import gpu_use
from ..base.option import option
from ..estimator.constants import Constants
from ..runners import Runner
from .emulating import memory_of_emulated
from .request.options import Request
from .request.target import Task

LEAST_HELD_MIB = 300.0
"""Used memory of a GPU above which other processes count as using it, MiB: a context, which a desktop has as well."""


def memory_of_rank(
    request: Request,
    task: Task,
    warn: Callable[[str], None] = lambda message: None,
    *,
    earlier_mib: float | None = None,
    elsewhere: bool = False,
) -> float | None:
    """Returns the memory of a rank, MiB; None for all of the device's memory, or if the target limits its own memory.

    Estimate and trials get the same limit: the memory that other processes use on this machine's GPUs is subtracted
    for both.

    Args:
        request, task: the request and its task.
        warn: receives a message about memory used by other processes.
        earlier_mib: limit of the trials of the resumed run, which further trials get too.
        elsewhere: True if the devices are those of other hosts than this one.

    Raises:
        UsageError: this host has less memory left than the earlier trials had.
    """
    requested = request.limit_mib
    if isinstance(request.runner, Runner):
        return requested  # the free memory of other machines is not known here
    if task.own is None:
        return requested
    if task.emulated:
        return memory_of_emulated(request.hardware, task.device, task.devices, requested)
    if task.device.type == "cuda":
        return _left_of_gpus(requested, warn) if request.runs_on == "local" else requested
    if requested is not None:
        return requested
    ranks = task.devices * (request.concurrency or 1)
    if elsewhere:
        return float(int(task.device.memory_mib * SHARE_OF_HOST / ranks))
    if earlier_mib is None:
        return share_of_host(ranks)
    if (free := available_memory_mib()) < earlier_mib * ranks:
        raise UsageError(
            f"the trials of '{request.out}' had {earlier_mib:,.0f} MiB a rank, but this host has {free / ranks:,.0f} MiB a "
            f"rank left: end other processes that use its memory, or start another run with {option('out')} DIR"
        )
    return earlier_mib


def _left_of_gpus(requested: float | None, warn: Callable[[str], None]) -> float | None:
    """Returns the memory of each GPU that other processes leave for a rank's allocator, MiB; the requested limit if they
    use none.
    """
    gpus = gpu_use()
    if not gpus or max(gpu.used_mib for gpu in gpus) < LEAST_HELD_MIB:
        return requested
    least = min(gpus, key=lambda gpu: gpu.total_mib - gpu.used_mib)
    free = float(int(max(1.0, least.total_mib - least.used_mib - Constants().context_mib)))
    if requested is not None and requested <= free:
        return requested
    warn(
        f"other processes use {least.used_mib:,.0f} of the {least.total_mib:,.0f} MiB of GPU {least.name}: "
        f"trials may take {free:,.0f} MiB of each GPU"
    )
    return free
