"""Checks on one GPU that redline's CPU tests cannot make.

    python bench/gpu.py --out DIR                       # eight minutes on the first GPU
    python bench/gpu.py --out DIR --only models,ranks   # these checks
    python bench/gpu.py --out DIR --tiny --device cpu   # the same code at tiny sizes, for its tests

Every check runs in its own process with its own time limit, in the order of bench/gpu_checks/__init__.py, and prints its
rows as they come. DIR receives gpu.jsonl with a line for each check, gpu.md with the table, and NAME.log with the output
of each check. The exit
status is 1 if a check fails. Needs torch, transformers, psutil and cloudpickle, but neither Ray nor Optuna nor an
installed redline.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LEAST_S = 10.0
"""Seconds that must be left to start a check."""
MARKS = {"ok": "ok", "failed": "**FAILED**", "crash": "**CRASH**", "timeout": "**TIMEOUT**", "skipped": "skipped"}


def main() -> int:
    """Runs the checks and prints each line as it comes, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all checks (8)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny models and few repetitions")
    parser.add_argument("--only", help="names of checks, with commas between")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the check as well
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        _importable(Path(place))
        from redline.runners.host.client import COMMON_IMPORTS, PLAIN_IMPORTS, HostAgent

        # One agent for the trials of all checks; it imports while this process does.
        agent = HostAgent(PLAIN_IMPORTS if options.tiny else COMMON_IMPORTS)
        stack.callback(agent.close)
        _import_once()
        agent.wait_ready()
        from gpu_checks import CHECKS, Setting

        names = options.only.split(",") if options.only else list(CHECKS)
        if unknown := sorted(set(names) - set(CHECKS)):
            parser.error(f"unknown check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
        setting = Setting(device=options.device, tiny=options.tiny, folder=options.out.resolve(), agent=agent)
        end = time.monotonic() + options.minutes * 60
        results = []
        with open(options.out / "gpu.jsonl", "w", encoding="utf-8") as lines:
            for result in outcomes(names, setting, end):
                results.append(result)
                print(json.dumps(result), file=lines, flush=True)
                print(f"{result['check']:12} {result['status']:8} {result['seconds']:6.1f} s", flush=True)
    text = table(results)
    (options.out / "gpu.md").write_text(text, encoding="utf-8")
    print("\n" + text)
    return 0 if all(each["status"] in ("ok", "skipped") for each in results) else 1


def _importable(place: Path) -> None:
    """Makes this repository importable as `redline` in this process and its children, installed or not."""
    here = Path(__file__).resolve().parents[1]
    (place / "redline").symlink_to(here)
    added = [str(place), str(here / "tests" / "support")]
    sys.path[:0] = added
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*added, os.environ.get("PYTHONPATH", "")]))
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _import_once() -> None:
    """Imports the common modules of the checks. It must not initialise CUDA, which a fork could not use then."""
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401

    assert not torch.cuda.is_initialized(), "an import initialised CUDA"


def outcomes(names: list[str], setting: Any, end: float) -> Iterator[dict[str, Any]]:
    """Yields the outcome of each check until the time is up; later checks are skipped.

    Args:
        names: names of the checks, in order.
        setting: a `gpu_checks.Setting`.
        end: end of the time for all checks, on the monotonic clock.
    """
    from gpu_checks import CHECKS

    for name in names:
        left = end - time.monotonic()
        if left < LEAST_S:
            yield {"check": name, "status": "skipped", "seconds": 0.0, "rows": [], "error": "no time left"}
            continue
        yield outcome(name, setting, min(left, CHECKS[name].limit_s))


def outcome(name: str, setting: Any, limit_s: float) -> dict[str, Any]:
    """Runs one check in its own process; `rows` of the outcome are its reports up to its end or its limit."""
    from redline.runners.host.process import kill_tree

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    begin = time.monotonic()
    process = context.Process(target=_serve, args=(name, setting, receiver, sender))
    process.start()
    sender.close()
    rows: list[dict[str, Any]] = []
    status, error = "timeout", f"took longer than {limit_s:.0f} s"
    try:
        while receiver.poll(max(0.0, begin + limit_s - time.monotonic())):
            try:
                kind, value = receiver.recv()
            except EOFError:
                process.join()
                status, error = "crash", f"ended with exit code {process.exitcode}; see {name}.log"
                break
            if kind == "row":
                rows.append(value)
                print(f"{name:12} {json.dumps(value)}", flush=True)
                continue
            status, error = kind, value
            break
    finally:
        kill_tree(process.pid)
        process.join()
        receiver.close()
    if status == "ok" and not all(row.get("holds", True) for row in rows):
        status, error = "failed", "; ".join(row["what"] for row in rows if not row.get("holds", True))
    seconds = round(time.monotonic() - begin, 1)
    return {"check": name, "status": status, "seconds": seconds, "rows": rows, "error": error}


def _serve(name: str, setting: Any, receiver: Connection, sender: Connection) -> None:
    """Runs a check in its own process."""
    from gpu_checks import CHECKS, Skipped

    receiver.close()
    with open(setting.folder / f"{name}.log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        for row in CHECKS[name].run(setting):
            sender.send(("row", {key: _rounded(value) for key, value in row.items()}))
        result = ("ok", "")
    except Skipped as reason:
        result = ("skipped", str(reason))
    except Exception as error:
        traceback.print_exc()
        result = ("crash", f"{type(error).__name__}: {error}")
    sys.stderr.flush()
    sender.send(result)


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def table(results: list[dict[str, Any]]) -> str:
    """Returns the results in Markdown, with a line for each row."""
    lines = ["| check | s | status | what | values |", "|---|---|---|---|---|"]
    for each in results:
        head = f"| {each['check']} | {each['seconds']:.0f} | {MARKS[each['status']]} |"
        for row in each["rows"]:
            values = ", ".join(
                f"{key} {value}" for key, value in row.items() if key not in ("what", "holds") and value is not None
            )
            wrong = "" if row.get("holds", True) else "**does not hold**: "
            lines.append(f"{head} {row['what']} | {wrong}{values} |")
            head = "| | | |"
        if each["error"]:
            lines.append(f"{head} | {each['error']} |")
    return "\n".join(each.replace("\n", " ") for each in lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
