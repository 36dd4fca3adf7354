"""Standard output that is closed, has no reader, or an encoding without a sign: the result is shown, without a traceback."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REDLINE = f"{shlex.quote(sys.executable)} -m redline.cli"
TUNE = (
    f"{REDLINE} tune --command '{sys.executable} train.py {{clients}}' --set clients=1,3 --metric 'value (?P<value>.)' "
    "--sampler grid --out run"
)


@pytest.fixture
def shell(tmp_path):
    """Runs a line of bash in a folder with a program. Returns the exit code of redline, standard output and error."""
    (tmp_path / "train.py").write_text("import sys\nprint('value', sys.argv[1])\n")

    def shell(line, **environment):
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    return shell


def winner(tmp_path):
    return yaml.safe_load(Path(tmp_path, "run", "best.yaml").read_text())["best"]["trial"]


def test_signs_that_an_encoding_lacks_are_spelled(shell):
    code, out, err = shell(TUNE, PYTHONIOENCODING="ascii")
    assert code == 0 and err == "" and "winner   trial 1: 3 value +- 0 %" in out, out + err


def test_a_closed_output_is_replaced_by_standard_error(shell, tmp_path):
    code, _, err = shell(f"{TUNE} >&-")
    assert code == 0 and "winner   trial 1: 3 value" in err and "Traceback" not in err, err
    assert winner(tmp_path) == 1


def test_a_search_outlives_the_reader_of_its_output(shell, tmp_path):
    code, out, err = shell(f"{TUNE} | head -1; exit ${{PIPESTATUS[0]}}")
    assert code == 0 and out == "starting workers ...\n", out + err
    assert "winner   trial 1: 3 value" in err and "Traceback" not in err
    assert winner(tmp_path) == 1
