"""Checks that the numeric tests pass on other machines, by varying the properties that differ between machines.

    python bench/portability.py                                       # or: make test-portable
    python bench/portability.py --seeds 3 tests/schedule -k pipeline  # with options of pytest
    python bench/portability.py --keep portability.json               # in several runs, if needed

Each numeric test (one with the fixture `seed`) runs with many seeds on the code paths of the maths libraries: the
vector instructions of ATen and oneDNN, MKL with the instructions of this processor and with those of every processor,
one thread and two. By default every two of these values occur together in one of six conditions, each with half of the
seeds, so that every value is combined with all others; `--all` runs all twelve, each with all seeds. The share of a
test is its largest deviation relative to its tolerance; it must be below a third, and a planted fault must be above
three. The exit status is 1 if one is not, or if a test failed.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARGIN = 3.0
"""Factor between the deviation of a correct result and its tolerance, and between that and a fault."""
CAPABILITIES = {"default": "SSE41", "avx2": "AVX2", "avx512": "ALL"}
"""ATen's names of vector instructions, lowest first, with oneDNN's names for the same."""
MKL = {"MKL native": {}, "MKL compatible": {"MKL_CBWR": "COMPATIBLE"}}
THREADS = (1, 2)
PAIRS = {
    ("default", "MKL native", 1): 0,
    ("default", "MKL compatible", 2): 1,
    ("avx2", "MKL compatible", 1): 0,
    ("avx2", "MKL native", 2): 1,
    ("avx512", "MKL native", 1): 1,
    ("avx512", "MKL compatible", 2): 0,
}
"""Conditions that contain every two values together, with the half of the seeds of each."""


def main() -> int:
    """Runs the numeric tests under every condition and prints the share of the tolerance that each used."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--capability", action="append", choices=list(CAPABILITIES), help="by default all")
    parser.add_argument("--all", action="store_true", help="every condition instead of every pair of values")
    parser.add_argument(
        "--mark", default="numeric and not exhaustive", help="expression of `pytest -m` that selects the tests"
    )
    parser.add_argument("--keep", type=Path, help="a JSON file: conditions that passed are not run again")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    options, selected = parser.parse_known_args()
    kept: dict[str, Any] = {}
    if options.keep and options.keep.exists():
        kept = json.loads(options.keep.read_text(encoding="utf-8"))
    conditions = itertools.product(available(), MKL, THREADS) if options.all else PAIRS
    chosen = [each for each in conditions if each[0] in (options.capability or available())]
    failed = []
    for capability, mkl, threads in chosen:
        name = f"{capability}, {mkl}, {threads} thread{'s' * (threads > 1)}"
        if name not in kept:
            half = -(-options.seeds // 2)
            second = PAIRS.get((capability, mkl, threads), 0)
            seeds = f"0:{options.seeds}" if options.all else (f"{half}:{2 * half}" if second else f"0:{half}")
            status, shares = run(capability, mkl, threads, seeds, options.mark, selected)
            if status:
                failed.append(name)
                continue
            kept[name] = shares
            if options.keep:
                options.keep.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        worst = max((each["share"] for each in kept[name].values()), default=0.0)
        print(f"{name}: {len(kept[name])} tests, worst share {worst:.2f}", flush=True)
    text, failures = table(kept)
    print("\n" + text)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    for name in failed:
        print(f"FAILED: {name}")
    for name in failures:
        print(f"too close to its tolerance: {name}")
    return 1 if failed or failures else 0


def available() -> list[str]:
    """Returns the vector instructions of this processor."""
    import torch

    highest = torch.backends.cpu.get_cpu_capability().lower()
    names = list(CAPABILITIES)
    return names[: names.index(highest) + 1] if highest in names else names[:1]


def run(
    capability: str, mkl: str, threads: int, seeds: str, mark: str, selected: list[str]
) -> tuple[int, dict[str, Any]]:
    """Returns pytest's status under one condition, and the share of its tolerance that each test used."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "MKL_CBWR"},
        **MKL[mkl],
        "ATEN_CPU_CAPABILITY": capability,
        "ONEDNN_MAX_CPU_ISA": CAPABILITIES[capability],
        # Ranks with several threads exceed the cores, so that waiting threads must not spin.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    with tempfile.TemporaryDirectory() as folder:
        margins = Path(folder) / "margins.json"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", mark, "--seeds", seeds,
            "--threads", str(threads), "--margins", str(margins), *selected,
        ]  # fmt: skip
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        return status, json.loads(margins.read_text(encoding="utf-8")) if margins.exists() else {}


def table(kept: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Returns a Markdown table, the closest to the tolerance first, and the tests that came too close."""
    tests: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for condition, shares in kept.items():
        for name, each in shares.items():
            tests.setdefault(name, []).append((condition, each))
    rows, failures = [], []
    for name, found in tests.items():
        condition, worst = max(found, key=lambda pair: pair[1]["share"])
        faults = [each["fault"] for _, each in found if each["fault"] is not None]
        rows.append((worst["share"], min(faults, default=None), name, worst["what"], condition, found))
        if worst["share"] * MARGIN > 1 or (faults and min(faults) < MARGIN):
            failures.append(name)
    lines = [
        "| test | conditions x seeds | worst share of its tolerance | of what, where | least planted fault |",
        "|---|---|---|---|---|",
    ]
    for share, fault, name, what, condition, found in sorted(rows, key=lambda row: -row[0]):
        where = f"{what} ({condition})" if what else "exact"
        seeds = min(each["seeds"] for _, each in found)
        shown = f"{fault:.0f} times the tolerance" if fault is not None else ""
        short = name.rpartition("/")[2]
        lines.append(f"| {short} | {len(found)} x {seeds} | {share:.3f} | {where} | {shown} |")
    return "\n".join(lines) + "\n", failures


if __name__ == "__main__":
    sys.exit(main())
