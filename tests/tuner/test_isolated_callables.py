"""Calls of `redline.tune(fn, space)` in separate processes: a process that dies is an outcome and does not end the search."""

import ctypes
import math
import os
import signal
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest
import redline as rl
import torch
import yaml
from redline.results import Status

# Test modules are imported by path, so other processes cannot import them by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def ways(*names):
    space = rl.Space()
    space.choice("how", list(names))
    return space


def measured(result):
    return {trial.config["how"]: trial.measurement for trial in result.all_trials}


def test_every_way_of_dying_is_an_outcome_and_the_search_continues(tmp_path):
    def fn(config):
        match config["how"]:
            case "segfault":
                ctypes.string_at(0)
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(600)
            case "memory":
                return len(bytearray(1 << 33))
            case "system exit":
                sys.exit("enough")
            case "killed":
                os.kill(os.getpid(), signal.SIGTERM)
        return 2.0 if config["how"] == "last" else 1.0

    space = ways("fine", "segfault", "exit", "hang", "memory", "system exit", "killed", "last")
    limits = {"trial_timeout": "5s", "memory_limit": "1GiB"}
    result = rl.tune(fn, space, trials=8, sampler="grid", out=tmp_path / "run", **limits)
    found = measured(result)
    assert {how: each.status for how, each in found.items()} == {
        "fine": Status.OK,
        "segfault": Status.CRASH,
        "exit": Status.CRASH,
        "hang": Status.TIMEOUT,
        "memory": Status.OOM,
        "system exit": Status.CRASH,
        "killed": Status.CRASH,
        "last": Status.OK,
    }
    assert "SIGSEGV" in found["segfault"].reason and "code 3" in found["exit"].reason
    assert found["hang"].reason == "no result within 5 s (during the call)"
    assert "in fn" in (tmp_path / "run" / found["hang"].log).read_text()  # the stack in which it hung
    assert found["memory"].memory_limit_mib == 1024 and found["memory"].peak_memory_mib >= 1024
    assert "SystemExit: enough" in found["system exit"].reason and "SIGTERM" in found["killed"].reason
    assert result.best.config["how"] == "last"
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["asked"]["runner"] == "local"


@pytest.mark.parametrize("isolate", [True, False])
def test_outcomes_are_equal_in_a_separate_process_and_in_this_one(isolate, tmp_path):
    def fn(config):
        match config["how"]:
            case "by hand":
                raise rl.OutOfMemory("too large")
            case "cuda":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            case "python":
                raise MemoryError
            case "text":
                raise RuntimeError("CUDA error: out of memory")
            case "bug":
                raise KeyError("bug")
            case "word":
                return "fast"
            case "flag":
                return torch.tensor(True)
            case "vector":
                return np.ones(3)
            case "nan":
                return math.nan
            case "tensor":
                return torch.tensor(2.5, requires_grad=True)
            case "array":
                return np.array(3)
            case "scalar":
                return np.float32(1.5)
            case "measurement":
                return rl.Measurement(status=Status.OK, throughput=5.0, unit="images/s", peak_memory_mib=10.0)
        return 1.0

    expected = {
        "number": (Status.OK, 1.0, ""),
        "by hand": (Status.OOM, None, "OutOfMemory: too large"),
        "cuda": (Status.OOM, None, "OutOfMemoryError: CUDA out of memory"),
        "python": (Status.OOM, None, "MemoryError"),
        "text": (Status.OOM, None, "RuntimeError: CUDA error: out of memory"),
        "bug": (Status.CRASH, None, "KeyError: 'bug'"),
        "word": (Status.CRASH, None, "must return a number (throughput, higher is better) or a redline.Measurement"),
        "flag": (Status.CRASH, None, "but returned tensor(True)"),
        "vector": (Status.CRASH, None, "but returned array([1., 1., 1.])"),
        "nan": (Status.WRONG, None, "the callable returned nan"),
        "tensor": (Status.OK, 2.5, ""),
        "array": (Status.OK, 3.0, ""),
        "scalar": (Status.OK, 1.5, ""),
        "measurement": (Status.OK, 5.0, ""),
    }
    result = rl.tune(fn, ways(*expected), trials=len(expected), sampler="grid", isolate=isolate, out=tmp_path / "run")
    for how, found in measured(result).items():
        status, throughput, reason = expected[how]
        assert (found.status, found.throughput) == (status, throughput), how
        assert reason in found.reason
        assert found.seconds_total is not None and found.started
        if status is Status.CRASH:
            assert "Traceback" in (tmp_path / "run" / found.log).read_text()
    assert measured(result)["cuda"].peak_memory_mib == 2048  # the requested amount
    assert measured(result)["by hand"].peak_memory_mib is None
    best = result.best.measurement
    assert (best.unit, best.peak_memory_mib) == ("images/s", 10.0)


def test_calls_run_at_once_where_that_is_asked_for(tmp_path):
    def fn(config):
        mine, other = (tmp_path / config["how"], tmp_path / ("b" if config["how"] == "a" else "a"))
        mine.touch()
        while not other.exists():  # the other call has to run before this one returns
            time.sleep(0.01)
        return 1.0

    result = rl.tune(fn, ways("a", "b"), trials=2, sampler="grid", concurrency=2)
    assert [trial.measurement.status for trial in result.all_trials] == [Status.OK, Status.OK]


def test_unpicklable_callables_are_refused_with_a_fix(tmp_path):
    held = threading.Lock()

    def holds_a_lock(config):
        with held:
            return 1.0

    with pytest.raises(rl.UsageError, match=r"holds_a_lock cannot be sent .*lock.*isolate=False"):
        rl.tune(holds_a_lock, ways("a"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trial_timeout": "5s"}, r"trial_timeout=5s needs a process that can be ended, but isolate=False"),
        ({"memory_limit": "1GiB"}, r"memory_limit=1GiB needs a process that can be ended"),
        ({"concurrency": 2}, r"one call at a time, but got concurrency=2"),
        ({"runner": "ray"}, r"isolate=False calls the function in this process and does not use the runner 'ray'"),
        ({"isolate": True, "measure_time": "1s"}, r"`measure_time` is for a workload"),
        (
            {"isolate": True, "ray_address": "127.0.0.1:1"},
            r"`ray_address` has no effect on the runner 'local'",
        ),
        ({"isolate": True, "device_kind": "a100"}, r"`device_kind` has no effect on the runner 'local'"),
        (
            {"isolate": True, "runner": "ray", "device_kind": "a100"},
            r"`device_kind` chooses among the devices of a cluster",
        ),
        ({"isolate": True, "runner": "rey"}, r"unknown runner 'rey'; did you mean 'ray'\?"),
    ],
)
def test_unsupported_options_of_isolation_are_refused(options, message, tmp_path):
    with pytest.raises(rl.UsageError, match=message):
        rl.tune(lambda config: 1.0, ways("a"), out=tmp_path / "run", **{"isolate": False, **options})
    assert not (tmp_path / "run").exists()
