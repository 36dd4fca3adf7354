"""`kill -9` at any moment of a save leaves the previous checkpoint complete, and nothing that looks like another."""

import os
import random
import signal
import time
from collections import Counter

import pytest
import torch
from redline.models.layouts.dcp import dcp_tensors
from redline.schedule.parallel.sharding import local
from redline.trainer.checkpoint.saver import CheckpointFolder, Saver, latest
from redline.trainer.checkpoint.state import State
from redline.trainer.loop import Hyperparameters
from trainings import built

KEEP = 2
MANY = pytest.mark.slow


@pytest.fixture(scope="module")
def training(small):
    """A training after one step, so that its optimizer has a state."""
    found = built(small("llama", num_hidden_layers=3), {"micro_batch": 8}, Hyperparameters())
    batch = found.micro_batches(found.workload.batch(8, 0))
    found.passes(batch)
    found.update()
    return found


def saving(training, where, finished, rank=0, group=None):
    """Saves checkpoints in a loop, each tensor filled with its step's number; writes finished steps to the pipe `finished`."""
    folder = CheckpointFolder(where, KEEP)
    found = latest(folder, group)
    if rank == 0:
        folder.prepare()
    state, saver = State(training), Saver(folder, rank, group)
    step = found.step if found else 0
    while True:
        step += 1
        with torch.no_grad():
            for tensor, _ in state.tensors().values():
                local(tensor.detach()).fill_(step)
        before = saver.save(state, step, {"samples": 8 * step})
        if before is not None and rank == 0:
            os.write(finished, (before.failure or str(before.step)).encode() + b"\n")


def forked(function, *args):
    """Runs a function in a child process until it is killed; returns the process and its pipe."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reads)
            function(*args, writes)
        finally:
            os._exit(1)
    os.close(writes)
    return pid, reads


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def output(reads):
    """Returns the output of a process until its end."""
    with os.fdopen(reads, "rb") as file:
        return file.read().decode().split()


def killed_once(training, where, chance):
    """Kills such a process at a random moment after its first checkpoint; returns the last step that it reported."""
    pid, reads = forked(lambda finished: saving(training, where, finished))
    first = os.read(reads, 64).decode().split()
    time.sleep(chance.uniform(0, 0.15))
    assert kill(pid) == signal.SIGKILL, "it ended by itself"
    return int((first + output(reads))[-1])


def holds(where, finished):
    """Checks the folder after a kill; returns the suffixes of the remaining temporary folders."""
    folder = CheckpointFolder(where, KEEP)
    assert folder.all()[0].step >= finished and len(folder.all()) <= KEEP + 1
    # A folder with a checkpoint's name is always complete.
    for checkpoint in folder.all():
        assert checkpoint.manifest["samples"] == 8 * checkpoint.step
        tensors = dcp_tensors(checkpoint.path)
        assert len(tensors) > 60
        assert [name for name, tensor in tensors.items() if not (tensor.read() == checkpoint.step).all()] == []
    return {each.name.rpartition(".")[2] for each in folder.path.iterdir() if each.name.startswith(".")}


@pytest.mark.parametrize("times", [20, pytest.param(100, marks=MANY)])
def test_a_kill_at_any_moment_leaves_the_last_checkpoint_whole(training, tmp_path, times):
    chance, rests, finished = random.Random(times), Counter(), 0
    for _ in range(times):
        again = killed_once(training, tmp_path / "here", chance)
        assert again > finished, "it went on from the last one"
        finished = again
        rests.update(holds(tmp_path / "here", finished))
    # Most kills must hit a save, or this would test nothing.
    assert rests["saving"] >= times / 4
    CheckpointFolder(tmp_path / "here", KEEP).prepare()
    assert [each.name for each in (tmp_path / "here").iterdir() if each.name.startswith(".")] == []


def ranks_saving(training, where, store, rank):
    def run(finished):
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        saving(training, where, finished, rank, dist.new_group(backend="gloo"))

    return forked(run)


@pytest.mark.parametrize("times", [4, pytest.param(40, marks=MANY)])
def test_a_kill_of_either_of_two_ranks(training, tmp_path, times):
    chance, finished = random.Random(times), 0
    for number in range(times):
        store = str(tmp_path / f"store{number}")
        (first, reads), (second, other) = (ranks_saving(training, tmp_path / "here", store, rank) for rank in (0, 1))
        first_lines = os.read(reads, 64).decode().split()
        time.sleep(chance.uniform(0, 0.15))
        victims = [first, second] if chance.random() < 0.5 else [second, first]
        kill(victims[0])
        time.sleep(chance.choice([0, 0.02, 0.1]))  # the other rank may notice, or may be saving itself
        try:
            os.kill(victims[1], signal.SIGKILL)
        finally:
            os.waitpid(victims[1], 0)
        steps = [int(each) for each in first_lines + output(reads) if each.isdigit()]
        os.close(other)
        assert steps[0] > finished
        finished = steps[-1]
        holds(tmp_path / "here", finished)
