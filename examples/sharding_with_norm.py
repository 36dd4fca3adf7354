"""Sharding with a LayerNorm in between: a norm over all features needs a sharded tensor gathered, or sharded by rows.

torchrun --nproc-per-node 2 examples/sharding_with_norm.py
"""

import gc

import redline as rl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Normed(nn.Module):
    """Two linear layers with a norm over the features between them."""

    def __init__(self, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.fc1, self.norm = nn.Linear(width, hidden), nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.norm(self.fc1(x))))


def gathered(sch: rl.Schedule) -> None:
    """Each rank has half of the features of fc1; the norm is given all of them, fc2 half of them again."""
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["fc1"].sync("fwd_post", "all_gather", axis=-1)
    sch["fc2"].sync("fwd_pre", "scatter", axis=-1)
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def in_rows(sch: rl.Schedule) -> None:
    """Behind fc1 features become rows, of which a norm needs only whole ones, and features again before fc2."""
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["fc1"].sync("fwd_post", "all_to_all", axis=0, join=-1)
    sch["norm"].sync("bwd_post", "all_reduce", on="parameters")  # each rank sees a part of the rows
    sch["norm"].sync("fwd_post", "all_to_all", axis=-1, join=0)
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def forgotten(sch: rl.Schedule) -> None:
    """The norm is given one rank's features."""
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def compare(mesh: DeviceMesh) -> dict[str, float | str]:
    """By schedule: how far its output departs from that of one process, or why it is refused."""
    out: dict[str, float | str] = {}
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    for apply in (gathered, in_rows, forgotten):
        torch.manual_seed(0)
        sch = rl.create_schedule(Normed(), mesh)
        expected = sch.copy().module(x)
        try:
            with rl.verify(sch, x):
                apply(sch)
        except rl.ScheduleError as error:
            out[apply.__name__] = str(error)
            continue
        model, _ = rl.build(sch)
        out[apply.__name__] = float((model(x) - expected).abs().max() / expected.abs().max())
    return out


def main() -> None:
    """Verifies the schedules and prints what each comes to."""
    dist.init_process_group("gloo")
    found = compare(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    if dist.get_rank() == 0:
        for name, result in found.items():
            print(
                f"{name:10} {result if isinstance(result, str) else f'verified; departs by {result:.1e} of the largest'}"
            )


if __name__ == "__main__":
    main()
    gc.collect()  # meanwhile gloo's threads let go of their last tensors, at which an exit would abort
    dist.destroy_process_group()
