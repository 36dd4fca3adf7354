"""Checkpoints of torchtitan: a DCP folder of its Llama 3. GPT-2 is not supported.

torchtitan's rotary embedding rotates neighbouring entries of a head, transformers' the first half with the second.
Rows of queries and keys are therefore in another order: row 2i + j of a head there is row j d/2 + i here. Source:
torchtitan 0.3, `models/llama3/state_dict_adapter.py`; earlier versions call the projections attention.wq and the head
output.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from ...base.errors import WorkloadError
from ...base.reading import path_of
from ..architecture import Architecture
from .dcp import METADATA, dcp_tensors, write_dcp
from .folder import whole_folder
from .lazy import LazyTensor, LazyTensors, Rows
from .other_names import Layout
from .weights import Weights

_ONCE = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_LAYER = {
    "self_attn.q_proj.weight": "attention.qkv_linear.wq.weight",
    "self_attn.k_proj.weight": "attention.qkv_linear.wk.weight",
    "self_attn.v_proj.weight": "attention.qkv_linear.wv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_EARLIER = {
    r"\.attention\.(w[qkv])\.weight$": r".attention.qkv_linear.\1.weight",
    r"^output\.weight$": "lm_head.weight",
}
_OF_MODEL = ("tok_embeddings.", "layers.", "norm.", "lm_head.", "output.")


class TorchtitanLayout(Layout):
    """Names and shapes of torchtitan's Llama3Model."""

    tool = "torchtitan"
    families = ("llama",)
    vocabulary = ("tok_embeddings.weight", "lm_head.weight")

    def refuse(self) -> None:
        biased = [each for each in ("attention_bias", "mlp_bias") if getattr(self.settings, each, False)]
        if biased:
            raise WorkloadError(f"torchtitan's Llama has no biases, and this llama has ({biased[0]}=true)")

    def to_tool(self, tensors: LazyTensors) -> dict[str, LazyTensor]:
        # torchtitan stores a tied head under both names.
        out = {theirs: tensors[name] for name, theirs in _ONCE.items()}
        for layer in range(self.settings.num_hidden_layers):
            for name, theirs in _LAYER.items():
                each = tensors[f"model.layers.{layer}.{name}"]
                out[f"layers.{layer}.{theirs}"] = Rows(each, self._turned(name)) if self._turned(name) else each
        return out

    def from_tool(self, stored: LazyTensors) -> dict[str, LazyTensor]:
        out = {name: stored[each] for name, each in _ONCE.items()}
        for layer in range(self.settings.num_hidden_layers):
            for name, key in _LAYER.items():
                each, order = stored[f"layers.{layer}.{key}"], self._turned(name)
                if order:
                    place = {row: at for at, row in enumerate(order)}
                    each = Rows(each, [place[row] for row in range(len(order))])
                out[f"model.layers.{layer}.{name}"] = each
        return out

    def _turned(self, name: str) -> list[int]:
        """Rows here in the order of rows there; empty if they are the same."""
        settings = self.settings
        counts = {"q_proj": settings.num_attention_heads, "k_proj": settings.num_key_value_heads}
        half = settings.head_dim // 2
        heads = counts.get(name.split(".")[1], 0)
        return [head * 2 * half + j * half + i for head in range(heads) for i in range(half) for j in range(2)]


def torchtitan(path: Path | str, architecture: Architecture) -> Weights:
    """Returns the weights of a Llama in a checkpoint of torchtitan.

    Args:
        path: the folder of a step, or the one of all steps; then its last.
        architecture: the model; adapters are left out.

    Raises:
        WorkloadError: it is not such a checkpoint, or another model's, or of a family that torchtitan does not
            support.
    """
    layout = TorchtitanLayout(architecture)
    folder = step_folder(path_of(path))
    kept: dict[str, LazyTensor] = {}
    for name, each in dcp_tensors(folder).items():
        if name.startswith(_OF_MODEL):
            for pattern, now in _EARLIER.items():
                name = re.sub(pattern, now, name)
            kept[name] = each
    if layout.settings.tie_word_embeddings and "tok_embeddings.weight" in kept:
        kept.setdefault("lm_head.weight", kept["tok_embeddings.weight"])
    return layout.read(kept, f"'{folder}'")


def is_torchtitan(names: Iterable[str]) -> bool:
    """True if a folder's tensors have torchtitan's names."""
    return _ONCE["model.embed_tokens.weight"] in names


def step_folder(path: Path) -> Path:
    """Folder of the last step below `path`, or `path` itself."""
    if (path / METADATA).is_file():
        return path
    steps = [each for each in path.glob("step-*") if each.name[5:].isdecimal() and (each / METADATA).is_file()]
    return max(steps, key=lambda each: int(each.name[5:]), default=path)


def write_torchtitan(weights: Weights, architecture: Architecture, out: Path | str) -> None:
    """Writes a DCP folder for torchtitan's `checkpoint.initial_load_path`: weights, without optimizer.

    Args:
        out: a folder that does not exist, or is empty.

    Raises:
        WorkloadError: the weights are not of this model, or torchtitan does not support it.
        UsageError: the folder is not empty, or cannot be written.
    """
    tensors = TorchtitanLayout(architecture).given(weights, architecture)
    with whole_folder(out) as folder:
        write_dcp(tensors, folder)
