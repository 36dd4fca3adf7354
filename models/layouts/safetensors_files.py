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
    tensors: dict[str, LazyTensor] = {}
    if path.is_file():
        if path.suffix != ".safetensors":
            raise WorkloadError(_not_safetensors(path, [path.name]))
        return _file_tensors(path)
    index = path / INDEX
    if not index.is_file():
        if (path / SINGLE).is_file():
            return _file_tensors(path / SINGLE)
        pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
        raise WorkloadError(_not_safetensors(path, pickles))
    file_of_tensor = read_index(index)
    for file in sorted(set(file_of_tensor.values())):
        if not (path / file).is_file():
            count = sum(file_of == file for file_of in file_of_tensor.values())
            raise WorkloadError(
                f"'{path}' lacks {file}, which contains {count} tensors according to {INDEX}; copy the whole checkpoint"
            )
        file_tensors = _file_tensors(path / file)
        missing = [name for name, listed in file_of_tensor.items() if listed == file and name not in file_tensors]
        if missing:
            raise WorkloadError(f"'{path / file}' lacks {missing[0]}, which {INDEX} lists in it; copy it again")
        tensors |= {name: file_tensors[name] for name, listed in file_of_tensor.items() if listed == file}
    return tensors


def read_index(path: Path) -> dict[str, str]:
    """File of every tensor, from an index of shards.

    Raises:
        WorkloadError: it is not such an index, or names a file outside its folder.
    """
    try:
        document = parse_json(read_named(path, at_most=_LARGEST_INDEX))
    except (Malformed, OSError) as error:
        raise WorkloadError(f"cannot read '{path}': {error}") from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise WorkloadError(f"'{path}' is not an index of safetensors: it must contain the mapping weight_map")
    elsewhere = [file for file in weight_map.values() if Path(file).name != file or file in ("", ".", "..")]
    if elsewhere:
        raise WorkloadError(f"'{path}' names the file '{elsewhere[0]}', which is not in its folder")
    return weight_map


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

    tensors: dict[str, LazyTensor] = {}
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118  not a mapping
            stored = file.get_slice(name)
            kind = stored.get_dtype()
            if kind not in _DTYPES:
                raise WorkloadError(
                    f"'{path}' contains {name} as {kind}, which is quantized or packed; give weights in "
                    "float32, bfloat16 or float16"
                )
            tensors[name] = _stored(path, name, stored.get_shape(), getattr(torch, _DTYPES[kind]))
    return tensors


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
        tensor = torch.empty([extent.stop - extent.start for extent in box], dtype=dtype)
        if not tensor.numel():
            return tensor
        row = dtype.itemsize * max(1, torch.Size(shape[1:]).numel())
        step = max(1, BLOCK_BYTES // row)
        # The file is mapped: pages that were read count as this process's memory until it is closed.
        for start in range(box[0].start, box[0].stop, step):
            stop = min(box[0].stop, start + step)
            with opened(path) as file:
                tensor[start - box[0].start : stop - box[0].start] = file.get_slice(name)[
                    (slice(start, stop), *box[1:])
                ]
        return tensor

    return Stored(read, shape, dtype, fresh=True)


def index_document(files: dict[str, str], total_bytes: int) -> bytes:
    """An index of shards in transformers' format."""
    document = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()
