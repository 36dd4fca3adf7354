"""Whether every family computes in every combination of parallel knobs what one process computes.

    python bench/numerics.py                                  # the whole table, some minutes on two cores
    python bench/numerics.py --family t5 --combination tp2    # one cell
    python bench/numerics.py --keep cells.json --write docs/numerics.md    # in as many runs as it takes

Each cell trains a tiny model of the family for three steps on one process and spread over ranks (gloo), and
compares the first step's loss, every gradient and every weight. Ends with status 1 where a cell departs.
"""

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Empty

from redline.models import Workload
from redline.testing import numerics

CELL_SECONDS = 300
"""Longest wait for one cell: compilation of every block on every rank included."""


def main() -> int:
    """Runs the table, prints it, and where asked writes it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--family", action="append", choices=sorted(numerics.FAMILIES))
    parser.add_argument("--combination", action="append", choices=list(numerics.COMBINATIONS))
    parser.add_argument("--write", type=Path, help="a Markdown file")
    parser.add_argument("--keep", type=Path, help="a JSON file: cells that hold are written to it, and not run again")
    options = parser.parse_args()
    families = options.family or list(numerics.FAMILIES)
    combinations = options.combination or list(numerics.COMBINATIONS)
    kept: dict[str, dict[str, float]] = {}
    if options.keep and options.keep.exists():
        kept = json.loads(options.keep.read_text(encoding="utf-8"))
    found: dict[tuple[str, str], str | float] = {}
    excluded: set[tuple[str, str]] = set()
    due: dict[int, list[tuple[str, str]]] = {}
    for family in families:
        known: dict[bool, Workload] = {}
        for combination in combinations:
            config = numerics.COMBINATIONS[combination]
            deep = config.get("pp", 1) * config.get("virtual_stages", 1) > 2
            workload = known[deep] = known.get(deep) or numerics.tiny(family, combination)
            reason = numerics.refusal(workload, config)
            if reason:
                found[family, combination] = reason
                excluded.add((family, combination))
            elif combination in kept.get(family, {}):
                found[family, combination] = kept[family][combination]
            else:
                due.setdefault(numerics.ranks(combination), []).append((family, combination))
    for size, cells in due.items():
        while cells:
            for cell, outcome in run(list(cells), size):
                cells.remove(cell)
                found[cell] = outcome
                shown = f"{outcome:.1e}" if isinstance(outcome, float) else f"FAILED\n{outcome}"
                print(f"{cell[0]:12} {cell[1]:18} {shown}", flush=True)
                if options.keep and isinstance(outcome, float):
                    kept.setdefault(cell[0], {})[cell[1]] = outcome
                    options.keep.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    failed = [cell for cell, value in found.items() if isinstance(value, str) and cell not in excluded]
    spread = [each for each in combinations if "ep" in numerics.COMBINATIONS[each]]
    unlike = [each for each in combinations if "strategy" in numerics.COMBINATIONS[each]]
    mixtures = [each for each in families if (each, next(iter(spread), "")) not in excluded]
    text = table(found, families, [each for each in combinations if each not in (*spread, *unlike)], failed)
    if spread and mixtures:
        text += f"\n{EXPERTS}\n{table(found, mixtures, spread, failed)}"
    if unlike:
        meant = "".join(f"\n- `{each}`: {in_words(numerics.COMBINATIONS[each])}" for each in unlike)
        text += f"\n{RUNS}{meant}\n\n{table(found, families, unlike, failed)}"
    print("\n" + text)
    if options.write:
        options.write.write_text(page(text), encoding="utf-8")
    return 1 if failed else 0


def run(cells: list[tuple[str, str]], size: int) -> "Iterator[tuple[tuple[str, str], str | float]]":
    """Outcomes of cells on `size` ranks with one process group, until all are done or one fails: the largest
    departure of a gradient, or what went wrong."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        processes = [
            context.Process(target=serve, args=(rank, size, f"{folder}/store", cells, answers), daemon=True)
            for rank in range(size)
        ]
        for each in processes:
            each.start()
        try:
            for cell in cells:
                values = []
                for _ in range(size):
                    try:
                        values.append(answers.get(timeout=CELL_SECONDS))
                    except Empty:
                        values.append(f"no answer within {CELL_SECONDS} s")
                    if isinstance(values[-1], str):
                        # The others may wait for that rank for ever.
                        yield cell, values[-1]
                        return
                wrong = next((value.wrong for value in values if not value.holds), None)
                worst = max(value.gravest("gradients").by for value in values)
                yield cell, f"{wrong.said} (allowed: {wrong.allowed:.2g})" if wrong else worst
        finally:
            for each in processes:
                each.kill()
                each.join()


def serve(rank: int, size: int, store: str, cells: list[tuple[str, str]], answers: "multiprocessing.Queue") -> None:
    """One rank: checks the cells in order."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    for family, combination in cells:
        try:
            answers.put(numerics.compare_cell(family, combination))
        except Exception:
            answers.put(f"rank {rank}: {traceback.format_exc()}")
            return
    # Until the parent ends them: the others may still exchange something.
    threading.Event().wait()


def table(
    found: dict[tuple[str, str], str | float],
    families: list[str],
    combinations: list[str],
    failed: list[tuple[str, str]],
) -> str:
    """A Markdown table with a note for each cell that cannot be."""
    notes: list[str] = []
    lines = ["| family | " + " | ".join(combinations) + " |", "|---" * (len(combinations) + 1) + "|"]
    for family in families:
        shown = []
        for combination in combinations:
            value = found[family, combination]
            if isinstance(value, float):
                shown.append(f"{value:.0e}")
            elif (family, combination) in failed:
                shown.append("**departs**")
            else:
                note = f"{family}: {value}."
                if note not in notes:
                    notes.append(note)
                shown.append(f"({notes.index(note) + 1})")
        lines.append(f"| {family} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]) + "\n"


def in_words(config: "Mapping[str, object]") -> str:
    """A configuration's knobs as a command names them."""
    return ", ".join(
        f'`{name}="{value}"`' if name == "strategy" else f"`{name}={value}`" for name, value in config.items()
    )


def page(text: str) -> str:
    """docs/numerics.md."""
    import torch
    import transformers

    return PAGE.format(
        table=text,
        samples=numerics.SAMPLES,
        steps=numerics.STEPS,
        rate=numerics.LEARNING_RATE,
        epsilon=numerics.EPSILON,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


EXPERTS = """## Experts over ranks

Families with experts, which `ep` ranks [share](parallel.md#experts-over-ranks), beside all else: `ep2·dp2` is four replicas, of
which two share the experts. A family without experts refuses `ep`: the model has no experts, so that ep must be 1.
"""
RUNS = """## A strategy per layer

Runs of blocks that are cut and shared out [unlike each other](parallel.md#a-strategy-per-layer), on two and four ranks:
"""
PAGE = """# Equal numerics

A configuration may change how fast a model trains, never what it computes. For every family and combination of
parallel knobs below, a tiny model of the family (two blocks, four where there are as many stages, an odd
vocabulary, dropout off, float32) trains for {steps} steps on one process and spread over ranks, from the same seed,
on the same {samples} samples a step. The first step's loss, every gradient of it and every weight after the last step
(AdamW, learning rate {rate:.0e}, epsilon
{epsilon:.0e}) must agree but for rounding: sums of n terms in another order depart by sqrt(n) 2^-24 of their magnitude,
and five standard deviations of that through all layers are allowed, 2e-05 for most of these families.
`redline/schedule/rounding.py` derives it, for losses and for weights behind AdamW as well.

A number is the largest departure of a gradient, relative to the largest in its tensor; float32 itself rounds at
6e-08. A note says why a combination cannot be: the same sentence with which the default space leaves it out.
With `kernels` the loss is computed [without all logits](kernels.md), alone on one process with two micro-batches.
`tp2+sp` is `sequence_parallel`, the sequence cut between layers that are cut; `sp2` and `sp4` are
[sequences over ranks](parallel.md#sequences-over-ranks), four of them with two heads of keys; `cp2` and `cp4` are rings.

{table}
## Sizes that ranks do not divide

- **Vocabulary**: padded. Embedding and head are filled up with rows of zeros (GPT-2's 50,257 to 50,258 over two ranks), no
  token looks them up, the loss leaves their logits out (Shoeybi et al., 2019), and a checkpoint has none of them.
  `redline space` says so beside `tp`. The odd vocabularies of the table are padded.
- **Heads, key-value heads, feed-forward width, the sequence** (for `sequence_parallel`): excluded, for the rest of
  the model would compute on zeros. The degree is a constraint of the default space, with the numbers:
  "tp: 8 ranks must divide the 12 attention heads".
- **Blocks and pipeline stages**: the first stages have a block more.
- **Parameters and ZeRO**: padded by PyTorch, unseen.

## How it is measured

Written by `python bench/numerics.py --write docs/numerics.md` on gloo ranks of one CPU host: Python {python},
torch {torch}, transformers {transformers}. `redline/testing/numerics.py` declares the table, `tests/training/test_numerics.py`
holds it. Dropout is compared too: under tensor parallelism masks agree where ranks hold the same activations
and differ where each has its own.
"""


if __name__ == "__main__":
    sys.exit(main())
