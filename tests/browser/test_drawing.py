"""The drawing layer: both pages draw only through it, it works without them, and keyboards and screen readers can use
it."""

import re
from importlib.resources import files

import pytest
from redline.views.dashboard.app import PAGES, asset_file
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


def test_the_layer_draws_a_chart_of_anything_without_the_scripts_of_either_page(tab):
    tab.set_content("<!doctype html><main></main>")
    drawn = tab.evaluate(f"""() => {{ {"".join(drawing().values())}
      const points = [[1, 2], [3, 5]].map(([x, y]) => ({{ x, y, kind: "a", lines: () => ["words"] }}));
      const frame = axes(400, 200, {{ x: {{ label: "time", scale: fromZero(10) }}, y: {{ label: "height", scale: counting(5) }} }});
      const at = points.map((each) => ({{ ...each, x: frame.x(each.x), y: frame.y(each.y) }}));
      marks(frame, at, new Map([["a", "star"]]));
      frame.path("line", through(at.map(({{ x, y }}) => [x, y])));
      note(frame, "", at[1].x, at[1].y, "peak");
      hover(frame, at);
      document.querySelector("main").append(frame.root, legend([picture(14, 14, ["a", outline("dot", 0, 0, 5)]), "points"]), shareBar([{{ kind: "a", size: 1 }}], "all"));
      frame.root.dispatchEvent(new PointerEvent("pointermove", {{ clientX: frame.root.getBoundingClientRect().left + at[0].x, clientY: frame.root.getBoundingClientRect().top + at[0].y }}));
      return {{ texts: [...frame.root.querySelectorAll("text")].map((each) => each.textContent), marks: frame.root.querySelector("path.mark").getAttribute("d").split("M").length - 1,
        tip: document.querySelector(".tip").textContent, corner: [frame.x(0), frame.y(0)], edges: [frame.left, frame.base] }};
    }}""")
    assert {"0", "10", "5", "time", "height", "peak"} <= set(drawn["texts"])
    assert (drawn["marks"], drawn["tip"]) == (2, "words")
    assert drawn["corner"] == drawn["edges"]


def test_every_figure_has_a_text_for_screen_readers(tab, made):
    tab.goto(made.as_uri())
    tab.locator("#timeline svg.chart").wait_for()
    labels = tab.evaluate(
        "[...document.querySelectorAll('figure svg.chart')].map((each) => [each.getAttribute('role'), each.getAttribute('aria-label')])"
    )
    assert (
        len(labels) >= 10
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


@pytest.mark.parametrize("width", [390, 1280])
def test_the_diagonal_is_where_predicted_and_measured_are_equal(tab, made, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto(made.as_uri())
    tab.locator("#predicted svg.chart").nth(1).wait_for()
    for chart in tab.locator("#predicted svg.chart").all():
        ticks = chart.evaluate("""(chart) => {
          const [begin, end] = ["x1", "x2"].map((x) => +chart.querySelector(".reference").getAttribute(x));
          const [base, top] = ["y1", "y2"].map((y) => +chart.querySelector(".reference").getAttribute(y));
          const texts = [...chart.querySelectorAll("text.tick")].map((each) => [each.textContent, +each.getAttribute("x"), +each.getAttribute("y"), each.getAttribute("text-anchor")]);
          const down = Object.fromEntries(texts.filter((each) => each[3] === "end").map(([text, , y]) => [text, (base - (y - 4)) / (base - top)]));
          const along = Object.fromEntries(texts.filter((each) => each[3] === "middle").map(([text, x]) => [text, (x - begin) / (end - begin)]));
          return Object.keys(along).map((text) => [along[text], down[text] ?? null]);
        }""")
        inner = [each for each in ticks[1:-1] if each[1] is not None]  # the labels at the ends are moved inwards
        assert inner and all(x == pytest.approx(y, abs=0.01) for x, y in inner), ticks


def test_labels_of_a_line_are_where_the_fewest_marks_are(tab):
    tab.set_content("<!doctype html><main></main>")
    places = tab.evaluate(f"""() => {{ {"".join(drawing().values())}
      const place = (points) => {{
        const frame = axes(400, 200, {{ x: {{ label: "", scale: fromZero(10) }}, y: {{ label: "", scale: fromZero(10) }} }});
        lineNote(frame, "", 100, points, "default");
        const note = frame.root.querySelector(".note");
        return [frame.right - +note.getAttribute("x"), +note.getAttribute("y")];
      }};
      const right = (y) => ({{ x: 375, y }});
      return [place([]), place([right(92)]), place([right(92), right(110)])];
    }}""")
    assert places[:2] == [[0, 95], [0, 114]]
    assert places[2][0] > 0
