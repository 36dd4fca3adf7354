"""Checks that every family computes the same in every combination of parallel knobs as on one process.

    python bench/numerics.py                                  # the whole table, some minutes on two cores
    python bench/numerics.py --family t5 --combination tp2    # one cell
    python bench/numerics.py --keep cells.json --write bench/results/numerics.md    # in several runs, if needed

Each cell trains a tiny model of the family for three steps on one process and on several ranks (gloo), and compares
the loss of the first step, every gradient and every weight. The exit status is 1 if a cell deviates.
"""

import multiprocessing
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Empty

from common import machine, markdown, parser, read_json, write_json
from redline.models import Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import numerics_table as numerics

CELL_SECONDS = 300
"""Longest time of a cell, including compilation of every block on every rank."""


def main() -> int:
    """Runs the table, prints it, and writes it if requested."""
    arguments = parser(__doc__)
    arguments.add_argument("--family", action="append", choices=sorted(numerics.FAMILIES))
    arguments.add_argument("--combination", action="append", choices=list(numerics.COMBINATIONS))
    arguments.add_argument("--write", type=Path, help="a Markdown file")
    arguments.add_argument("--keep", type=Path, help="a JSON file: passed cells are written to it and not run again")
    options = arguments.parse_args()
    families = options.family or list(numerics.FAMILIES)
    combinations = options.combination or list(numerics.COMBINATIONS)
    kept: dict[str, dict[str, float]] = read_json(options.keep)
    found: dict[tuple[str, str], str | float] = {}
    excluded: set[tuple[str, str]] = set()
    due: dict[int, list[tuple[str, str]]] = {}
    for family in families:
        known: dict[bool, Workload] = {}
        for combination in combinations:
            config = numerics.COMBINATIONS[combination]
            deep = numerics.is_deep(config)
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
                if isinstance(outcome, float):
                    kept.setdefault(cell[0], {})[cell[1]] = outcome
                    write_json(options.keep, kept)
    failed = [cell for cell, value in found.items() if isinstance(value, str) and cell not in excluded]
    spread = [each for each in combinations if {"ep", "etp"} & numerics.COMBINATIONS[each].keys()]
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
        page = PAGE.format(
            table=text,
            samples=numerics.SAMPLES,
            steps=numerics.STEPS,
            rate=numerics.LEARNING_RATE,
            epsilon=numerics.EPSILON,
            machine=machine(),
        )
        options.write.write_text(page, encoding="utf-8")
    return 1 if failed else 0


def run(cells: list[tuple[str, str]], size: int) -> "Iterator[tuple[tuple[str, str], str | float]]":
    """Yields the outcomes of cells on `size` ranks with one process group, until all are done or one fails.

    An outcome is the largest deviation of a gradient, or an error.
    """
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
                        # The others may wait for that rank indefinitely.
                        yield cell, values[-1]
                        return
                wrong = next((value.wrong for value in values if not value.holds), None)
                worst = max(value.largest_of("gradients").by for value in values)
                yield cell, f"{wrong.description} (allowed: {wrong.allowed:.2g})" if wrong else worst
        finally:
            for each in processes:
                each.kill()
                each.join()


def serve(rank: int, size: int, store: str, cells: list[tuple[str, str]], answers: "multiprocessing.Queue") -> None:
    """Runs one rank, which checks the cells in order."""
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
    # Until the parent ends them, as other ranks may still be communicating.
    threading.Event().wait()


def table(
    found: dict[tuple[str, str], str | float],
    families: list[str],
    combinations: list[str],
    failed: list[tuple[str, str]],
) -> str:
    """Returns a Markdown table with a note for each unsupported cell."""
    notes: list[str] = []
    rows = []
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
        rows.append([family, *shown])
    numbered = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))
    return f"{markdown(['family', *combinations], rows)}\n\n{numbered}\n"


def in_words(config: "Mapping[str, object]") -> str:
    """A configuration's knobs as a command names them."""
    return ", ".join(
        f'`{name}="{value}"`' if name == "strategy" else f"`{name}={value}`" for name, value in config.items()
    )


EXPERTS = """## Experts over ranks

`ep2·dp2` has four replicas, of which two share the experts. A family without experts refuses `ep`: the model has no experts, so
ep must be 1. `etp1` is `etp=1`: experts are whole on the ranks of a layer, which share them and divide the tokens. With a
capacity one process has the same and trains the same micro-batches one after the other, those of the first rank first.
"""
RUNS = """## A strategy per layer

Runs of blocks that are cut and shared out unlike each other, on two and four ranks:
"""
PAGE = """# Equal numerics

`python bench/numerics.py --write bench/results/numerics.md` on gloo ranks of one CPU host: {machine}
{steps} steps of {samples} samples, AdamW with learning rate {rate:.0e} and epsilon {epsilon:.0e}. A
number is the largest difference of a gradient, relative to the largest in its tensor; docs/numerics.md has the method and the
tolerance. A note has the reason why a combination is not supported.

{table}"""


if __name__ == "__main__":
    sys.exit(main())
