"""Tied embeddings over pipeline stages: the first stage looks tokens up in what is the last one's head.

torchrun --nproc-per-node 2 examples/tied_embeddings.py
"""

import gc

import redline as rl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 32}
DROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2() -> nn.Module:
    """A small GPT-2 without memory, whose head is its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(**SIZES, **DROPPED, bos_token_id=1, eos_token_id=2))


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of both models."""
    return torch.optim.AdamW(params, lr=1e-3)


def compare(mesh: DeviceMesh, steps: int = 3) -> dict[str, float]:
    """After some steps: how far the tied weight departs between the stages, and from that of one process."""
    sch = rl.create_schedule(gpt2(), mesh)
    sch["transformer.h.0"].cut_pipeline_stage()
    staged, optimizer = rl.build(sch, optimizer=adamw)
    alone, reference = rl.build(rl.create_schedule(gpt2()), optimizer=adamw)
    losses = []
    for step in range(steps):
        tokens = torch.randint(128, (4, 16), generator=torch.Generator().manual_seed(step))
        batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        loss = alone(**batch).loss
        loss.backward()
        losses.append((loss.item(), staged.pipeline.step(**batch).item()))
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    first = mesh.get_local_rank() == 0
    mine = (staged.transformer.wte if first else staged.lm_head).weight.detach()
    every = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(every, mine.contiguous())
    whole = alone.lm_head.weight.detach()
    return {
        "moved": float((whole - rl.build(rl.create_schedule(gpt2()))[0].lm_head.weight).abs().max()),
        "between the stages": float((every[0] - every[-1]).abs().max()),
        "from one process": float((every[0] - whole).abs().max()),
        "of the loss": max(abs(one - other) / one for one, other in losses),
    }


def main() -> None:
    """Trains a few steps either way and prints by how much they depart."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    found = compare(mesh)
    if dist.get_rank() == 0:
        print(f"the tied weight has moved by {found.pop('moved'):.1e}; departures:")
        for name, value in found.items():
            print(f"  {name:20} {value:.1e}")


if __name__ == "__main__":
    main()
    gc.collect()  # meanwhile gloo's threads let go of their last tensors, at which an exit would abort
    dist.destroy_process_group()
