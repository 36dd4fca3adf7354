"""Whatever a callable does to its process, the study can be finished and its folder read."""

import signal
import subprocess
import sys
import textwrap

import pytest
import redline as rl
from redline.results import Measurement, Status, View
from tiers import tiered

STUDY = """
import os, pathlib, sys
import redline as rl

calls = pathlib.Path(sys.argv[2])
space = rl.Space()
space.choice("x", [1, 2, 3])

def fn(config):
    with calls.open("a") as file:
        file.write(str(config["x"]))
    if config["x"] == 2:
        {poison}
    return float(config["x"])

out = pathlib.Path(sys.argv[1])
result = rl.tune(fn, space, trials=3, sampler="grid", isolate=False, out=out, resume=out.exists())
print(sorted((t.config["x"], str(t.measurement.status), t.measurement.reason) for t in result.all_trials if not t.pending))
"""


def study(tmp_path, poison):
    code = STUDY.replace("{poison}", poison)
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run"), str(tmp_path / "calls")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_value_that_ends_the_process_is_a_crash_after_the_second_time(tmp_path):
    poison = "import ctypes; ctypes.string_at(0)"
    assert [study(tmp_path, poison).returncode for _ in range(2)] == [-signal.SIGSEGV] * 2
    last = study(tmp_path, poison)
    assert last.returncode == 0, last.stderr
    reason = "the process that called it died, 2 times"
    assert last.stdout.strip() == str([(1, "ok", ""), (2, "crash", reason), (3, "ok", "")])
    assert (tmp_path / "calls").read_text().count("2") == 2


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no words")


def returns(**fields):
    return lambda: Measurement(status=Status.OK, **fields)


def raises(error):
    def fn():
        raise error

    return fn


NAN = float("nan")
OUTCOMES = {
    "a measurement without a throughput": (returns(), Status.WRONG, "ok measurement with throughput=None"),
    "a throughput that is no number": (returns(throughput=NAN), Status.WRONG, "ok measurement with throughput=nan"),
    "an endless throughput": (lambda: float("inf"), Status.WRONG, "returned inf"),
    "a memory that is no number": (returns(throughput=1.0, peak_memory_mib=NAN), Status.OK, ""),
    "an exception that cannot be printed": (raises(Unprintable()), Status.CRASH, "cannot be printed: ValueError"),
    "one exit": (raises(SystemExit("enough")), Status.CRASH, "SystemExit: enough"),
    "half a character": (raises(ValueError("half \ud800")), Status.CRASH, "ValueError: half "),
    "half a character in a reason": (
        returns(throughput=1.0, reason="half \ud800"),
        Status.OK,
        "half ",
    ),
    "an endless reason": (returns(throughput=1.0, reason="x" * 10**7), Status.OK, "x" * 100),
    "an endless message": (raises(ValueError("x" * 2 * 10**7)), Status.CRASH, "ValueError: xxx"),
    "a memory in words": (
        returns(throughput=1.0, peak_memory_mib="lots"),
        Status.CRASH,
        "peak_memory_mib must be a number, but got 'lots'",
    ),
}


@pytest.mark.parametrize("isolate", tiered([True], [False]), ids=["in processes of their own", "in this process"])
def test_every_return_value_is_an_outcome_that_can_be_read_again(tmp_path, isolate):
    space = rl.Space()
    space.choice("how", list(OUTCOMES))
    made = {how: make for how, (make, _, _) in OUTCOMES.items()}
    options = {"trials": len(OUTCOMES), "sampler": "grid", "out": tmp_path / "run", "isolate": isolate}
    result = rl.tune(lambda config: made[config["how"]](), space, **options)
    for trial in (*result.all_trials, *View(tmp_path / "run").trials()):
        _, status, reason = OUTCOMES[trial.config["how"]]
        measured = trial.measurement
        assert measured.status is status, (trial.config, measured)
        assert reason in measured.reason and len(measured.reason) <= 100_000
        assert measured.peak_memory_mib is None
        log = tmp_path / "run" / measured.log
        assert not measured.log or log.stat().st_size < 10 << 20
    assert len(list((tmp_path / "run" / "trials.csv").open(encoding="utf-8"))) == 1 + len(OUTCOMES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"status": "fine"}, "unknown status 'fine'"),
        ({"status": 3}, "unknown status"),
        ({"throughput": "fast"}, "throughput must be a number, but got 'fast'"),
        ({"throughput": True}, "throughput must be a number, but got true|True"),
        ({"devices": 1.5}, "devices must be a whole number"),
        ({"reason": None}, "reason must be a text"),
        ({"probe": {"loss": 1}}, "probe has no quiet, roundoff, loss_roundoff"),
        ({"ranks": [1]}, "ranks must be a mapping, but got 1"),
    ],
)
def test_a_measurement_is_checked_when_it_is_made(fields, message):
    with pytest.raises(rl.UsageError, match=message):
        Measurement(**{"status": "ok", **fields})
