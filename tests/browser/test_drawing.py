"""The drawing layer: both pages draw only through it, it works without them, and keyboards and screen readers can use
it."""

import re
from importlib.resources import files

import pytest
from redline.views.dashboard.serve import PAGES, asset_file
from redline.views.report import write_report
from redline.views.report.page import DRAWING, SCRIPTS, asset


@pytest.fixture(scope="module")
def made(tmp_path_factory, disk):
    folder = tmp_path_factory.mktemp("drawing") / "run"
    disk.write_run(folder, 80)
    return write_report(folder)


def drawing():
    """Returns the layer's scripts by name."""
    return {name: asset(f"js/{name}.js") for name in DRAWING}


def test_only_the_drawing_layer_creates_svg_or_uses_a_canvas():
    others = {name: asset(f"js/{name}.js") for name in (*SCRIPTS, "report") if name not in DRAWING} | {
        name: asset_file(f"{name}.js") for name in PAGES
    }
    makes = re.compile(r"createElementNS|www\.w3\.org|getContext|\bsvg\(|new Pen\b")
    assert {name: makes.findall(text) for name, text in others.items() if makes.search(text)} == {}
    assert makes.search("".join(drawing().values()))


def test_every_script_of_the_package_is_in_a_page():
    root = files("redline.views.report") / "assets" / "js"
    there = {path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.js")}
    assert there == {*SCRIPTS, "report"}


def test_every_figure_has_a_text_for_screen_readers(tab, made):
    tab.goto(made.as_uri())
    tab.locator("#effects svg.chart").first.wait_for()
    labels = tab.evaluate(
        "[...document.querySelectorAll('figure svg.chart')].map((each) => [each.getAttribute('role'), each.getAttribute('aria-label')])"
    )
    assert (
        len(labels) >= 9
        and len({label for _, label in labels}) == len(labels)
        and all(len(label or "") > 10 for _, label in labels)
    )
    # Controls are inside a group: a screen reader ignores the parts of an image.
    assert {role for role, _ in labels} == {"img", "group"}
    assert (
        tab.locator("svg[role=img] [role=button]").count() == 0 < tab.locator("svg[role=group] [role=button]").count()
    )


def test_values_of_the_parallel_coordinates_are_pressed_by_keyboard_one_after_the_other(tab, made, expect):
    tab.goto(made.as_uri())
    values = tab.locator("#parallel text.choice[data-knob=attention]")
    eager = values.filter(has_text="eager")
    eager.focus()
    for pressed, key in (("true", "Enter"), ("false", " "), ("true", " ")):
        tab.keyboard.press(key)
        expect(eager).to_have_attribute("aria-pressed", pressed)
        expect(eager).to_be_focused()
    sdpa = values.filter(has_text="sdpa")
    sdpa.press("Enter")
    assert (eager.get_attribute("aria-pressed"), sdpa.get_attribute("aria-pressed")) == ("false", "true")
    assert tab.locator("#parallel path.line.out").count() == 1
    assert tab.locator("#parallel svg.chart").get_attribute("aria-label")
