"""Lossy values are marked everywhere, and the best configuration without any is reported with them."""

import io
import re
from xml.etree import ElementTree

import pytest
import yaml
from redline.frameworks import export_targets, render
from redline.results import View, read_table, summary
from redline.views.report import Source
from redline.views.report.page import document
from redline.views.show import html, render as show
from rich.console import Console


@pytest.fixture
def run(tmp_path, open_run, point, asked, knobs, ok):
    """Four trials: the default in fp32, two in bf16, the faster one in bf16_pure."""
    asked = {**asked, "lossy": {"precision": ["bf16_pure"]}}
    knobs = {**knobs, "precision": ("fp32", "bf16", "bf16_pure")}
    with open_run(tmp_path / "run", asked=asked, knobs=knobs) as run:
        for number, (precision, speed) in enumerate(
            [("fp32", 100.0), ("bf16", 160.0), ("bf16_pure", 200.0), ("bf16", 150.0)]
        ):
            run.start(point(number, precision=precision), sampler="tpe" if number else "default")
            run.finish(number, ok(speed, devices=1))
        run.write_best(["redline"])
    return tmp_path / "run"


def shown(view, **more):
    out = io.StringIO()
    show(view, Console(file=out, width=200), **more)
    return out.getvalue()


def test_a_trial_knows_that_it_is_lossy(run):
    assert [trial.lossy for trial in View(run).trials()] == [(), (), ("precision",), ()]


def test_the_best_exact_configuration_is_shown_beside_the_winner(run):
    trials = View(run).trials()
    assert (summary.best(trials).number, summary.best_exact(trials).number) == (2, 1)
    text = shown(View(run))
    assert "best: trial 2, 200 tokens/s" in text
    differing = "micro_batch=2, precision=bf16\n"
    assert f"without lossy values: trial 1, 160 tokens/s, 0.80 times the best; {differing}" in text
    best = yaml.safe_load((run / "best.yaml").read_text())
    assert (best["best"]["trial"], best["best"]["lossy"]) == (2, "precision=bf16_pure")
    assert best["best_exact"]["trial"] == 1 and "lossy" not in best["best_exact"]
    assert best["best_exact"]["configuration"]["precision"] == "bf16"
    notebook = "".join(ElementTree.fromstring(html(trials)).itertext())
    assert "without lossy values: trial 1, 160 tokens/s" in notebook
    head = document(Source.read(run))["headline"]
    assert (head["winner"]["trial"], head["winner"]["lossy"]) == (2, "precision=bf16_pure")
    assert (head["exact"]["trial"], head["exactness"]) == (1, "without lossy values")


def test_every_table_marks_lossy_values_and_data_for_programs_does_not(run):
    assert re.search(r"^ +2 .* bf16_pure \(lossy\)", shown(View(run)), re.MULTILINE)
    trials = View(run).trials()
    assert list(read_table(run / "trials.csv")["knob.precision"])[2] == "bf16_pure"
    assert "<td>bf16_pure (lossy)</td>" in html(trials) and "<td>bf16</td>" in html(trials)
    assert document(Source.read(run))["lossy"] == {"precision": ["bf16_pure"]}


@pytest.mark.parametrize("target", sorted(export_targets()))
def test_every_export_of_a_lossy_configuration_states_it(run, target):
    view = View(run)
    made = render(target, view.trials()[2], view.document)
    message = "precision=bf16_pure trains differently from fp32 or bf16: there are no fp32 master weights"
    assert message in made.notes
    assert not any("training than" in note for note in render(target, view.trials()[1], view.document).notes)


def test_a_run_that_asked_for_none_says_nothing_of_it(tmp_path, open_run, point, knobs, ok):
    with open_run(tmp_path, knobs={**knobs, "precision": ("bf16_pure",)}) as run:
        run.start(point(0, precision="bf16_pure"), sampler="default")
        run.finish(0, ok(200.0))
        run.write_best(["redline"])
        assert "lossy" not in shown(run) and "master" not in shown(run)
    assert "best_exact" not in yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert document(Source.read(tmp_path))["headline"]["exactness"] == ""
