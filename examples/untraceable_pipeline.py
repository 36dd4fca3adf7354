"""A pipeline of a model that cannot be traced: its code looks at values, and stays as it is.

torchrun --nproc-per-node 2 examples/untraceable_pipeline.py
"""

import gc

import redline as rl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F


class Layer(nn.Module):
    """Clips what it computes where that has grown too large, which only the values can tell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.abs().max() > 2:
            y = y.clamp(-2, 2)
        return x + torch.tanh(y)


class Net(nn.Module):
    """Some layers, called in a loop."""

    def __init__(self, width: int = 32, depth: int = 4, classes: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def compare(mesh: DeviceMesh, steps: int = 5) -> tuple[str, list[float], list[float]]:
    """Why the model is no graph, and its losses on one process and in stages of so many layers on each rank."""
    torch.manual_seed(0)
    model = Net()
    try:
        rl.create_schedule(model).copy()["layers.0"].trace()
        reason = "it was traced"
    except rl.TraceError as error:
        reason = str(error)

    sch = rl.create_schedule(model, mesh)
    alone, _ = rl.build(sch.copy())
    stages = mesh.size()
    for stage in range(1, stages):
        sch[f"layers.{4 * stage // stages - 1}"].cut_pipeline_stage()
    sch.pipeline("1f1b", micro_batches=4)
    staged, optimizer = rl.build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), loss=F.cross_entropy)
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)

    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, target = torch.randn(16, 32, generator=generator) * 3, torch.randint(8, (16,), generator=generator)
        loss = F.cross_entropy(alone(x), target)
        loss.backward()
        losses[0].append(loss.item())
        losses[1].append(staged.pipeline.step(x, target=target).item())
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    return reason, *losses


def main() -> None:
    """Prints the losses of either, and by how much they depart."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    reason, alone, staged = compare(mesh)
    if dist.get_rank() == 0:
        print(f"no graph: {reason}")
        for step, (one, other) in enumerate(zip(alone, staged)):
            print(f"step {step}: loss {one:.6f} on one process, {other:.6f} in {mesh.size()} stages")
        print(f"they depart by {max(abs(a - b) / a for a, b in zip(alone, staged)):.1e}")


if __name__ == "__main__":
    main()
    gc.collect()  # meanwhile gloo's threads let go of their last tensors, at which an exit would abort
    dist.destroy_process_group()
