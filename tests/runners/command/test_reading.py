"""Output of a command: lines of known frameworks, user-defined patterns, growing files, and reports."""

import json
import math

import pytest
from redline.base.errors import UsageError
from redline.runners.command.objective import Objective, Requirement, smaller_is_better, usable
from redline.runners.command.reading import StepNumbers, lines_for, number, suggestion
from tqdm import tqdm

MEGATRON = (
    " [2025-03-04 10:11:12] iteration       12/     100 | consumed samples:          768 | "
    "elapsed time per iteration (ms): 1243.7 | throughput per GPU (TFLOP/s/GPU): 312.4 | learning rate: 1.200000E-05 | "
    "global batch size:    64 | lm loss: 1.064E+01 | loss scale: 1.0 | grad norm: 12.345 |"
)
NANOTRON = (
    "10/02/2024 12:00:00 [INFO|DP=0|PP=1|TP=0]: iteration: 5 / 20 | elapsed_time_per_iteration_ms: 1.21K | "
    "tokens_per_sec: 866K | tokens_per_sec_per_gpu: 13.5K | global_batch_size: 1.05M | lm_loss: 10.9 | lr: 0.0003"
)


def bar(name, unit="it", step=3, total=10):
    return tqdm.format_meter(step, total, 1.4, prefix=name, unit=unit)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (MEGATRON, {"loss": 10.64}),
        (NANOTRON, {"loss": 10.9}),
        (bar("Epoch 0"), {"step": 3.0}),
        (bar("Training", "step"), {"step": 3.0}),
        (bar("1|12|Loss: 2.301"), {"step": 3.0, "loss": 2.301}),
        ("{'loss': 5.1234, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.01}", {"loss": 5.1234}),
        ("{'eval_loss': 5.1234, 'epoch': 0.01}", {}),
        ("iter 10: val loss: 3.2", {}),
        ('{"step": 4, "tokens_per_second": 1234.5, "lr": 0.1}', {"step": 4.0, "tokens_per_second": 1234.5}),
        ("step 4 of the installation: 3 of 7 done", {}),
    ],
)
def test_what_usually_contains_steps_and_losses_is_read(line, expected):
    assert lines_for(()).read(line) == pytest.approx(expected)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "Epochs",
            "train: Scanning /data/labels... 64 images, 0 backgrounds",
            "train: Caching images (0.1GB ram)",
        ),
        *("Tokenizing train set", "Loading training data", "Loading pipeline steps", "Extracting features (train)"),
        *("Evaluating", "Validation epoch 1", "Eval step", "Sanity Checking DataLoader 0"),
    ],
)
def test_a_bar_that_may_count_anything_else_than_steps_is_not_read(name):
    assert "step" not in lines_for(()).read(bar(name)), name
    assert "step" not in lines_for(()).read(bar("Epoch 1/5", "img"))


def test_the_first_metric_that_is_asked_for_is_the_objective():
    lines = lines_for([r"loss (?P<loss>\S+) at (?P<p99_ms>[\d.]+) ms", "rps"])
    assert lines.objective == "p99_ms"
    assert lines.read("loss nan at 12.5 ms") == pytest.approx({"loss": math.nan, "p99_ms": 12.5}, nan_ok=True)
    assert lines.read('{"rps": 3, "other": 4}') == {"rps": 3.0}
    assert lines_for(["rps", r"at (?P<p99_ms>[\d.]+) ms"]).objective == "rps"
    assert lines_for(()).objective is None and lines_for(["step_ms"]).objective == "step_ms"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("(?P<speed>", "is not a valid regular expression"),
        ("loss (", "is not a valid regular expression"),
        (r"speed: (\d+)", "has no named group; write one for the number"),
        ("speed: ([0-9.]+)", "has no named group; write one for the number"),
    ],
)
def test_a_metric_that_cannot_be_read_is_refused(text, says):
    with pytest.raises(UsageError, match=says):
        lines_for([text])


@pytest.mark.parametrize(
    ("text", "metric", "name"),
    [
        ("rps", "rps", "rps"),
        ("perf/throughput(tok/s)", "perf/throughput(tok/s)", "perf/throughput(tok/s)"),
        ("iteration-time", "iteration-time", "iteration-time"),
        ("train/steps_per_second", "steps_per_second", "train/steps_per_second"),
        ("train/loss", "loss", "train/loss"),
        ("tokens_per_second=throughput(tps)", "tokens_per_second", "throughput(tps)"),
        ("train_loss=train/loss", "train_loss", "train/loss"),
        ("a/b=c", "a/b=c", "a/b=c"),
    ],
)
def test_a_metric_that_is_no_regular_expression_is_a_name(text, metric, name):
    lines = lines_for([text])
    assert lines.requested == [metric]
    assert lines.read(json.dumps({name: 2.5, "x": 1})) == {metric: 2.5}


def test_two_metrics_of_one_name_are_refused():
    with pytest.raises(
        UsageError, match="'train/loss' and 'eval/loss' are both called loss; write one as OTHER=eval/loss"
    ):
        lines_for(["train/loss", "eval/loss"])
    assert lines_for(["train/loss", "eval_loss=eval/loss"]).read('{"train/loss": 1, "eval/loss": 2}') == {
        "loss": 1.0,
        "eval_loss": 2.0,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", 12.0),
        ("1,234.5", 1234.5),
        ("26.5K", 26500.0),
        ("1.2e-3", 1.2e-3),
        ("-inf", -math.inf),
        ("13,25", 13.25),
        ("1.234,5", 1234.5),
        ("1,325", 1325.0),
        ("12,34,56", None),
        ("x", None),
        ("1.2.3", None),
    ],
)
def test_numbers_are_read_as_programs_print_them(text, expected):
    assert number(text) == expected


def test_lines_end_at_carriage_returns_and_endless_ones_are_cut():
    lines = lines_for(())
    assert list(lines.feed(b"a\rb\nc")) == ["a", "b"] and list(lines.remaining()) == ["c"]
    for _ in range(100):
        assert list(lines.feed(b"x" * 65536)) == []
    (whole,) = lines.feed(b"\n")
    assert len(whole) == 65536
    assert list(lines.feed("ä\n".encode()[:1])) == [] and list(lines.feed("ä\n".encode()[1:])) == ["ä"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([(0, 0.0), (1, 0.02), (2, 0.04)], [20, 20]),
        ([(0, 0.0), (0, 0.01), (1, 0.02), (1, 0.03), (2, 0.04)], [20, 20]),  # printed twice a step
        ([(0, 0.0), (5, 0.1), (10, 0.2)], [20, 20]),  # printed every five steps
        ([(0, 0.0), (1, 0.02), *((step, 0.12) for step in range(2, 7)), (7, 0.14)], [20, 20, 20]),  # a burst
        ([(0, 0.0), (1, 0.0199), (2, 0.02), (3, 0.06)], [19.9, 20.05]),  # a late line; the next one is on time
        ([(step, step / 1000) for step in range(1, 20)], [1.0] * 3),  # faster than lines can be distinguished
        ([(0, 0.0), (8, 0.08), (0, 0.3), (1, 0.32)], [10, 20]),  # a progress bar that restarts
        ([(0, 0.0), (8, 0.08), (6, 0.09), (9, 0.1), (7, 0.11)], [10, 20]),  # a rank that is behind
    ],
)
def test_steps_are_timed_by_the_arrival_of_their_lines(lines, expected):
    steps, times = StepNumbers(), []
    moments = sorted({at for _, at in lines})
    for moment in moments:
        times += [steps.add(step, at) for step, at in lines if at == moment]
        times.append(steps.step_ms())
    assert [each for each in times if each] == pytest.approx(expected)
    # Several moments read at once, such as from a file.
    steps = StepNumbers()
    times = [*(steps.add(step, at) for step, at in lines), steps.step_ms()]
    assert [each for each in times if each] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        ("[rank0]: MemoryError", "MemoryError"),
        ("[default3]:  50%|#    | 5/10", " 50%|#    | 5/10"),
        ("[default1]:[rank1]: ValueError: x", "ValueError: x"),
        ('[1,0]<stdout>:{"step_ms": 5}', '{"step_ms": 5}'),
        ("[iter12]: 5 ms", "[iter12]: 5 ms"),
        ("[rank0]", "[rank0]"),
    ],
)
def test_the_name_of_a_rank_is_not_part_of_its_lines(printed, line):
    assert list(lines_for([]).feed(f"{printed}\n".encode())) == [line]


@pytest.mark.parametrize(
    ("objective", "value", "cost", "throughput", "unit"),
    [
        (Objective(name="tokens_per_second"), 2000.0, 0.5, 2000.0, "tokens/s"),
        (Objective(name="step_ms"), 20.0, 20.0, 50.0, "steps/s"),
        (Objective(name="step_s", samples_per_step=8.0), 0.5, 500.0, 16.0, "samples/s"),
        (Objective(name="speed"), 2.5, 400.0, 2.5, "speed"),
        (Objective(name="requests_per_second"), 50.0, 20.0, 50.0, "requests/s"),
        (Objective(name="p99_ms", smaller=True), 4.0, 4.0, 0.25, "1/p99_ms"),
    ],
)
def test_reported_metrics_become_a_cost_and_a_throughput(objective, value, cost, throughput, unit):
    assert objective.cost(value) == cost and objective.throughput(cost) == throughput and objective.unit == unit
    assert objective.cost_of(throughput) == pytest.approx(cost)


def test_a_value_that_is_no_positive_number_is_no_objective():
    assert [usable(value) for value in (0.5, 0.0, -1.0, math.inf, math.nan)] == [True, *[False] * 4]


@pytest.mark.parametrize(
    ("name", "direction", "says"),
    [
        ("tokens_per_second", "min", "leave direction out"),
        ("step_ms", "max", "leave direction out"),
        ("x", "up", "unknown direction"),
    ],
)
def test_a_direction_that_turns_a_known_metric_around_is_refused(name, direction, says):
    with pytest.raises(UsageError, match=says):
        smaller_is_better(name, direction)


def test_a_requirement_says_what_breaks_it():
    bound = Requirement.read("p99_ms < 200 and errors == 0")
    assert bound.violation({"p99_ms": 150.0, "errors": 0.0}) is None
    assert "p99_ms = 250" in bound.violation({"p99_ms": 250.0, "errors": 0.0})
    assert bound.violation({"p99_ms": 150.0}).startswith("the command did not report errors")
    for text in ("p99_ms +", "p99_ms * 2", "p99_ms < 'x'"):
        with pytest.raises(UsageError, match="require"):
            Requirement.read(text)


@pytest.mark.parametrize(
    ("line", "metric", "value"),
    [
        ("Throughput: 12.3 tok/s", "tokens_per_second", 12.3),
        ("iter 472: loss 1.6078, time 466.83ms, mfu 0.01%", "step_ms", 466.83),
        ("[iter 00010] loss=2.30 | 654.4 samples/sec", "samples_per_second", 654.4),
        (MEGATRON, "step_ms", 1243.7),
        (NANOTRON, "tokens_per_second", 866e3),
        ("step: 10 loss: 2.1 tps: 1,234 mfu 1%", "tokens_per_second", 1234.0),
        ("12/100 5s 60ms/step - loss: 2.3", "step_ms", 60.0),
    ],
)
def test_a_metric_is_built_from_a_line_that_is_not_read_and_reads_it(line, metric, value):
    built = suggestion(["a line without a number", line])
    assert lines_for([built.metric]).read(line) == {metric: value}
    assert f"metric={built.metric!r}" in built.text


def test_no_metric_is_built_from_lines_about_other_work():
    lines = ["loading 3 files at 12 it/s", "Scanning: 64 images/s", "Evaluation took 12 ms", "done in 3 s"]
    assert suggestion(lines) is None


def test_a_report_is_written_where_the_search_listens_and_by_the_first_rank_alone(tmp_path, monkeypatch):
    from redline import report

    report(step=1, tokens=5)  # a knob that is not tuned
    path = tmp_path / "report.jsonl"
    monkeypatch.setenv("REDLINE_REPORT", str(path))
    report(step=2, tokens=10)
    monkeypatch.setenv("RANK", "1")
    report(step=3, tokens=10)
    (line,) = path.read_text().splitlines()
    record = json.loads(line)
    assert record.pop("time_s") > 0 and record == {"step": 2.0, "tokens": 10.0}
