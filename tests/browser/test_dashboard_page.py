"""The dashboard in a real browser: it lists, follows runs live, filters, overlays, copies, and executes nothing of a
run."""

import json
import shutil
import threading
import time

import pytest
from redline.results import Measurement, RunFolder, Status, Trial, summary

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
ASKED = {
    "model": "made-up",
    "workload": {"id": "x"},
    "space": {"knobs": [{"name": "micro_batch", "values": [1, 2, 4, 8]}]},
    "seed": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, disk):
    """Three runs: two of the same space and one that is damaged."""
    root = tmp_path_factory.mktemp("dashboard") / "runs"
    for seed, name in enumerate(("first", "second")):
        for each in disk.write_run(root / name, 60, seed=seed):
            if each.measurement.log:
                (root / name / "logs").mkdir(exist_ok=True)
                (root / name / each.measurement.log).write_text(f"step 1\nwords of trial {each.number}\n")
    disk.write_run(root / "deep" / "torn", 30)
    (root / "deep" / "torn" / "run.yaml").write_text("format: [1\n")
    return root


@pytest.fixture(scope="module")
def address(folder, serving_factory):
    with serving_factory() as start:
        yield start(folder)


def test_the_list_shows_every_run_with_sparkline_state_and_what_is_damaged(tab, address, folder):
    tab.goto(address)
    lines = tab.locator(".run-line")
    lines.nth(2).wait_for()
    assert {each.get_attribute("data-run") for each in lines.all()} == {"first", "second", "deep/torn"}
    assert tab.locator(".run-line svg.spark path.best").count() == 2
    assert tab.locator("[data-run=first] .state").inner_text() == "stopped"
    assert "unreadable files" in tab.locator("[data-run='deep/torn']").inner_text()
    assert "could be read" not in tab.locator("[data-run=first]").inner_text()
    tab.locator("input[type=search]").fill("torn stopped")
    assert lines.count() == 1
    tab.locator("input[type=search]").fill("")
    tab.locator("select").select_option("by name")
    assert [each.get_attribute("data-run") for each in lines.all()] == ["first", "second", "deep/torn"]
    tab.locator("[data-run='deep/torn'] a").click()
    assert "run.yaml" in tab.locator(".problems").inner_text()


@pytest.mark.parametrize("page", ["run/gone", "overlay/gone/kept"])
def test_the_page_of_a_run_deleted_meanwhile_says_so_asks_no_more_and_leads_to_the_list(
    tab, tmp_path, disk, serving, expect, page
):
    for name in ("gone", "kept"):
        disk.write_run(tmp_path / "runs" / name, 3)
    asked = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(f"{serving(tmp_path / 'runs')}#/{page}")
    tab.locator("section").first.wait_for()
    shutil.rmtree(tmp_path / "runs" / "gone")
    problems = tab.locator(".problems")
    expect(problems).to_contain_text("'gone'", timeout=5000)
    expect(problems).to_contain_text("was deleted, moved or renamed while this page was open")
    assert tab.locator("main section").count() == 0
    count = len(asked)
    tab.wait_for_timeout(2500)
    assert len(asked) == count
    problems.locator("a", has_text="All runs").click()
    expect(tab.locator(".run-line")).to_have_count(1)
    tab.errors.clear()  # the browser logs the 404


def test_pages_fit_phone_and_desktop_in_both_schemes(tab, address, phone, desktop, overflow):
    for size, scheme in ((desktop, "dark"), (phone, "light")):
        tab.set_viewport_size(size)
        tab.emulate_media(color_scheme=scheme)
        for place, ready in (
            ("", ".run-line"),
            ("#/run/first", "#memory .plot svg"),
            ("#/overlay/first/second", "#overlay-winners td"),
        ):
            tab.goto(address + place)
            tab.locator(ready).first.wait_for()
            assert overflow(tab) == 0, (size, place)


def test_a_run_filters_sorts_and_gives_table_log_and_formats(tab, address, folder, expect, disk):
    trials = disk.write_run(folder / "first", 60, seed=0)
    tab.goto(f"{address}#/run/first")
    rows = tab.locator("#trials tbody tr[data-trial]")
    leader = summary.leaders(trials)[0]
    expect(rows.first).to_have_attribute("data-trial", str(leader.number))
    tab.locator("#trials input[type=search]").fill("fusion=true status=ok")
    wanted = sum(each.ok and each.config["fusion"] for each in trials)
    expect(tab.locator("#trials [role=status]")).to_have_text(f"{wanted} of 60 trials")
    tab.locator("[data-sort=step_ms]").click()
    expect(rows.first).to_have_attribute(
        "data-trial",
        str(
            min(
                (t for t in trials if t.ok and t.config["fusion"]), key=lambda t: (t.measurement.step_ms, t.number)
            ).number
        ),
    )
    with tab.expect_download() as got:
        tab.locator("text=Download the table (CSV)").click()
    assert got.value.path().read_bytes() == (folder / "first" / "trials.csv").read_bytes()
    assert got.value.suggested_filename == "first.csv"
    tab.locator(f"tr[data-trial='{leader.number}']").click()
    expect(tab.locator("dialog .log")).to_have_text(f"step 1\nwords of trial {leader.number}\n", use_inner_text=True)
    with tab.expect_download() as got:
        tab.locator("text=Download the whole log").click()
    assert got.value.path().read_text() == f"step 1\nwords of trial {leader.number}\n"
    tab.locator("dialog [data-target=json]").click()
    tab.locator("dialog [data-copy=json]").click()
    tab.locator("dialog [data-copy].done").wait_for()
    assert f'"micro_batch": {leader.config["micro_batch"]}' in tab.evaluate("navigator.clipboard.readText()")


def test_two_runs_are_overlaid_and_their_winners_set_side_by_side(tab, address, folder, expect):
    tab.goto(address)
    tab.locator("[data-choose=first]").check()
    assert tab.locator("#overlay").is_disabled()
    tab.locator("[data-choose=second]").check()
    tab.locator("#overlay").click()
    expect(tab.locator("#overlay-progress figure svg path.overlay")).to_have_count(4)
    expect(tab.locator("#overlay-memory figure svg path.overlay-dots")).to_have_count(2)
    assert tab.locator("#overlay-winners thead th").all_inner_texts()[1:] == [" first", " second"]
    assert {"micro_batch", "attention", "Throughput"} <= set(tab.locator("#overlay-winners tbody th").all_inner_texts())


# Records when a trial's row first appeared, by the machine's clock, which page and server share.
WATCH_ROWS = """() => {
  window.drawn = {};
  new MutationObserver(() => {
    for (const row of document.querySelectorAll("tr[data-trial]"))
      window.drawn[row.dataset.trial] ??= (performance.timeOrigin + performance.now()) / 1000;
  }).observe(document.body, {childList: true, subtree: true});
}"""
# Counts requests to the server between a trial's end and its row.
ASKED_MEANWHILE = """([number, ended]) => performance.getEntriesByType("resource").filter((each) => {
  const asked = (performance.timeOrigin + each.startTime) / 1000;
  return each.initiatorType === "fetch" && ended < asked && asked < window.drawn[number];
}).length"""


def test_a_run_is_followed_live_without_losing_ones_place(tab, tmp_path, serving, expect, disk):
    """A trial that has ended is in the first answer requested since; the page sends a request every second."""
    stop, ended = threading.Event(), {}

    def search():
        with RunFolder.open(
            tmp_path / "live", ASKED, knobs={"micro_batch": (1, 2, 4, 8), "at": None}, make_config=disk.Point
        ) as run:
            number = 0
            while not stop.is_set() and number < 60:
                run.start(disk.Point(micro_batch=2 ** (number % 4), at=number), sampler="random")
                run.finish(
                    number,
                    Measurement(
                        status=Status.OK,
                        throughput=100.0 + number,
                        unit="tokens/s",
                        peak_memory_mib=50.0 + number,
                        seconds_total=0.4,
                    ),
                )
                ended[number] = time.time()
                number += 1
                stop.wait(0.4)

    thread = threading.Thread(target=search)
    thread.start()
    try:
        while 0 not in ended:
            time.sleep(0.02)
        tab.goto(f"{serving(tmp_path)}#/run/live")
        expect(tab.locator(".state")).to_have_text("running")
        tab.locator("#trials input[type=search]").fill("throughput>=100")
        tab.locator("#parallel text.choice[data-knob=micro_batch]").first.click()
        tab.evaluate(WATCH_ROWS)
        for _ in range(4):
            number = max(ended) + 1
            tab.locator(f"tr[data-trial='{number}']").wait_for()
            assert tab.evaluate(ASKED_MEANWHILE, [number, ended[number]]) <= 1
        assert tab.locator("#trials input[type=search]").input_value() == "throughput>=100"
        assert tab.locator("#parallel text.choice[aria-pressed=true]").count() == 1
    finally:
        stop.set()
        thread.join()
    expect(tab.locator(".state")).to_have_text("stopped")
    last = max(ended)
    expect(tab.locator("#trials [role=status]")).to_have_text(f"{last + 1} trials")


def test_new_runs_appear_in_the_list_and_a_lost_server_is_reported(tab, tmp_path, disk, expect, serving_factory):
    disk.write_run(tmp_path / "a", 3)
    with serving_factory() as start:
        tab.goto(start(tmp_path))
        expect(tab.locator(".run-line")).to_have_count(1)
        disk.write_run(tmp_path / "b", 3)
        expect(tab.locator(".run-line")).to_have_count(2)
    expect(tab.locator("#connection")).to_contain_text("does not answer")
    expect(tab.locator(".run-line")).to_have_count(2)
    tab.errors.clear()  # the browser logs the refused connections


def test_texts_of_a_run_are_never_executed(tab, tmp_path, disk, serving, expect):
    folder = tmp_path / "runs" / "<img src=x onerror=alert(1)>"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "0.log").write_text(HOSTILE)
    fields = {"unit": HOSTILE, "reason": HOSTILE, "log": "logs/0.log"}
    trials = [
        Trial(
            number=n, config={"a": HOSTILE if n % 2 else "plain", HOSTILE: n}, sampler=HOSTILE,
            measurement=Measurement(
                status="ok" if n < 3 else "crash", throughput=n + 1.0 if n < 3 else None, peak_memory_mib=5.0 + n, **fields
            ),
        )
        for n in range(5)
    ]  # fmt: skip
    disk.write_run(folder, 0, trials=trials)
    asked = {"model": HOSTILE, "space": {"knobs": [{"name": HOSTILE, "values": [1], "help": HOSTILE}]}}
    document = {"format": 1, "study": disk.STUDY, "asked": asked, "environment": {"versions": {"x": HOSTILE}}}
    (folder / "run.yaml").write_text(json.dumps(document))
    tab.goto(serving(tmp_path / "runs"))
    tab.locator(".run-line a").wait_for()
    assert HOSTILE in tab.locator(".run-line").inner_text()
    tab.locator(".run-line a").click()
    tab.locator("tr[data-trial='4']").click()
    expect(tab.locator("dialog .log")).to_have_text(HOSTILE)
    tab.keyboard.press("Escape")
    tab.locator("#trials input[type=search]").fill(HOSTILE)
    assert tab.title() != "owned"
    assert tab.locator("img").count() == 0
    run = tab.evaluate("location.hash").removeprefix("#/run/")
    tab.evaluate(f"location.hash = '#/overlay/{run}/{run}'")
    tab.locator("#overlay-winners td").first.wait_for()
    assert tab.locator("img, main script").count() == 0
    tab.evaluate("location.hash = '#/run/' + encodeURIComponent('<img src=x>')")
    expect(tab.locator(".problems")).to_contain_text("unknown run '<img src=x>'")
    tab.errors.clear()  # the browser logs the 404
