"""GPT-Neo on four ranks by a configuration alone: two pipeline stages, each sharded over two ranks, some blocks recomputed.

torchrun --nproc-per-node 4 examples/gpt_neo.py
"""

import gc

import redline as rl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

CONFIG = {"pp": 2, "tp": 2, "checkpoint_ratio": 0.5}
DROPPED = {"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}


def neo() -> nn.Module:
    """A small GPT-Neo without memory; every second block looks back eight tokens only."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 128, "max_position_embeddings": 64}
    kinds = {"attention_types": [[["global", "local"], 2]], "window_size": 8}
    with torch.device("meta"):
        return GPTNeoForCausalLM(GPTNeoConfig(**sizes, **kinds, **DROPPED, bos_token_id=1, eos_token_id=2))


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of both models."""
    return torch.optim.AdamW(params, lr=1e-3)


def compare(mesh: DeviceMesh, steps: int = 3) -> tuple[list[float], list[float], int, int]:
    """Losses on one process and on the mesh, and how many weights each holds."""
    sch = rl.apply_schedule(neo(), CONFIG, mesh)
    cut, optimizer = rl.build(sch, optimizer=adamw)
    alone, reference = rl.build(rl.create_schedule(neo()), optimizer=adamw)
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(steps):
        tokens = torch.randint(128, (4, 32), generator=torch.Generator().manual_seed(step))
        batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        loss = alone(**batch).loss
        loss.backward()
        losses[0].append(loss.item())
        losses[1].append(cut.pipeline.step(**batch).item())
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    return *losses, *(sum(param.numel() for param in model.parameters()) for model in (alone, cut))


def main() -> None:
    """Trains a few steps either way and prints losses and sizes."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    alone, cut, whole, mine = compare(mesh)
    if dist.get_rank() == 0:
        for step, (one, other) in enumerate(zip(alone, cut)):
            print(f"step {step}: loss {one:.6f} on one process, {other:.6f} on four")
        print(f"they depart by {max(abs(a - b) / a for a, b in zip(alone, cut)):.1e}")
        print(f"weights: {whole / 1e3:.0f} k on one process, {mine / 1e3:.0f} k on this rank")


if __name__ == "__main__":
    main()
    gc.collect()  # meanwhile gloo's threads let go of their last tensors, at which an exit would abort
    dist.destroy_process_group()
