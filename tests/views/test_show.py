"""Output of `redline show`."""

import csv
import io
import json

import pytest
from redline.base.errors import UsageError
from redline.results import Measurement, Status, View, listing
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
    text = shown(run, selection=listing.Selection(top=1))
    assert "3 more; all are in " in text
    assert "default  " not in text
    assert "more; all" not in shown(run, selection=listing.Selection())


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


def listed(run, form, *columns, **selection):
    """The chosen trials' cells in a form."""
    trials = run.trials()
    chosen, _ = listing.select(trials, listing.Selection(**selection))
    return listing.write(chosen, listing.chosen_columns(trials, columns), form)


def test_trials_are_chosen_by_status_and_sorted_by_any_column(run):
    assert listed(run, "csv", "trial", statuses=("ok",)) == "trial\n1\n0\n"
    assert listed(run, "csv", "trial", sort="trial") == "trial\n0\n1\n2\n3\n"
    assert listed(run, "csv", "trial", sort="-peak_memory_mib") == "trial\n2\n1\n0\n3\n"  # without a value: last
    assert listed(run, "csv", "trial", sort="peak_memory_mib", top=2) == "trial\n0\n1\n"
    assert listed(run, "csv", "trial", sort="-micro_batch") == "trial\n3\n2\n1\n0\n"
    assert listed(run, "csv", "trial", statuses=("oom", "pending")) == "trial\n2\n3\n"


def test_the_formats_say_the_same(run):
    columns = ("trial", "status", "throughput", "micro_batch", "fusion")
    rows = list(csv.reader(io.StringIO(listed(run, "csv", *columns))))
    assert rows[0] == ["trial", "status", "throughput", "knob.micro_batch", "knob.fusion"]
    assert rows[1] == ["1", "ok", "300", "2", "false"] and rows[4] == ["3", "pending", "", "8", "false"]
    records = json.loads(listed(run, "json", *columns))
    assert records[0] == dict(zip(rows[0], [1, "ok", 300.0, 2, False]))
    assert records[3]["throughput"] is None
    markdown = listed(run, "markdown", *columns).splitlines()
    assert markdown[1] == "| --- | --- | --- | --- | --- |"
    assert [each.strip() for each in markdown[2].strip("|").split("|")] == rows[1]


def test_hostile_cells_stay_cells(run):
    run.finish(3, Measurement(status=Status.CRASH, reason='a|b "c", <i>\n=1'))
    cells = list(csv.reader(io.StringIO(listed(run, "csv", "trial", "reason", statuses=("crash",)))))
    assert cells[1] == ["3", 'a|b "c", <i> =1']
    (line,) = listed(run, "markdown", "reason", statuses=("crash",)).splitlines()[2:]
    assert line == '| a\\|b "c", &lt;i> =1 |'


def test_asked_columns_are_the_table(run):
    text = shown(run, selection=listing.Selection(columns=("trial", "loss", "micro_batch"), statuses=("ok",)))
    lines = [line.split() for line in text.splitlines()[5:]]
    assert lines == [["trial", "loss", "micro_batch"], ["1", "2"], ["0", "1"]]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"sort": "trhoughput"}, "unknown column 'trhoughput'; did you mean 'throughput'"),
        ({"sort": "-micro_bach"}, "did you mean 'micro_batch'"),
        ({"columns": ("knob.fusoin",)}, "did you mean"),
        ({"statuses": ("oomm",)}, "unknown status 'oomm'; did you mean 'oom'"),
        ({"top": 0}, "top must be at least 1"),
    ],
)
def test_missing_trials_are_named(run, selection, message):
    with pytest.raises(UsageError, match=message):
        shown(run, selection=listing.Selection(**selection))
