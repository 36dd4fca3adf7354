"""`redline.results` is light to import and knows its location."""

import subprocess
import sys

import pytest
from redline.base.errors import UsageError
from redline.results import Measurement, Status, environment


def test_importing_results_loads_nothing_heavy():
    code = (
        "import sys, redline.results, redline.views.show\n"
        "heavy = {'torch', 'pandas', 'numpy', 'optuna', 'transformers', 'ray', 'redline.space'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_driver_is_read_from_the_kernel(tmp_path):
    path = tmp_path / "version"
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\nGCC version: 12.3.0\n")
    assert environment.nvidia_driver(str(path)) == "570.86.15"
    assert environment.nvidia_driver(str(tmp_path / "none")) is None


def test_every_measurement_is_valid_json():
    import json

    import numpy

    outcome = Measurement(
        status=Status.WRONG,
        throughput=numpy.float32(1.5),
        devices=numpy.int64(2),
        loss=float("-inf"),
        reason="nan",
    )
    text = json.dumps(outcome.to_dict(), allow_nan=False)
    again = Measurement.from_dict(json.loads(text) | {"from_the_future": 1})
    assert (again.throughput, again.devices, again.loss, again.reason) == (1.5, 2, float("-inf"), "nan")


def test_a_measurement_takes_its_status_as_a_word():
    assert Measurement(status="ok").ok and Measurement(status="oom").status is Status.OOM
    with pytest.raises(UsageError, match="unknown status 'okay'; did you mean 'ok'"):
        Measurement(status="okay")
