"""A training on DeepSpeed, as its documentation begins.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 zero.py --stage 2 --batch 4 --accumulate 2
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from clock import Clock
from small import Net, samples
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    settings = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulate,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": options.stage > 0},
    }
    deepspeed.init_distributed("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    data = samples(options.batch * options.accumulate * options.steps * world_size)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=settings
    )
    clock = Clock(dist.get_rank())
    dtype = next(engine.parameters()).dtype
    for x, y in loader:
        loss = nn.functional.cross_entropy(engine(x.to(dtype)).float(), y)
        clock.loss(loss.item())
        engine.backward(loss)
        update = engine.is_gradient_accumulation_boundary()
        engine.step()
        if update:
            clock.step(engine.train_batch_size())
            if dist.get_rank() == 0:
                print(f"step {engine.global_steps} loss {loss.item():.4f}", flush=True)
    dist.barrier()  # as in ddp.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
