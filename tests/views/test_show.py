"""Output of `redline show`."""

import io

import pytest
from redline.base.errors import UsageError
from redline.results import Measurement, Status, View
from redline.views.show import render
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text


@pytest.fixture
def run(tmp_path, open_run, point, ok, oom):
    """Four trials: the default, a faster one, an oom with a hostile reason, a pending one."""
    with open_run(tmp_path / "a") as run:
        run.start(point(0), sampler="default")
        run.finish(0, ok(100.0, step_ms=10.123, peak_memory_mib=500.0))
        run.start(point(1), sampler="tpe")
        run.finish(1, ok(300.0, step_ms=3.5, peak_memory_mib=700.0))
        run.start(point(2), sampler="tpe")
        run.finish(2, oom(2000.0))
        run.start(point(3), sampler="gp")
        yield run


def shown(run, **more):
    out = io.StringIO()
    width = more.pop("width", 80)
    render(run, Console(file=out, width=width, force_terminal=more.pop("terminal", False)), **more)
    return out.getvalue()


def test_plain_output_names_the_winner_and_sorts_by_throughput(run):
    lines = shown(run).splitlines()
    assert lines[0] == f"{run.path}: gpt2-tiny, seq_len 128, global_batch 8, sampler tpe, seed 0"
    assert lines[1] == "4 trials: 2 ok, 1 oom, 1 pending"
    assert lines[2] == "best: trial 1, 300 tokens/s; the default configuration (trial 0): 100 tokens/s; gain 3.00x"
    assert lines[3].startswith("configuration: micro_batch=2, checkpoint_ratio=0, attention=sdpa, fusion=false")
    table = [line.split() for line in lines[5:10]]
    assert " ".join(table[0]) == "trial status tokens/s step ms peak MiB sampler micro_batch reason"
    assert [row[:2] for row in table[1:]] == [["1", "ok"], ["0", "ok"], ["2", "oom"], ["3", "pending"]]
    assert table[1] == ["1", "ok", "300", "3.5", "700", "tpe", "2"]
    assert lines[10] == "the same in all: checkpoint_ratio=0, attention=sdpa, fusion=false, grad_accum=8"


def test_top_limits_the_rows_and_says_so(run):
    text = shown(run, top=1)
    assert "3 more; all are in " in text
    assert "default  " not in text
    assert "more; all" not in shown(run, top=None)


def test_hostile_reasons_are_printed_as_they_are_on_one_line(run):
    reason = "[bold]not markup[/bold]\n\x1b[31mred " + "x" * 300
    run.finish(3, Measurement(status=Status.CRASH, reason=reason))
    plain = shown(run)
    (line,) = [line for line in plain.splitlines() if "not markup" in line]
    assert line.endswith("[bold]not markup[/bold] \\x1b[31mred " + "x" * 300)
    drawn = shown(run, terminal=True, width=100)
    assert "[bold]not" in drawn and "\x1b[31mred" not in drawn
    assert all(cell_len(Text.from_ansi(line).plain) <= 100 for line in drawn.splitlines())


def test_on_a_terminal_statuses_have_colours_and_lines_fit(run):
    drawn = shown(run, terminal=True, width=100)
    assert "\x1b[32mok" in drawn and "\x1b[33moom" in drawn
    assert "trial 1, 300 tokens/s" in drawn


def test_without_a_winner_the_reason_is_shown(tmp_path, open_run, point, oom):
    with open_run(tmp_path / "b") as run:
        assert "no trials yet" in shown(run)
        run.start(point(0), sampler="default")
        run.finish(0, oom(2000.0))
        assert "none of 1 trials succeeded: 1 oom. The smallest need seen is 2000 MiB (trial 0)." in shown(run)


def test_a_failed_default_is_named(tmp_path, open_run, point, ok, oom):
    with open_run(tmp_path / "c") as run:
        run.start(point(0), sampler="default")
        run.finish(0, oom())
        run.start(point(1), sampler="tpe")
        run.finish(1, ok(5.0))
        assert "best: trial 1, 5 tokens/s; the default configuration (trial 0) ended as oom" in shown(run)


def test_missing_files_are_noted(run):
    run.close()
    (run.path / "run.yaml").unlink()
    text = shown(View(run.path))
    assert "note: " in text and "run.yaml is missing" in text
    assert "best: trial 1" in text


def test_trials_are_chosen_by_status(run):
    rows = [line.split()[:2] for line in shown(run, statuses=("oom", "pending")).splitlines()[6:8]]
    assert rows == [["2", "oom"], ["3", "pending"]]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"statuses": ("oomm",)}, "unknown status 'oomm'; did you mean 'oom'"),
        ({"top": 0}, "top must be at least 1"),
    ],
)
def test_missing_trials_are_named(run, selection, message):
    with pytest.raises(UsageError, match=message):
        shown(run, **selection)
