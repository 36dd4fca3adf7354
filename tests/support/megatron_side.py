"""A program that runs megatron-core's own GPTModel on the CPU with our checkpoint, and saves its checkpoints.

    python megatron_side.py SPEC.json

SPEC: `family`, `sizes`, `ours` (a folder that `write_megatron` wrote), `ids`, `out`. Writes the logits to
`out`/logits.pt. Then draws all weights anew, writes their logits to `out`/drawn.pt, and saves them by
dist_checkpointing.save to `out`/theirs and, with a name for each layer, to `out`/by_layer.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

# Triton's folder, if it is installed beside the other packages.
sys.path.append(os.path.join(sys.prefix, "beside"))

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from torch.nn import functional


def gelu(x):
    return functional.gelu(x, approximate="tanh")


def model_of(family, sizes):
    common = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_dropout_fusion": False, "masked_softmax_fusion": False,
        "bias_activation_fusion": False, "gradient_accumulation_fusion": False, "apply_rope_fusion": False,
    }  # fmt: skip
    if family == "llama":
        norm, position, length = "RMSNorm", "rope", 40
        more = {"num_query_groups": 2, "ffn_hidden_size": 64, "gated_linear_unit": True, "add_bias_linear": False,
                "activation_func": functional.silu}  # fmt: skip
    else:
        norm, position, length = "LayerNorm", "learned_absolute", 32
        more = {"ffn_hidden_size": 128, "activation_func": gelu}
    config = TransformerConfig(**common, **more, normalization=norm, layernorm_epsilon=sizes["epsilon"])
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization=norm), vocab_size=128, max_sequence_length=length,
        position_embedding_type=position, share_embeddings_and_output_weights=sizes["tied"],
    ).eval()  # fmt: skip


def logits(model, ids):
    ids = torch.tensor(ids)
    length = ids.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        return model(ids, torch.arange(length)[None].expand(len(ids), -1), mask)


def main():
    asked = json.loads(Path(sys.argv[1]).read_text())
    out = Path(asked["out"])
    # megatron-core calls these although the tensors are on the CPU.
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.current_device = lambda: "cpu"
    CudaRNGStatesTracker.fork = lambda self, *args: contextlib.nullcontext()
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    model = model_of(asked["family"], asked["sizes"])
    loaded = dist_checkpointing.load(model.sharded_state_dict(), str(Path(asked["ours"]) / "release"))
    assert (loaded["checkpoint_version"], loaded["iteration"]) == (3.0, 0)
    model.load_state_dict(loaded, strict=False)
    torch.save(logits(model, asked["ids"]), out / "logits.pt")
    torch.manual_seed(1)
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(0, 0.3)
    torch.save(logits(model, asked["ids"]), out / "drawn.pt")
    for name, single in (("theirs", False), ("by_layer", True)):
        (out / name).mkdir()
        state = model.sharded_state_dict(metadata={"non_homogeneous_layers": single})
        dist_checkpointing.save(state, str(out / name), async_strategy="mcore")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
