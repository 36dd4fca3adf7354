"""Trials in a Slurm allocation: two nodes of a real Slurm, both on this machine."""

import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import redline
from processes import left_of
from redline.base.device import Device, detect, usable_cores
from redline.base.errors import MissingDependency, UsageError
from redline.results import Status
from redline.runners import SlurmRunner, TrialTerms, slurm as slurm_runner
from redline.runners.command.command import Command
from redline.runners.command.work import Commands
from redline.runners.job import Job, Outcome
from redline.runners.slurm import _cores, shares
from redline.runners.worker_group import HostWorker, lay_out
from redline.space import Space
from redline.tuner.request import Request

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
TRAIN = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, mode = dist.get_rank(), sys.argv[1]
dist.barrier()
if mode == "oom" and rank == 1:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
for step in range(100_000):
    total = torch.ones(1)
    dist.all_reduce(total)
    time.sleep(0.01)
    if rank == 1:
        print(f"elapsed time per iteration (ms): {float(total) * 5}", flush=True)
"""


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which `salloc` provides two nodes."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "salloc"))):
        pytest.skip("Slurm's daemons (slurm-wlm, munge) are not installed, or this is not root")
    folder = tmp_path_factory.mktemp("slurm")
    for each in ("state", "spool-n1", "spool-n2"):
        (folder / each).mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, host=socket.gethostname().partition(".")[0], ports=free_ports(3)))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    munge = ["munged", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}", f"--log-file={folder}/munge.log",
             f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed", "--foreground"]  # fmt: skip
    daemons = []
    try:
        nodes = (["slurmd", "-D", "-N", name, "-f", conf] for name in ("n1", "n2"))
        for command in (munge, ["slurmctld", "-D", "-i", "-f", conf], *nodes):
            daemons.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            time.sleep(1)
        for _ in range(60):
            output = subprocess.run(
                ["sinfo", "-h", "-o", "%T %D"], env=environment, capture_output=True, text=True
            ).stdout
            if output.split() == ["idle", "2"]:
                break
            time.sleep(0.5)
        else:
            pytest.fail(f"Slurm's nodes do not become idle: {output}")
        yield environment
    finally:
        for each in reversed(daemons):
            each.terminate()
        for each in daemons:
            each.wait(30)


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


COMMAND = (
    f"{sys.executable} -m torch.distributed.run --nnodes {{hosts}} --node-rank {{node_rank}} "
    "--nproc-per-node {devices_per_host} --master-addr {master_addr} --master-port {master_port} train.py {mode}"
)

SHORT = ("--devices", 2, "--out", "r")


def tune(*arguments):
    return ["salloc", "--quiet", "-N2", sys.executable, "-m", "redline.cli", "tune", *map(str, arguments)]


def words_of_processes():
    return [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]


@pytest.mark.slow
def test_a_command_has_a_process_on_each_node_of_the_allocation(slurm, checkout):
    done = subprocess.run(
        tune("--command", COMMAND, "--set", "mode=train,oom", *SHORT, "--trials", 2, "--measure-time", "1s"),
        env=slurm, cwd=checkout, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runner slurm" in done.stdout and "steps/s" in done.stdout
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if line.strip()[:2] in ("0 ", "1 ")}
    assert set(lines) == {"ok", "oom"} and "Tried to allocate 3.00 GiB" in lines["oom"]
    assert "--nnodes 2 --node-rank '{node_rank}'" in " ".join(done.stdout.split())
    assert not [words for words in words_of_processes() if "train.py" in words or "redline.runners.slurm_host" in words]


@pytest.mark.slow
def test_a_model_is_trained_on_both_nodes(slurm, checkout):
    done = subprocess.run(
        tune("gpt2-tiny", *SHORT, "--trials", 1, "--measure-time", "1s", "--fix", "fusion=false"),
        env=slurm, cwd=checkout, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runner slurm" in done.stdout and "per_host: 1" in (checkout / "r/run.yaml").read_text()


@pytest.mark.slow
def test_a_killed_search_leaves_no_tasks(slurm, checkout):
    search = subprocess.Popen(
        tune("--command", COMMAND, "--set", "mode=train", *SHORT, "--measure-time", "60s"),
        env=slurm, cwd=checkout, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    log = checkout / "r/logs/0.log"
    end = time.monotonic() + 120
    while not [words for words in words_of_processes() if "train.py" in words] and time.monotonic() < end:
        time.sleep(0.2)
    family = psutil.Process(search.pid).children(recursive=True)
    (redline_itself,) = (each for each in family if each.cmdline()[1:4] == ["-m", "redline.cli", "tune"])
    redline_itself.send_signal(signal.SIGKILL)
    search.wait(60)
    assert left_of(family, timeout=30) == []
    end = time.monotonic() + 30
    while any("train.py" in words for words in words_of_processes()) and time.monotonic() < end:
        time.sleep(0.2)
    assert not [words for words in words_of_processes() if "train.py" in words or "redline.runners.slurm_host" in words]
    assert not log.exists() or "Traceback" not in log.read_text()


def work():
    space = Space()
    space.choice("mode", ["train"])
    return Commands(Command(command="true {mode}"), space, devices=2)


def test_outside_of_an_allocation_it_says_so(monkeypatch, tmp_path):
    terms = TrialTerms(device=detect(), devices=2)
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match="needs Slurm's `srun`"):
        SlurmRunner(work(), terms)
    (tmp_path / "srun").write_text("#!/bin/sh\necho no nodes today >&2\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with pytest.raises(UsageError, match="must run in an allocation"):
        SlurmRunner(work(), terms)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    with pytest.raises(redline.RunnerError, match="Slurm started 0 of 2 tasks: no nodes today"):
        SlurmRunner(work(), terms)
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "8")
    with pytest.raises(UsageError, match="the allocation has GPUs, but this process sees none"):
        SlurmRunner(work(), TrialTerms(device=Device(type="cpu", name="a CPU", count=1, memory_mib=1000), devices=2))


STRANGER = r"""#!{python}
import os, socket, sys, time
port = int(sys.argv[-1])
held = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]  # says nothing, and stays
loud = socket.create_connection(("127.0.0.1", port))
loud.sendall(b"GET / HTTP/1.0\r\n\r\n")
time.sleep(1)
sys.exit("no nodes today")
"""


def test_connections_without_the_key_are_refused_and_block_nothing(monkeypatch, tmp_path):
    srun = tmp_path / "srun"
    srun.write_text(STRANGER.format(python=sys.executable))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setattr(slurm_runner, "ANSWER_S", 1)
    begin = time.monotonic()
    with pytest.raises(redline.RunnerError, match="Slurm started 0 of 2 tasks: no nodes today"):
        SlurmRunner(work(), TrialTerms(device=Device(type="cpu", name="a CPU", count=1, memory_mib=1000), devices=2))
    assert time.monotonic() - begin < 30


def test_a_group_that_is_lost_gets_no_further_trial():
    class Lost:
        killed = 0
        workers = (SimpleNamespace(lost=False),)

        def run(self, job):
            raise TimeoutError("1 hosts did not end a trial within 10 s")

        def kill(self):
            self.killed += 1

    class Fine(Lost):
        def run(self, job):
            return Outcome(status=Status.OK)

    runner = object.__new__(SlurmRunner)
    runner._groups, runner._left, runner._counting = queue.SimpleQueue(), 2, threading.Lock()
    lost, fine = Lost(), Fine()
    runner._groups.put(lost)
    runner._groups.put(fine)
    with pytest.raises(redline.RunnerError, match="Slurm lost the node of a trial"):
        runner.dispatch(Job(program=b""))
    assert [runner.dispatch(Job(program=b"")).status for _ in range(3)] == [Status.OK] * 3 and lost.killed == 1

    def failing(job):
        raise redline.RunnerError("the agent of its host has ended")

    fine.run = failing
    with pytest.raises(redline.RunnerError, match="^the agent of its host has ended"):
        runner.dispatch(Job(program=b""))
    assert fine.killed == 0, "its host is there and starts another agent"
    fine.workers = (SimpleNamespace(lost=True),)
    with pytest.raises(redline.RunnerError, match="Slurm lost the node"):
        runner.dispatch(Job(program=b""))
    assert fine.killed == 1
    for _ in range(2):
        with pytest.raises(redline.RunnerError, match="has lost all nodes"):
            runner.dispatch(Job(program=b""))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("72(x2),36", [72, 72, 36]), ("1(x3)", [1, 1, 1]), ("4,2,1", [4, 2, 1]), ("", None), ("8", None)],
)
def test_the_cores_of_each_node_are_read(monkeypatch, text, expected):
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", text)
    assert _cores(3) == (expected or [usable_cores()] * 3)


class Node(HostWorker):
    def __init__(self, name):
        self.name, self.asked = name, []

    def ask(self, what, *arguments):
        self.asked.append((what, *arguments))

    def kill(self):
        self.asked.append("kill")


@pytest.mark.parametrize(
    ("devices", "count", "gpus", "expected"),
    [
        (4, 2, 8, [["n0 0,1,2,3"], ["n0 4,5,6,7"], ["n1 0,1,2,3"], ["n1 4,5,6,7"]]),
        (8, 2, 8, [["n0 0,1,2,3,4,5,6,7"], ["n1 0,1,2,3,4,5,6,7"]]),
        (3, 1, 8, [["n0 0,1,2"], ["n0 3,4,5"]]),
        (4, 4, 2, [["n0 0,1", "n1 0,1"], ["n2 0,1", "n3 0,1"]]),
        (2, 3, 0, [["n0"], ["n1"], ["n2"]]),
    ],
)
def test_trials_at_once_have_gpus_of_their_own(devices, count, gpus, expected):
    nodes = [Node(f"n{number}") for number in range(count)]
    layout = lay_out(devices, gpus > 0, [gpus or devices] * count)
    groups = shares(nodes, layout, gpus)
    assert not gpus or len(groups) == layout.at_once
    found = []
    for group in groups:
        found.append([])
        for member in group:
            member.ask("run", Job(program=b""), "key", True)
            (node,) = (each for each in nodes if each.asked)
            ((what, job, key, send),) = node.asked
            assert (what, key, send) == ("run", "key", True)
            found[-1].append(f"{node.name} {','.join(job.device_ids)}".strip())
            node.asked.clear()
    assert found == expected


def test_slurm_is_the_default_in_an_allocation_of_several_nodes(monkeypatch):
    command = Command(command="true")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for count, model, of_command in (("", "ray", "local"), ("1", "ray", "local"), ("4", "slurm", "slurm")):
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", count)
        assert Request("gpt2-tiny").runs_on == model and Request(command).runs_on == of_command
        assert Request(lambda config: 1.0).runs_on == "local"
    assert Request("gpt2-tiny", ray_address="auto").runs_on == "ray"
