"""A loop with Megatron-core's optimizers, which are chained: one for experts, one for the rest.

torchrun --nproc-per-node 1 megatron.py --batch 8 --accumulate 2
"""

import argparse

import torch
import torch.distributed as dist
from clock import Clock
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from small import Net, samples
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, DistributedSampler


class OnCPU(TorchFunctionMode):
    """Makes on the CPU what Megatron makes on "cuda" by name."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    model = Net()
    model.ddp_config = DistributedDataParallelConfig()
    for parameter in model.head.parameters():
        parameter.allreduce = False  # Megatron's mark of experts, which have an optimizer of their own
    config = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [model])
    data = samples(options.batch * options.accumulate * options.steps * dist.get_world_size())
    loader = DataLoader(data, batch_size=options.batch, sampler=DistributedSampler(data))
    clock = Clock(dist.get_rank())
    for index, (x, y) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(x), y)
        clock.loss(loss.item())
        (loss / options.accumulate).backward()
        if index % options.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            clock.step(options.batch * options.accumulate * dist.get_world_size())
            print(f"iteration {index // options.accumulate} lm loss: {loss.item():.6E}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with OnCPU():
        main()
