"""Schedules for GPT-2, BERT and Llama as transformers builds them: tensor and sequence parallel.

    torchrun --nproc-per-node 2 examples/transformer_parallel.py --model llama --sequence-parallel

The models are untouched; a schedule cuts the attention and the MLP of every block over the `tp` axis, the
embedding and the head over the vocabulary, and computes the loss from the pieces (Shoeybi et al., 2019). With
sequence parallelism what lies between is cut along the sequence (Korthikanti et al., 2022).
"""

import argparse
import time
from dataclasses import dataclass

import redline as rl
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


@dataclass(frozen=True)
class Names:
    """Where a family keeps what is cut."""

    blocks: str
    embedding: str
    head: str
    last: str
    """The norm behind the blocks; empty where a block ends in its own."""
    norms: tuple[str, ...]
    """Within a block, what computes on the sequence's pieces under sequence parallelism."""


NAMES = {
    "gpt2": Names("transformer.h.*", "transformer.wte", "lm_head", "transformer.ln_f", ("ln_1", "ln_2")),
    "bert": Names("bert.encoder.layer.*", "bert.embeddings.word_embeddings", "cls.predictions.decoder", "",
                  ("attention.output.LayerNorm", "output.LayerNorm")),
    "llama": Names("model.layers.*", "model.embed_tokens", "lm_head", "model.norm",
                   ("input_layernorm", "post_attention_layernorm")),
}  # fmt: skip


def tensor_parallel(sch: rl.Schedule, family: str, sequence_parallel: bool = False) -> None:
    """Cuts a language model over the mesh's `tp` axis."""
    names = NAMES[family]
    tied = sch[names.embedding].module.weight is sch[names.head].module.weight
    sch[names.embedding].shard("weight", axis=0, tied=tied).sync("fwd_post", "all_reduce")
    if not tied:
        sch[names.head].shard("weight", axis=0)
    if sch[names.head].module.bias is not None:
        sch[names.head].shard("bias", axis=0, tied=True)
    sch[names.head].sync("bwd_post", "all_reduce").parallel_loss()
    for block in sch.select(names.blocks):
        BLOCKS[family](block, sequence_parallel)
    if sequence_parallel:
        blocks = sch.select(names.blocks)
        blocks[0].sync("fwd_pre", "scatter", axis=1)
        for block in blocks:
            for norm in names.norms:
                block[norm].sync("bwd_post", "all_reduce", on="parameters")
        if names.last:
            sch[names.last].sync("bwd_post", "all_reduce", on="parameters")
        last = sch[names.last] if names.last else blocks[-1]
        last.sync("fwd_post", "all_gather", axis=1)


def _around(region: rl.Schedule, last: rl.Schedule, sequence_parallel: bool) -> None:
    """The exchanges at the entry and the exit of a region whose weights are cut."""
    if sequence_parallel:
        region.sync("fwd_pre", "all_gather", axis=1)
        last.sync("fwd_post", "reduce_scatter", axis=1)
    else:
        region.sync("bwd_post", "all_reduce")
        last.sync("fwd_post", "all_reduce")


def gpt2_block(block: rl.Schedule, sequence_parallel: bool) -> None:
    """Attention by heads (q, k and v are fused in one weight), the MLP by its inner features."""
    block["attn.c_attn"].shard("weight", axis=1, parts=3).shard("bias", axis=0, parts=3)
    block["attn.c_proj"].shard("weight", axis=0)
    block["attn"].fork_rng()
    block["mlp.c_fc"].shard("weight", axis=1).shard("bias", axis=0)
    block["mlp.c_proj"].shard("weight", axis=0)
    _around(block["attn"], block["attn.c_proj"], sequence_parallel)
    _around(block["mlp"], block["mlp.c_proj"], sequence_parallel)
    # Dropout after the projections: each rank has the whole again, or another piece of the sequence.
    block["attn.resid_dropout"].fork_rng(differ=sequence_parallel)
    block["mlp.dropout"].fork_rng(differ=sequence_parallel)


def bert_block(block: rl.Schedule, sequence_parallel: bool) -> None:
    """Attention by heads, the feed-forward part by its inner features."""
    for name in ("query", "key", "value"):
        block[f"attention.self.{name}"].shard(["weight", "bias"], axis=0)
    block["attention.output.dense"].shard("weight", axis=1)
    block["intermediate.dense"].shard(["weight", "bias"], axis=0)
    block["output.dense"].shard("weight", axis=1)
    block["attention.self"].fork_rng()
    _around(block["attention.self"], block["attention.output.dense"], sequence_parallel)
    _around(block["intermediate"], block["output.dense"], sequence_parallel)
    for name in ("attention.output.dropout", "output.dropout"):
        block[name].fork_rng(differ=sequence_parallel)


def llama_block(block: rl.Schedule, sequence_parallel: bool) -> None:
    """Attention by heads (query and key-value heads alike), the gated MLP by its inner features."""
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        block[name].shard("weight", axis=0)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        block[name].shard("weight", axis=1)
    block["self_attn"].fork_rng()
    _around(block["self_attn"], block["self_attn.o_proj"], sequence_parallel)
    _around(block["mlp"], block["mlp.down_proj"], sequence_parallel)


BLOCKS = {"gpt2": gpt2_block, "bert": bert_block, "llama": llama_block}


def tiny(family: str) -> torch.nn.Module:
    """A small model of a family, on the meta device."""
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
    parser.add_argument("--model", choices=sorted(NAMES), default="gpt2")
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
        tensor_parallel(sch, options.model, options.sequence_parallel)
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
