"""The ranks of a job on GPUs get compilers, network settings, and time to end."""

import os
import sys
import time
from multiprocessing import Pipe
from types import SimpleNamespace

import cloudpickle
import pytest
from redline.results import Status
from redline.runners.host import client, supervisor
from redline.runners.host.client import HostAgent
from redline.runners.host.log import LogFile
from redline.runners.host.protocol import Caller, Channel, Received
from redline.runners.trial import compiling
from redline.runners.trial.job import Begun, Job, Rendezvous

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(("cores", "ranks", "each"), [(64, 8, 8), (4, 8, 1), (16, 3, 5)])
def test_ranks_divide_the_cores_among_their_compilers(monkeypatch, cores, ranks, each):
    imported = SimpleNamespace(compile_threads=32)
    monkeypatch.setattr(compiling, "usable_cores", lambda: cores)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", imported)
    monkeypatch.setenv(compiling.COMPILE_THREADS, "")
    monkeypatch.delenv(compiling.COMPILE_THREADS)
    compiling.share_compile_threads(ranks)
    assert (imported.compile_threads, os.environ[compiling.COMPILE_THREADS]) == (each, str(each))
    monkeypatch.setenv(compiling.COMPILE_THREADS, "7")
    imported.compile_threads = 7
    compiling.share_compile_threads(ranks)
    assert (imported.compile_threads, os.environ[compiling.COMPILE_THREADS]) == (7, "7")


def test_both_backends_use_the_interface_by_which_the_host_is_reached(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)

    def program(context):
        return os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]

    agent = HostAgent(["cloudpickle", "redline.runners.host.supervisor"])
    try:
        job = Job(program=cloudpickle.dumps(program), rendezvous=Rendezvous(interface="eth7"), timeout_s=60)
        (rank,) = agent.run(job).ranks
    finally:
        agent.close()
    assert rank.report == ("eth7", "=eth7")


@pytest.mark.parametrize(
    ("job", "seconds"),
    [({"device_type": "cpu"}, 15.0), ({"device_type": "cuda"}, 60.0), ({"device_ids": ("0", "1")}, 60.0)],
    ids=["cpu", "cuda", "a command on GPUs"],
)
def test_ranks_on_gpus_have_longer_to_end(monkeypatch, job, seconds):
    given = []
    monkeypatch.setattr(supervisor, "kill_descendants", given.append)
    call = Received(Channel(Pipe()[0]), 1, "job", ())
    one = supervisor.Supervisor(Job(program=b"", **job), call)
    with LogFile(None) as log:
        one._end(log)
    assert given == [seconds]


@pytest.mark.parametrize(
    ("job", "waits"), [({"device_type": "cpu"}, False), ({"device_ids": ("0", "1")}, True)], ids=["CPU", "GPUs"]
)
def test_a_command_waits_for_the_memory_of_its_gpus(monkeypatch, job, waits):
    asked = []
    monkeypatch.setattr(supervisor, "wait_for_room", lambda ids, *rest, **options: asked.append(ids) or 512.0)
    one = supervisor.Supervisor(Job(program=b"", **job), Received(Channel(Pipe()[0]), 1, "job", ()))
    with LogFile(None) as log:
        one._wait_for_gpus(log)
    assert asked == ([("0", "1")] if waits else [])


@pytest.mark.parametrize(("device", "patience"), [("cpu", 1), ("cuda", 2.5)])
def test_a_client_waits_for_the_supervisor_s_teardown(monkeypatch, device, patience):
    monkeypatch.setattr(client, "ANSWER_S", 1.0)
    monkeypatch.setattr(client, "WAIT_S", 0.5)
    monkeypatch.setattr("redline.runners.trial.job.CUDA_TEARDOWN_S", client.TEARDOWN_S + 1)
    monkeypatch.setattr(client, "kill_tree", lambda pid: None)
    here, there = Pipe()
    call = Caller(here, str).begin("job")
    Received(Channel(there), call.number, "job", ()).note(Begun(os.getpid()))
    begin = time.monotonic()
    outcome = client._outcome(call, Job(program=b"", device_type=device, timeout_s=0.1))
    assert time.monotonic() - begin >= 0.1 + patience
    assert outcome.status is Status.TIMEOUT and f"did not answer for another {patience} s" in outcome.reason
