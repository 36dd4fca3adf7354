"""Tensors in safetensors files, read box by box."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import UsageError, WorkloadError
from ...base.reading import Malformed, parse_json, path_of, read_named
from ...base.writing import sync_folder
from ..architecture import one_line
from .weights import Box, LazyTensor, box_shape

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OTHER_TOOLS = (
    "A checkpoint of redline, Megatron-LM or torchtitan has to be written in Hugging Face's format: by `redline convert`, or by "
    "that tool's converter"
)
_LARGEST_INDEX = 64 << 20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def stored_tensors(path: Path) -> dict[str, LazyTensor]:
    """Tensors of a folder of safetensors, or of one such file, by their stored names.

    Raises:
        WorkloadError: there is none, a part of it is missing, or a file is damaged; pickles are refused.
    """
    if path.suffix == ".safetensors" and path.is_file():
        return file_tensors(path)
    if not (path / INDEX).is_file():
        if (path / SINGLE).is_file():
            return file_tensors(path / SINGLE)
        raise WorkloadError(_not_safetensors(path))
    try:
        document = parse_json(read_named(path / INDEX, at_most=_LARGEST_INDEX))
        file_of_tensor = {name: Path(file).name for name, file in document["weight_map"].items()}
    except (Malformed, OSError, TypeError, KeyError, AttributeError) as error:
        raise WorkloadError(f"'{path / INDEX}' is not an index of safetensors: {one_line(error)}") from error
    tensors: dict[str, LazyTensor] = {}
    for file in sorted(set(file_of_tensor.values())):
        names = [name for name, listed in file_of_tensor.items() if listed == file]
        contents = file_tensors(path / file) if (path / file).is_file() else {}
        if missing := [name for name in names if name not in contents]:
            raise WorkloadError(
                f"'{path}' lacks {missing[0]}, and {len(missing)} tensors in all, which {INDEX} lists in {file}; copy the whole "
                "checkpoint again"
            )
        tensors |= {name: contents[name] for name in names}
    return tensors


def _not_safetensors(path: Path) -> str:
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else None
    if files is None:
        return f"there is no checkpoint '{path}'"
    if pickles := [file.name for file in files if file.suffix in _PICKLES]:
        return (
            f"'{path}' contains {', '.join(pickles[:3])} and no safetensors; such a file may be a pickle, which runs code "
            "when it is read, and cannot be read in part. Save it again with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
        )
    return f"'{path}' contains neither {SINGLE} nor {INDEX}. {OTHER_TOOLS}"


def file_tensors(path: Path) -> dict[str, LazyTensor]:
    """Tensors of a safetensors file.

    Raises:
        WorkloadError: it cannot be read, is damaged, or has packed weights.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: _stored(path, name, file) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (SafetensorError, OSError, RuntimeError) as error:
        raise WorkloadError(
            f"'{path}' cannot be read as safetensors: {one_line(error)}; give a complete file, without packed weights"
        ) from error


def _stored(path: Path, name: str, file: Any) -> LazyTensor:
    from safetensors import safe_open

    entry = file.get_slice(name)
    shape = entry.get_shape()
    dtype = (entry[:0] if shape else file.get_tensor(name)).dtype

    def read(box: Box) -> "torch.Tensor":
        import torch

        # The file is mapped: pages that were read count as this process's memory until it is closed.
        with safe_open(path, framework="pt") as file:
            tensor = file.get_slice(name)[box] if box else file.get_tensor(name)
            return torch.empty(box_shape(box), dtype=dtype).copy_(tensor)

    return LazyTensor(read, shape, dtype)


@contextmanager
def whole_folder(target: Path | str) -> Iterator[Path]:
    """Yields a new folder beside `target`, which is renamed to `target` at the end of the `with`; an error removes it.

    A killed process leaves a hidden folder, `.NAME.*.writing`.

    Raises:
        UsageError: `target` is a file or a folder that is not empty, or cannot be written.
    """
    from safetensors import SafetensorError

    target = path_of(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        problem = "is not empty" if target.is_dir() else "is a file"
        raise UsageError(f"'{target}' {problem}, and a checkpoint is written to a new folder; give another")
    folder = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex[:8]}.writing")
    try:
        folder.mkdir(parents=True)
        yield folder
        for file in folder.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        os.replace(folder, target)
        sync_folder(target.parent)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
        raise UsageError(f"cannot write '{target}': {reason}; nothing was left there") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
