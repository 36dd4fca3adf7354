"""The speed of the dashboard: the first page with many runs, and scrolling, sorting and following a large one.

    python bench/dashboard.py [--runs 200] [--trials 5000]

Creates the runs (a run.yaml, a best.yaml and 40 trials each, one of --trials), serves them by `redline dashboard` in
another process, and requests pages over HTTP and in headless Chromium (Debian's `chromium`, and playwright). Every
time starts at a request or a key press and ends when the response has arrived or the next frame is drawn. Prints one
JSON object; without a browser only the times of the server.
"""

import argparse
import importlib.util
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ASKED = {
    "model": "gpt2", "workload": {"id": "bench"}, "devices": {"type": "cpu", "count": 2}, "seq_len": 1024, "global_batch": 64,
    "memory_limit_mib": 1000, "sampler": "tpe", "seed": 0,
}  # fmt: skip
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

# Calls `act`, and resolves with the milliseconds until the next frame is drawn.
UNTIL_DRAWN = """(act) => new Promise((resolve) => {
  const begin = performance.now();
  act();
  requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - begin), 0));
})"""


def runs_on_disk() -> Any:
    """Returns the module of the browser tests that creates runs."""
    spec = importlib.util.spec_from_file_location("runs_on_disk", ROOT / "tests" / "browser" / "runs_on_disk.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_runs(root: Path, runs: int, trials: int) -> None:
    """Creates the folders of runs."""
    from redline.results import Measurement, RunFolder, Status

    disk = runs_on_disk()

    class Point(dict):
        id = "x"
        to_dict = dict.copy

    model = root.parent / "model"
    knobs = dict(disk.KNOBS)
    space = {"knobs": [{"name": name, "values": list(values)} for name, values in knobs.items()]}
    with RunFolder.open(model, ASKED | {"space": space}, knobs=knobs, make_config=Point) as run:
        run.start(Point({name: values[0] for name, values in knobs.items()}), sampler="default")
        run.finish(0, Measurement(status=Status.OK, throughput=1.0, unit="tokens/s"))
        run.write_best(["redline", "tune", "gpt2"])
    for number in range(runs):
        folder = root / f"group-{number % 10}" / f"run-{number}"
        disk.write_run(folder, trials if number == 0 else 40, seed=number)
        for name in ("run.yaml", "best.yaml"):
            shutil.copy(model / name, folder)


def seconds_of(address: str) -> tuple[float, int]:
    """Returns the seconds of a response, and its bytes as transferred."""
    begin = time.perf_counter()
    request = urllib.request.Request(address, headers={"accept-encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        size = len(answer.read())
    return time.perf_counter() - begin, size


def touch(path: Path) -> None:
    """Appends a trial to a table as a search does, by replacing the file."""
    lines = path.read_text().splitlines(keepends=True)
    last = lines[-1].split(",", 1)
    new = path.with_suffix(".new")
    new.write_text("".join([*lines, f"{int(last[0]) + 1},{last[1]}"]))
    new.replace(path)


def of_server(address: str, large: Path) -> dict[str, float]:
    """Returns the times of the server, s."""
    run = "api/run?run=group-0%2Frun-0"
    out = {"list_first_s": seconds_of(address + "api/runs")[0]}
    out["list_again_s"] = statistics.median(seconds_of(address + "api/runs")[0] for _ in range(5))
    out["run_first_s"], size = seconds_of(address + run)
    out["run_first_kib"] = size / 1024
    version = json.loads(urllib.request.urlopen(address + run, timeout=60).read())["version"]
    touch(large)
    out["run_after_a_trial_s"], size = seconds_of(f"{address}{run}&have={version}")
    out["run_after_a_trial_kib"] = size / 1024
    return out


def of_browser(address: str, large: Path, chromium: str) -> dict[str, float]:
    """Returns the times that a user waits, s and ms."""
    from playwright.sync_api import expect, sync_playwright

    out = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto("about:blank")
        begin = time.perf_counter()
        page.goto(address)
        page.locator(".run-line").first.wait_for()
        out["first_page_s"] = time.perf_counter() - begin
        begin = time.perf_counter()
        page.goto(f"{address}#/run/group-0%2Frun-0")
        page.locator("#timeline .plot svg").wait_for()
        page.locator("#trials tbody tr[data-trial]").first.wait_for()
        out["run_page_s"] = time.perf_counter() - begin

        def drawn(act: str) -> float:
            return page.evaluate(f"({UNTIL_DRAWN})({act})")

        out["sort_ms"] = statistics.median(
            drawn(f"() => document.querySelector('[data-sort={name}]').click()")
            for name in ("step_ms", "trial", "peak_memory_mib")
        )
        typed = (
            "() => { const box = document.querySelector('#trials input'); box.value = %s; "
            "box.dispatchEvent(new Event('input')); }"
        )
        out["filter_ms"] = statistics.median(
            drawn(typed % json.dumps(text)) for text in ("micro_batch=8", "throughput>2000", "")
        )
        frames = [
            drawn(f"() => {{ document.querySelector('.table-pane').scrollTop = {at * 2400}; }}") for at in range(60)
        ]
        out["scroll_frame_median_ms"], out["scroll_frame_worst_ms"] = statistics.median(frames), max(frames)
        before = page.locator("#trials [role=status]").inner_text()
        page.evaluate(
            "() => { window.longest = 0; new PerformanceObserver((list) => { "
            "for (const each of list.getEntries()) window.longest = Math.max(window.longest, each.duration); "
            "}).observe({ type: 'longtask' }); }"
        )
        begin = time.perf_counter()
        touch(large)
        expect(page.locator("#trials [role=status]")).not_to_have_text(before)
        out["seen_after_a_trial_s"] = time.perf_counter() - begin
        page.wait_for_timeout(500)
        out["redraw_longest_block_ms"] = page.evaluate("window.longest")
        browser.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--trials", type=int, default=5000)
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    out: dict[str, object] = {
        "runs": options.runs,
        "trials": options.trials,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "runs"
        make_runs(root, options.runs, options.trials)
        large = root / "group-0" / "run-0" / "trials.csv"
        # A new server for each, so that nothing is cached.
        for kind in ("server", "browser"):
            if kind == "browser" and (chromium is None or importlib.util.find_spec("playwright") is None):
                continue
            server = subprocess.Popen(
                [sys.executable, "-u", "-m", "redline.cli", "dashboard", str(root), "--port", "0"],
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                address = (server.stdout.readline() + server.stdout.readline()).split()[-1]
                figures = of_server(address, large) if kind == "server" else of_browser(address, large, chromium)
                out[kind] = {name: round(value, 3) for name, value in figures.items()}
            finally:
                server.terminate()
                server.wait(10)
    print(json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
