"""Whether a training that is saved in any strategy goes on in any other as if nothing had happened.

    python bench/reshard.py                                     # the whole table, half an hour on two cores
    python bench/reshard.py --family t5 --strategy tp2+sp       # from and to one strategy
    python bench/reshard.py --keep cells.json --write docs/checkpoints.md    # in as many runs as it takes

Each cell trains a tiny model for four steps in one strategy, takes it up in another, on up to four ranks (gloo), saves it
again at once, and trains five steps more. It holds where both checkpoints are equal bit for bit, optimizer state and moving
averages included, and where the five losses are those of one process that never stopped. Ends with status 1 where a cell
does not.
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
from redline.runners.dry_run import join
from redline.runners.host import PLAIN_IMPORTS, HostAgent
from redline.runners.job import Job, Rendezvous
from redline.runners.rank import RankContext
from redline.testing import resharding
from redline.testing.resharding import AFTER, BEFORE, STRATEGIES, TABLE_FAMILIES, PartResult

CELL_SECONDS = 300.0
MARKS = "<!-- table -->", "<!-- end of table -->"
"""Between these a page holds the table."""


def main() -> int:
    """Runs the table, prints it, and where asked writes it into a page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--family", action="append", choices=TABLE_FAMILIES)
    parser.add_argument("--strategy", action="append", choices=list(STRATEGIES), help="taken up in; repeatable")
    parser.add_argument("--write", type=Path, help="a Markdown page with the table's marks")
    parser.add_argument("--keep", type=Path, help="a JSON file: cells that hold are written to it, and not run again")
    options = parser.parse_args()
    kept: dict[str, float] = {}
    if options.keep and options.keep.exists():
        kept = json.loads(options.keep.read_text())
    failed = 0
    agent = HostAgent((*PLAIN_IMPORTS, "redline.testing.resharding", "torch.distributed.checkpoint"))
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
    """Outcomes of a family's cells that are not known: by how much losses depart, or what is wrong."""
    able = [each for each in STRATEGIES if not resharding.obstacle(family, each)]
    due = [(a, b) for b in able if b in targets for a in able if name(family, a, b) not in kept]
    if not due:
        return
    workload = resharding.tiny(family)
    whole = went(agent, "one", partial(resharding.part, workload, "one", BEFORE + AFTER))
    for first in dict.fromkeys(a for a, _ in due):
        begin = folder / family / first
        went(agent, first, partial(resharding.part, workload, first, BEFORE, save=begin))
    for first, second in due:
        begin, again = folder / family / first, folder / family / "again" / first / second
        given = partial(resharding.part, workload, second, BEFORE + AFTER, begin=begin, copy=again)
        try:
            found = went(agent, second, given)
        except RuntimeError as error:
            yield name(family, first, second), str(error)
            continue
        differ = resharding.unequal(begin, again)
        departs = resharding.departure(whole, found)
        if differ:
            yield name(family, first, second), f"{len(differ)} tensors differ: {', '.join(differ[:3])}"
        elif not departs <= resharding.tolerance(first, second):
            yield name(family, first, second), f"losses depart by {departs:.1e}"
        else:
            yield name(family, first, second), departs


def went(agent: HostAgent, strategy: str, what: Callable[[], PartResult]) -> PartResult:
    """What rank 0 of a strategy's ranks returns."""
    size = resharding.ranks(strategy)

    def program(context: RankContext) -> PartResult:
        if context.world_size > 1:
            join(context)
        return what()

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
    """Of a cell."""
    return f"{family}: {first} -> {second}"


def table(kept: dict[str, float]) -> str:
    """The cells that hold, by family: saved in the row's strategy, taken up in the column's."""
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
            f"### {family}: {held} of {len(known) ** 2} cells hold, in float32 losses depart by {max(exact):.0e} at most",
            "",
            f"| saved in \\ taken up in | {' | '.join(known)} |",
            f"|---|{'---|' * len(known)}",
        ]
        for a in known:
            cells = [kept.get(name(family, a, b)) for b in known]
            lines.append(f"| {a} | {' | '.join('' if each is None else f'{each:.0e}' for each in cells)} |")
    about = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
    return "\n".join([*lines, "", f"`python bench/reshard.py` with {about}."]).strip("\n")


if __name__ == "__main__":
    sys.exit(main())
