"""Trainings by the command line: a tiny model's folder, English texts, and commands that run in the background."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import yaml
from redline.cli import main
from texts import TOPICS

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 300,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 32, "n_head": 4,
    "vocab_size": 300, "n_positions": 64, "resid_pdrop": 0.1, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SIZES = ["--seq-len", "16", "--global-batch", "8"]
PLAIN = ["--fix", "precision=fp32", "--fix", "fusion=false", "--fix", "attention=eager", "--fix", "kernels=false"]
WORKLOADS = """
import pathlib
import time

import torch
from torch import nn

import redline as rl


class Net(nn.Module):
    spike = lambda self, samples: 0
    pause = 0.0

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 2048), nn.Linear(2048, 4)
        self.samples = 0

    def forward(self, x):
        time.sleep(self.pause)
        if self.training and x.device.type != "meta" and torch.is_grad_enabled():
            self.samples += len(x)
            if self.samples > 160:
                # As a long sample among short ones would.
                held = torch.ones(1 + (self.spike(len(x)) << 18))
                x = x + 0 * held[0]
        return self.two(torch.relu(self.one(x))).mean(1)


class Spiking(Net):
    spike = lambda self, samples: 128 * samples


class Bursting(Net):
    spike = lambda self, samples: 4096


class Slow(Net):
    pause = 3.0

    def forward(self, x):
        if x.device.type != "meta":
            pathlib.Path(__file__).with_name("slow-began").touch()
        return super().forward(x)


class Broken(Net):
    def forward(self, x):
        if self.samples > 100:
            raise KeyError("no such token")
        return super().forward(x)


def batch(size, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, 256, 16, generator=draw), torch.randint(0, 4, (size,), generator=draw)


def space():
    made = rl.Space()
    micro = made.choice("micro_batch", [1, 2, 4, 8], default=8)
    made.derive("grad_accum", 8 // micro)
    return made


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def workload(model):
    return rl.Workload(name=model.__name__.lower(), model=model, batch=batch, loss=loss, space=space(), global_batch=8)


net, spiking, bursting, slow, broken = map(workload, (Net, Spiking, Bursting, Slow, Broken))
"""


@pytest.fixture(scope="session")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    for name, config in (("llama", LLAMA), ("gpt2", GPT2)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "corpus.txt").write_text("\n".join(TOPICS)[:40_000])
    (folder / "work.py").write_text(WORKLOADS)
    settings(folder)
    return folder


@pytest.fixture
def run(here, capsys, monkeypatch):
    """Returns `run(*arguments)`, which runs a command in this process and returns its exit code, output and errors."""
    monkeypatch.chdir(here)

    def command(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(each) for each in arguments])
        return ended.value.code, *capsys.readouterr()

    return command


def settings(folder, **values):
    """Writes settings of a training that logs every step into the folder, and returns their option."""
    name = "-".join(["every-step", *values]) + ".yaml"
    (folder / name).write_text(yaml.safe_dump({"log_every": 1, **values}))
    return "--settings", name


EVERY_STEP = ("--settings", "every-step.yaml")
"""Settings in the folder of `here`."""


def ended(here, *arguments):
    """Runs a command in this process for all tests of a module; returns its exit code."""
    with contextlib.chdir(here), pytest.raises(SystemExit) as end:
        main([str(each) for each in arguments])
    return end.value.code


class Command:
    """A command that runs in the background."""

    def __init__(self, arguments, cwd, launcher=()):
        program = launcher or [sys.executable, "-m", "redline.cli"]
        self.process = subprocess.Popen(
            [str(each) for each in (*program, *arguments)],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        self.began = []
        self._lines = []
        self._reader = threading.Thread(target=lambda: self._lines.extend(self.process.stdout), daemon=True)
        self._reader.start()

    @property
    def text(self):
        """Its output so far."""
        return "".join(self._lines)

    def until_holds(self, holds, timeout=240):
        """Waits until the condition holds."""
        end = time.monotonic() + timeout
        while not holds():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end, f"it does not come to that:\n{self.text}"
            time.sleep(0.02)

    def until(self, folder, holds, timeout=240):
        """Waits until a line of the training's log satisfies `holds`, and records the command's processes."""
        self.until_holds(lambda: any(holds(each) for each in lines_of(folder)), timeout)
        self.began = processes_of(self.process.pid)

    def signal(self, number):
        os.kill(self.process.pid, number)

    def wait(self, timeout=300):
        """Returns its exit code and output."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        self._reader.join()
        return self.process.returncode, self.text


@pytest.fixture
def start(here):
    """Returns `start(*arguments)`, which starts a background command."""
    started = []

    def command(*arguments, launcher=()):
        started.append(Command(arguments, here, launcher))
        return started[-1]

    yield command
    for each in started:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


def processes_of(pid):
    """Returns a process and all its descendants."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def lines_of(folder):
    """Returns the complete lines of a training's log."""
    path = folder / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def curve(folder):
    """Returns the loss of every step, as it was last computed."""
    return {line["step"]: line["loss"] for line in lines_of(folder) if line["kind"] == "step"}


def trained(command, source, out, *more, steps=12, devices=1):
    """Returns the arguments of a training on the texts."""
    return [command, source, "--data", "corpus.txt", *SIZES, *PLAIN, "--devices", devices, "--steps", steps,
            *EVERY_STEP, "--out", out, *more]  # fmt: skip


def words(result):
    """Returns the output of a command that succeeded, on one line."""
    code, out, err = result
    assert code == 0, out + err
    return " ".join(out.split())
