"""Tensors in safetensors files, read box by box."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import WorkloadError
from ...base.reading import Malformed, parse_json, read_named
from .lazy import Box, LazyTensor, Stored

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BLOCK_BYTES = 8 << 20
"""Bytes that are mapped at once while a box is copied."""
_LARGEST_INDEX = 64 << 20
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
OTHER_TOOLS = (
    "A checkpoint of Megatron-LM or torchtitan has to be written in Hugging Face's format by that tool's converter"
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def stored_tensors(path: Path) -> dict[str, LazyTensor]:
    """Tensors of a folder of safetensors, or of one such file, by their stored names.

    Raises:
        WorkloadError: there is none, a part of it is missing, or a file is damaged; pickles are refused.
    """
    found: dict[str, LazyTensor] = {}
    if path.is_file():
        if path.suffix != ".safetensors":
            raise WorkloadError(_not_safetensors(path, [path.name]))
        return _file_tensors(path)
    index = path / INDEX
    if not index.is_file():
        if (path / SINGLE).is_file():
            return _file_tensors(path / SINGLE)
        pickles = sorted(each.name for pattern in _PICKLES for each in path.glob(pattern))
        raise WorkloadError(_not_safetensors(path, pickles))
    named = read_index(index)
    for file in sorted(set(named.values())):
        if not (path / file).is_file():
            count = sum(each == file for each in named.values())
            raise WorkloadError(
                f"'{path}' lacks {file}, which contains {count} tensors according to {INDEX}; copy the whole checkpoint"
            )
        here = _file_tensors(path / file)
        absent = [name for name, where in named.items() if where == file and name not in here]
        if absent:
            raise WorkloadError(f"'{path / file}' lacks {absent[0]}, which {INDEX} lists in it; copy it again")
        found |= {name: here[name] for name, where in named.items() if where == file}
    return found


def read_index(path: Path) -> dict[str, str]:
    """File of every tensor, from an index of shards.

    Raises:
        WorkloadError: it is not such an index, or names a file outside its folder.
    """
    try:
        document = parse_json(read_named(path, at_most=_LARGEST_INDEX))
    except (Malformed, OSError) as error:
        raise WorkloadError(f"cannot read '{path}': {error}") from error
    named = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(named, dict) or not all(isinstance(each, str) for each in named.values()):
        raise WorkloadError(f"'{path}' is not an index of safetensors: it must contain the mapping weight_map")
    outside = [each for each in named.values() if Path(each).name != each or each in ("", ".", "..")]
    if outside:
        raise WorkloadError(f"'{path}' names the file '{outside[0]}', which is not in its folder")
    return named


def _not_safetensors(path: Path, pickles: Iterable[str]) -> str:
    pickles = list(pickles)
    if pickles:
        return (
            f"'{path}' contains {', '.join(pickles[:3])} and no safetensors; such a file may be a pickle, which runs code "
            "when it is read, and cannot be read in part. Save it again with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
        )
    if not path.exists():
        return f"there is no checkpoint '{path}'"
    return f"'{path}' contains neither {SINGLE} nor {INDEX}. {OTHER_TOOLS}"


def _file_tensors(path: Path) -> dict[str, LazyTensor]:
    import torch

    out: dict[str, LazyTensor] = {}
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118  not a mapping
            about = file.get_slice(name)
            kind = about.get_dtype()
            if kind not in _DTYPES:
                raise WorkloadError(
                    f"'{path}' contains {name} as {kind}, which is quantized or packed; give weights in "
                    "float32, bfloat16 or float16"
                )
            out[name] = _stored(path, name, about.get_shape(), getattr(torch, _DTYPES[kind]))
    return out


def opened(path: Path) -> Any:
    """Opens a safetensors file, for a `with`.

    Raises:
        WorkloadError: it cannot be read, or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WorkloadError(
            f"'{path}' is not a complete safetensors file: {' '.join(str(error).split())[:200]}; copy it again"
        ) from error


def _stored(path: Path, name: str, shape: list[int], dtype: "torch.dtype") -> LazyTensor:
    def read(box: Box) -> "torch.Tensor":
        import torch

        if not shape:
            with opened(path) as file:
                return file.get_tensor(name).clone()
        out = torch.empty([each.stop - each.start for each in box], dtype=dtype)
        if not out.numel():
            return out
        row = dtype.itemsize * max(1, torch.Size(shape[1:]).numel())
        step = max(1, BLOCK_BYTES // row)
        # The file is mapped: pages that were read count as this process's memory until it is closed.
        for first in range(box[0].start, box[0].stop, step):
            last = min(box[0].stop, first + step)
            with opened(path) as file:
                out[first - box[0].start : last - box[0].start] = file.get_slice(name)[(slice(first, last), *box[1:])]
        return out

    return Stored(read, shape, dtype, fresh=True)


def index_document(files: dict[str, str], total_bytes: int) -> bytes:
    """An index of shards in transformers' format."""
    document = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()
