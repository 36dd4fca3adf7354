"""Schedules for GPT-2, BERT and Llama as transformers builds them: tensor and sequence parallel.

    torchrun --nproc-per-node 2 examples/transformer_parallel.py --model llama --sequence-parallel

The models are untouched; the schedule of their family (`redline/models/families`) cuts the attention and the
MLP of every block over the `tp` axis, the embedding and the head over the vocabulary, and computes the loss
from the pieces (Shoeybi et al., 2019). With sequence parallelism what lies between is cut along the sequence
(Korthikanti et al., 2022).
"""

import argparse
import gc
import time

import redline as rl
import torch
import torch.distributed as dist
from redline.models.families import schedule_of
from torch.distributed.device_mesh import init_device_mesh

FAMILIES = ("bert", "gpt2", "llama")


def tiny(family: str) -> torch.nn.Module:
    """A small model of a family, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    sizes = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if family != "gpt2":
        sizes["intermediate_size"] = 512
    config = AutoConfig.for_model(family, **sizes, **tokens)
    make = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    with torch.device("meta"):
        return make.from_config(config)


def main() -> None:
    """Verifies the schedule against the model on one process and times a training step of either."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", choices=FAMILIES, default="gpt2")
    parser.add_argument("--sequence-parallel", action="store_true")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    tokens = torch.randint(3, 512, (4, 64), generator=torch.Generator().manual_seed(0)).to(device)
    batch = {"input_ids": tokens, "labels": tokens}

    sch = rl.create_schedule(tiny(options.model), mesh)
    with rl.verify(sch, batch, device=device):
        degrees = {"tp": mesh.size(), "sequence_parallel": options.sequence_parallel}
        schedule_of(options.model)(sch, degrees)
    plain, _ = rl.build(rl.create_schedule(tiny(options.model)), device=device)
    cut, _ = rl.build(sch, device=device)
    for label, model in (("one process", plain), (f"tensor parallel {mesh.size()}", cut)):
        times = []
        for _ in range(6):
            start = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        size = sum(p.numel() for p in model.parameters())
        if dist.get_rank() == 0:
            weights = f"{size / 1e3:6.0f} k weights a rank"
            print(f"{label:20} loss {loss.item():.6f}  {weights}  {min(times) * 1e3:6.1f} ms")


if __name__ == "__main__":
    main()
    gc.collect()  # meanwhile gloo's threads let go of their last tensors, at which an exit would abort
    dist.destroy_process_group()
