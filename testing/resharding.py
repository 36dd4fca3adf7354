"""Whether a training goes on in another configuration as if nothing had happened: a declared table, and its check.

A cell is a family at a tiny size, the strategy it was saved in, and the one that it is taken up in, with as many ranks as
that takes. It holds where what is saved again at once is equal bit for bit, weights and optimizer state, and where the
losses of further steps are those of one process that never stopped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .numerics import FAMILIES, SAMPLES, refusal

if TYPE_CHECKING:
    import torch

    from ..models.workload import Workload

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "one": {"micro_batch": 4},
    "tp2+sp": {"tp": 2, "sequence_parallel": True, "micro_batch": 8},
    "zero1": {"dp": 2, "zero": 1, "micro_batch": 2},
    "zero2+ckpt": {"dp": 2, "zero": 2, "checkpoint_ratio": 1.0},
    "zero3": {"dp": 2, "zero": 3},
    "zero3+bf16": {"dp": 2, "zero": 3, "precision": "bf16"},
    "pp2": {"pp": 2, "grad_accum": 4, "pipeline_schedule": "1f1b"},
    "pp2 interleaved": {"pp": 2, "virtual_stages": 2, "grad_accum": 4, "pipeline_schedule": "interleaved"},
    "tp2·pp2": {"tp": 2, "pp": 2, "grad_accum": 4, "pipeline_schedule": "1f1b"},
    "pp2·dp2+zero1": {"pp": 2, "dp": 2, "zero": 1, "grad_accum": 2, "pipeline_schedule": "1f1b"},
    "tp2·dp2+zero3": {"tp": 2, "dp": 2, "zero": 3},
    "ep2": {"dp": 2, "ep": 2, "micro_batch": 2},
    "ep2+zero3": {"dp": 2, "ep": 2, "zero": 3},
    "ep4+zero1": {"dp": 4, "ep": 4, "zero": 1, "micro_batch": 1},
    "ep2·tp2": {"dp": 2, "ep": 2, "tp": 2},
    "runs": {"tp": 2, "micro_batch": 4, "strategy": "0-1:tp1,zero3 2:ckpt 3:-"},
    "hsdp2+zero3": {"dp": 4, "hsdp": 2, "zero": 3, "micro_batch": 1},
}
"""Every strategy of the table by its name: knobs, absent ones neutral."""
TABLE_FAMILIES = ("llama", "gpt2", "bert", "t5", "mixtral")
"""Those of `numerics.FAMILIES` that the table has."""
BEFORE, AFTER = 4, 5
"""Steps before the checkpoint, and behind it."""
EXACT = 1e-6
"""What the losses of strategies that compute in float32 may depart by, relatively: some units in the last place."""
HALF = 2.0**-8
"""The same where one of them computes in bfloat16: a unit in the last place of that."""
_DEEPER = {"gpt2": {"n_layer": 4}, "t5": {"num_layers": 4}}


@dataclass(frozen=True, kw_only=True)
class Went:
    """What a part of a training came to, on one rank."""

    losses: tuple[float, ...]
    """Of each step."""
    norms: tuple[float, ...]
    """Of all gradients together, before they were clipped."""


def tiny(family: str) -> "Workload":
    """The workload of a family of the table, of four blocks, with an optimizer whose weight decay differs by parameter."""
    from ..models.architecture import Architecture
    from ..models.huggingface import hugging_face_workload

    task, arguments = FAMILIES[family]
    architecture = Architecture(
        model_type=family, arguments={**arguments, **_DEEPER.get(family, {"num_hidden_layers": 4})}, task=task
    )
    return hugging_face_workload(architecture, name=family, spec=family, seq_len=16, global_batch=SAMPLES)


def ranks(strategy: str) -> int:
    """How many ranks a strategy takes."""
    config = STRATEGIES[strategy]
    return config.get("tp", 1) * config.get("pp", 1) * config.get("dp", 1)


def obstacle(family: str, strategy: str) -> str:
    """Why a family cannot follow a strategy; empty where it can."""
    return refusal(tiny(family), STRATEGIES[strategy])


def tolerance(*strategies: str) -> float:
    """What losses may depart by, relatively, where a training went through these strategies."""
    half = any(STRATEGIES[each].get("precision", "fp32") != "fp32" for each in strategies)
    return HALF if half else EXACT


def part(
    workload: "Workload", strategy: str, steps: int, *, begin: Path | None = None, copy: Path | None = None,
    save: Path | None = None,
) -> Went:  # fmt: skip
    """Trains in a strategy, on every rank of an initialised process group of the right size; all call it alike.

    Args:
        workload: of `tiny`.
        strategy: its name.
        steps: up to which step.
        begin: a folder of checkpoints, whose latest it begins with; None for the first step.
        copy: where what it has begun with is saved again, before any step.
        save: where it is saved at the end.
    """
    import torch
    import torch.distributed as dist

    from ..training.checkpoint.folder import CheckpointFolder
    from ..training.checkpoint.restoring import latest, restore
    from ..training.checkpoint.state import State
    from ..training.data import FromWorkload
    from ..training.hyperparameters import Hyperparameters
    from ..training.loop import Loop, LoopPlan, averages
    from ..training.training import Training

    hyper = Hyperparameters(steps=BEFORE + AFTER, lr=1e-3, warmup=2, average=0.9)
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
    state = State(training, average := averages(training))
    step = 0
    if begin is not None:
        found = latest(CheckpointFolder(begin), group, print)
        assert found is not None, "there is a checkpoint to begin with"
        restore(state, found)
        step = found.step
    if copy is not None:
        saver = _saver(copy, rank, group)
        saver.save(state, step, {"samples": step * SAMPLES})
        saver.wait()
        saver.close()
    lines: list[Mapping[str, Any]] = []
    loop = Loop(
        training, FromWorkload(workload), hyper, LoopPlan(log_every=1, save_minutes=0),
        saver=None if save is None else _saver(save, rank, group), step=step, position=step * SAMPLES, until=steps,
        log=lines.append, average=average,
    )  # fmt: skip
    loop.run()
    told = [each for each in lines if each["kind"] == "step"]
    return Went(losses=tuple(each["loss"] for each in told), norms=tuple(each["grad_norm"] for each in told))


def _saver(where: Path, rank: int, group: "torch.distributed.ProcessGroup | None") -> Any:
    import torch.distributed as dist

    from ..training.checkpoint.folder import CheckpointFolder
    from ..training.checkpoint.saver import Saver

    folder = CheckpointFolder(where)
    if rank == 0:
        folder.prepare()
    if group is not None:
        dist.barrier(group)
    return Saver(folder, rank, group)


def unequal(one: Path, other: Path) -> list[str]:
    """Names of the tensors that are not equal bit for bit in the latest checkpoints of two folders."""
    import torch

    from ..models.layouts.dcp import dcp_tensors
    from ..training.checkpoint.folder import CheckpointFolder

    here, there = (dcp_tensors(CheckpointFolder(each).all()[0].path) for each in (one, other))
    missing = sorted(here.keys() ^ there.keys())
    return missing + [
        name for name in here.keys() & there.keys() if not torch.equal(here[name].read(), there[name].read())
    ]


def departure(expected: Went, found: Went) -> float:
    """The largest relative difference of losses, step by step from the end."""
    pairs = list(zip(reversed(expected.losses), reversed(found.losses)))
    return max(abs(a - b) / abs(a) for a, b in pairs)
