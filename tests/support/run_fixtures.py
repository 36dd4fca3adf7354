"""A stand-in for `redline.space.Config`, sample knobs and outcomes, and functions run in a child process."""

import hashlib
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna  # noqa: F401  (forked children need not import it again)
import pytest
from redline.results import Measurement, RunFolder, Status


class Point(Mapping[str, Any]):
    """The part of a configuration that results need."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    @property
    def id(self) -> str:
        return hashlib.sha256(json.dumps(self._values, sort_keys=True).encode()).hexdigest()[:10]

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self._values == other._values


KNOBS = {
    "micro_batch": (1, 2, 4, 8),
    "checkpoint_ratio": (0, 0.25, 0.5, 0.75, 1),
    "attention": ("eager", "sdpa"),
    "fusion": (False, True),
    "zero": (0, 1, 2, 3),
    "grad_accum": None,
}

ASKED = {
    "model": "gpt2-tiny",
    "workload": {"id": "3f2a", "spec": "gpt2-tiny"},
    "space": {"knobs": [{"name": name, "values": list(values or ())} for name, values in KNOBS.items()]},
    "devices": {"type": "cpu", "name": "Some CPU", "count": 1, "memory_mib": 24000},
    "seq_len": 128,
    "global_batch": 8,
    "memory_limit_mib": 1024,
    "sampler": "tpe",
    "seed": 0,
}


def point(number: int = 0, **knobs: Any) -> Point:
    """A configuration that differs by number."""
    values = {
        "micro_batch": 2 ** (number % 4),
        "checkpoint_ratio": KNOBS["checkpoint_ratio"][number // 4 % 5],
        "attention": "sdpa",
        "fusion": number // 20 % 2 == 1,
        "grad_accum": 8,
    }
    return Point(values | knobs)


def ok(throughput: float = 1000.0, **more: Any) -> Measurement:
    """A successful measurement."""
    return Measurement(status=Status.OK, throughput=throughput, unit="tokens/s", **more)


def oom(peak: float | None = None, **more: Any) -> Measurement:
    """A measurement of a candidate that did not fit."""
    return Measurement(status=Status.OOM, reason="out of memory", peak_memory_mib=peak, **more)


def open_run(path: Path, **more: Any) -> RunFolder:
    """Opens a run of the standard request."""
    asked = more.pop("asked", ASKED)
    return RunFolder.open(path, asked, **{"knobs": KNOBS, "make_config": Point} | more)


def in_child(function: Callable[[], Any], *, unprivileged: bool = False) -> Any:
    """Calls `function` in a forked process and returns its result; an exception there is raised here with its traceback.

    Args:
        function: called in the child.
        unprivileged: drop root first, since root can write to read-only folders.
    """
    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe(duplex=False)

    def run() -> None:
        try:
            if unprivileged and os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            theirs.send((function(), None))
        except BaseException:
            theirs.send((None, traceback.format_exc()))
        finally:
            os._exit(0)

    child = fork.Process(target=run)
    child.start()
    theirs.close()
    try:
        result, error = mine.recv()
    finally:
        child.join()
    if error:
        raise AssertionError(error)
    return result


def _given(name: str, value: Any) -> Any:
    return pytest.fixture(scope="session", name=name)(lambda: value)


# Fixtures for the helpers above: test modules cannot import a conftest.
_fixtures = [
    _given(name, value)
    for name, value in {
        "make_config": Point,
        "knobs": KNOBS,
        "asked": ASKED,
        "point": point,
        "ok": ok,
        "oom": oom,
        "open_run": open_run,
        "in_child": in_child,
    }.items()
]
make_config, knobs, asked, given_point, given_ok, given_oom, given_open_run, given_in_child = _fixtures
