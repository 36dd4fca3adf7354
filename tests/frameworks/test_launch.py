"""Launches of trainings on the available hosts: command lines, scheduler scripts, and each host's arguments."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from redline.base.errors import UsageError
from redline.frameworks import export_targets, render
from redline.frameworks.export_input import Hosts
from redline.frameworks.launch import LAUNCHES
from redline.results import Measurement, Status, Trial

CONFIG = {"tp": 8, "pp": 2, "dp": 4, "micro_batch": 1, "grad_accum": 4, "precision": "bf16", "zero": 1}
STARTED = [name for name, target in export_targets().items() if target.start is not None]
WITHOUT_PIPELINES = {"accelerate", "trainer", "lightning"}
STANDIN = """\
#!/usr/bin/env bash
printf '%s|' "${0##*/}" "$@" >> "$SEEN"
printf 'MASTER_ADDR=%s NODE_RANK=%s\\n' "${MASTER_ADDR:-}" "${NODE_RANK:-}" >> "$SEEN"
"""


def made(target, launch=None, *, per_host=8, model="llama3-8b", device="cuda", file=None, **knobs):
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
    return render(target, trial, {"asked": asked}, launch=launch, file=file)


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


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("target", sorted(set(export_targets()) - set(STARTED)))
def test_targets_that_start_nothing_have_no_launch(target, launch):
    with pytest.raises(
        UsageError, match=f"{target} has no launch.*accelerate, trainer, deepspeed, lightning, torchtitan"
    ):
        made(target, launch)


def test_an_unknown_launch_comes_with_the_nearest():
    with pytest.raises(UsageError, match="unknown launch 'slurmm'; did you mean 'slurm'"):
        made("python", "slurmm")


def test_a_refused_export_has_no_launch():
    with pytest.raises(UsageError, match="DeepSpeed cannot run tp=2 with pp=2"):
        made("deepspeed", "slurm", tp=2, dp=16)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("target", STARTED)
def test_a_launch_says_what_it_is_of(target, launch):
    text = made(target, launch, precision="bf16_pure", file="jobs/mine").text
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("# "))
    assert f"for {target}: llama3-8b, trial 3: 10 tokens/s" in head
    assert "precision=bf16_pure trains differently" in head
    assert "jobs/mine" in head
    beside = export_targets()[target].file(next(iter(export_targets()[target].forms)))
    if launch == "kubernetes":
        assert "Needs Kubeflow's training operator 1 (kubeflow.org/v1)" in head
    else:
        assert f"redline export RUN --to {target} -o {beside}" in head


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """A PATH for scripts: a scheduler that runs its command here, launchers that do nothing, `touch` and `rm`."""
    folder = tmp_path_factory.mktemp("tools")
    for name, text in {"srun": 'shift\nexec "$@"\n', "scontrol": "echo n1\n", "torchrun": "", "accelerate": ""}.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (folder / name).chmod(0o755)
    for name in ("bash", "touch", "rm"):
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


@pytest.mark.parametrize("launch", ["torchrun", "slurm"])
@pytest.mark.parametrize("target", STARTED)
@pytest.mark.parametrize("model", ["llama3-8b", "x'\"$(touch pwned)`touch pwned`\nrm #"])
def test_scripts_are_bash(target, launch, model, tmp_path, tools):
    """No part of a name is executed: no file is created."""
    around = {"PATH": tools, "MASTER_ADDR": "n1", "NODE_RANK": "0", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n1"}
    for text in (
        made(target, launch, model=model).text,
        made(target, launch, model=model, pp=1, tp=1, dp=4).text,
    ):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        # Some scripts start with files that are missing here, and end with an error.
        subprocess.run(["bash", "-c", text], cwd=tmp_path, env=around, check=False, capture_output=True)
    assert list(tmp_path.iterdir()) == []


def stage(folder, target, text):
    """Runs a launch beside the target's file, with stand-ins for its programs. Returns the stand-ins' arguments."""
    tools = folder / "tools"
    tools.mkdir()
    for name in ("torchrun", "accelerate", "deepspeed"):
        (tools / name).write_text(STANDIN)
    # Slurm's srun starts its command once on each host.
    (tools / "srun").write_text(
        '#!/usr/bin/env bash\necho "$1" >> "$SEEN"\nshift\n'
        'for each in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$each "$@"; done\n'
    )
    (tools / "scontrol").write_text(
        '#!/usr/bin/env bash\n[[ "$*" == "show hostnames n[1-8]" ]] && printf "n%s\\n" {1..8}\n'
    )
    for each in tools.iterdir():
        each.chmod(0o755)
    exported = made(target)
    kind = export_targets()[target]
    (folder / kind.file(exported.form)).write_text(exported.text)
    (folder / "job.sh").write_text(text)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "SEEN": str(folder / "seen")}

    def run(*arguments, **more):
        subprocess.run(["bash", "job.sh", *arguments], cwd=folder, env={**environment, **more}, check=True)
        return (folder / "seen").read_text().splitlines()

    return run


@pytest.mark.parametrize("target", STARTED)
def test_a_batch_script_starts_every_host_with_its_number(target, tmp_path):
    text = made(target, "slurm").text
    hosts = 4 if target in WITHOUT_PIPELINES else 8
    directives = re.findall(r"^#SBATCH --(\S+)$", text, re.MULTILINE)
    assert {f"nodes={hosts}", "ntasks-per-node=1", "gpus-per-node=8", "job-name=llama3-8b"} <= set(directives)
    # sbatch reads directives only before the first command.
    assert text.index("#SBATCH --exclusive") < text.index("set -euo")
    run = stage(tmp_path, target, text)
    binding, *seen = run("--more", "a b", SLURM_JOB_NODELIST="n[1-8]", SLURM_NNODES=str(hosts))
    assert binding == "--cpu-bind=none"
    assert [line.rpartition("|")[2] for line in seen] == [f"MASTER_ADDR=n1 NODE_RANK={rank}" for rank in range(hosts)]
    called = seen[0].split("|")
    assert called[0] == ("accelerate" if target == "accelerate" else "torchrun")
    assert called[called.index("--more") + 1] == "a b"
    if target == "accelerate":
        assert called[called.index("--machine_rank") + 1] == "0"
        assert seen[3].split("|")[called.index("--machine_rank") + 1] == "3"
        assert called[called.index("--main_process_ip") + 1] == "n1"
    else:
        assert called[1:9] == [
            "--nnodes", str(hosts), "--nproc-per-node", "8", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "n1:29500",
        ]  # fmt: skip
    if target == "megatron":
        assert "--tensor-model-parallel-size" in called and "pretrain_gpt.py" in called
    if target == "torchtitan":
        assert called.index("--more") < called.index("activation_checkpoint:none")


@pytest.mark.parametrize("target", STARTED)
def test_a_script_for_each_host_wants_to_know_the_first_and_its_own_number(target, tmp_path):
    run = stage(tmp_path, target, made(target, "torchrun").text)
    for given in ({}, {"NODE_RANK": "2"}, *([{"MASTER_ADDR": "first"}] if target == "accelerate" else [])):
        with pytest.raises(subprocess.CalledProcessError):
            run(**given)
    (seen,) = run("--steps", "3", MASTER_ADDR="first", NODE_RANK="2", MASTER_PORT="1234")
    assert seen.endswith("MASTER_ADDR=first NODE_RANK=2") and "|--steps|3|" in seen
    assert "first:1234" in seen or "|--main_process_port|1234|" in seen


@pytest.mark.parametrize("target", STARTED)
def test_a_pytorchjob_has_a_replica_a_host_and_holds_the_file(target):
    text = made(target, "kubernetes").text
    config, job = yaml.safe_load_all(text)
    hosts = 4 if target in WITHOUT_PIPELINES else 8
    assert (config["apiVersion"], config["kind"]) == ("v1", "ConfigMap")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["spec"]["nprocPerNode"] == "8"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": hosts - 1}
    ((name, content),) = config["data"].items()
    assert name == export_targets()[target].file(next(iter(export_targets()[target].forms)))
    assert content == made(target, file=f"/redline/{name}").text
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"  # the operator requires this name
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert {each["mountPath"] for each in container["volumeMounts"]} == {"/redline", "/dev/shm"}
        assert {"name": "redline", "configMap": {"name": config["metadata"]["name"]}} in pod["volumes"]
        shell, flag, line = container["command"]
        assert (shell, flag) == ("bash", "-c") and f"/redline/{name}" in line and 'NODE_RANK="$RANK"' in line
        subprocess.run(["bash", "-n"], input=line, text=True, check=True)


def test_one_host_is_a_master_without_workers():
    _, job = yaml.safe_load_all(made("python", "kubernetes", tp=1, pp=1, dp=8).text)
    assert set(job["spec"]["pytorchReplicaSpecs"]) == {"Master"}
    assert (
        "nnodes" not in job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["command"][2]
    )


@pytest.mark.parametrize("model", ["Llama 3.1/8B", "x" * 200, "7b", "'\"$(touch)\n---\nkind: Pod", "", "ü"])
def test_names_in_a_cluster_are_names(model):
    config, job = yaml.safe_load_all(made("accelerate", "kubernetes", model=model).text)
    name = job["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 50
    assert name == config["metadata"]["name"]
    assert f"#SBATCH --job-name={name}\n" in made("accelerate", "slurm", model=model).text


def test_on_cpus_no_gpus_are_asked_for():
    assert "gpus" not in made("python", "slurm", device="cpu").text
    assert "nvidia" not in made("python", "kubernetes", device="cpu").text
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
    (tmp_path / "job.sh").write_text(made(target, "torchrun", **sizes).text)
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
    assert "OMP_WAIT_POLICY=PASSIVE torchrun" in render(target, trial, document, launch="torchrun").text
    if target == "python":
        text = render(target, trial, document).text
        assert 0 < text.index("os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')") < text.index("import torch\n")
