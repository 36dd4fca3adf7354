"""Waits for processes and conditions."""

import time

import psutil


def running(process: psutil.Process) -> bool:
    """True unless the process has ended or is a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_of(processes, timeout: float = 30) -> list[psutil.Process]:
    """Returns those of `processes`, or of process numbers, that still run after at most `timeout` seconds."""
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


def until(condition, within_s: float = 30.0):
    """Waits until the condition is true and returns its value."""
    end = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {within_s:g} s"
        time.sleep(0.02)
    return found
