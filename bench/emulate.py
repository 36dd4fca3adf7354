"""Holds emulated ranks against real ones: memory of each rank, step time, and the order of configurations.

    python bench/emulate.py                              # all parts, and the tables of bench/results/emulate.md
    python bench/emulate.py --parts memory --models llama-tiny
    python bench/emulate.py --write                      # the tables alone, from bench/results/emulate.json

Every configuration is run by real gloo ranks on this machine and by emulated ones, in turns. Three parts:

- `memory`: peak of each emulated rank. Both run with glibc's thresholds for mmap and trimming fixed at 64 KiB, so that memory
  that is freed is returned. Without that the resident peak of a small model is mostly what glibc keeps, and runs of one
  configuration scatter by 5 to 10 % among themselves.
- `time`: the step, with glibc as it is, so that times are those that trials have; the median of the turns counts.
- `ranking`: 20 configurations of llama-tiny on 8 ranks, by Spearman's correlation.

Results are kept row by row in bench/results/emulate.json; rows that are there are not run again (`--again` drops them).
"""

import os
import statistics
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, markdown, parser, put, read_json, write_json

KEPT, PAGE = RESULTS / "emulate.json", RESULTS / "emulate.md"
MODELS = ("llama-tiny", "gpt2-tiny", "bert-tiny", "t5-tiny", "mixtral-tiny")
ORDERS = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zero_bubble": 1, "zbv": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp=2": (2, {"tp": 2}),
    **{f"zero={zero}": (2, {"zero": zero}) for zero in range(4)},
    **{
        f"pp=2 {order}": (2, {"pp": 2, "pipeline_schedule": order, "virtual_stages": held})
        for order, held in ORDERS.items()
    },
    "sp=2": (2, {"sp": 2}),
    "cp=2": (2, {"cp": 2}),
    "ep=2": (2, {"ep": 2}),
    "tp=2 zero=3": (4, {"tp": 2, "zero": 3}),
    "pp=2 dp=2": (4, {"pp": 2, "zero": 1}),
}
RANKED: tuple[dict[str, Any], ...] = (
    {"micro_batch": 4}, {"micro_batch": 2, "zero": 1}, {"micro_batch": 4, "zero": 2}, {"micro_batch": 4, "zero": 3},
    {"micro_batch": 1, "zero": 3}, {"micro_batch": 4, "checkpoint_ratio": 1}, {"tp": 2, "micro_batch": 8},
    {"tp": 2, "micro_batch": 4, "zero": 3}, {"tp": 4, "micro_batch": 16}, {"tp": 2, "micro_batch": 8, "zero": 1},
    {"pp": 2, "micro_batch": 4}, {"pp": 2, "micro_batch": 2, "zero": 1},
    {"pp": 2, "micro_batch": 4, "pipeline_schedule": "gpipe"},
    {"pp": 4, "micro_batch": 4, "pipeline_schedule": "gpipe"}, {"pp": 2, "tp": 2, "micro_batch": 8},
    {"pp": 2, "micro_batch": 4, "pipeline_schedule": "interleaved", "virtual_stages": 2},
    {"sp": 2, "micro_batch": 8}, {"cp": 2, "micro_batch": 8}, {"cp": 2, "micro_batch": 8, "zero": 3},
    {"sp": 2, "micro_batch": 2, "zero": 1},
)  # fmt: skip
TUNABLES = "glibc.malloc.mmap_threshold=65536:glibc.malloc.trim_threshold=65536"
LIMIT_MIB = 2500.0


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--parts", nargs="+", default=["memory", "time", "ranking"])
    options.add_argument("--models", nargs="+", default=list(MODELS))
    options.add_argument("--turns", type=int, default=3, help="turns of the parts with times")
    options.add_argument("--seconds", type=float, default=2.0, help="for measuring the steps of one turn")
    options.add_argument("--again", action="store_true", help="drop the rows of these parts that are kept")
    options.add_argument("--write", action="store_true", help="write the tables alone")
    arguments = options.parse_args()
    rows: dict[str, Any] = read_json(KEPT)
    if not arguments.write:
        if arguments.again:
            rows = {key: row for key, row in rows.items() if row["part"] not in arguments.parts}
        if "memory" in arguments.parts:
            os.environ["GLIBC_TUNABLES"] = TUNABLES
            memory(rows, arguments.models)
            os.environ.pop("GLIBC_TUNABLES")
        if "time" in arguments.parts:
            times(rows, arguments.models, arguments.turns, arguments.seconds)
        if "ranking" in arguments.parts:
            ranking(rows, arguments.turns, arguments.seconds)
    tables = written(rows)
    print(tables)
    put(PAGE, "bench/emulate.py", tables)


class Sides:
    """Real and emulated trials of one model on so many ranks."""

    def __init__(self, model: str, devices: int, agent: Any, seconds: float, batch: int = 16) -> None:
        import redline as rl
        from redline.base.device import detect, usable_cores
        from redline.estimator.measuring import this_machine
        from redline.runners import TimingPlan, TrialTerms
        from redline.runners.dispatch import DryRuns
        from redline.runners.place.emulate import EmulateRunner, EmulationTerms
        from redline.runners.place.local import LocalRunner

        workload = rl.workload(model, global_batch=batch)
        plan = TimingPlan(seconds=seconds, min_steps=4, precision=0.01)
        threads = max(1, usable_cores() // devices)
        terms = TrialTerms(device=detect(), devices=devices, memory_limit_mib=LIMIT_MIB, threads=threads, plan=plan)
        work = DryRuns(workload, compiles=False)
        hardware = this_machine().shared(devices)
        self.real = LocalRunner(work, terms, agent=agent)
        self.emulated = EmulateRunner(workload, terms, EmulationTerms(hardware=hardware), compiles=False, agent=agent)

    def run(self, runner: Any, config: dict[str, Any]) -> Any:
        from redline.runners.runner import TrialRequest
        from redline.space import Config

        return runner.run(TrialRequest(config=Config(config), number=0, log=Path("/dev/null")))


def agent_of() -> Any:
    from redline.runners.host.client import PLAIN_IMPORTS, HostAgent

    return HostAgent(PLAIN_IMPORTS)


def keep(rows: dict[str, Any], key: str, row: dict[str, Any]) -> None:
    rows[key] = row
    write_json(KEPT, rows)
    print(key, {name: value for name, value in row.items() if name not in ("part",)}, flush=True)


def cases(models: list[str]) -> list[tuple[str, str, int, dict[str, Any]]]:
    return [
        (model, name, devices, {"micro_batch": 4, **config})
        for model in models
        for name, (devices, config) in CASES.items()
    ]


def failed(real: Any, emulated: Any) -> str:
    """Why there is nothing to compare; empty where there is."""
    if not real.ok:
        return f"not valid: {real.reason[:160]}"
    return "" if emulated.ok else f"emulated {emulated.status}: {emulated.reason[:160]}"


def memory(rows: dict[str, Any], models: list[str]) -> None:
    agent = agent_of()
    try:
        for model, name, devices, config in cases(models):
            key = f"memory {model} {name}"
            if key in rows:
                continue
            sides = Sides(model, devices, agent, 0.3)
            real, emulated = sides.run(sides.real, config), sides.run(sides.emulated, config)
            row: dict[str, Any] = {"part": "memory", "model": model, "case": name, "why": failed(real, emulated)}
            if not row["why"]:
                real_peaks = {each.rank: each.peak_memory_mib for each in real.ranks}
                row["ranks"] = [[each.rank, real_peaks[each.rank], each.peak_memory_mib] for each in emulated.ranks]
            keep(rows, key, row)
    finally:
        agent.close()


def times(rows: dict[str, Any], models: list[str], turns: int, seconds: float) -> None:
    agent = agent_of()
    try:
        for model, name, devices, config in cases(models):
            key = f"time {model} {name}"
            if key in rows:
                continue
            sides = Sides(model, devices, agent, seconds)
            keep(rows, key, {"part": "time", "model": model, "case": name, **in_turns(sides, config, turns)})
    finally:
        agent.close()


def in_turns(sides: Sides, config: dict[str, Any], turns: int) -> dict[str, Any]:
    """Median steps of both sides, ms."""
    real_ms, emulated_ms, modelled, spread = [], [], [], []
    for _ in range(turns):
        real, emulated = sides.run(sides.real, config), sides.run(sides.emulated, config)
        if reason := failed(real, emulated):
            return {"why": reason}
        real_ms.append(real.step_ms)
        emulated_ms.append(emulated.step_ms)
        modelled.append(emulated.seconds_modelled * 1e3)
        spread.append(emulated.step_ms_spread)
    return {
        "why": "",
        "real_ms": statistics.median(real_ms),
        "emulated_ms": statistics.median(emulated_ms),
        "modelled_ms": statistics.median(modelled),
        "spread_ms": statistics.median(spread),
        "real_memory_mib": real.peak_memory_mib,
        "emulated_memory_mib": emulated.peak_memory_mib,
    }


def ranking(rows: dict[str, Any], turns: int, seconds: float) -> None:
    os.environ["GLIBC_TUNABLES"] = TUNABLES  # for memory; both sides have it
    agent = agent_of()
    try:
        sides = None
        for config in RANKED:
            name = " ".join(f"{knob}={value}" for knob, value in config.items())
            key = f"ranking {name}"
            if key in rows:
                continue
            sides = sides or Sides("llama-tiny", 8, agent, seconds, batch=64)
            keep(rows, key, {"part": "ranking", "model": "llama-tiny", "case": name, **in_turns(sides, config, turns)})
    finally:
        agent.close()
        os.environ.pop("GLIBC_TUNABLES")


def off(value: float, measured: float) -> float:
    """Departure in per cent."""
    return 100 * (value / measured - 1)


def spearman(one: list[float], other: list[float]) -> float:
    import pandas

    return float(pandas.Series(one).corr(pandas.Series(other), method="spearman"))


def written(rows: dict[str, Any]) -> str:
    """The tables as Markdown."""
    parts = {part: [row for row in rows.values() if row["part"] == part and not row["why"]] for part in
             ("memory", "time", "ranking")}  # fmt: skip
    out: list[str] = []
    if found := parts["memory"]:
        apart = [abs(off(emulated, real)) for row in found for _, real, emulated in row["ranks"]]
        out += [
            f"Memory of {len(apart)} ranks of {len(found)} configurations: median error {statistics.median(apart):.1f} %, "
            f"largest {max(apart):.1f} %. For each configuration the rank that is furthest off, real and emulated, MiB:",
            "",
            grid(found, memory_cell),
            "",
        ]
    if found := parts["time"]:
        apart = [abs(off(row["emulated_ms"], row["real_ms"])) for row in found]
        out += [
            f"Step time of {len(apart)} configurations: median error {statistics.median(apart):.1f} %, largest "
            f"{max(apart):.1f} %. Real and emulated, ms:",
            "",
            grid(found, time_cell),
            "",
        ]
    if found := parts["ranking"]:
        memories = spearman(*([row[name] for row in found] for name in ("real_memory_mib", "emulated_memory_mib")))
        steps = spearman(*([row[name] for row in found] for name in ("real_ms", "emulated_ms")))
        apart = [abs(off(row["emulated_memory_mib"], row["real_memory_mib"])) for row in found]
        slower = [off(row["emulated_ms"], row["real_ms"]) for row in found]
        out += [
            f"{len(found)} configurations of llama-tiny on 8 ranks: Spearman's correlation with real ranks is {memories:.3f} "
            f"for memory and {steps:.3f} for step time. Memory of the fullest rank is off by {statistics.median(apart):.1f} % "
            f"(median), {max(apart):.1f} % at most. Emulated steps are {-statistics.median(slower):.0f} % shorter (median, "
            f"{-max(slower):.0f} to {-min(slower):.0f} %).",
            "",
        ]
    return "\n".join(out)


def memory_cell(row: dict[str, Any]) -> str:
    _, real, emulated = max(row["ranks"], key=lambda each: abs(off(each[2], each[1])))
    return f"{real:.0f} {emulated:.0f} ({off(emulated, real):+.1f} %)"


def time_cell(row: dict[str, Any]) -> str:
    return f"{row['real_ms']:.0f} {row['emulated_ms']:.0f} ({off(row['emulated_ms'], row['real_ms']):+.0f} %)"


def grid(rows: list[dict[str, Any]], cell: Any) -> str:
    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    cells = {(row["case"], row["model"]): cell(row) for row in rows}
    named = [name for name in CASES if any(case == name for case, _ in cells)]
    return markdown(["", *models], [[name, *(cells.get((name, model), "") for model in models)] for name in named])


if __name__ == "__main__":
    sys.exit(main())
