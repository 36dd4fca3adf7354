"""Lines that start an exported training on its hosts, and each host's arguments."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from redline.frameworks import export_targets, render
from redline.frameworks.export_input import Hosts
from redline.results import Measurement, Status, Trial

CONFIG = {"tp": 8, "pp": 2, "dp": 4, "micro_batch": 1, "grad_accum": 4, "precision": "bf16", "zero": 1}
STARTED = [name for name, target in export_targets().items() if target.start is not None]
WITHOUT_PIPELINES = {"accelerate", "trainer", "lightning"}


def made(target, *, per_host=8, model="llama3-8b", device="cuda", file=None, **knobs):
    config = {**CONFIG, **knobs}
    if target == "deepspeed":
        config["tp"] = knobs.get("tp", 1)
        config["dp"] = knobs.get("dp", 32)
    devices = config["tp"] * config["pp"] * config["dp"]
    asked = {
        "model": model,
        "workload": {"id": "3f2a", "spec": model},
        "seq_len": 128,
        "devices": {"type": device, "count": per_host, "used": devices, "per_host": per_host},
    }
    measured = Measurement(status=Status.OK, throughput=10.0, unit="tokens/s", devices=devices)
    trial = Trial(number=3, config=config, measurement=measured)
    return render(target, trial, {"asked": asked}, file=file)


@pytest.mark.parametrize(
    ("processes", "per_host", "expected"),
    [
        (64, 8, (8, 8)), (8, 8, (1, 8)), (4, 8, (1, 4)), (1, 8, (1, 1)), (12, 8, (2, 6)), (7, 4, (7, 1)),
        (16, 4, (4, 4)), (64, None, (1, 64)),
    ],
)  # fmt: skip
def test_processes_are_shared_among_the_fewest_hosts_as_many_on_each(processes, per_host, expected):
    found = Hosts.of(processes, per_host)
    assert (found.count, found.each) == expected


@pytest.mark.parametrize("target", STARTED)
def test_sixty_four_devices_are_eight_hosts_of_eight(target):
    text = made(target).text
    hosts = 4 if target in WITHOUT_PIPELINES else 8
    assert f"Start on each of {hosts} hosts of 8, MASTER_ADDR being the first one's name" in text
    if target == "accelerate":
        config = yaml.safe_load(text)
        assert (config["num_machines"], config["num_processes"]) == (4, 32)
        assert (config["machine_rank"], config["main_process_ip"], config["main_process_port"]) == (
            0,
            "FIRST-HOST",
            29500,
        )
        assert '--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR"' in text
        return
    assert f"--nnodes {hosts} --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint" in text.replace('\\"', '"')


@pytest.mark.parametrize("target", STARTED)
def test_eight_devices_are_one_host_without_a_rendezvous(target):
    text = made(target, tp=1, pp=1, dp=8).text
    assert "Start: " in text and not any(
        word in text for word in ("nnodes", "MASTER_ADDR", "main_process_ip", "hosts of")
    )
    if target == "accelerate":
        assert yaml.safe_load(text)["num_machines"] == 1


def test_devices_of_a_host_that_are_not_known_are_not_made_up():
    trial = Trial(number=0, config={"dp": 16, "micro_batch": 1}, measurement=None)
    text = render("python", trial, {"asked": {"workload": {"spec": "gpt2"}, "global_batch": 16}}).text
    assert "torchrun --nproc-per-node 16 train.py" in text
    assert "for one host, as how many devices a host has is not known" in text


def test_ranks_on_a_cpu_are_started_by_torchrun():
    text = made("accelerate", device="cpu", tp=1, pp=1, dp=2).text
    launched = "torchrun --nproc-per-node 2 --no-python accelerate launch --config_file accelerate.yaml"
    assert launched in text and "by MPI only" in text


@pytest.mark.parametrize("target", ["python", "trainer", "accelerate", "deepspeed", "lightning"])
@pytest.mark.parametrize(("cores", "ranks", "each"), [(16, 2, 8), (2, 2, None), (2, 4, None), (16, 1, None)])
def test_ranks_on_a_cpu_have_the_threads_they_were_measured_with(target, cores, ranks, each):
    """torchrun's default is one thread for each of several ranks, and all threads for a single rank."""
    devices = {"type": "cpu", "used": ranks, "per_host": ranks}
    asked = {"model": "m", "workload": {"spec": "llama-tiny"}, "seq_len": 64, "devices": devices}
    document = {"asked": asked, "environment": {"host": {"cores": cores}}}
    trial = Trial(number=0, config={"micro_batch": 2, "grad_accum": 1, "dp": ranks}, measurement=None)
    start = render(target, trial, document).use[-1]
    assert re.findall(r"OMP_NUM_THREADS=(\d+) torchrun", start) == ([] if each is None else [str(each)])
    devices["type"] = "cuda"
    assert "OMP_NUM_THREADS" not in render(target, trial, document).text


@pytest.mark.slow
@pytest.mark.parametrize("target", ["python", "accelerate"])
def test_two_hosts_meet_by_the_script_of_an_export(target, tmp_path):
    """Both hosts are this machine: the ranks are numbered host by host."""
    pytest.importorskip(target if target == "accelerate" else "torch")
    sizes = {"per_host": 1, "tp": 1, "pp": 1, "dp": 2, "zero": 0}
    (tmp_path / "accelerate.yaml").write_text(made("accelerate", **sizes).text)
    (tmp_path / "job.sh").write_text(made(target, **sizes).use[-1])
    (tmp_path / "train.py").write_text(
        "import os\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'GROUP_RANK')\n"
        "print('|'.join(os.environ[name] for name in names))\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PATH": tools,
    }
    hosts = [
        subprocess.Popen(
            ["bash", "job.sh"], cwd=tmp_path, env={**environment, "NODE_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    output = [host.communicate(timeout=100) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], output
    assert sorted(out.strip() for out, _ in output) == ["0|2|0|0", "1|2|0|1"]


@pytest.mark.parametrize("target", ["python", "trainer"])
def test_an_export_has_the_environment_of_the_measurement(target):
    """Spinning threads of OpenMP made an exported script on a busy CPU 3 to 5 times slower than its trial."""
    document = {"asked": {"workload": {"spec": "gpt2-tiny"}, "devices": {"type": "cpu", "used": 1}}}
    measured = Measurement(status=Status.OK, throughput=1.0, devices=1)
    trial = Trial(number=0, config={"micro_batch": 2, "grad_accum": 1}, measurement=measured)
    assert "OMP_WAIT_POLICY=PASSIVE torchrun" in render(target, trial, document).use[-1]
    if target == "python":
        text = render(target, trial, document).text
        assert 0 < text.index("os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')") < text.index("import torch\n")
