"""Trials over two hosts: two Ray nodes on this machine, an agent on each, one rank on each."""

import socket
import subprocess
import sys

import pytest
from redline.base.errors import RunnerError
from redline.results import Status
from redline.runners.place import ray_host
from redline.runners.place.ray_cluster import Layout, lay_out
from redline.runners.place.ray_host import merge
from redline.runners.trial.job import Outcome, RankOutcome

SCRIPT = """
import os, pathlib, sys, time
import cloudpickle, psutil, torch
from torch import nn
from ray.cluster_utils import Cluster
import redline as rl
from redline.base.device import detect
from redline.training import Training
from redline.schedule.comparison import allowance, loss_allowance
from redline.runners import RayRunner, TrialRequest, TrialTerms
from redline.runners.trial.job import Job, Rendezvous

folder = pathlib.Path(sys.argv[1])

def batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 32, generator=generator), torch.randint(0, 10, (size,), generator=generator)

workload = rl.Workload(
    name="mlp", model=lambda: nn.Linear(32, 10), batch=batch, global_batch=16,
    loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
)

def fails(context):
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=context.init_method, rank=context.rank, world_size=2)
    (folder / f"pid{context.rank}").write_text(str(os.getpid()))
    dist.barrier()
    if context.rank == 1:
        raise ValueError("rank one fails")
    time.sleep(600)  # not even a collective that would notice

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
try:
    with RayRunner(workload, TrialTerms(device=detect(), devices=2, threads=1), address=cluster.address) as runner:
        runner.wait_ready()
        print("PER_HOST", runner.per_host)
        for zero in (0, 3):
            done = runner.run(TrialRequest(config={"zero": zero}, number=0, log=folder / "0.log"))
            print("TRIAL", done.status, done.reason, len(done.ranks), [each.rank for each in done.ranks])
            print("MEMORY", all(each.peak_memory_mib > 0 for each in done.ranks))
            print("SLOWEST", done.step_ms == max(each.step_ms for each in done.ranks))
            alone = Training(workload, {}, torch.device("cpu"))
            expected = float(alone.step())
            rounding = loss_allowance(allowance(alone.model, 16 * 32), 16)
            print("LOSS", abs(done.loss - expected) <= rounding * expected)
        job = Job(program=cloudpickle.dumps(fails), ranks=2, rendezvous=Rendezvous(world_size=2), threads=1, timeout_s=500)
        outcome = runner.dispatch(job)
        print("FAILED", outcome.status, outcome.reason)
        print("GONE", not psutil.pid_exists(int((folder / "pid0").read_text())))
finally:
    cluster.shutdown()
"""


def lines_of(script, folder):
    """Runs a script and groups the lines that it prints by their first word."""
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    return {word: [rest for each, _, rest in lines if each == word] for word, _, _ in lines}


@pytest.mark.slow
def test_a_trial_runs_on_two_hosts_and_trains_as_one_process_and_the_first_failing_rank_ends_all(tmp_path):
    reported = lines_of(SCRIPT, tmp_path)
    assert reported["PER_HOST"] == ["1"]
    assert reported["TRIAL"] == ["ok  2 [0, 1]"] * 2
    assert reported["LOSS"] == reported["MEMORY"] == reported["SLOWEST"] == ["True"] * 2
    assert reported["FAILED"] == ["crash rank 1: ValueError: rank one fails (during start)"]
    assert reported["GONE"] == ["True"]


@pytest.mark.parametrize(
    ("devices", "capacities", "expected"),
    [
        (4, [8], (1, 4, 2)),
        (8, [8, 8], (1, 8, 2)),
        (16, [8, 8], (2, 8, 1)),
        (16, [8, 8, 8, 8], (2, 8, 2)),
        (8, [4, 2, 4], (2, 4, 1)),
        (6, [4, 4, 4], (2, 3, 1)),
        (4, [1, 1, 1, 1], (4, 1, 1)),
        (9, [8, 8], None),
    ],
)
def test_a_trial_takes_as_few_hosts_as_will_do(devices, capacities, expected):
    layout = lay_out(devices, True, capacities)
    assert (layout and (layout.hosts, layout.per_host, layout.at_once)) == expected


def test_cpu_ranks_share_a_host_where_the_cluster_has_too_few_cores():
    assert lay_out(4, False, [2.0]) == Layout(hosts=1, per_host=4, bundle={"CPU": 1.0}, at_once=1)


SLOW_TO_STOP = """
import threading, time
import ray
from redline.results import Status
from redline.runners.place import ray_host
from redline.runners.trial import job as jobs
from redline.runners.trial.job import Job, Outcome

ray_host.STOP_S = jobs.TEARDOWN_S = 0.2
jobs.CUDA_TEARDOWN_S = 5.0

class SlowToStop:
    # A host whose rank fails at once, or one whose rank takes a while to end after it is stopped.

    def __init__(self, fails, seconds):
        self.fails, self.seconds, self.stopped = fails, seconds, threading.Event()

    def wait_ready(self, imports):
        pass

    def node_id(self):
        return "another"

    def meeting_point(self):
        return "127.0.0.1", 1

    def stop(self, key):
        self.stopped.set()

    def run(self, job, key, sends_output):
        if self.fails:
            return Outcome(status=Status.OOM, reason="rank 0: CUDA out of memory"), b""
        self.stopped.wait()
        time.sleep(self.seconds)
        return Outcome(status=Status.CRASH, reason="stopped", secondary=True), b""

ray.init(address="local", num_cpus=0, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
Host = ray.remote(num_cpus=0, max_concurrency=4)(SlowToStop)

def run(job, seconds):
    group = ray_host.HostGroup([Host.remote(True, 0), Host.remote(False, seconds)], 1)
    group.wait_ready()
    return group.run(job)

on_gpus = run(Job(program=b"", ranks=2, device_type="cuda"), 1.0)
print("GPU", on_gpus.status, on_gpus.reason)
try:
    run(Job(program=b"", ranks=2), 30.0)
except TimeoutError as error:
    print("CPU", error)
"""


@pytest.mark.slow
def test_a_host_whose_ranks_take_long_to_leave_their_gpus_is_waited_for(tmp_path):
    reported = lines_of(SLOW_TO_STOP, tmp_path)
    assert reported["GPU"] == ["oom rank 0: CUDA out of memory"]
    assert reported["CPU"] == ["1 hosts did not end a trial after it was stopped"]


def test_the_cause_is_told_from_its_echoes_on_other_hosts():
    echo = Outcome(status=Status.CRASH, reason="rank 0: Connection reset by peer", secondary=True)
    oom = Outcome(
        status=Status.OOM,
        reason="rank 9: CUDA out of memory",
        ranks=(RankOutcome(rank=9, status=Status.OOM), RankOutcome(rank=8, status=Status.OK)),
    )
    merged = merge([echo, oom])
    assert (merged.status, merged.reason) == (Status.OOM, "rank 9: CUDA out of memory")
    assert [each.rank for each in merged.ranks] == [8, 9]
    late = [Outcome(status=Status.TIMEOUT, reason=f"no result within 9 s (on rank {rank})") for rank in (0, 1)]
    assert merge([*late, echo]).reason == "no result within 9 s (on rank 0); no result within 9 s (on rank 1)"


def test_ranks_of_several_hosts_meet_at_a_free_port(monkeypatch):
    with socket.socket() as taken, socket.socket() as left:
        for each in (taken, left):
            each.bind(("127.0.0.1", 0))
        ports = [taken.getsockname()[1], left.getsockname()[1]]
        monkeypatch.setattr(ray_host, "PORTS", ports)
        with pytest.raises(RunnerError, match=rf"no port from {ports[0]} to {ports[1]} is free on 127\.0\.0\.1"):
            ray_host.free_port("127.0.0.1")
        left.close()
        assert ray_host.free_port("127.0.0.1") == ports[1]
