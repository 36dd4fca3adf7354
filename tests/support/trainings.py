"""Runs a part of a training of a small model, on every rank of the process group if there is one."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from redline.models.layouts.dcp import dcp_tensors
from redline.trainer.checkpoint.saver import CheckpointFolder, Saver, latest
from redline.trainer.checkpoint.state import State
from redline.trainer.data import FromWorkload
from redline.trainer.loop import Hyperparameters, Loop, LoopPlan
from redline.training import Training

CPU = torch.device("cpu")
QUIET = {"log_every": 1, "save_minutes": 0}
KNOWN: dict[str, dict[str, Any]] = {}
"""Facts found about workloads in this process. A driver finds them once and sends them along; finding them takes longer
than a step."""


@dataclass(kw_only=True)
class Part:
    """Results of a part of a training, on one rank."""

    lines: list[dict[str, Any]]
    """Lines of the log; only on rank 0."""
    step: int
    """Number of steps done at its end."""
    stopped: bool
    failure: str
    found: int | None
    """Step of the checkpoint that it resumed from."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights at its end, if the model is whole on this rank."""

    def of(self, kind, what=None):
        """Returns the lines of a kind, or their values of the key `what`."""
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
    """Returns a training without data of its own, with the workload's optimizer or else that of `hyper`."""
    rank, size = place()
    workload.known.update(KNOWN.setdefault(workload.id, {}))
    made = workload.with_optimizer(hyper.optimizer)
    return Training(made, config, CPU, seed=seed, rank=rank, world_size=size, own_data=False)


def part(workload, config, hyper=None, *, until=None, samples=None, begin=None, save=None, seed=0, stop=None,
         watch=None, from_weights=(), **plan):  # fmt: skip
    """Trains on every rank; all ranks make the same call.

    Args:
        until: the last step; None for the end of the training.
        begin: a folder of checkpoints; the training resumes from the latest.
        save: folder for checkpoints.
        stop: returns True to end, given the loop; called on every rank at every step.
        watch: called with the training before its first step.
        from_weights: frozen parameters that checkpoints leave out.
    """
    hyper = hyper or Hyperparameters(steps=8, lr=1e-3, warmup=2)
    plan = LoopPlan(**{**QUIET, **plan})
    rank, size = place()
    group = dist.new_group(backend="gloo") if size > 1 else None
    training = built(workload, config, hyper, seed)
    found = None
    if begin is not None:
        found = latest(CheckpointFolder(begin), group)
        if found is not None:
            State(training, from_weights).load(dcp_tensors(found.path))
    saver = None
    if save is not None:
        folder = CheckpointFolder(save, plan.keep)
        if rank == 0:
            folder.prepare()
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
        stop=lambda: stop(loop) if stop else False, from_weights=from_weights,
    )  # fmt: skip
    ended = loop.run()
    KNOWN[workload.id].update(training.workload.known)
    if saver is not None:
        saver.close()
    whole = size == 1 or (config.get("tp", 1) == config.get("pp", 1) == 1 and config.get("zero", 0) < 2)
    weights = {name: each.detach().clone() for name, each in training.model.state_dict().items()} if whole else {}
    return Part(
        lines=lines, step=ended.step, stopped=ended.stopped, failure=ended.failure,
        found=found.step if found else None, weights=weights,
    )  # fmt: skip


def unequal(one, other):
    """Names of tensors that are not equal in two models, bit for bit."""
    return sorted(one.keys() ^ other.keys()) + [name for name in one if not torch.equal(one[name], other[name])]
