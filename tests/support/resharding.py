"""A table of strategies, with the check that a training saved in one continues exactly in another.

A cell is a family at a tiny size, the strategy in which it is saved, and the one in which it is resumed, on the number
of ranks of each. It passes if weights and optimizer state that are saved again at once are equal bit for bit, and if
the losses of further steps equal those of one uninterrupted process.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numerics_table as numerics
from numerics_table import SAMPLES

if TYPE_CHECKING:
    import torch
    from redline.models.workload import Workload

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "one": {"micro_batch": 4},
    "tp2+sp": {"tp": 2, "sequence_parallel": True, "micro_batch": 8},
    "zero1": {"dp": 2, "zero": 1, "micro_batch": 2},
    "zero2+ckpt": {"dp": 2, "zero": 2, "checkpoint_ratio": 1.0},
    "zero3": {"dp": 2, "zero": 3},
    "zero3+bf16": {"dp": 2, "zero": 3, "precision": "bf16"},
    "pp2": {"pp": 2, "grad_accum": 4, "pipeline_schedule": "1f1b"},
    "pp2 uneven": {"pp": 2, "grad_accum": 4, "pipeline_schedule": "1f1b", "stage_blocks": "3,1"},
    "pp2 interleaved": {"pp": 2, "virtual_stages": 2, "grad_accum": 4, "pipeline_schedule": "interleaved"},
    "tp2·pp2": {"tp": 2, "pp": 2, "grad_accum": 4, "pipeline_schedule": "1f1b"},
    "pp2·dp2+zero1": {"pp": 2, "dp": 2, "zero": 1, "grad_accum": 2, "pipeline_schedule": "1f1b"},
    "tp2·dp2+zero3": {"tp": 2, "dp": 2, "zero": 3},
    "ep2": {"dp": 2, "ep": 2, "micro_batch": 2},
    "ep2+zero3": {"dp": 2, "ep": 2, "zero": 3},
    "ep4+zero1": {"dp": 4, "ep": 4, "zero": 1, "micro_batch": 1},
    "ep2·tp2": {"dp": 2, "ep": 2, "tp": 2},
    "ep2·tp2 etp1": {"tp": 2, "ep": 2, "etp": 1},
    "ep2·tp2·dp2 etp1": {"tp": 2, "dp": 2, "ep": 2, "etp": 1, "zero": 1, "micro_batch": 2},
    "runs": {"tp": 2, "micro_batch": 4, "strategy": "0:tp1,zero3 1:tp1 2:ckpt 3:-"},
    "hsdp2+zero3": {"dp": 4, "hsdp": 2, "zero": 3, "micro_batch": 1},
}
"""Knobs of every strategy of the table by name; absent knobs are neutral."""
TABLE_FAMILIES = ("llama", "gpt2", "bert", "t5", "mixtral")
"""The families of `numerics.FAMILIES` in the table."""
BEFORE, AFTER = 4, 5
"""Steps before the checkpoint, and after it."""
EXACT = 1e-6
"""Allowed relative difference of losses if all strategies compute in float32: a few units in the last place."""
HALF = 2.0**-8
"""Allowed relative difference if one of them computes in bfloat16: a unit in the last place of bfloat16."""


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """The result of a part of a training on one rank."""

    losses: tuple[float, ...]
    """Loss of each step."""
    norms: tuple[float, ...]
    """Norm of all gradients together before clipping, of each step."""


def tiny(family: str) -> "Workload":
    """Returns the workload of a family with four blocks."""
    return numerics.tiny(family, deep=True)


def ranks(strategy: str) -> int:
    """Returns the number of ranks of a strategy."""
    config = STRATEGIES[strategy]
    return config.get("tp", 1) * config.get("pp", 1) * config.get("dp", 1)


def obstacle(family: str, strategy: str) -> str:
    """Returns the reason why a family does not support a strategy; empty if it does."""
    return numerics.refusal(tiny(family), STRATEGIES[strategy])


def tolerance(*strategies: str) -> float:
    """Returns the allowed relative difference of losses for a training in these strategies."""
    half = any(STRATEGIES[each].get("precision", "fp32") != "fp32" for each in strategies)
    return HALF if half else EXACT


def part(
    workload: "Workload", strategy: str, steps: int, *, begin: Path | None = None, copy: Path | None = None,
    save: Path | None = None,
) -> PartResult:  # fmt: skip
    """Trains in a strategy; called alike on every rank of an initialised process group of the right size.

    Args:
        steps: the step at which it ends.
        begin: a folder of checkpoints, of which the latest is loaded; None for the first step.
        copy: folder in which the loaded state is saved again before any step.
        save: folder in which the state is saved at the end.
    """
    import torch
    import torch.distributed as dist
    from redline.models.layouts.dcp import dcp_tensors
    from redline.trainer.checkpoint.saver import CheckpointFolder, latest
    from redline.trainer.checkpoint.state import State
    from redline.trainer.data import FromWorkload
    from redline.trainer.loop import Hyperparameters, Loop, LoopPlan
    from redline.training.training import Training

    hyper = Hyperparameters(steps=BEFORE + AFTER, lr=1e-3, warmup=2)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    group = dist.new_group(backend="gloo") if size > 1 else None
    cuda = torch.cuda.is_initialized()
    training = Training(
        workload.with_optimizer(hyper.optimizer),
        {"attention": "eager", **STRATEGIES[strategy]},
        torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        rank=rank,
        world_size=size,
        own_data=False,
    )
    state = State(training)
    step = 0
    if begin is not None:
        checkpoint = latest(CheckpointFolder(begin), group)
        assert checkpoint is not None, "there is a checkpoint to load"
        state.load(dcp_tensors(checkpoint.path))
        step = checkpoint.step
    if copy is not None:
        saver = _saver(copy, rank, group)
        saver.save(state, step, {"samples": step * SAMPLES})
        saver.wait()
        saver.close()
    lines: list[Mapping[str, Any]] = []
    loop = Loop(
        training, FromWorkload(workload), hyper, LoopPlan(log_every=1, save_minutes=0),
        saver=None if save is None else _saver(save, rank, group), step=step, position=step * SAMPLES, until=steps,
        log=lines.append,
    )  # fmt: skip
    loop.run()
    logged = [each for each in lines if each["kind"] == "step"]
    return PartResult(losses=tuple(each["loss"] for each in logged), norms=tuple(each["grad_norm"] for each in logged))


def _saver(path: Path, rank: int, group: "torch.distributed.ProcessGroup | None") -> Any:
    import torch.distributed as dist
    from redline.trainer.checkpoint.saver import CheckpointFolder, Saver

    folder = CheckpointFolder(path)
    if rank == 0:
        folder.prepare()
    if group is not None:
        dist.barrier(group)
    return Saver(folder, rank, group)


def unequal(one: Path, other: Path) -> list[str]:
    """Returns the names of the tensors that differ in the latest checkpoints of two folders."""
    import torch
    from redline.models.layouts.dcp import dcp_tensors
    from redline.trainer.checkpoint.saver import CheckpointFolder

    here, there = (dcp_tensors(CheckpointFolder(each).all()[0].path) for each in (one, other))
    missing = sorted(here.keys() ^ there.keys())
    return missing + [
        name for name in here.keys() & there.keys() if not torch.equal(here[name].read(), there[name].read())
    ]


def departure(expected: PartResult, found: PartResult) -> float:
    """Returns the largest relative difference of losses, matched from the last step backwards."""
    pairs = list(zip(reversed(expected.losses), reversed(found.losses)))
    return max(abs(a - b) / abs(a) for a, b in pairs)
