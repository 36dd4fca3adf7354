"""Time to enumerate a space: redline compared with python-constraint2, in the same run.

    python bench/space.py [--timeout SECONDS]

Each row is a fresh process: it declares the space, finds every valid configuration, and reports the seconds from the
first declaration to the last configuration and the peak resident memory. `redline, valid set` stops at the indexed
table that the search uses; `redline, list` also creates a Config for every row, which is comparable with the
dictionaries that python-constraint2 returns. python-constraint2 is run with functions and with its own constraint
classes; its string constraints evaluate text as Python and are left out.

redline enumerates by its own joins because they are faster: the indexed set took 1/3 to 1/40 of the time of
python-constraint2 on two shared cores. A full list, which the search does not need, costs about the same with both if
it is long, since most of the time creates the objects.

Goals: 10^6 combinations with three constraints in less than 1 s, 10^9 with product constraints in less than 3 s, both
below 1 GiB.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

DIGITS = list(range(1, 11))
DEGREES = list(range(1, 33))
POWERS = [1 << bit for bit in range(10)]
RATIOS = [0.0, 0.25, 0.5, 0.75, 1.0]
PRECISIONS = ["fp32", "bf16", "fp16"]

Rule = tuple[Callable[..., bool], tuple[str, ...], tuple[str, int]]

CASES: dict[str, tuple[dict[str, list[Any]], list[Rule]]] = {
    "10^6, three constraints": (
        dict.fromkeys("abcdef", DIGITS),
        [
            (lambda a, b: a * b <= 20, ("a", "b"), ("MaxProd", 20)),
            (lambda c, d, e: c + d + e <= 18, ("c", "d", "e"), ("MaxSum", 18)),
            (lambda e, f: e * f >= 12, ("e", "f"), ("MinProd", 12)),
        ],
    ),
    "10^6, one component": (
        dict.fromkeys("abcdef", DIGITS),
        [
            (lambda a, b, c, d: a * b * c * d <= 400, ("a", "b", "c", "d"), ("MaxProd", 400)),
            (lambda c, d, e: c + d + e <= 18, ("c", "d", "e"), ("MaxSum", 18)),
            (lambda e, f: e * f >= 12, ("e", "f"), ("MinProd", 12)),
        ],
    ),
    "10^9, two products": (
        dict.fromkeys(("tp", "pp", "dp", "micro", "acc"), DEGREES)
        | {"checkpoint_ratio": RATIOS, "precision": PRECISIONS, "fusion": [False, True]},
        [
            (lambda tp, pp, dp: tp * pp * dp == 512, ("tp", "pp", "dp"), ("ExactProd", 512)),
            (lambda micro, dp, acc: micro * dp * acc == 2048, ("micro", "dp", "acc"), ("ExactProd", 2048)),
        ],
    ),
    "10^9, powers of two": (
        dict.fromkeys(("tp", "pp", "dp", "micro", "acc"), POWERS)
        | dict.fromkeys(("checkpoint_ratio",), RATIOS * 1)
        | {f"flag{at}": [False, True] for at in range(11)},
        [
            (lambda tp, pp, dp: tp * pp * dp == 512, ("tp", "pp", "dp"), ("ExactProd", 512)),
            (lambda micro, dp, acc: micro * dp * acc == 2048, ("micro", "dp", "acc"), ("ExactProd", 2048)),
            *[(lambda x, y: x == y, (f"flag{at}", f"flag{at + 1}"), ("AllEqual", 0)) for at in range(8)],
        ],
    ),
}


def redline(knobs: dict[str, list[Any]], rules: list[Rule], listed: bool) -> int:
    """Returns the number of valid configurations, found by redline with its own expressions."""
    from redline.space import Space

    space = Space()
    declared = {name: space.choice(name, values) for name, values in knobs.items()}
    for function, names, _ in rules:
        # A lambda over knobs without `and` or `or` returns an expression when called with knobs.
        space.require(function(*(declared[name] for name in names)))
    return len(list(space)) if listed else len(space)


def constraint2(knobs: dict[str, list[Any]], rules: list[Rule], classes: bool) -> int:
    """Returns the number of valid configurations, found by python-constraint2."""
    import constraint

    problem = constraint.Problem()
    for name, values in knobs.items():
        problem.addVariable(name, values)
    for function, names, (kind, bound) in rules:
        if not classes:
            problem.addConstraint(function, names)
        elif kind == "AllEqual":
            problem.addConstraint(constraint.AllEqualConstraint(), names)
        else:
            problem.addConstraint(getattr(constraint, f"{kind}Constraint")(bound), names)
    return len(problem.getSolutions())


SOLVERS: dict[str, Callable[..., int]] = {
    "redline, valid set": lambda knobs, rules: redline(knobs, rules, listed=False),
    "redline, list": lambda knobs, rules: redline(knobs, rules, listed=True),
    "constraint2, functions": lambda knobs, rules: constraint2(knobs, rules, classes=False),
    "constraint2, classes": lambda knobs, rules: constraint2(knobs, rules, classes=True),
}


def measure(case: str, solver: str) -> dict[str, Any]:
    """Runs in the fresh process; imports are not measured."""
    if solver.startswith("redline"):
        import redline.space  # noqa: F401
    else:
        import constraint  # noqa: F401
    start = time.perf_counter()
    count = SOLVERS[solver](*CASES[case])
    seconds = time.perf_counter() - start
    return {
        "count": count,
        "seconds": seconds,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def run(case: str, solver: str, timeout: float) -> dict[str, Any] | None:
    """Returns the result of `measure` in a separate process; None if it takes longer than `timeout` seconds."""
    command = [sys.executable, os.path.abspath(__file__), "--case", case, "--solver", solver]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        raise SystemExit(f"{solver} failed on {case}:\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one solver on one case")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--solver", choices=SOLVERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measure(given.case, given.solver)))
        return
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, "
        f"numpy {version('numpy')}, python-constraint2 {version('python-constraint2')}\n"
    )
    print(f"{'case':<26}{'solver':<26}{'combinations':>14}{'valid':>10}{'seconds':>10}{'peak MiB':>10}")
    for case, (knobs, _) in CASES.items():
        combinations = 1
        for values in knobs.values():
            combinations *= len(values)
        seconds, counts = {}, set()
        for solver in SOLVERS:
            found = run(case, solver, given.timeout)
            start = f"{case:<26}{solver:<26}{combinations:>14,}"
            if found is None:
                print(f"{start}{'':>10}{'> ' + format(given.timeout, '.0f'):>10}")
                seconds[solver] = given.timeout
                continue
            counts.add(found["count"])
            seconds[solver] = found["seconds"]
            print(f"{start}{found['count']:>10,}{found['seconds']:>10.3f}{found['mib']:>10.0f}")
        if len(counts) != 1:
            raise SystemExit(f"the solvers disagree on {case}: {counts}")
        ours = seconds["redline, list"]
        rival = min((value, name) for name, value in seconds.items() if name.startswith("constraint2"))
        print(f"{'':<26}redline's list takes {ours / rival[0]:.2g} of the time of {rival[1]}\n")


if __name__ == "__main__":
    main()
