"""Checkpoints of Megatron-LM: megatron-core's `torch_dist` format of its GPTModel, for Llama and GPT-2.

    L    number of layers           H    hidden size           V    vocabulary, padded
    n    heads of queries           g    query groups: heads of keys and of values
    d    size of a head             q, k, v    rows of one head, (d, H)

A tensor of a layer is stored once for all layers, with the layer as its first dimension, or by a name for each layer
(`non_homogeneous_layers`); both are read. Rows of `linear_qkv` are ordered by query group: n/g heads of q, then k,
then v. Rows of a gated `linear_fc1` are those of the gate, then those of the other projection. A norm before a
projection belongs to it (`linear_qkv.layer_norm_weight`), with Transformer Engine and without. Sources: megatron-core
0.19, `GPTModel.sharded_state_dict`, `models/gpt/gpt_layer_specs.py`, `transformer/mlp.py`.
"""

import json
import re
from pathlib import Path
from typing import Any

from ...base.errors import WorkloadError
from ...base.reading import Malformed, parse_json, path_of, read_named
from ..architecture import Architecture
from .dcp import dcp_tensors, write_dcp
from .folder import whole_folder
from .lazy import LazyTensor, LazyTensors, Rows, cat, pad_rows, select, split, stack, transpose
from .other_names import Layout
from .weights import Weights

CONFIG = "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
BACKEND = "torch_dist"
VOCABULARY_MULTIPLE = 128
"""Megatron-LM pads the vocabulary with zeros to a multiple of this (`--make-vocab-size-divisible-by`) times the tensor-parallel
degree.
"""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OF_MODEL = ("embedding.", "decoder.", "output_layer.")
_PROJECTIONS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
_ONCE_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class MegatronLayout(Layout):
    """Names and shapes of a GPTModel."""

    tool = "Megatron-LM"
    families = ("llama", "gpt2")
    vocabulary = ("embedding.word_embeddings.weight", "output_layer.weight")

    def refuse(self) -> None:
        if self.architecture.model_type == "gpt2" and self.settings.add_cross_attention:
            raise WorkloadError(
                "Megatron-LM's GPTModel has no cross-attention, and this gpt2 has (add_cross_attention)"
            )

    @property
    def heads(self) -> tuple[int, int, int]:
        """n, g and d."""
        settings = self.settings
        if self.architecture.model_type == "gpt2":
            return settings.n_head, settings.n_head, settings.n_embd // settings.n_head
        return settings.num_attention_heads, settings.num_key_value_heads, settings.head_dim

    def to_tool(self, tensors: LazyTensors) -> dict[str, LazyTensor]:
        own = _GPT2 if self.architecture.model_type == "gpt2" else _LLAMA
        out = {theirs: tensors[name] for name, theirs in own["once"].items() if name in tensors}
        if self.settings.tie_word_embeddings:
            out.pop("output_layer.weight", None)
        for kind in ("weight", "bias"):
            for suffix, names in own["layers"].items():
                keys = [[f"{own['prefix']}{layer}.{each}.{kind}" for each in names] for layer in range(self.layers)]
                if keys[0][0] in tensors:
                    parts = [self._tensor_to_tool(suffix, [tensors[each] for each in key], own) for key in keys]
                    # A norm's name becomes part of its projection's: layer_norm_weight.
                    out[f"decoder.layers.{suffix}{'' if suffix.endswith('_') else '.'}{kind}"] = stack(parts)
        return out

    def from_tool(self, stored: LazyTensors) -> dict[str, LazyTensor]:
        own = _GPT2 if self.architecture.model_type == "gpt2" else _LLAMA
        out = {name: stored[each] for name, each in own["once"].items() if each in stored}
        for kind in ("weight", "bias"):
            for suffix, names in own["layers"].items():
                key = f"decoder.layers.{suffix}{'' if suffix.endswith('_') else '.'}{kind}"
                for layer in range(self.layers) if key in stored else ():
                    found = self._tensor_from_tool(suffix, select(stored[key], 0, layer), len(names), own)
                    out |= {f"{own['prefix']}{layer}.{each}.{kind}": part for each, part in zip(names, found)}
        return out

    @property
    def layers(self) -> int:
        """L."""
        return self.settings.num_hidden_layers

    def _tensor_to_tool(self, suffix: str, parts: list[LazyTensor], own: dict[str, Any]) -> LazyTensor:
        joined = cat([transpose(each, 0, 1) if own["transposed"] and each.ndim == 2 else each for each in parts])
        return Rows(joined, self.grouped()) if suffix.endswith("linear_qkv") else joined

    def _tensor_from_tool(self, suffix: str, found: LazyTensor, count: int, own: dict[str, Any]) -> list[LazyTensor]:
        parts: list[LazyTensor] = [found]
        if suffix.endswith("linear_qkv"):
            order = self.grouped()
            place = {row: at for at, row in enumerate(order)}
            found = Rows(found, [place[row] for row in range(len(order))])
            n, g, d = self.heads
            parts = list(split(found, [n * d, g * d, g * d])) if count == 3 else [found]
        elif count == 2:
            parts = list(split(found, found.shape[0] // 2))
        return [transpose(each, 0, 1) if own["transposed"] and each.ndim == 2 else each for each in parts]

    def grouped(self) -> list[int]:
        """Rows of concatenated q, k and v, in the order of query groups."""
        n, g, d = self.heads
        per_group = n // g
        order: list[int] = []
        for group in range(g):
            order += range(group * per_group * d, (group + 1) * per_group * d)
            order += range((n + group) * d, (n + group + 1) * d)
            order += range((n + g + group) * d, (n + g + group + 1) * d)
        return order


_LLAMA: dict[str, Any] = {
    "prefix": "model.layers.",
    "transposed": False,
    "once": {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
        "lm_head.weight": "output_layer.weight",
    },
    "layers": {
        "self_attention.linear_qkv.layer_norm_": ["input_layernorm"],
        "self_attention.linear_qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "self_attention.linear_proj": ["self_attn.o_proj"],
        "mlp.linear_fc1.layer_norm_": ["post_attention_layernorm"],
        "mlp.linear_fc1": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.linear_fc2": ["mlp.down_proj"],
    },
}
_GPT2: dict[str, Any] = {
    "prefix": "transformer.h.",
    "transposed": True,
    "once": {
        "transformer.wte.weight": "embedding.word_embeddings.weight",
        "transformer.wpe.weight": "embedding.position_embeddings.weight",
        "transformer.ln_f.weight": "decoder.final_layernorm.weight",
        "transformer.ln_f.bias": "decoder.final_layernorm.bias",
        "lm_head.weight": "output_layer.weight",
    },
    "layers": {
        "self_attention.linear_qkv.layer_norm_": ["ln_1"],
        "self_attention.linear_qkv": ["attn.c_attn"],
        "self_attention.linear_proj": ["attn.c_proj"],
        "mlp.linear_fc1.layer_norm_": ["ln_2"],
        "mlp.linear_fc1": ["mlp.c_fc"],
        "mlp.linear_fc2": ["mlp.c_proj"],
    },
}
"""Names outside the layers, and suffixes of the assembled tensors of a layer; Conv1D stores (in, out)."""


def megatron(path: Path | str, architecture: Architecture) -> Weights:
    """Returns the weights of a Llama or GPT-2 in a `torch_dist` checkpoint of Megatron-LM.

    Args:
        path: the folder of an iteration, or Megatron-LM's --save folder; then its latest iteration.
        architecture: the model; adapters are left out.

    Raises:
        WorkloadError: it is not such a checkpoint, or another model's, or of a family that Megatron-LM's GPTModel does
            not support.
    """
    layout = MegatronLayout(architecture)
    folder = iteration_folder(path_of(path))
    _check_backend(folder)
    kept = {name: each for name, each in dcp_tensors(folder).items() if name.startswith(_OF_MODEL)}
    return layout.read(stacked(kept, layout.layers, folder), f"'{folder}'")


def iteration_folder(path: Path) -> Path:
    """Folder of the iteration below `path` that Megatron-LM would resume, or `path` itself.

    Raises:
        WorkloadError: the file that names the iteration is malformed.
    """
    if not (path / TRACKER).is_file():
        return path
    try:
        tracker = read_named(path / TRACKER, at_most=100).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"cannot read '{path / TRACKER}': {error}") from error
    if tracker != "release" and not tracker.isdecimal():
        raise WorkloadError(
            f"'{path / TRACKER}' must contain the number of an iteration, or release, but contains '{tracker}'"
        )
    return path / (tracker if tracker == "release" else f"iter_{int(tracker):07d}")


def stacked(stored: LazyTensors, layers: int, folder: Path) -> dict[str, LazyTensor]:
    """Tensors by the names of layers that are stored together, in either storage format.

    Raises:
        WorkloadError: the number of layers differs from the model's.
    """
    out: dict[str, LazyTensor] = {}
    single: dict[str, dict[int, LazyTensor]] = {}
    for name, each in stored.items():
        found = _LAYER.fullmatch(name)
        if found:
            single.setdefault(f"decoder.layers.{_norm(found[2])}", {})[int(found[1])] = each
        else:
            head, _, rest = name.partition("decoder.layers.")
            out[name if head else f"decoder.layers.{_norm(rest)}"] = each
    for name, parts in single.items():
        out[name] = stack([parts[at] for at in sorted(parts)])
    for name, each in out.items():
        if name.startswith("decoder.layers.") and each.shape[0] != layers:
            raise WorkloadError(
                f"'{folder}' is a checkpoint of another model: {name} has {each.shape[0]} layers, the model {layers}"
            )
    return out


def _norm(name: str) -> str:
    """Converts a layer's name of a norm to that within its projection; other versions separate them."""
    once = next((each for each in _ONCE_NORMS if name.startswith(each)), None)
    return name if once is None else _ONCE_NORMS[once] + name.removeprefix(once)


def _check_backend(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        if any(folder.glob("mp_rank_*")):
            raise WorkloadError(
                f"'{folder}' is a checkpoint of Megatron-LM's old format, which is a pickle; convert it there: "
                "--ckpt-convert-format torch_dist --ckpt-convert-save DIR"
            )
        raise WorkloadError(f"'{folder}' is not a checkpoint of Megatron-LM: it has no {CONFIG}")
    try:
        document = parse_json(read_named(folder / CONFIG, at_most=1 << 20))
    except (OSError, Malformed) as error:
        raise WorkloadError(f"cannot read '{folder / CONFIG}': {error}") from error
    backend = document.get("sharded_backend") if isinstance(document, dict) else None
    if backend != BACKEND:
        raise WorkloadError(f"'{folder}' is stored as '{backend}'; redline reads '{BACKEND}' (--ckpt-format {BACKEND})")


def write_megatron(weights: Weights, architecture: Architecture, out: Path | str) -> None:
    """Writes a folder for Megatron-LM's --load (with --finetune --ckpt-format torch_dist): weights, without
    optimizer.

    Args:
        out: a folder that does not exist, or is empty.

    Raises:
        WorkloadError: the weights are not of this model, or Megatron-LM's GPTModel does not support it.
        UsageError: the folder is not empty, or cannot be written.
    """
    layout = MegatronLayout(architecture)
    tensors = layout.given(weights, architecture)
    for name in layout.vocabulary:
        if name in tensors:
            count = -(-tensors[name].shape[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
            tensors[name] = pad_rows(tensors[name], count)
    with whole_folder(out) as folder:
        inner = folder / "release"
        inner.mkdir()
        write_dcp(tensors, inner, _objects(layout.layers))
        (inner / CONFIG).write_text(json.dumps({"sharded_backend": BACKEND, "sharded_backend_version": 1}))
        (folder / TRACKER).write_text("release")


def _objects(layers: int) -> dict[str, Any]:
    """Objects beside the tensors, stored like a ShardedObject: in a list, at an index."""
    common = {"checkpoint_version": 3.0, "iteration": 0, "num_floating_point_operations_so_far": 0}
    out: dict[str, Any] = {"common_state/shard_0_1": [common], "decoder.final_layernorm._extra_state/shard_0_1": [None]}
    for layer in range(layers):
        for name in (*_PROJECTIONS, "self_attention.core_attention"):
            out[f"decoder.layers.{name}._extra_state/shard_{layer}_{layers}"] = [None]
    return out
