"""Reading a run ends soon and in little memory, whatever its files contain, with an error row or a refusal."""

import json
import os
import subprocess
import sys

import pytest
from damage import make_run

SECONDS = 2
"""CPU seconds that reading a run may take. The test allows twice that, as other processes may use the caches."""
MIB = 200

_READ = """
import io, json, resource, sys
sys.setrecursionlimit(1000)
from pathlib import Path
import optuna, rich.console, rich.table  # what reading imports is no part of reading
from redline.errors import RedlineError
from redline.results import View
from redline.views.dashboard.library import Library
from redline.views.report import Source
from redline.frameworks import render

def spent():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

def held():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024

def reset():
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew, proc(5)

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024

run, whole = Path(sys.argv[1]), Path(sys.argv[2])
ways = {
    "view": lambda path: View(path),
    "source": lambda path: Source.read(path),
    "dashboard": lambda path: Library(path.parent).lines(),
}
for way in ways.values():
    way(whole)
out = {}
for name, way in ways.items():
    reset()
    before, begin = held(), spent()
    try:
        text = str(way(run))[:2000]
    except RedlineError as error:
        text = "refused: " + str(error)[:2000]
    out[name] = {"seconds": spent() - begin, "mib": peak() - before, "text": text}
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("whole") / "whole")


def read(run, whole):
    """Returns the cost of reading the run in each way, measured in a separate process that may be killed."""
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(run), str(whole)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout)


def deep_yaml(run):
    text = (run / "best.yaml").read_text()
    (run / "best.yaml").write_text("[" * 50_000)
    (run / "run.yaml").write_text("asked: " + "{a: " * 50_000)
    return text


def alias_bomb(run):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]" for before, name in zip("abcdefghi", "bcdefghij")]
    (run / "best.yaml").write_text("\n".join(lines))
    with open(run / "run.yaml", "a") as file:
        file.write("\n".join(lines))


def large_yaml(run):
    with open(run / "run.yaml", "a") as file:
        file.write("".join(f"key{number}: a value of some length\n" for number in range(450_000)))


def pipes(run):
    for name in ("run.yaml", "best.yaml", "study.log", "trials.csv", ".lock"):
        (run / name).unlink()
        os.mkfifo(run / name)
    (run / "run.yaml").unlink()
    (run / "run.yaml").write_text("format: 1\nstudy: a\nasked: {model: a}\n")


def deep_record(run):
    with open(run / "study.log", "a") as file:
        file.write('{"op_code":' + "[" * 200_000 + "\n")


def many_records(run):
    line = (run / "study.log").read_text().splitlines()[-1]
    with open(run / "study.log", "a") as file:
        file.write(f"{line}\n" * 200_000)


def small_lists(run):
    with open(run / "study.log", "a") as file:
        for _ in range(20):
            file.write('{"op_code":8,"worker_id":"x","trial_id":8,"user_attr":{"b":[' + "[]," * 600_000 + "[]]}}\n")


DAMAGES = (
    deep_yaml,
    alias_bomb,
    large_yaml,
    pipes,
    deep_record,
    many_records,
    small_lists,
)


def check(how, tmp_path, whole):
    import shutil

    run = tmp_path / "runs" / "run"
    shutil.copytree(whole, run)
    how(run)
    for way, outcome in read(run, whole).items():
        assert outcome["seconds"] < 2 * SECONDS, (way, outcome)
        assert outcome["mib"] < MIB, (way, outcome)


@pytest.mark.parametrize("how", [deep_yaml, deep_record, pipes, alias_bomb], ids=lambda how: how.__name__)
def test_files_that_would_kill_or_hang_a_reader_are_refused(how, tmp_path, whole):
    check(how, tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGES, ids=lambda how: how.__name__)
def test_any_file_is_read_or_refused_within_two_seconds_and_200_mib(how, tmp_path, whole):
    check(how, tmp_path, whole)
