"""The GPU benchmark tier runs here at tiny sizes: leased GPU time is too short to find its mistakes."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "optuna"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def without_ray_and_optuna(tmp_path):
    """An environment for processes in which neither can be imported."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT)
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.slow
def test_every_check_runs_on_a_cpu_at_tiny_sizes(tmp_path, without_ray_and_optuna):
    begin = time.monotonic()
    command = [sys.executable, "bench/gpu.py", "--out", str(tmp_path), "--tiny", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, env=without_ray_and_optuna, capture_output=True, text=True, check=False)
    lines = [json.loads(each) for each in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    wrong = [each for each in lines if each["status"] != "ok"]
    assert not wrong and done.returncode == 0, f"{wrong}\n{done.stdout}\n{done.stderr}"
    names = [each["check"] for each in lines]
    assert names[:2] == ["versions", "tests"] and names[-1] == "ranks" and len(names) == 16
    assert all(each["rows"] for each in lines)
    assert "23/" in next(each for each in lines if each["check"] == "tests")["rows"][0]["ended"]
    print(f"{time.monotonic() - begin:.0f} s")


@pytest.fixture(scope="module")
def bench():
    """bench/gpu.py as a module, with stub checks instead of the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        spec = importlib.util.spec_from_file_location("bench_gpu", ROOT / "bench" / "gpu.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        import gpu_checks as gpu

        def wrong(setting):
            yield {"what": "first", "value": 1.0}
            yield {"what": "second", "holds": False}

        def slow(setting):
            yield {"what": "before"}
            time.sleep(60)

        def broken(setting):
            yield {"what": "before"}
            raise ValueError("no such kernel")

        def killed(setting):
            yield {"what": "before"}
            os._exit(9)

        checks = {
            each.__name__: gpu.Check(each, 1.0 if each is slow else 30.0) for each in (wrong, slow, broken, killed)
        }
        patch.setattr(gpu, "CHECKS", checks)
        yield module


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("wrong", "failed", "second"),
        ("slow", "timeout", "took longer than 1 s"),
        ("broken", "crash", "ValueError: no such kernel"),
        ("killed", "crash", "exit code 9"),
    ],
)
def test_a_check_that_ends_badly_keeps_what_it_reported(bench, tmp_path, name, status, error):
    import gpu_checks as gpu

    setting = gpu.Setting(device="cpu", tiny=True, folder=tmp_path)
    found = bench.outcome(name, setting, gpu.CHECKS[name].limit_s)
    assert found["status"] == status and error in found["error"] and found["rows"][0]["what"] in ("first", "before")
    assert found["seconds"] < 20
    assert bench.MARKS[status] in bench.table([found]) and found["rows"][0]["what"] in bench.table([found])


def test_checks_for_which_there_is_no_time_are_skipped(bench, tmp_path):
    import gpu_checks as gpu

    setting = gpu.Setting(device="cpu", tiny=True, folder=tmp_path)
    found = list(bench.outcomes(["wrong", "slow"], setting, time.monotonic() + 5))
    assert [each["status"] for each in found] == ["skipped", "skipped"]
