"""A host agent starts whatever its imports print, read or break, and names the cause when it does not."""

import os
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import cloudpickle
import psutil
import pytest
from redline.base.errors import RunnerError
from redline.results import Status
from redline.runners.host.client import STARTS, HostAgent
from redline.runners.trial.job import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Makes an agent that imports only a module with this source, so that it starts quickly."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(source):
        name = f"imported_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(f"starts = {str(tmp_path / 'starts')!r}\n" + textwrap.dedent(source))
        made.append(HostAgent([name]))
        return made[-1]

    yield make
    for each in made:
        each.close()


COUNT = """
import os, sys
with open(starts, "a") as file:
    file.write("x")
count = os.path.getsize(starts)
"""


NOISES = {
    "prints": "print('hello from an import', 'x' * 100_000)",
    "writes": "import sys; sys.stdout.write('no line end'); sys.stdout.flush()",
    "writes to the descriptor": "import os; os.write(1, b'\\x80\\x04written to the descriptor')",
    "prints from C": "import ctypes; libc = ctypes.CDLL(None); libc.puts(b'from C'); libc.fflush(None)",
    "starts what prints": "import subprocess; subprocess.run(['echo', 'from a child'])",
    "reads": "import sys; assert sys.stdin.read() == ''",
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_imports_that_change_standard_streams_are_harmless(agent, noise):
    agent(noise).wait_ready()


def test_output_of_imports_is_not_in_trial_logs(agent, tmp_path):
    noisy = "\n".join(NOISES.values())
    made = agent(f"import torch\n{noisy}\nprint('never flushed')")
    for _ in range(2):
        log = tmp_path / "0.log"
        outcome = made.run(Job(program=cloudpickle.dumps(lambda context: print("mine")), timeout_s=60, log=str(log)))
        assert outcome.status is Status.OK, outcome.reason
        assert log.read_text() == "mine\n"
    assert Path(made._process.folder, "log").read_bytes().count(b"never flushed") == 1


def test_an_agent_that_dies_while_it_starts_is_started_again(agent, tmp_path):
    agent(COUNT + f"if count < {STARTS}: os.abort()").wait_ready()
    assert (tmp_path / "starts").read_text() == "x" * STARTS


@pytest.mark.parametrize(
    ("death", "how"),
    [("os.abort()", "killed by signal 6 (SIGABRT)"), ("os._exit(7)", "the process exited with code 7")],
)
def test_an_agent_that_keeps_dying_fails_with_its_last_output(agent, tmp_path, death, how):
    made = agent(COUNT + f"os.write(2, b'no licence for this library ' + str(count).encode())\n{death}")
    with pytest.raises(RunnerError) as caught:
        made.wait_ready()
    assert str(caught.value) == (
        f"the host agent died {STARTS} times before it was ready ({how})\nno licence for this library {STARTS}"
    )
    assert (tmp_path / "starts").read_text() == "x" * STARTS


def test_later_imports_are_loaded_when_ready_and_after_a_restart(agent, tmp_path):
    made = agent("")
    (tmp_path / "later.py").write_text("import time; time.sleep(0.5)")
    made.also_import(["later"])
    loaded = Job(program=cloudpickle.dumps(lambda context: "later" in sys.modules), timeout_s=60)

    def run():
        (rank,) = made.run(loaded).ranks
        return rank.report

    assert run() is True
    psutil.Process(made.pid).kill()
    psutil.Process(made.pid).wait()
    assert run() is True


def test_an_agent_that_is_lost_later_fails_its_trial_and_is_replaced(agent):
    made = agent("")
    made.wait_ready()
    lost = psutil.Process(made.pid)

    def kill():
        while not lost.children():  # the trial's supervisor
            time.sleep(0.01)
        lost.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RunnerError, match="the host agent was lost"):
        made.run(Job(program=cloudpickle.dumps(lambda context: time.sleep(600)), timeout_s=60))
    thread.join()
    made.wait_ready()
    assert made.pid != lost.pid


def test_an_agent_ends_with_whoever_started_it(tmp_path):
    (tmp_path / "quick.py").write_text("")
    code = """
    import sys
    from redline.runners.host.client import HostAgent
    made = HostAgent(["quick"])
    made.wait_ready()
    print(made.pid, flush=True)
    sys.stdin.read()
    """
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    agent = psutil.Process(int(starter.stdout.readline()))
    starter.kill()
    starter.communicate()
    _, alive = psutil.wait_procs([agent], timeout=30)
    assert alive == []


def driver(folder, *, initialised):
    """A CUDA driver that is initialised, or is not."""
    status = 0 if initialised else 3  # CUDA_SUCCESS, CUDA_ERROR_NOT_INITIALIZED
    folder.mkdir()
    (folder / "driver.c").write_text(f"int cuCtxGetCurrent(void **context) {{ *context = 0; return {status}; }}")
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, folder / "driver.c"]
    subprocess.run(command, check=True)
    return library


def test_a_module_that_loads_the_cuda_driver_is_imported_once(agent, tmp_path):
    made = agent(f"import ctypes\nctypes.CDLL({str(driver(tmp_path / 'cuda', initialised=False))!r})")
    names = made._imports
    made.wait_ready()
    assert made._imports == names


def test_a_module_that_initialises_cuda_is_imported_by_each_trial(agent, tmp_path):
    made = agent(f"import ctypes\nctypes.CDLL({str(driver(tmp_path / 'cuda', initialised=True))!r})")
    (spoils,) = made._imports
    spoiled = made.pid
    made.also_import(["json", spoils])
    with pytest.warns(RuntimeWarning, match=f"importing {spoils} initialises CUDA, so each trial imports it itself"):
        made.wait_ready()
    assert made.pid != spoiled
    made.also_import([spoils])
    outcome = made.run(Job(program=cloudpickle.dumps(lambda context: spoils in sys.modules), timeout_s=60))
    assert outcome.status is Status.OK
    assert outcome.ranks[0].report is False
