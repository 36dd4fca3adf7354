"""Checks that a training saved in any strategy continues exactly in any other.

    python bench/reshard.py                                     # the whole table, half an hour on two cores
    python bench/reshard.py --family t5 --strategy tp2+sp       # from and to one strategy
    python bench/reshard.py --keep cells.json --write bench/results/reshard.md    # in several runs, if needed

Each cell trains a tiny model for four steps in one strategy, resumes it in another, on up to four ranks (gloo), saves
it again at once, and trains five more steps. It passes if both checkpoints are equal bit for bit, including optimizer
state, and if the five losses equal those of one uninterrupted process. The exit status is 1 if a cell fails.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from redline.runners.host.client import PLAIN_IMPORTS, HostAgent
from redline.runners.trial.dry_run import join
from redline.runners.trial.job import Job, Rendezvous
from redline.runners.trial.rank import RankContext

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import resharding
from resharding import AFTER, BEFORE, STRATEGIES, TABLE_FAMILIES, PartResult

CELL_SECONDS = 300.0
MARKS = "<!-- table -->", "<!-- end of table -->"
"""Marks around the table in a page."""


def main() -> int:
    """Runs the table, prints it, and writes it into a page if requested."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--family", action="append", choices=TABLE_FAMILIES)
    parser.add_argument(
        "--strategy", action="append", choices=list(STRATEGIES), help="the resuming strategy; repeatable"
    )
    parser.add_argument("--write", type=Path, help="a Markdown page with the table's marks")
    parser.add_argument("--keep", type=Path, help="a JSON file: passed cells are written to it and not run again")
    options = parser.parse_args()
    kept: dict[str, float] = {}
    if options.keep and options.keep.exists():
        kept = json.loads(options.keep.read_text())
    failed = 0
    agent = HostAgent((*PLAIN_IMPORTS, "resharding", "torch.distributed.checkpoint"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            for family in options.family or TABLE_FAMILIES:
                for cell, outcome in run(agent, Path(folder), family, options.strategy or list(STRATEGIES), kept):
                    shown = f"{outcome:.1e}" if isinstance(outcome, float) else f"FAILED: {outcome}"
                    print(f"{cell:60} {shown}", flush=True)
                    failed += not isinstance(outcome, float)
                    if isinstance(outcome, float):
                        kept[cell] = outcome
                        if options.keep:
                            options.keep.write_text(json.dumps(kept, indent=1))
    finally:
        agent.close()
    text = table(kept)
    print("\n" + text)
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        before, _, rest = page.partition(MARKS[0])
        _, _, after = rest.partition(MARKS[1])
        options.write.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")
    return 1 if failed else 0


def run(agent: HostAgent, folder: Path, family: str, targets: list[str], kept: dict[str, float]) -> Any:
    """Returns the unknown outcomes of a family's cells: the difference of the losses, or an error."""
    able = [each for each in STRATEGIES if not resharding.obstacle(family, each)]
    due = [(a, b) for b in able if b in targets for a in able if name(family, a, b) not in kept]
    if not due:
        return
    workload = resharding.tiny(family)
    whole = on_ranks(agent, "one", partial(resharding.part, workload, "one", BEFORE + AFTER))
    for first in dict.fromkeys(a for a, _ in due):
        begin = folder / family / first
        on_ranks(agent, first, partial(resharding.part, workload, first, BEFORE, save=begin))
    for first, second in due:
        begin, again = folder / family / first, folder / family / "again" / first / second
        given = partial(resharding.part, workload, second, BEFORE + AFTER, begin=begin, copy=again)
        try:
            found = on_ranks(agent, second, given)
        except RuntimeError as error:
            yield name(family, first, second), str(error)
            continue
        differ = resharding.unequal(begin, again)
        departs = resharding.departure(whole, found)
        if differ:
            yield name(family, first, second), f"{len(differ)} tensors differ: {', '.join(differ[:3])}"
        elif not departs <= resharding.tolerance(first, second):
            yield name(family, first, second), f"losses differ by {departs:.1e}"
        else:
            yield name(family, first, second), departs


def on_ranks(agent: HostAgent, strategy: str, function: Callable[[], PartResult]) -> PartResult:
    """Returns the result of rank 0 in a strategy."""
    size = resharding.ranks(strategy)

    def program(context: RankContext) -> PartResult:
        if context.world_size > 1:
            join(context)
        return function()

    job = Job(
        program=cloudpickle.dumps(program),
        ranks=size,
        rendezvous=Rendezvous(world_size=size),
        threads=1,
        timeout_s=CELL_SECONDS,
    )
    outcome = agent.run(job)
    if not outcome.ranks or outcome.ranks[0].report is None:
        raise RuntimeError(outcome.reason)
    return outcome.ranks[0].report


def name(family: str, first: str, second: str) -> str:
    """Returns the name of a cell."""
    return f"{family}: {first} -> {second}"


def table(kept: dict[str, float]) -> str:
    """Returns the table of passed cells by family: saved in the strategy of the row, resumed in that of the column."""
    lines = []
    for family in TABLE_FAMILIES:
        known = [a for a in STRATEGIES if any(name(family, a, b) in kept for b in STRATEGIES)]
        if not known:
            continue
        held = sum(name(family, a, b) in kept for a in known for b in known)
        exact = [
            kept[name(family, a, b)]
            for a in known
            for b in known
            if name(family, a, b) in kept and resharding.tolerance(a, b) == resharding.EXACT
        ]
        lines += [
            "",
            f"### {family}: {held} of {len(known) ** 2} cells pass, in float32 losses differ by {max(exact):.0e} at most",
            "",
            f"| saved in \\ resumed in | {' | '.join(known)} |",
            f"|---|{'---|' * len(known)}",
        ]
        for a in known:
            cells = [kept.get(name(family, a, b)) for b in known]
            lines.append(f"| {a} | {' | '.join('' if each is None else f'{each:.0e}' for each in cells)} |")
    about = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
    return "\n".join([*lines, "", f"`python bench/reshard.py` with {about}."]).strip("\n")


if __name__ == "__main__":
    sys.exit(main())
