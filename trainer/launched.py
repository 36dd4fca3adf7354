"""A training whose ranks were started by a launcher, such as torchrun.

Rank 0 decides as `redline train` does, and sends the decision to the others. A rank that runs out of memory leaves a
note in the folder. The next start, such as by torchrun's `--max-restarts`, then takes a safer configuration.
"""

import contextlib
import json
import os
from dataclasses import replace

from ..base.device import usable_cores
from ..base.errors import RedlineError, UsageError
from ..base.reading import JsonLines
from ..base.writing import write_atomic
from ..results.trained import LOG, OUT_OF_MEMORY, log_size
from ..runners.trial import failure
from ..runners.trial.memory import CudaMemoryMeter, HostMemoryMeter, MemoryMeter
from ..runners.trial.rank import RankContext
from .driver import Driver
from .listener import TrainListener
from .program import TrainRank
from .ranks import RankPlace, decide_once
from .request import TrainRequest


def train_rank(request: TrainRequest, place: RankPlace, listener: TrainListener) -> bool:
    """Runs the training on this rank. Returns True if it was ended before its last step.

    Raises:
        RedlineError: on every rank, if rank 0 refuses the request.
        TrainingFailed: on rank 0, if the last step could not be saved.
    """
    import torch
    import torch.distributed as dist

    with contextlib.ExitStack() as stack:
        listeners, drivers = [listener], list[Driver]()
        work, joined = decide_once(place, lambda: _decide(request, place, listeners, drivers, stack))
        if dist.is_initialized():
            stack.callback(dist.destroy_process_group)
        if not work:
            return False
        (program,) = work
        meter: MemoryMeter = HostMemoryMeter()
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", place.size))
        if joined.device.type == "cuda":
            # torchrun sets OMP_NUM_THREADS=1, too few for the update of offloaded states.
            torch.set_num_threads(max(1, usable_cores() // local_ranks))
            stack.callback(torch.cuda.synchronize)
            meter = CudaMemoryMeter([joined.device])
        context = RankContext(
            rank=place.rank,
            local_rank=place.local_rank if joined.device.index is None else joined.device.index,
            world_size=place.size,
            device_type=joined.device.type,
            init_method="env://",
            memory_limit_mib=request.limit_mib,
            memory=meter,
            local_world_size=local_ranks,
        )
        if request.limit_mib is not None:
            meter.limit(request.limit_mib)
        reader = JsonLines(program.folder, LOG, log_size(program.folder))
        following = replace(program, on_line=lambda: _follow(reader, listeners[0])) if place.rank == 0 else program
        try:
            end = following(context)
        except Exception as error:
            if failure.is_oom(error):
                note = {"rank": place.rank, "configuration": dict(program.config), "reason": failure.one_line(error)}
                with contextlib.suppress(OSError):  # the original error is more important
                    write_atomic(program.folder / OUT_OF_MEMORY, json.dumps(note).encode())
            raise
        for driver in drivers:
            driver.check_saved(end)
        return end.stopped


def _decide(
    request: TrainRequest,
    place: RankPlace,
    listeners: list[TrainListener],
    drivers: list[Driver],
    stack: contextlib.ExitStack,
) -> list[TrainRank]:
    """Returns the work of all ranks, none if the training has reached its end before. Adds the driver to `drivers`, and
    replaces the single listener in `listeners` by the driver's, which includes trackers.
    """
    if request.devices not in (None, place.size):
        raise UsageError(
            f"devices={request.devices} contradicts the launcher's number of ranks, {place.size}; leave --devices out"
        )
    driver = Driver(replace(request, devices=place.size), listeners[0], stack, again=True)
    if driver.reports_done():
        return []
    try:
        driver.prepare()
    except RedlineError:
        driver.discard()
        raise
    drivers.append(driver)
    listeners[0] = driver.listener
    driver.listener.on_start(driver.training_start())
    return [driver.program()]


def _follow(reader: JsonLines, listener: TrainListener) -> None:
    for line in reader.lines():
        listener.on_line(line)
