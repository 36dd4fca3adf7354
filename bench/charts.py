"""The cost of redline's drawing layer compared with uPlot and Observable Plot: bytes, and time until a chart is
shown.

    python bench/charts.py [--trials 200 2000 20000] [--rounds 5] [--packages DIR]

Each draws the best so far, throughput over peak memory and parallel coordinates of a synthetic run, in headless
Chromium (Debian's `chromium`, and playwright). The libraries and esbuild, which bundles each into one file, come from
npm into a temporary folder, or are under DIR/node_modules. Prints tables in Markdown; without npm only those of
redline's own layer.

For each chart: `work` is the work of the page's main thread, as counted by Chromium; `shown` the time until a
screenshot of the window, less that of an empty one, so with rasterisation, and accurate to a frame or two; `hover` the
work of one move of the pointer; `elements` the number of added elements. Medians of rounds.
"""

import argparse
import gzip
import json
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from dashboard import FLAGS, runs_on_disk

HERE = Path(__file__).parent / "charts"
PACKAGES = ("uplot@1.6.32", "@observablehq/plot@0.6.17", "esbuild@0.28.2")
ENTRIES = {
    # Its style, added as a script would do it.
    "uplot": 'import uPlot from "uplot"; import style from "uplot/dist/uPlot.min.css"; window.uPlot = uPlot;'
    ' const sheet = document.createElement("style"); sheet.textContent = style; document.head.append(sheet);',
    "plot": """
        import {plot, dot, line, lineY, ruleY, barX, rect, text, boxY, tip, pointer} from "@observablehq/plot"
        window.Plot = {plot, dot, line, lineY, ruleY, barX, rect, text, boxY, tip, pointer}""",
}
"""The entry file of each library, limited to the parts that the charts need."""

TITLES = {"ours": "ours", "uplot": "uPlot", "plot": "Observable Plot and its part of d3"}

MOVES = 30
"""Moves of the pointer across a chart."""

# Draws a chart and resolves after two frames.
DRAW = """(name) => new Promise((resolve) => {
  const host = document.getElementById("host");
  const made = CHARTS[name]();
  if (typeof made === "function") made(host); else host.append(made);
  requestAnimationFrame(() => requestAnimationFrame(resolve));
})"""
CLEAR = """() => new Promise((resolve) => {
  document.getElementById("host").replaceChildren();
  requestAnimationFrame(() => requestAnimationFrame(resolve));
})"""


def libraries(folder: Path | None, place: Path) -> dict[str, str]:
    """Returns each library as one minified file; empty without npm."""
    if folder is None:
        if shutil.which("npm") is None:
            return {}
        subprocess.run(
            ["npm", "install", "--prefix", place, "--no-audit", "--no-fund", "--silent", *PACKAGES],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        folder = place
    return {name: minified(folder, text, "--bundle", "--loader:.css=text") for name, text in ENTRIES.items()}


def minified(folder: Path, text: str, *options: str) -> str:
    """Returns a script minified by esbuild."""
    command = [folder / "node_modules" / ".bin" / "esbuild", "--minify", "--log-level=error", *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=folder).stdout


def sizes(drawing: str, libs: dict[str, str], packages: Path | None) -> list[list[Any]]:
    """Returns name, bytes, and bytes with gzip of each layer."""
    layers = {"our layer, as shipped": drawing}
    if packages is not None:
        layers["our layer, minified"] = minified(packages, drawing)
    layers |= {f"{TITLES[name]}, minified": text for name, text in libs.items()}
    return [
        [name, f"{len(text.encode()):,}", f"{len(gzip.compress(text.encode(), 9)):,}"] for name, text in layers.items()
    ]


def made_up(place: Path, trials: int) -> dict[str, Any]:
    """Returns the document of a run with that many trials."""
    from redline.views.report import RunFiles, document

    runs_on_disk().write_run(place / str(trials), trials)
    return document(RunFiles.read(place / str(trials)))


def page_of(kind: str, libs: dict[str, str]) -> str:
    """Returns a page whose `CHARTS` draw with one of the libraries."""
    from redline.views.report.page import SCRIPTS, asset

    ours = [asset(f"js/{name}.js") for name in SCRIPTS] + [
        (HERE / f"{kind}.js").read_text(),
        "Object.assign(window, { begin, CHARTS });",
    ]
    # Our scripts in their own scope, as in a report.
    scripts = [libs.get(kind, ""), "(() => {" + "\n".join(ours) + "})();"]
    tags = "".join("<script>" + each.replace("</script", "<\\/script") + "</script>" for each in scripts)
    host = '<div id="host" style="width: 1040px; height: 880px; overflow: hidden"></div>'
    return f'<!doctype html><meta charset="utf-8"><style>{asset("style.css")}</style>{host}{tags}'


def measure(page: Any, chart: str, rounds: int) -> list[str]:
    """Returns the figures of one chart as texts; times in ms."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def work() -> float:
        return (
            next(
                each["value"]
                for each in session.send("Performance.getMetrics")["metrics"]
                if each["name"] == "TaskDuration"
            )
            * 1e3
        )

    def timed(act: Any) -> tuple[float, float]:
        begin, before = time.perf_counter(), work()
        act()
        page.screenshot(clip={"x": 0, "y": 0, "width": 1040, "height": 880})
        return (time.perf_counter() - begin) * 1e3, work() - before

    names = ("nothing", "idle", "shown", "work", "hover", "elements")
    found: list[tuple[float, ...]] = []
    for _ in range(rounds + 1):  # the first one warms up
        page.evaluate(CLEAR)
        empty = timed(lambda: page.evaluate(CLEAR))
        drawn = timed(lambda: page.evaluate(DRAW, chart))
        before = work()
        for at in range(MOVES):
            page.mouse.move(200 + 20 * at, 150 + 5 * (at % 7))
            page.evaluate("() => new Promise(requestAnimationFrame)")
        hover = (work() - before) / MOVES
        found.append((*empty, *drawn, hover, page.evaluate("document.querySelectorAll('#host *').length")))
    middle = {name: statistics.median(each) for name, each in zip(names, zip(*found[1:]))}
    shown, busy = middle["shown"] - middle["nothing"], middle["work"] - middle["idle"]
    return [
        f"{max(busy, 0):.0f}",
        f"{max(shown, 0):.0f}",
        f"{middle['hover']:.1f}",
        f"{middle['elements']:,.0f}",
    ]


def table(header: list[str], rows: list[list[Any]]) -> str:
    """Returns a table in Markdown."""
    return "\n".join("| " + " | ".join(map(str, each)) + " |" for each in (header, ["---"] * len(header), *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, nargs="+", default=[200, 2000, 20_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--packages", type=Path, help="folder whose node_modules has " + ", ".join(PACKAGES))
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright
    from redline.views.report.page import DRAWING, asset

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as text, sync_playwright() as playwright:
        place = Path(text)
        libs = libraries(options.packages, place)
        drawing = "\n".join(asset(f"js/{name}.js") for name in DRAWING if name.startswith("draw/"))
        print(
            table(
                ["layer", "bytes", "gzip"],
                sizes(drawing, libs, (options.packages or place) if libs else None),
            )
        )
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        rows = []
        for trials in options.trials:
            document = json.dumps(made_up(place, trials))
            for kind in ("ours", *libs):
                for chart in ("progress", "memory", "parallel"):
                    if kind == "uplot" and chart == "parallel":
                        continue
                    page = browser.new_page(viewport={"width": 1280, "height": 900})
                    page.on("pageerror", lambda error: print(error))
                    page.set_content(page_of(kind, libs))
                    page.evaluate(f"begin({document})")
                    rows.append([f"{trials:,}", chart, kind, *measure(page, chart, options.rounds)])
                    page.close()
        print(f"\nChromium {browser.version}, {platform.processor() or platform.machine()}\n")
        print(
            table(
                ["trials", "chart", "by", "work, ms", "shown, ms", "hover, ms", "elements"],
                sorted(rows, key=lambda row: (int(row[0].replace(",", "")), row[1])),
            )
        )
        browser.close()


if __name__ == "__main__":
    main()
