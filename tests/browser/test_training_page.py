"""Trainings in the dashboard: the page's contents, live updates, and files that are never served."""

import http.client
import importlib.util
import json
import re
import time
import urllib.parse
from pathlib import Path

import pytest
from redline.base.lock import FolderLock
from redline.results.history import STRETCHES
from redline.results.trained import DOCUMENT, LOG
from redline.views.dashboard.discover import find_folders

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="session")
def made():
    """The module that writes trainings."""
    path = Path(__file__).with_name("trainings_on_disk.py")
    spec = importlib.util.spec_from_file_location("trainings_on_disk", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory, made):
    root = tmp_path_factory.mktemp("trainings") / "all"
    made.eventful(root / "train" / "llama")
    made.write_training(
        root / "plain",
        [
            made.step_line(5, 6.0, mfu=0.25),
            made.step_line(10, 5.0, mfu=0.5),
            {"kind": "end", "step": 10, "stopped": False},
        ],
        steps=10,
    )
    (root / "damaged").mkdir()
    (root / "damaged" / DOCUMENT).write_text("format: 1\nasked: [")
    made.write_training(root / "hostile", [made.step_line(1, 1.0), {"kind": "note", "text": HOSTILE}],
                        strategies=({HOSTILE: HOSTILE},), name=HOSTILE)  # fmt: skip
    return root


@pytest.fixture(scope="module")
def address(folder, serving_factory):
    with serving_factory() as start:
        yield start(folder)


def answer(address, path, **parameters):
    where = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=20)
    connection.request("GET", f"{path}?{urllib.parse.urlencode(parameters)}")
    found = connection.getresponse()
    body = found.read()
    connection.close()
    return found.status, body


def show(tab, address, training):
    tab.goto(f"{address}#/training/{urllib.parse.quote(training, safe='')}")
    tab.locator("#headline .tile").first.wait_for()


def ends(path):
    """Returns the coordinates of the last point of a path."""
    return [float(each) for each in re.findall(r"-?[\d.]+", path.get_attribute("d"))[-2:]]


# -- trainings that are found ----------------------------------------------------------------------------------


def test_trainings_are_found_beside_runs_and_not_within_each_other(tmp_path, made, disk):
    made.write_training(tmp_path / "a" / "b", [])
    made.write_training(tmp_path / "a" / "b" / "checkpoints" / "step-1", [])
    disk.write_run(tmp_path / "runs" / "x", 1)
    made.write_training(tmp_path / "runs" / "x", [])
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    assert find_folders(tmp_path) == (["runs/x"], ["a/b", "runs/x"])


def test_the_list_shows_each_training_and_what_is_damaged(tab, address):
    tab.goto(address)
    lines = tab.locator(".training-line")
    lines.nth(3).wait_for()
    assert {each.get_attribute("data-training") for each in lines.all()} == {
        "train/llama",
        "plain",
        "damaged",
        "hostile",
    }
    llama = tab.locator("[data-training='train/llama']")
    assert "step 300 of 400" in llama.inner_text() and "stopped" in llama.inner_text()
    assert "loss 2.475" in llama.inner_text() and "held out 2.675" in llama.inner_text()
    assert tab.locator("[data-training=plain] .state").inner_text() == "finished"
    assert "unreadable files" in tab.locator("[data-training=damaged]").inner_text()
    tab.locator("input[type=search]").fill("llama stopped")
    assert lines.count() == 1
    lines.locator("a").click()
    tab.locator("#loss svg.chart").wait_for()
    assert tab.locator("h1").inner_text() == "llama-tiny"


# -- one training ----------------------------------------------------------------------------------------------


def test_the_loss_curve_shows_what_was_logged_and_nothing_that_was_done_again(tab, address, made):
    show(tab, address, "train/llama")
    chart = tab.locator("#loss svg.chart")
    drawn = chart.locator("path.curve.train").get_attribute("d").strip("M").split("L")
    assert len(drawn) == 30
    ticks = chart.evaluate(
        """(svg) => [...svg.querySelectorAll("text.tick[text-anchor=end]")].map((each) => [+each.textContent, +each.getAttribute("y") - 4])"""
    )
    (low, at_low), (high, at_high) = ticks[0], ticks[-1]
    heights = [float(each.split()[1]) for each in drawn]
    shown = [low + (each - at_low) / (at_high - at_low) * (high - low) for each in heights]
    assert shown == pytest.approx([made.loss(step) for step in range(10, 301, 10)], abs=0.01)
    box = chart.bounding_box()
    x, y = ends(chart.locator("path.curve.train"))
    tab.mouse.move(box["x"] + x, box["y"] + y + 1)
    tip = tab.locator(".tip").inner_text()
    assert "Step 300" in tip and "loss 2.47462" in tip and "configuration #2" in tip


def test_a_change_of_configuration_a_restart_and_a_failed_checkpoint_are_marked(tab, address):
    show(tab, address, "train/llama")
    chart = tab.locator("#loss svg.chart")
    scale = chart.evaluate(
        """(svg) => [...svg.querySelectorAll("text.tick[text-anchor=middle]")].map((each) => [+each.textContent, +each.getAttribute("x")])"""
    )
    at = dict(scale)
    change = chart.locator("line.change")
    assert change.count() == 1 and float(change.get_attribute("x1")) == pytest.approx(at[200], abs=0.5)
    assert chart.locator("text.change-note").text_content() == "#2"
    restart = chart.locator("line.taken-up")
    assert restart.count() == 1 and float(restart.get_attribute("x1")) == pytest.approx(at[100], abs=0.5)
    assert chart.locator("path.saved").get_attribute("d").count("M") == 2
    assert chart.locator("path.unsaved").get_attribute("d").count("M") == 2  # one cross
    color = chart.locator("path.unsaved").evaluate("(each) => getComputedStyle(each).stroke")
    red, green, blue = (int(each) for each in re.findall(r"\d+", color)[:3])
    assert red > 180 and red > 2 * max(green, blue)
    assert "1 checkpoint not saved: [Errno 28] No space left on device" in tab.locator("#headline").inner_text()
    assert "CHECKPOINT NOT SAVED" in tab.locator("#log .failed-words").inner_text()
    latest = tab.locator(".strategy").first
    assert latest.get_attribute("data-strategy") == "2"
    assert latest.locator(".knob.changed").inner_text().split("\n") == ["zero", "3 was 0"]
    assert tab.locator("#course svg.chart").count() == 4


def test_utilisation_is_a_curve_if_the_peak_is_known(tab, address):
    show(tab, address, "plain")
    charts = tab.locator("#course svg.chart")
    assert charts.count() == 5
    chart = charts.filter(has_text="MFU, %")
    assert chart.locator("path.curve.train").count() == 1
    ticks = chart.evaluate(
        """(svg) => [...svg.querySelectorAll("text.tick[text-anchor=end]")].map((each) => [+each.textContent, +each.getAttribute("y") - 4])"""
    )
    (low, at_low), (high, at_high) = ticks[0], ticks[-1]
    drawn = chart.locator("path.curve.train").get_attribute("d").strip("M").split("L")
    heights = [float(each.split()[1]) for each in drawn]
    shown = [low + (each - at_low) / (at_high - at_low) * (high - low) for each in heights]
    assert shown == pytest.approx([25, 50], abs=0.5)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(tab, address, phone, overflow, scheme):
    tab.set_viewport_size(phone)
    tab.emulate_media(color_scheme=scheme)
    for training in ("train/llama", "damaged", "hostile"):
        show(tab, address, training)
        assert overflow(tab) <= 0
    tab.goto(address)
    tab.locator(".training-line").first.wait_for()
    assert overflow(tab) <= 0


def test_damage_is_reported_and_texts_are_escaped(tab, address):
    show(tab, address, "damaged")
    assert "'damaged/train.yaml' is damaged" in tab.locator(".problems").inner_text()
    tab.goto("about:blank")
    show(tab, address, "hostile")
    tab.locator("#log pre").wait_for()
    assert HOSTILE in tab.locator("#log pre").inner_text() and HOSTILE in tab.locator("h1").inner_text()
    assert tab.locator("main img, main script").count() == 0 and tab.title() != "owned"


def test_a_page_follows_a_training_and_says_when_it_is_gone(tab, tmp_path, made, serving, expect):
    folder = tmp_path / "all" / "a"
    made.write_training(folder, [made.step_line(10, 5.0)])
    address = serving(tmp_path / "all")
    show(tab, address, "a")
    expect(tab.locator(".state")).to_have_text("stopped")
    lock = FolderLock(folder)
    expect(tab.locator(".state")).to_have_text("running")
    made.write_training(folder, [made.step_line(20, 4.0)], strategies=({"zero": 0}, {"zero": 3}), at=(0, 10))
    expect(tab.locator("#headline .value").first).to_have_text("20")
    expect(tab.locator("#left")).to_have_text("95\u00a0s left")
    assert tab.locator("#loss line.change").count() == 1
    with (folder / LOG).open("a") as file:
        file.write("{half\n")
    expect(tab.locator(".problems")).to_contain_text("1 line that cannot be read")
    lock.release()
    expect(tab.locator(".state")).to_have_text("stopped")
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()
    expect(tab.locator(".problems")).to_contain_text("'a' was deleted, moved or renamed")
    tab.errors[:] = [each for each in tab.errors if "404" not in each]


# -- files that are never served -------------------------------------------------------------------------------


def test_the_page_of_a_long_log_stays_small(tmp_path, made, serving):
    made.write_training(tmp_path / "a", [made.step_line(step, 1.0 / step) for step in range(1, 20_001)])
    address = serving(tmp_path)
    version, deadline = "", time.monotonic() + 60
    while time.monotonic() < deadline:
        status, body = answer(address, "/api/training", training="a", have=version)
        if status == 204:
            break
        last = json.loads(body)
        version = last["version"]
    assert last["unread"] == 0 and last["step"] == 20_000
    sent = {name: len(steps) for name, (steps, _) in last["curves"].items()}
    assert STRETCHES / 2 < sent["loss"] <= 3 * STRETCHES and sum(sent.values()) < 7000


@pytest.mark.parametrize("name", ["..", "../all", "/etc", "none", "train", "train/llama/../llama", "", "a\0b"])
def test_only_trainings_that_were_found_are_read(address, name):
    for path in ("/api/training", "/api/printed"):
        status, body = answer(address, path, training=name)
        assert status == 404 and b"unknown training" in body


def test_the_ranks_output_is_the_latest_start_s_and_links_are_not_followed(tmp_path, made, serving):
    made.write_training(tmp_path / "all" / "a", [])
    logs = tmp_path / "all" / "a" / "logs"
    address = serving(tmp_path / "all")
    assert "cannot be shown" in json.loads(answer(address, "/api/printed", training="a")[1])["why"]
    logs.mkdir()
    (logs / "9.log").write_text("before\n")
    (logs / "10.log").write_text("words\n")
    found = json.loads(answer(address, "/api/printed", training="a")[1])
    assert found == {"name": "logs/10.log", "text": "words\n", "size": 6, "cut": False}
    (tmp_path / "secret").write_text("secret")
    (logs / "11.log").symlink_to(tmp_path / "secret")
    assert "link" in json.loads(answer(address, "/api/printed", training="a")[1])["why"]


# -- a real training -------------------------------------------------------------------------------------------
