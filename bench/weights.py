"""Peak memory and time of a rank that reads or writes its share of a checkpoint.

    python bench/weights.py [--layers 16] [--hidden 1024] [--shard-mib 256] [--json]

A Llama with random weights is in a sharded folder. In a fresh fork for each row, a share of it is read into memory, or
all of it is written again; the resident memory of the process is sampled every millisecond, including pages of mapped
files. A row has the size of the share and the largest growth of memory.
"""

import json
import multiprocessing
import platform
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common import parser

if TYPE_CHECKING:
    from redline.models.architecture import Architecture

MIB = 1 << 20
ROWS = (
    "half of each matrix by rows",
    "half of each matrix by columns",
    "a quarter of each matrix by rows",
    "one layer",
    "all of it",
    "written as shards",
)


def architecture(layers: int, hidden: int) -> "Architecture":
    from redline.models.architecture import Architecture

    arguments = {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden, "vocab_size": 8192,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "max_position_embeddings": 128,
    }  # fmt: skip
    return Architecture(model_type="llama", arguments=arguments, task="causal")


def make(folder: Path, layers: int, hidden: int, shard_mib: int) -> int:
    """Writes the folder, drawing each tensor as it is written; returns its bytes."""
    import torch
    from redline.models.architecture import without_memory
    from redline.models.layouts.hugging_face import write_hugging_face
    from redline.models.layouts.weights import LazyTensor, Weights, box_shape

    def drawn(shape: torch.Size) -> LazyTensor:
        return LazyTensor(lambda box: torch.randn(box_shape(box)), shape, torch.float32)

    made = architecture(layers, hidden)
    weights = Weights({name: drawn(each.shape) for name, each in without_memory(made).state_dict().items()})
    write_hugging_face(weights, made, folder, max_shard_bytes=shard_mib * MIB)
    return sum(each.nbytes for each in weights.tensors.values())


def share(name: str, shape: tuple[int, ...], what: str) -> tuple[slice, ...] | None:
    """Returns the slice of a tensor that is read, or None if none is."""
    if what == "one layer":
        return () if ".layers.0." in name else None
    if len(shape) < 2 or what == "all of it":
        return ()
    parts, dim = (4, 0) if "quarter" in what else (2, int("columns" in what))
    whole = [slice(None)] * len(shape)
    whole[dim] = slice(0, shape[dim] // parts)
    return tuple(whole)


class Peak:
    """Largest resident memory of this process within the `with`, relative to that before it."""

    def __enter__(self) -> "Peak":
        import psutil

        self.process, self.done = psutil.Process(), threading.Event()
        self.before = self.most = self.process.memory_info().rss
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(0.001):
            self.most = max(self.most, self.process.memory_info().rss)

    def __exit__(self, *exc: object) -> None:
        self.most = max(self.most, self.process.memory_info().rss)
        self.done.set()
        self.thread.join()


def measure(folder: Path, layers: int, hidden: int, shard_mib: int, what: str) -> dict[str, float | str]:
    """Returns one row, measured in this process."""
    import torch
    from redline.models.layouts.hugging_face import find_weights, write_hugging_face

    made = architecture(layers, hidden)
    weights = find_weights(folder, made)
    torch.zeros(1)
    kept, out = [], folder.parent / "out"
    # Imports and one-time allocations.
    weights.tensors["model.norm.weight"].read()
    begin = time.perf_counter()
    with Peak() as peak:
        if what == "written as shards":
            write_hugging_face(weights, made, out, max_shard_bytes=shard_mib * MIB)
        else:
            for name, tensor in weights.tensors.items():
                box = share(name, tuple(tensor.shape), what)
                if box is not None:
                    kept.append(tensor.read(box))
    seconds = time.perf_counter() - begin
    return {
        "what": what,
        "share_mib": sum(each.nbytes for each in kept) / MIB,
        "peak_mib": (peak.most - peak.before) / MIB,
        "seconds": seconds,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--hidden", type=int, default=1024)
    arguments.add_argument("--shard-mib", type=int, default=256)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    # Imported once: each row is a fresh fork of this process, which computes nothing itself.
    import transformers.models.llama.modeling_llama  # noqa: F401

    rows = []
    sizes = (options.layers, options.hidden, options.shard_mib)
    with (
        tempfile.TemporaryDirectory(prefix="redline-bench-") as scratch,
        multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as fresh,
    ):
        folder = Path(scratch) / "model"
        whole = fresh.apply(make, (folder, *sizes))
        files = len(list(folder.glob("*.safetensors")))
        for what in ROWS:
            rows.append({**fresh.apply(measure, (folder, *sizes, what)), "whole_mib": whole / MIB})
            shutil.rmtree(folder.parent / "out", ignore_errors=True)
    if options.json:
        print(json.dumps(rows))
        return
    print(
        f"a Llama of {whole / MIB:.0f} MiB in {files} files of at most {options.shard_mib} MiB; {platform.platform()}"
    )
    print(f"{'':<34}{'share MiB':>11}{'peak growth MiB':>17}{'s':>8}")
    for row in rows:
        print(f"{row['what']:<34}{row['share_mib']:>11.0f}{row['peak_mib']:>17.0f}{row['seconds']:>8.2f}")


if __name__ == "__main__":
    main()
