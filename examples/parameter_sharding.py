"""Parameter sharding: an MLP sharded over two ranks, with the gradients of one.

torchrun --nproc-per-node 2 examples/parameter_sharding.py
"""

import copy
import gc
import time

import redline as rl
import torch
import torch.distributed as dist
from redline.schedule.parallel.sharding import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int = 512, hidden: int = 2048) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


def schedule(sch: rl.Schedule) -> None:
    """Each rank has half of the hidden features; partial sums of the output are added up."""
    sch["fc1"].shard(["weight", "bias"], axis=0)
    sch["fc2"].shard("weight", axis=1)
    sch["fc2"].sync("fwd_post", "all_reduce")
    sch["fc1"].sync("bwd_post", "all_reduce")


def main() -> None:
    """Verifies the schedule, compares the gradients, and times a step of either."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = MLP().to(device)
    x = torch.randn(64, 512, device=device)
    plain = copy.deepcopy(model)

    sch = rl.create_schedule(model, mesh)
    with rl.verify(sch, x):
        schedule(sch)
    cut, _ = rl.build(sch)

    for each in (plain, cut):
        each(x).pow(2).mean().backward()
    worst = 0.0
    for name, param in plain.named_parameters():
        module, _, own = name.rpartition(".")
        holder = cut.get_submodule(module)
        gathered = whole(holder, own, holder.get_parameter(own).grad)
        worst = max(worst, float((gathered - param.grad).abs().max() / param.grad.abs().max()))
    if dist.get_rank() == 0:
        print(f"verified; gradients of {mesh.size()} ranks depart from one by {worst:.1e} of their largest")
        for name, param in cut.named_parameters():
            print(f"  {name:12} {tuple(param.shape)} a rank")
    for label, each in (("one process", plain), (f"{mesh.size()} ranks", cut)):
        times = []
        for _ in range(20):
            dist.barrier()
            start = time.perf_counter()
            each(x).pow(2).mean().backward()
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(f"{label:12} {min(times) * 1e3:8.2f} ms a step")


if __name__ == "__main__":
    main()
    gc.collect()  # meanwhile gloo's threads let go of their last tensors, at which an exit would abort
    dist.destroy_process_group()
