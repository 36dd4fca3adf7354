"""`redline show`, `compare`, `report` and `models` on the command line."""

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--status", "ok,,oom"], "must look like a,b,c"),
        (["--format", "csv"], "--format was removed: trials.csv"),
        (["--status", "okay"], "did you mean 'ok'"),
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
