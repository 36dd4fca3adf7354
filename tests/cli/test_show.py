"""`redline show`, `compare`, `report` and `models` on the command line."""

import csv
import io
import json

import pytest
from command_line import run
from redline.results import Measurement, RunFolder, Status

KNOBS = {"micro_batch": (1, 2, 4), "fusion": (False, True)}


@pytest.fixture
def folder(tmp_path):
    """A run of three trials."""
    with RunFolder.open(tmp_path / "a", {"model": "gpt2-tiny", "seed": 0}, knobs=KNOBS) as made:
        for number, (status, speed) in enumerate(((Status.OK, 100.0), (Status.OOM, None), (Status.OK, 150.0))):
            made.start({"micro_batch": 2**number, "fusion": False}, sampler="default" if not number else "tpe")
            made.finish(number, Measurement(status=status, throughput=speed, unit="tokens/s", reason=""))
    return tmp_path / "a"


def test_show_prints_the_run(capsys, folder):
    code, out, _ = run(capsys, "show", folder)
    assert code == 0
    assert "best: trial 2, 150 tokens/s; the default configuration (trial 0): 100 tokens/s; gain 1.50x" in out


def test_show_as_data_is_data_alone(capsys, folder):
    code, out, _ = run(capsys, "show", folder, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [row["trial"] for row in rows] == ["2", "0", "1"]
    assert rows[0]["knob.micro_batch"] == "4"
    code, out, _ = run(
        capsys,
        "show",
        folder,
        "--format",
        "json",
        "--status",
        "ok",
        "--sort=-trial",
        "--columns",
        "trial,micro_batch",
    )
    assert json.loads(out) == [{"trial": 2, "knob.micro_batch": 4}, {"trial": 0, "knob.micro_batch": 1}]
    code, out, _ = run(capsys, "show", folder, "--format", "markdown", "--top", "1", "--columns", "trial")
    assert out == "| trial |\n| --- |\n| 2 |\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "cvs"], "did you mean 'csv'"),
        (["--columns", "trial,stauts"], "did you mean 'status'"),
        (["--columns", "trial,,status"], "must look like a,b,c"),
        (["--status", "okay"], "did you mean 'ok'"),
        (["--sort", "step"], "unknown column 'step'"),
        (["--top", "0"], "--top"),
    ],
)
def test_bad_input_of_show_is_named(capsys, folder, arguments, message):
    code, out, err = run(capsys, "show", folder, *arguments)
    assert code == 2 and message in err and out == ""


def test_runs_are_compared_by_the_dashboard(capsys, folder):
    code, _, err = run(capsys, "compare", folder)
    assert code == 2 and "compare was removed: `redline dashboard DIR` overlays the runs that are selected" in err
    code, _, err = run(capsys, "show", folder, folder)
    assert code == 2 and "unexpected extra argument" in err
