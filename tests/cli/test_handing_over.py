"""A run handed over: by its best.yaml alone, beside its workload, and continued by its folder."""

import csv
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from command_line import run
from redline.base.errors import UsageError
from redline.cli.outcome import print_result
from redline.results import Measurement, RunFolder, Status
from redline.results.best import load
from redline.trainer.request import read_source
from redline.tuner.result import make_result

WORKLOAD = """
import redline as rl, torch
from torch import nn
workload = rl.Workload(
    model=lambda config: nn.Linear(4, 4),
    batch=lambda size, seed: {"input": torch.ones(size, 4)},
    loss=lambda output, batch: output.mean(),
    global_batch=4,
)
"""


def finished(folder: Path, asked: dict, stopped: str = "") -> Path:
    """Writes a run of two trials with its best.yaml."""
    with RunFolder.open(folder, asked, knobs={"micro_batch": (1, 2)}) as made:
        for number, speed in enumerate((100.0, 150.0)):
            made.start({"micro_batch": 2**number}, sampler="random" if number else "default")
            made.finish(number, Measurement(status=Status.OK, throughput=speed, unit="samples/s"))
        made.write_best(["redline", "tune"], stopped=stopped)
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a workload and a run of it."""
    (tmp_path / "train.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    asked = {"model": "workload", "workload": {"spec": f"{tmp_path}/train.py:workload"}, "devices": {"used": 1}}
    return finished(tmp_path / "runs" / "own", asked)


@pytest.mark.parametrize("command", ["show", "report"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_run_is_named_by_its_best_yaml(project, tmp_path, capsys, command, alone):
    best = project / "best.yaml"
    if alone:
        best = Path(shutil.copy(best, tmp_path / "winner.yaml"))
    more = {"report": ["-o", tmp_path / "page.html"], "show": []}[command]
    code, out, err = run(capsys, command, best, *more)
    assert code == 0, err
    text = (tmp_path / "page.html").read_text() if command == "report" else out
    assert "150" in text and "micro_batch" in text
    assert ("100" in text) == (not alone) or command != "show"


def test_another_file_is_no_run(project, capsys):
    code, _, err = run(capsys, "show", project / "trials.csv")
    assert code == 2 and f"'{project}/trials.csv' is a file; give the folder of a run, or its best.yaml" in err


def test_an_own_workload_moves_with_its_best_yaml(project, tmp_path, monkeypatch):
    written = yaml.safe_load((project / "best.yaml").read_text())
    assert written["trains"]["workload"]["spec"] == "../../train.py:workload"
    assert load(project / "best.yaml").trains["workload"]["spec"] == f"{tmp_path}/train.py:workload"
    (tmp_path / "moved").mkdir()
    for name in ("train.py", "runs"):
        shutil.move(tmp_path / name, tmp_path / "moved" / name)
    shutil.copy(tmp_path / "moved/runs/own/best.yaml", tmp_path / "moved/runs/own/winner.yaml")
    assert read_source("moved/runs/own/winner.yaml").workload().global_batch == 4


@pytest.mark.parametrize("command", ["tune", "train"])
def test_a_workload_that_has_moved_is_asked_for(project, tmp_path, capsys, command):
    (tmp_path / "train.py").rename("other.py")
    winner = shutil.copy(project / "best.yaml", project / "winner.yaml")
    code, _, err = run(capsys, command, winner, "--out", "new")
    assert code == 2
    assert f"names its own workload, {tmp_path}/train.py:workload; if it has moved, add --workload FILE:NAME" in err


@pytest.mark.parametrize("command", ["tune", "train"])
def test_workload_replaces_that_of_a_best_yaml(project, tmp_path, capsys, monkeypatch, command):
    (tmp_path / "train.py").rename("other.py")
    winner = shutil.copy(project / "best.yaml", project / "winner.yaml")
    taken = []

    def resolved(spec, **how):
        taken.append(str(spec))
        raise UsageError("resolved")

    monkeypatch.setattr("redline.models.request.resolve_workload", resolved)
    monkeypatch.setattr("redline.trainer.request.resolve_workload", resolved)
    more = ["--runner", "local"] if command == "tune" else []
    code, _, err = run(capsys, command, winner, "--workload", "other.py:workload", "--out", "new", *more)
    assert code == 2 and err.endswith("redline: resolved\n") and taken == ["other.py:workload"]


def test_an_export_names_the_given_workload(project, tmp_path, capsys):
    winner = shutil.copy(project / "best.yaml", project / "winner.yaml")
    for source in (project, winner):
        code, out, err = run(capsys, "export", source, "--to", "python", "--workload", "other.py:workload")
        assert code == 0, err
        assert f"{tmp_path}/other.py:workload" in out and f"{tmp_path}/train.py" not in out


def test_workload_does_not_replace_a_named_model(tmp_path, capsys):
    folder = finished(tmp_path / "run", {"model": "gpt2-tiny", "workload": {"spec": "gpt2-tiny"}})
    code, _, err = run(capsys, "export", folder, "--to", "python", "--workload", "other.py:workload")
    assert code == 2 and "is of the model gpt2-tiny, which --workload does not replace" in err


def test_an_interrupted_search_prints_the_line_that_continues_it(tmp_path, capsys):
    print_result(make_result([], [], folder=tmp_path, ended="interrupted", interrupted=True))
    assert f"next     redline tune --out {tmp_path} --resume" in capsys.readouterr().out.splitlines()
    print_result(
        make_result([], [], folder=tmp_path, ended="interrupted", interrupted=True),
        storage="postgresql://me:secret@host/db",
    )
    out = capsys.readouterr().out
    assert f"redline tune --out {tmp_path} --storage postgresql://" in out and "secret" not in out


def test_a_run_continues_by_its_folder_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("knobs.yaml").write_text("knobs:\n- {name: micro_batch, values: [1, 2, 4]}\n")
    Path("train.py").write_text(
        "import sys, time\nfrom redline import report\n"
        "for step in range(400):\n    time.sleep(0.01)\n    report(step=step, samples=int(sys.argv[1]))\n"
    )
    words = ["--command", f"{sys.executable} train.py {{micro_batch}}", "--space", "knobs.yaml"]
    limits = ["--measure-time", "200ms", "--sampler", "random", "--patience", "0", "--seed", "3"]
    code, out, err = run(capsys, "tune", *words, *limits, "--trials", 1, "--out", "run")
    assert code == 0, out + err
    kept = yaml.safe_load(Path("run/run.yaml").read_text())["asked"]["request"]
    assert kept["target"]["command"].endswith("train.py {micro_batch}") and kept["seed"] == 3 and kept["trials"] == 1
    code, out, err = run(capsys, "tune", "--out", "run", "--resume", "--trials", 2)
    assert code == 0, out + err
    assert len(list(csv.DictReader(open("run/trials.csv")))) == 2
    assert yaml.safe_load(Path("run/run.yaml").read_text())["asked"]["request"]["trials"] == 2


@pytest.mark.parametrize(
    ("request_of_run", "message"),
    [
        (None, "cannot be resumed by its folder alone"),
        ({"target": "gpt2-tiny", "nonsense": 1}, "cannot be resumed by its folder alone"),
        ({"target": {"nonsense": 1}}, "the command in its run.yaml is damaged"),
    ],
)
def test_a_run_without_its_request_is_not_resumed_by_its_folder(tmp_path, capsys, request_of_run, message):
    folder = finished(tmp_path / "run", {"model": "f", **({"request": request_of_run} if request_of_run else {})})
    code, _, err = run(capsys, "tune", "--out", folder, "--resume")
    assert code == 2 and message in err
