"""A command on several hosts of a Ray cluster: one process per host; they find each other, and none is left."""

import subprocess
import sys
import textwrap

import pytest
from redline.results import Measurement, Status
from redline.runners.command.trial import CommandReport
from redline.runners.command.work import _combined
from redline.runners.trial.job import Outcome, RankOutcome

SCRIPT = r"""
import os, sys, time
from pathlib import Path
import psutil
from ray.cluster_utils import Cluster
from redline.base.device import detect
from redline.runners import RayRunner, TimingPlan, TrialRequest, TrialTerms
from redline.runners.command.command import Command
from redline.runners.command.work import Commands
from redline.space import Space

folder = Path(sys.argv[1])
os.chdir(folder)
Path("on_a_host.py").write_text('''TRAIN''')
command = Command(command=(
    f"{sys.executable} -m torch.distributed.run --nnodes {{hosts}} --node-rank {{node_rank}} "
    "--nproc-per-node {devices_per_host} --master-addr {master_addr} --master-port {master_port} on_a_host.py {mode}"
), samples="4", metric=[r"per iteration \(ms\): (?P<step_ms>[\d.]+)"])
space = Space()
space.choice("mode", ["train", "oom", "crash", "silent"])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
try:
    terms = TrialTerms(device=detect(), devices=2, timeout_s=120, plan=TimingPlan(seconds=1.0))
    with RayRunner(Commands(command, space, devices=2), terms, address=cluster.address) as runner:
        runner.wait_ready()
        print("PER_HOST", runner.per_host)
        for number, mode in enumerate(["train", "oom", "crash", "silent", "train"]):
            log = folder / f"run/logs/{number}.log"
            begin = time.monotonic()
            done = runner.run(TrialRequest(config=space.config(mode=mode), number=number, log=log))
            seconds = time.monotonic() - begin
            print("TRIAL", mode, done.status, done.unit, done.reason)
            if mode == "oom":
                at = float(log.read_text().rpartition("at ")[2].split()[0])
                print("WITHIN", time.time() - at < 5)
            words = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
            print("LEFT", [each for each in words if "on_a_host.py" in each])
finally:
    cluster.shutdown()
"""
TRAIN = r"""
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, mode = dist.get_rank(), sys.argv[1]
dist.barrier()
if mode == "crash" and rank == 1:
    raise ValueError("rank one fails")
if mode == "oom" and rank == 1:
    print("at", time.time(), flush=True)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 1 has a total capacity of 79.10 GiB")
for step in range(20 if mode == "silent" else 1000):
    total = torch.ones(1)
    dist.all_reduce(total)
    time.sleep(0.01)
    # As Megatron has it, the last rank tells.
    if rank == 1 and mode == "train":
        print(f"elapsed time per iteration (ms): {float(total) * 5}", flush=True)
"""


@pytest.mark.slow
def test_each_host_starts_its_part_and_what_one_tells_or_suffers_is_the_trials(tmp_path):
    script = SCRIPT.replace("TRAIN''')", textwrap.dedent(TRAIN) + "''')")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=590)
    logs = "".join(each.read_text()[-3000:] for each in sorted((tmp_path / "run/logs").glob("*.log")))
    assert done.returncode == 0, done.stderr[-4000:] + logs
    lines = done.stdout.splitlines()
    assert "PER_HOST 1" in lines
    train, oom, crash, silent, again = (line for line in lines if line.startswith("TRIAL"))
    # A step of two ranks is reported as 10 ms and processes four samples.
    assert train.startswith("TRIAL train ok samples/s"), train + logs
    assert oom.startswith("TRIAL oom oom") and "Tried to allocate 3.00 GiB" in oom and "WITHIN True" in lines
    assert crash.startswith("TRIAL crash crash") and "ValueError: rank one fails" in crash
    assert silent.startswith("TRIAL silent crash") and "without reporting 'step_ms'" in silent
    assert again.startswith("TRIAL train ok")
    assert [line for line in lines if line.startswith("LEFT")] == ["LEFT []"] * 5


def test_hosts_reports_rank_measurement_before_cause_before_consequence():
    def report_of(rank, status, **more):
        report = CommandReport(measured=Measurement(status=status, **more), losses={rank: 1.0})
        return RankOutcome(rank=rank, status=Status.OK, report=report)

    ok = report_of(1, Status.OK, throughput=5.0, unit="samples/s", peak_memory_mib=10.0)
    oom, echo = (
        report_of(1, Status.OOM, reason="memory"),
        report_of(0, Status.CRASH, reason="peer lost", peak_memory_mib=20.0),
    )
    stopped = Outcome(status=Status.CRASH, reason="ended with the ranks of another host", secondary=True)
    for ranks, status, peak in (
        ((echo, ok), Status.OK, 20.0),
        ((echo, oom), Status.OOM, 20.0),
        ((ok,), Status.OK, 10.0),
    ):
        found, losses = _combined(Outcome(status=stopped.status, reason=stopped.reason, ranks=ranks))
        (rank,) = found.ranks
        assert (found.status, rank.report.status, rank.report.peak_memory_mib) == (Status.OK, status, peak)
        assert losses == {ranks[-1].rank: 1.0}
    assert _combined(stopped) == (stopped, {})


def test_the_crash_with_a_reason_counts():
    report = CommandReport(measured=Measurement(status=Status.CRASH, reason="ValueError: rank one fails"))
    echo = CommandReport(measured=Measurement(status=Status.CRASH, reason="exited with code 1"), echo=True)
    ranks = tuple(RankOutcome(rank=rank, status=Status.OK, report=each) for rank, each in enumerate((echo, report)))
    found, _ = _combined(Outcome(status=Status.OK, ranks=ranks))
    assert found.ranks[0].report.reason == "ValueError: rank one fails"


def test_memory_of_hosts_that_were_stopped_counts():
    report = CommandReport(measured=Measurement(status=Status.OK, throughput=1.0, unit="steps/s", peak_memory_mib=10.0))
    ranks = (
        RankOutcome(rank=0, status=Status.CRASH, reason="ended", peak_memory_mib=70.0, secondary=True),
        RankOutcome(rank=1, status=Status.OK, report=report, peak_memory_mib=900.0),
    )
    found, _ = _combined(Outcome(status=Status.CRASH, ranks=ranks, secondary=True))
    assert found.ranks[0].report.peak_memory_mib == 70.0
