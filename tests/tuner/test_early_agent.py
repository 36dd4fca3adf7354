"""The host agent and Ray start while a search is prepared, and end with the search however it ends."""

import signal
import subprocess
import sys
import time

import psutil
import pytest
import redline as rl
from predicted_runner import predicted
from processes import left_of
from redline.estimator import measuring
from redline.runners.host.client import HostAgent
from redline.tuner import runner_start


@pytest.fixture
def started(monkeypatch):
    """The host agents that searches start. They import nothing, which saves time."""
    made = []

    class Quick(HostAgent):
        def __init__(self, imports, environment=None):
            super().__init__([], environment)
            while not (variables := psutil.Process(self.pid).environ()):
                time.sleep(0.01)  # empty until the process runs its program
            self.variables = variables
            made.append(self)

        def also_import(self, imports):
            """Does nothing."""

    monkeypatch.setattr(runner_start, "HostAgent", Quick)
    yield made
    for each in made:
        each.close()


def made_by(model):
    return rl.Workload(model=model, batch=lambda size, seed: (), loss=lambda output, batch: output, name="own")


def interrupted():
    raise KeyboardInterrupt


FAULTS = {
    "a knob to fix": (lambda: {"target": "gpt2-tiny", "fix": {"micro_batch": 999}}, rl.UsageError),
    "a model that is built": (lambda: {"target": made_by(lambda: 1 / 0)}, rl.RedlineError),
    "patience": (lambda: {"target": made_by(interrupted)}, KeyboardInterrupt),
}


@pytest.mark.parametrize("missing", FAULTS)
def test_errors_before_the_first_trial_end_the_agent(started, tmp_path, missing):
    options, raised = FAULTS[missing]
    with pytest.raises(raised):
        rl.tune(**options(), runner="local", out=tmp_path / "run")
    (agent,) = started
    assert agent._process.process.returncode is not None
    assert not (tmp_path / "run").exists()


def test_this_machine_is_measured_when_the_agent_is_at_rest(started, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    owed = []

    def measure(**_):
        owed.extend(len(each._imports_begun) for each in started)
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "table_entry", lambda device: None)
    monkeypatch.setattr(measuring, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        rl.tune("gpt2-tiny", runner="local", out=tmp_path / "run", fix={"fusion": False})
    assert owed == [0]


def test_runs_without_local_trials_start_no_agent(started, tmp_path):
    space = rl.Space()
    space.choice("x", [1, 2])
    rl.tune(lambda config: float(config["x"]), space, isolate=False, trials=2)
    rl.tune("gpt2-tiny", out=tmp_path / "run", **predicted("gpt2-tiny", "h100-80gb", trials=1))
    with pytest.raises(rl.UsageError):
        rl.tune("gpt3-tiny", runner="ray")
    with pytest.raises(rl.UsageError):
        rl.tune("gpt2-tiny", tmp_path / "missing.yaml", runner="local")
    assert started == []


@pytest.mark.parametrize(
    ("runner", "module"), [("local", "redline.runners.host.agent"), ("ray", "redline.runners.place.ray_driver")]
)
def test_an_interrupt_while_it_starts_leaves_no_process(tmp_path, runner, module):
    process = subprocess.Popen(
        [sys.executable, "-m", "redline.cli", "tune", "gpt2-tiny", "--runner", runner, "--out", "run"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    driver = psutil.Process(process.pid)
    while not (agents := [each for each in driver.children() if module in each.cmdline()]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and "redline: interrupted" in errors
    assert left_of(agents) == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "huge"),
    [
        ({"runner": "local"}, False),
        ({"runner": "emulate", "devices": 2}, False),
        ({"runner": "emulate", "devices": 2, "hardware": "h100-80gb"}, True),
    ],
)
def test_memory_of_other_hardware_is_measured_with_huge_pages(started, tmp_path, options, huge):
    with pytest.raises(rl.UsageError):
        rl.tune("gpt2-tiny", fix={"micro_batch": 999}, out=tmp_path / "run", **options)
    (agent,) = started
    assert (agent.variables.get("THP_MEM_ALLOC_ENABLE") == "1") is huge
