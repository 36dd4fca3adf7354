"""The report in a real browser: it draws, fits, copies, prints, and executes nothing it was told."""

import csv
import random
import re

import pytest
from redline.results import Status, summary
from redline.results.report import Source, document, write_report

SECTIONS = ["headline", "progress", "memory", "parallel", "effects", "predicted", "timeline", "failures", "trials", "space"]


@pytest.fixture(scope="module")
def made(tmp_path_factory, disk):
    folder = tmp_path_factory.mktemp("report") / "run"
    trials = disk.write_run(folder, 80)
    (folder / "logs").mkdir()
    for each in trials:
        if each.measurement.status is Status.CRASH:
            (folder / "logs" / f"{each.number}.log").write_text("first\nlast words\n")
    return write_report(folder), trials


def test_every_figure_is_drawn_at_both_widths_and_in_both_schemes_without_overflow(tab, made, phone, desktop, overflow):
    path, trials = made
    for size, scheme in ((desktop, "light"), (phone, "dark")):
        tab.set_viewport_size(size)
        tab.emulate_media(color_scheme=scheme)
        tab.goto(path.as_uri())
        for name in SECTIONS:
            assert tab.locator(f"#{name}").count() == 1, name
        assert tab.locator("figure svg.chart").count() >= 10
        assert overflow(tab) == 0
        dark = tab.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", dark)[:3])) < 200) == (scheme == "dark")
    gain = summary.gain(trials)
    assert tab.locator(".big").inner_text() == f"{gain:.2f}×"
    assert "last words" in tab.locator("#failures").inner_text()


def test_no_labels_of_an_axis_overlap(tab, made, phone, desktop):
    for size in (desktop, phone):
        tab.set_viewport_size(size)
        tab.goto(made[0].as_uri())
        tab.locator("#timeline .plot svg").wait_for()
        clashes = tab.evaluate("""() => {
          const bad = [];
          for (const chart of document.querySelectorAll("#progress svg, #memory .plot svg, #predicted svg, #timeline .plot svg, #effects svg")) {
            const boxes = [...chart.querySelectorAll("text:not([transform])")].filter(t => t.textContent && !t.classList.contains("note")).map(t => [t.textContent, t.getBoundingClientRect()]);
            boxes.forEach(([a, x], i) => boxes.slice(i + 1).forEach(([b, y]) => {
              if (x.left < y.right - 1 && y.left < x.right - 1 && x.top < y.bottom - 4 && y.top < x.bottom - 4) bad.push(a + " | " + b);
            }));
          }
          return bad;
        }""")
        assert clashes == []


def test_the_table_sorts_and_filters(tab, made):
    path, trials = made
    tab.goto(path.as_uri())
    shown = tab.locator("#trials tbody tr[data-trial]")
    leader = summary.leaders(trials)[0]
    assert shown.first.get_attribute("data-trial") == str(leader.number)
    tab.locator("[data-sort=peak_memory_mib]").click()
    least = min((t for t in trials if t.measurement.peak_memory_mib), key=lambda t: (t.measurement.peak_memory_mib, t.number))
    assert shown.first.get_attribute("data-trial") == str(least.number)
    tab.locator("#trials input[type=search]").fill("micro_batch=4 throughput>=2000 ok")
    wanted = [t for t in trials if t.ok and t.config["micro_batch"] == 4 and t.measurement.throughput >= 2000]
    assert f"{len(wanted)} of 80 trials" in tab.locator("#trials [role=status]").inner_text()
    tab.locator("#trials input[type=search]").fill("micro_bach=4")
    assert "No column is called micro_bach" in tab.locator("#trials [role=status]").inner_text()
    tab.locator("#trials input[type=search]").fill("")
    tab.locator("#trials [data-status=ok]").click()
    assert f"{sum(not t.ok for t in trials)} of 80" in tab.locator("#trials [role=status]").inner_text()


def test_a_trial_opens_with_all_it_has(tab, made, expect):
    path, trials = made
    tab.goto(path.as_uri())
    leader = summary.leaders(trials)[0]
    tab.locator(f"tr[data-trial='{leader.number}']").click()
    text = tab.locator("dialog").inner_text()
    assert f"Trial {leader.number}" in text and "Predicted memory" in text
    tab.keyboard.press("Escape")
    expect(tab.locator("dialog")).to_have_count(0)


def test_every_format_of_the_winner_is_copied_as_it_is(tab, made):
    tab.goto(made[0].as_uri())
    offered = {each["target"]: each for each in document(Source.read(made[0].parent))["exports"]}
    targets = tab.locator("#winner [data-target]")
    assert [each.get_attribute("data-target") for each in targets.all()] == list(offered)
    assert sum("text" in each for each in offered.values()) >= 8
    for name, each in offered.items():
        tab.locator(f"#winner [data-target={name}]").click()
        if "error" in each:  # such as a script, of a table that does not say which model it is of
            assert tab.locator(".exports pre").inner_text() == each["error"]
            assert tab.locator("[data-copy]").count() == 0
            continue
        tab.locator(f"[data-copy={name}]").click()
        tab.locator("[data-copy].done").wait_for()
        assert tab.evaluate("navigator.clipboard.readText()") == each["text"]


def test_the_winner_is_copied_where_there_is_no_clipboard(tab, made):
    tab.goto(made[0].as_uri())
    tab.evaluate("""() => {
      Object.defineProperty(navigator, "clipboard", { value: undefined });
      document.addEventListener("copy", () => { window.copied = document.activeElement.value; });
    }""")
    tab.locator("#winner [data-target=json]").click()
    tab.locator("[data-copy]").click()
    tab.locator("[data-copy].done").wait_for()
    assert '"micro_batch"' in tab.evaluate("window.copied")


def test_a_value_of_the_parallel_coordinates_keeps_its_trials_only(tab, made):
    tab.goto(made[0].as_uri())
    value = tab.locator("#parallel text.choice", has_text="eager")
    value.click()
    assert tab.locator("#parallel text.choice", has_text="eager").get_attribute("aria-pressed") == "true"
    assert tab.locator("#parallel path.line.out").count() == 1
    tab.locator("#parallel text.choice", has_text="eager").click()
    assert tab.locator("#parallel path.line.out").count() == 0


HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def test_what_a_table_says_is_never_executed(tab, tmp_path):
    rows = [
        {"trial": n, "status": "ok" if n < 3 else "crash", "throughput": n + 1 if n < 3 else "", "unit": HOSTILE, "reason": HOSTILE,
         "sampler": HOSTILE, "knob.a": HOSTILE if n % 2 else "plain", f"knob.{HOSTILE}": n, "peak_memory_mib": 5 + n}
        for n in range(5)
    ]  # fmt: skip
    with open(tmp_path / "x.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    tab.goto(write_report(tmp_path / "x.csv").as_uri())
    tab.locator("tr[data-trial='4']").click()
    tab.mouse.move(640, 400)
    assert tab.title() == "x: redline report"
    assert tab.locator("img").count() == 0
    assert HOSTILE in tab.locator("dialog .reason").inner_text()


NUMBERS = ("", "0", "1e300", "1e-300", "5e-324", "-5", "nan", "-inf", "12345678901234567890")
COLUMNS = ("throughput", "step_ms", "peak_memory_mib", "memory_limit_mib", "predicted_throughput", "predicted_memory_mib", "devices", "started", "seconds_total", "knob.a", "knob.b")  # fmt: skip


def test_numbers_without_measure_break_no_figure(tab, tmp_path, overflow):
    for seed in range(12):
        rng = random.Random(seed)
        statuses = ["ok"] * rng.choice((1, 2, 3)) + ["ok", "oom", "skipped", "crash"] * rng.choice((0, 1, 3))
        rows = [{"trial": n, "status": status} | {name: rng.choice(NUMBERS) for name in COLUMNS} for n, status in enumerate(statuses)]
        with open(tmp_path / "x.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        tab.goto(write_report(tmp_path / "x.csv").as_uri())
        tab.locator("footer").wait_for()
        tab.wait_for_timeout(30)
        broken = "[...document.querySelectorAll('svg *')].filter(e => [...e.attributes].some(a => /NaN|Infinity|undefined/.test(a.value))).map(e => e.outerHTML)"
        assert tab.evaluate(broken) == [], seed
        assert not re.search("NaN|undefined|Infinity", tab.locator("#page").inner_text()), seed
        assert overflow(tab) == 0
        assert tab.errors == [], seed


def test_few_trials_no_success_and_none_at_all_are_pages_too(tab, tmp_path, overflow, disk):
    rng = random.Random(1)
    cases = {
        "one": [disk.trial(0, rng, Status.OK)],
        "none": [disk.trial(n, rng, status) for n, status in enumerate((Status.OOM, Status.CRASH, Status.SKIPPED))],
        "empty": [],
    }
    words = {"one": "the default configuration: nothing else was tried", "none": "None of 3 trials succeeded", "empty": "No trials yet"}
    for name, trials in cases.items():
        disk.write_run(tmp_path / name, 0, trials=trials)
        tab.goto(write_report(tmp_path / name).as_uri())
        assert words[name] in tab.locator("#headline").inner_text()
        assert overflow(tab) == 0


def test_five_thousand_trials_stay_quick_to_draw_and_to_scroll(tab, tmp_path, disk, expect):
    disk.write_run(tmp_path / "many", 5000)
    tab.goto(write_report(tmp_path / "many").as_uri())
    tab.locator("#timeline .plot svg").wait_for()
    assert "5,000 trials" in tab.locator("#trials [role=status]").inner_text()
    # What makes it quick: few elements, whatever the number of trials.
    assert tab.evaluate("document.querySelectorAll('*').length") < 6000
    assert tab.locator("#trials tbody tr[data-trial]").count() < 80
    tab.evaluate("document.querySelector('.table-pane').scrollTop = 4000 * 30")
    # The rows of row 4000 on, and eight before them.
    expect(tab.locator("#trials .spacer td").first).to_have_css("height", f"{(4000 - 8) * 30}px")
    assert 10 < tab.locator("#trials tbody tr[data-trial]").count() < 80


def test_it_prints_on_pages_no_wider_than_paper_with_all_rows_of_the_table(tab, made, tmp_path):
    path, trials = made
    tab.goto(path.as_uri())
    # What a browser does around printing, kept as it is then.
    tab.evaluate("() => { window.printed = 0; addEventListener('beforeprint', () => { window.printed = document.querySelectorAll('#trials tr[data-trial]').length; }); }")
    tab.pdf(path=str(tmp_path / "report.pdf"), format="A4")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert tab.evaluate("window.printed") == len(trials)
    assert tab.locator("#trials tr[data-trial]").count() < len(trials)
    tab.emulate_media(media="print", color_scheme="dark")
    tab.set_viewport_size({"width": 718, "height": 1000})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 718
    assert tab.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
