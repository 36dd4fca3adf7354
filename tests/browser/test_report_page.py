"""The report in a real browser: it draws, fits, copies, prints, and executes nothing from a run."""

import math
import random
import re

import pytest
from redline.results import Measurement, Status, Trial, summary
from redline.views.report import Source, document, page, write_report

SECTIONS = [
    "headline",
    "progress",
    "memory",
    "parallel",
    "effects",
    "predicted",
    "failures",
    "trials",
    "space",
]


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
    assert tab.locator(".big").inner_text() == f"{gain.ratio:.2f}×"
    assert "last words" in tab.locator("#failures").inner_text()


def test_the_table_sorts_and_filters(tab, made):
    path, trials = made
    tab.goto(path.as_uri())
    shown = tab.locator("#trials tbody tr[data-trial]")
    leader = summary.leaders(trials)[0]
    assert shown.first.get_attribute("data-trial") == str(leader.number)
    tab.locator("[data-sort=peak_memory_mib]").click()
    least = min(
        (t for t in trials if t.measurement.peak_memory_mib), key=lambda t: (t.measurement.peak_memory_mib, t.number)
    )
    assert shown.first.get_attribute("data-trial") == str(least.number)
    tab.locator("#trials input[type=search]").fill("micro_batch=4 throughput>=2000 ok")
    wanted = [t for t in trials if t.ok and t.config["micro_batch"] == 4 and t.measurement.throughput >= 2000]
    assert f"{len(wanted)} of 80 trials" in tab.locator("#trials [role=status]").inner_text()
    tab.locator("#trials input[type=search]").fill("micro_bach=4")
    assert "There is no column micro_bach" in tab.locator("#trials [role=status]").inner_text()
    tab.locator("#trials input[type=search]").fill("")
    tab.locator("#trials [data-status=ok]").click()
    assert f"{sum(not t.ok for t in trials)} of 80" in tab.locator("#trials [role=status]").inner_text()


def test_every_format_of_the_winner_is_copied_as_it_is(tab, made):
    tab.goto(made[0].as_uri())
    offered = {each["target"]: each for each in document(Source.read(made[0].parent))["exports"]}
    targets = tab.locator("#winner [data-target]")
    assert [each.get_attribute("data-target") for each in targets.all()] == list(offered)
    assert sum("text" in each for each in offered.values()) >= 8
    for name, each in offered.items():
        tab.locator(f"#winner [data-target={name}]").click()
        if "error" in each:  # for instance a script, if the table does not name its model
            assert tab.locator(".exports pre").inner_text() == each["error"]
            assert tab.locator("[data-copy]").count() == 0
            continue
        tab.locator(f"[data-copy={name}]").click()
        tab.locator("[data-copy].done").wait_for()
        assert tab.evaluate("navigator.clipboard.readText()") == each["text"]


def test_a_value_of_the_parallel_coordinates_keeps_its_trials_only(tab, made):
    tab.goto(made[0].as_uri())
    value = tab.locator("#parallel text.choice", has_text="eager")
    value.click()
    assert tab.locator("#parallel text.choice", has_text="eager").get_attribute("aria-pressed") == "true"
    assert tab.locator("#parallel path.line.out").count() == 1
    tab.locator("#parallel text.choice", has_text="eager").click()
    assert tab.locator("#parallel path.line.out").count() == 0


LOSSY = {"precision": ["bf16_pure"]}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory, disk):
    """A simulated run on 64 devices whose lossy winner is the fastest of four. Its trials ran one after the other."""
    outcomes = [
        ({"precision": precision, "micro_batch": n}, disk.measured(speed, devices=64, started=1.7e9 + 100 * n, seconds_total=100.0))
        for n, (precision, speed) in enumerate([("fp32", 1000.0), ("bf16", 400_000.0), ("bf16", 562_283.0), ("bf16_pure", 705_124.0)])
    ]  # fmt: skip
    devices = {"type": "cuda", "name": "h100-80gb", "count": 8, "used": 64}
    return write_report(
        disk.write_search(
            tmp_path_factory.mktemp("simulated") / "run-7", outcomes, simulated=True, devices=devices, lossy=LOSSY
        )
    )


def test_a_simulated_run_says_so_beside_its_title_in_its_verdict_and_on_its_tiles(tab, simulated, made):
    tab.goto(simulated.as_uri())
    assert tab.locator("header h1 ~ .tag-simulated").inner_text() == "simulated"
    verdict = tab.locator(".verdict").inner_text()
    assert verdict.startswith("simulated Nothing was run. Trial 3 is predicted to train at 705,124")
    titles = tab.locator(".tile h3").all_inner_texts()
    assert titles == ["Throughput, predicted", "Peak memory, predicted", "Device time, predicted", "Trials, simulated"]
    assert tab.locator(".problems").count() == 0
    assert tab.locator("#predicted h2").inner_text() == "Predicted against simulated"
    assert "Nothing was run" in tab.locator("#trials .lead").inner_text()
    assert not re.search("[Mm]easured", tab.locator("main").inner_text())
    tab.goto(made[0].as_uri())
    assert tab.locator(".tag-simulated").count() == 0 and "predicted" not in tab.locator("#headline").inner_text()


def test_a_lossy_winner_is_marked_in_title_headline_table_and_space(tab, simulated, made):
    tab.goto(simulated.as_uri())
    assert tab.locator("header h1 ~ .tag-lossy").inner_text() == "lossy"
    caution = tab.locator(".caution").inner_text()
    assert "precision=bf16_pure trades accuracy for speed" in caution
    assert "The best without lossy values is trial 2 at 562,283" in caution
    assert "1.25 times as fast" in caution
    assert tab.locator("#winner .knob", has_text="precision").locator(".tag-lossy").count() == 1
    assert tab.locator("#trials tr[data-trial='3'] .tag-lossy").count() == 1
    assert tab.locator("#trials tr[data-trial='2'] .tag-lossy").count() == 0
    assert tab.locator("#space .tag-lossy").count() == 1
    tab.locator("#trials tr[data-trial='3']").click()
    assert tab.locator("dialog .tag-lossy").count() == 1
    tab.goto(made[0].as_uri())
    assert tab.locator(".tag-lossy, .caution").count() == 0


ELEVEN = {
    "tp": (1, 2, 4, 8), "pipeline_schedule": ("gpipe", "1f1b", "interleaved_1f1b"), "checkpoint_ratio": (0.0, 0.25, 0.5, 0.75, 1.0),
    "attention": ("sdpa", "eager", "flash_attention_2"), "fused_optimizer": (True, False), "sequence_parallel": (True, False),
    "precision": ("fp32", "bf16", "bf16_pure"), "offload": ("none", "optimizer"), "micro_batch": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "virtual_stages": (1, 2, 4), "compile_mode": ("default", "autotune-without-graphs", "max-autotune-no-cudagraphs"),
}  # fmt: skip
CLIPPED = """() => [...document.querySelectorAll("#parallel svg.chart, #effects svg.chart")].flatMap((chart) => {
  const room = chart.getBoundingClientRect();
  return [...chart.querySelectorAll("text")].filter((text) => {
    const box = text.getBoundingClientRect();
    return text.textContent.includes("…") || box.left < room.left - 1 || box.right > room.right + 1 || box.top < room.top - 1 || box.bottom > room.bottom + 1;
  }).map((text) => text.textContent);
})"""


@pytest.fixture(scope="module")
def eleven(tmp_path_factory, disk):
    rng = random.Random(3)
    outcomes = [
        ({name: rng.choice(values) for name, values in ELEVEN.items()}, disk.measured(1e5 * (1 + rng.random())))
        for _ in range(40)
    ]
    return write_report(disk.write_search(tmp_path_factory.mktemp("eleven") / "run", outcomes))


@pytest.mark.parametrize("width", [320, 768, 1600])
def test_no_label_of_eleven_knobs_is_clipped(tab, eleven, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto(eleven.as_uri())
    tab.locator("#effects svg.chart").nth(len(ELEVEN) - 1).wait_for()
    assert tab.evaluate(CLIPPED) == []
    assert set(tab.locator("#parallel .axis-name").all_text_contents()) == {*ELEVEN, "tokens/s"}
    pressable = {
        name: sorted(map(str, values))
        for name, values in ELEVEN.items()
        if name in ("compile_mode", "pipeline_schedule", "attention")
    }
    for name, values in pressable.items():
        assert sorted(tab.locator(f"#parallel text.choice[data-knob={name}]").all_text_contents()) == values


@pytest.fixture(scope="module")
def again(tmp_path_factory, disk):
    """The default at 1000, a winner at 3000 that is 2000 when measured again, and 2500 measured once."""
    outcomes = [
        ({"micro_batch": n, "precision": "bf16"}, disk.measured(speed))
        for n, speed in enumerate((1000.0, 3000.0, 2500.0, 1500.0))
    ]
    return write_report(
        disk.write_search(
            tmp_path_factory.mktemp("again") / "run", outcomes, {1: [1980.0, 2020.0], 0: [1000.0, 1000.0]}
        )
    )


def test_a_winner_below_others_is_explained_and_they_are_marked(tab, again, made):
    tab.goto(again.as_uri())
    for name in ("progress", "memory", "parallel", "trials"):
        lead = tab.locator(f"#{name} .lead").first.inner_text()
        assert "Trial 2, above the winner, was measured only once: a trial that is not confirmed cannot win." in lead, (
            name
        )
    assert [each.get_attribute("data-trial") for each in tab.locator("#trials tbody tr[data-trial]").all()] == [
        "1",
        "0",
        "2",
        "3",
    ]
    for name in ("progress", "memory"):
        plot = tab.locator(f"#{name} .plot").first
        plot.locator("path.mark.once").first.wait_for(state="attached")
        assert plot.locator("path.mark.once").count() == 1
        assert plot.locator("path.mark.once").get_attribute("d").count("M") == 2
        # One line for each of the two re-measured trials; the winner's goes down to its star.
        lines = re.findall(r"M(\S+) (\S+)V([\d.]+)", plot.locator("path.revised").get_attribute("d"))
        assert len(lines) == 2 and sum(float(to) > float(first) for _, to, first in lines) == 1
        assert "measured again, from its first value" in tab.locator(f"#{name} .legend").inner_text()
        assert "measured once" in tab.locator(f"#{name} .legend").inner_text()
    star, best = (
        tab.evaluate(f"(({{ y, height }}) => ({{ y, height }}))(document.querySelector('#progress {each}').getBBox())")
        for each in (".star", "path.best")
    )
    # The line of the best so far ends at the winner and does not run above its star.
    assert abs(star["y"] + star["height"] / 2 - best["y"]) < 2
    tab.goto(made[0].as_uri())
    assert tab.locator(".mark.once, .revised").count() == 0 and "cannot win" not in tab.locator("main").inner_text()


NUMBERS = (None, 0.0, 1e300, 1e-300, 5e-324, -5.0, math.nan, -math.inf, 12345678901234567890.0)
MEASURED = ("step_ms", "peak_memory_mib", "memory_limit_mib", "started", "seconds_total")
PREDICTED = ("predicted_throughput", "predicted_memory_mib")


def test_numbers_without_measure_break_no_figure(tab, tmp_path, overflow):
    for seed in range(12):
        rng = random.Random(seed)
        statuses = ["ok"] * rng.choice((1, 2, 3)) + ["ok", "oom", "skipped", "crash"] * rng.choice((0, 1, 3))
        trials = [
            Trial(
                number=n,
                config={name: draw for name in "ab" if (draw := rng.choice(NUMBERS)) is not None},
                measurement=Measurement(
                    status=status,
                    throughput=rng.choice(
                        [number for number in NUMBERS if number is not None and math.isfinite(number)]
                    ),
                    devices=rng.choice((None, 0, 4)),
                    **{name: rng.choice(NUMBERS) for name in MEASURED},
                ),
                **{name: rng.choice(NUMBERS) for name in PREDICTED},
            )
            for n, status in enumerate(statuses)
        ]
        (tmp_path / "x.html").write_text(page(document(Source(folder=tmp_path, trials=trials))))
        tab.goto((tmp_path / "x.html").as_uri())
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
    words = {
        "one": "the default configuration: no other configuration was tried",
        "none": "None of 3 trials succeeded",
        "empty": "No trials yet",
    }
    for name, trials in cases.items():
        disk.write_run(tmp_path / name, 0, trials=trials)
        tab.goto(write_report(tmp_path / name).as_uri())
        assert words[name] in tab.locator("#headline").inner_text()
        assert overflow(tab) == 0


def test_five_thousand_trials_stay_quick_to_draw_and_to_scroll(tab, tmp_path, disk, expect):
    disk.write_run(tmp_path / "many", 5000)
    tab.goto(write_report(tmp_path / "many").as_uri())
    tab.locator("#memory .plot svg").first.wait_for()
    assert "5,000 trials" in tab.locator("#trials [role=status]").inner_text()
    # The page is quick because it has few elements, for any number of trials.
    assert tab.evaluate("document.querySelectorAll('*').length") < 6000
    assert tab.locator("#trials tbody tr[data-trial]").count() < 80
    tab.evaluate("document.querySelector('.table-pane').scrollTop = 4000 * 30")
    # The rows from row 4000 on, and eight before them.
    expect(tab.locator("#trials .spacer td").first).to_have_css("height", f"{(4000 - 8) * 30}px")
    assert 10 < tab.locator("#trials tbody tr[data-trial]").count() < 80
