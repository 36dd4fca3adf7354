"""Trainings of small models: a part of one, on every rank of whatever process group there is."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from redline.training import Training
from redline.training.checkpoint.folder import CheckpointFolder
from redline.training.checkpoint.restoring import latest, restore
from redline.training.checkpoint.saver import Saver
from redline.training.checkpoint.state import State
from redline.training.data import FromWorkload
from redline.training.hyperparameters import Hyperparameters
from redline.training.loop import Loop, LoopPlan, averages

CPU = torch.device("cpu")
QUIET = {"log_every": 1, "save_minutes": 0}
KNOWN: dict[str, dict[str, Any]] = {}
"""What was found out of workloads in this process, which a driver finds once and sends along: it takes longer than a step."""


@dataclass(kw_only=True)
class Part:
    """What a part of a training came to, on one rank."""

    lines: list[dict[str, Any]]
    """Of the log; none but on rank 0."""
    step: int
    """Steps that were done at its end."""
    stopped: bool
    failure: str
    found: int | None
    """The step of the checkpoint that it began with."""
    said: list[str] = field(default_factory=list)
    """Of checkpoints that were passed over."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """At its end, where the model is whole on this rank."""

    def of(self, kind, what=None):
        """Lines of a kind, or what they say of something."""
        found = [each for each in self.lines if each["kind"] == kind]
        return found if what is None else [each[what] for each in found]

    @property
    def losses(self):
        return self.of("step", "loss")

    @property
    def norms(self):
        return self.of("step", "grad_norm")


def place():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def built(workload, config, hyper, seed=0):
    """A training without data of its own, in the optimizer of the workload or else of `hyper`."""
    rank, size = place()
    workload.known.update(KNOWN.setdefault(workload.id, {}))
    made = workload.with_optimizer(hyper.optimizer)
    return Training(made, config, CPU, seed=seed, rank=rank, world_size=size, own_data=False)


def part(workload, config, hyper=None, *, until=None, samples=None, begin=None, save=None, seed=0, stop=None,
         watch=None, **plan):  # fmt: skip
    """Trains, on every rank; all call it alike.

    Args:
        until: up to which step; None for the last one.
        begin: a folder of checkpoints, whose latest it begins with.
        save: where checkpoints go.
        stop: whether to end, given the loop; asked on every rank at every step.
        watch: called with the training before its first step.
    """
    hyper = hyper or Hyperparameters(steps=8, lr=1e-3, warmup=2)
    plan = LoopPlan(**{**QUIET, **plan})
    rank, size = place()
    group = dist.new_group(backend="gloo") if size > 1 else None
    training = built(workload, config, hyper, seed)
    average = averages(training) if hyper.average is not None else None
    found, said = None, []
    if begin is not None:
        found = latest(CheckpointFolder(begin), group, said.append)
        if found is not None:
            restore(State(training, average), found)
    saver = None
    if save is not None:
        folder = CheckpointFolder(save, plan.keep)
        if rank == 0:
            folder.prepare(found)
        if group is not None:
            dist.barrier(group)
        saver = Saver(folder, rank, group)
    if watch is not None:
        watch(training)
    lines = []
    step, position = (found.step, found.manifest["samples"]) if found else (0, 0)
    loop = Loop(
        training, samples or FromWorkload(workload, seed=seed, num_evaluation=2 * workload.global_batch), hyper, plan,
        saver=saver, step=step, position=position, until=until, log=lines.append,
        stop=lambda: stop(loop) if stop else False, average=average,
    )  # fmt: skip
    ended = loop.run()
    KNOWN[workload.id].update(training.workload.known)
    if saver is not None:
        saver.close()
    whole = size == 1 or (config.get("tp", 1) == config.get("pp", 1) == 1 and config.get("zero", 0) < 2)
    weights = {name: each.detach().clone() for name, each in training.model.state_dict().items()} if whole else {}
    return Part(
        lines=lines, step=ended.step, stopped=ended.stopped, failure=ended.failure,
        found=found.step if found else None, said=said, weights=weights,
    )  # fmt: skip


def unequal(one, other):
    """Names of tensors that two models do not have alike, bit for bit."""
    return sorted(one.keys() ^ other.keys()) + [name for name in one if not torch.equal(one[name], other[name])]
