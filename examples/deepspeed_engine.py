"""A scheduled model in DeepSpeed's engine: its blocks recomputed by the schedule, its replicas by ZeRO.

torchrun --nproc-per-node 2 examples/deepspeed_engine.py

On CPUs DeepSpeed compiles its communication library at the first start, which takes some minutes.
"""

import gc

import redline as rl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def gpt2() -> nn.Module:
    """A small GPT-2 without memory."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 32}
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropped, bos_token_id=1, eos_token_id=2))


def scheduled(mesh: DeviceMesh) -> rl.Schedule:
    """Every block recomputed, the optimizer's state divided among the replicas."""
    sch = rl.create_schedule(gpt2(), mesh)
    for block in sch.select("transformer.h.*"):
        block.checkpoint()
    return sch.shard_data(zero=1)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of both models."""
    return torch.optim.AdamW(params, lr=1e-3)


def compare(mesh: DeviceMesh, steps: int = 3) -> tuple[list[float], list[float]]:
    """Losses of this rank, of the plain build and of the engine."""
    plain, optimizer = rl.build(scheduled(mesh), optimizer=adamw)
    size = {"train_micro_batch_size_per_gpu": 4}
    engine, _ = rl.build(scheduled(mesh), optimizer=adamw, target="deepspeed", config=size)
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(steps):
        tokens = torch.randint(128, (8, 16), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(mesh.size())[mesh.get_local_rank()]
        batch = {"input_ids": mine, "labels": mine, "use_cache": False}
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[0].append(loss.item())
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses[1].append(loss.item())
    return losses


def main() -> None:
    """Trains a few steps either way and prints by how much the losses depart."""
    dist.init_process_group("gloo")
    plain, engine = compare(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    if dist.get_rank() == 0:
        for step, (one, other) in enumerate(zip(plain, engine)):
            print(f"step {step}: loss {one:.6f} by redline, {other:.6f} by DeepSpeed")
        print(f"they depart by {max(abs(a - b) / a for a, b in zip(plain, engine)):.1e}")


if __name__ == "__main__":
    main()
    gc.collect()  # meanwhile gloo's threads let go of their last tensors, at which an exit would abort
    dist.destroy_process_group()
