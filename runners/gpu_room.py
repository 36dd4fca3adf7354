"""The memory of a trial's GPUs before it starts: waited for until it is back, then what others hold is counted.

The driver frees the memory of a killed process some time after that is gone, and NVML's list of processes is empty in
many containers. So memory is compared: a GPU is free again when no more is used than before an earlier trial.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..base.gpus import GpuUse, gpu_use

WAIT_S = 30.0
"""How long memory is waited for, s."""
POLL_S = 0.1
NEAR_MIB = 64.0
"""By how much what is used may differ from what it was."""
FLOOR = "used-of-gpu-"
"""Beginning of a file's name in the host agent's folder, which has what was used of a GPU before the last trial, MiB."""


def wait_for_room(
    names: Sequence[str],
    folder: str | Path | None,
    say: Callable[[str], None],
    *,
    given_up: Callable[[], bool] = lambda: False,
    use: Callable[[Sequence[str]], list[GpuUse]] = gpu_use,
) -> float:
    """Waits until the memory of earlier trials is back, and returns what is used all the same of the fullest GPU, MiB.

    Args:
        names: the GPUs, as `CUDA_VISIBLE_DEVICES` has them.
        folder: keeps what was used before; None to wait for nothing.
        say: told of a wait and of what others hold.
        given_up: whether nobody waits for the trial any more.
        use: reads the memory.
    """
    begin, found = time.monotonic(), use(names)
    files = (
        {each.name: Path(folder, FLOOR + each.name.replace("/", "-")) for each in found} if folder is not None else {}
    )
    floors = {name: float(file.read_text()) for name, file in files.items() if file.exists()}

    def over(found: list[GpuUse]) -> list[GpuUse]:
        return [each for each in found if each.used_mib > floors.get(each.name, each.used_mib) + NEAR_MIB]

    held = over(found)
    while over(found) and time.monotonic() - begin < WAIT_S and not given_up():
        time.sleep(POLL_S)
        found = use(names)
    if held:
        seconds, late = time.monotonic() - begin, over(found)
        for each in late:
            say(
                f"GPU {each.name}: after {seconds:.0f} s {each.used_mib:,.0f} of {each.total_mib:,.0f} MiB are still used, "
                f"{each.used_mib - floors[each.name]:,.0f} more than before; other processes hold them now"
            )
        if not late:
            say(
                f"waited {seconds:.1f} s until the memory of GPU {', '.join(each.name for each in held)} was free again"
            )
    for each in found if files else ():
        # What did not come back is somebody else's: later trials do not wait for it.
        files[each.name].write_text(f"{each.used_mib}")
    return max((each.used_mib for each in found), default=0.0)
