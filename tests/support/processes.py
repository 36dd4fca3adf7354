"""Which processes are still there, whatever ends while one looks."""

import time

import psutil


def running(process: psutil.Process) -> bool:
    """Whether it runs: it has neither ended nor is a zombie that nobody has reaped yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_of(processes, timeout: float = 30) -> list[psutil.Process]:
    """Those of `processes`, or of process numbers, that still run `timeout` seconds from now."""
    found = []
    for each in processes:
        try:
            found.append(each if isinstance(each, psutil.Process) else psutil.Process(int(each)))
        except psutil.NoSuchProcess:
            continue
    end = time.monotonic() + timeout
    while (found := [each for each in found if running(each)]) and time.monotonic() < end:
        time.sleep(0.02)
    return found
