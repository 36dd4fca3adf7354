"""The log of a training as curves: thinning of millions of steps, repeated steps, and damage."""

import json
import random
import time

import pytest
from redline.base.errors import StudyError
from redline.base.reading import LARGEST_DOCUMENT
from redline.results.history import STRETCHES, Curve, History
from redline.results.trained import DOCUMENT, LOG, LONGEST_LINE, highest_step, read_document, step_before


def line(step, loss=1.0, **more):
    return {"kind": "step", "step": step, "loss": loss, **more}


def append(folder, *lines):
    with (folder / LOG).open("ab") as file:
        for each in lines:
            file.write(each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n")


def history(folder, *lines):
    append(folder, *lines)
    made = History(folder)
    made.read(10.0)
    return made


# -- thinning --------------------------------------------------------------------------------------------------


def test_few_points_are_all_kept():
    curve, points = Curve(), [(step, step % 7 / 3) for step in range(0, STRETCHES * 10, 10)][:100]
    for point in points:
        curve.add(*point)
    assert curve.points() == points


@pytest.mark.parametrize(("stride", "window"), [(1, 128), (10, 1024)])  # a stretch's width at the end
def test_thinned_curves_keep_lowest_highest_and_last_points(stride, window):
    drawn = random.Random(0)
    values = {step: drawn.gauss(0, 1) for step in range(stride, 20_000 * stride + 1, stride)}
    values[777 * stride], values[15_001 * stride] = 100.0, -100.0
    curve = Curve()
    for step, value in values.items():
        curve.add(step, value)
    kept = curve.points()
    assert STRETCHES / 2 <= len(kept) <= 3 * STRETCHES
    assert all(values[step] == value for step, value in kept)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert (777 * stride, 100.0) in kept and (15_001 * stride, -100.0) in kept and kept[-1][0] == 20_000 * stride
    for begin in range(0, 20_000 * stride, window):
        there = {step: value for step, value in values.items() if begin <= step < begin + window}
        shown = [value for step, value in kept if step in there]
        assert (min(shown), max(shown)) == (min(there.values()), max(there.values()))


def test_going_back_forgets_what_lies_behind_and_nothing_else():
    curve = Curve()
    for step in range(1, 5001):
        curve.add(step, float(step))
    curve.back(3000)
    assert all(step <= 3000 for step, _ in curve.points()) and curve.points()[-1][0] > 3000 - 64
    for step in range(3001, 5001):
        curve.add(step, -float(step))
    kept = curve.points()
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert all(value == (step if step <= 3000 else -step) for step, value in kept)
    curve.back(-1)
    assert curve.points() == []


# -- the log ---------------------------------------------------------------------------------------------------


def test_steps_that_are_done_again_count_once(tmp_path):
    found = history(
        tmp_path,
        line(10, 9.0), line(20, 8.0), {"kind": "checkpoint", "step": 20, "failure": ""}, line(30, 99.0),
        {"kind": "evaluation", "step": 30, "loss": 99.0}, {"kind": "resumed", "step": 20, "checkpoint": "step-20"},
        line(30, 7.0), {"kind": "evaluation", "step": 30, "loss": 7.5}, line(40, 6.0),
    )  # fmt: skip
    assert found.curves["loss"].points() == [(10, 9.0), (20, 8.0), (30, 7.0), (40, 6.0)]
    assert found.held_out.points() == [(30, 7.5)]
    assert [each["step"] for each in found.resumed] == [20]


def test_a_training_that_began_again_without_a_checkpoint_counts_once(tmp_path):
    found = history(tmp_path, line(10, 9.0), line(20, 8.0), line(10, 5.0), line(20, 4.0), line(30, 3.0))
    assert found.curves["loss"].points() == [(10, 5.0), (20, 4.0), (30, 3.0)]


@pytest.mark.parametrize(
    ("given", "last", "expected"),
    [
        (line(30), 20, None), (line(20), 20, 19), (line(10), 20, 9), ({"kind": "evaluation", "step": 20}, 20, None),
        ({"kind": "evaluation", "step": 10}, 20, 9), ({"kind": "resumed", "step": 10}, 20, 10),
        ({"kind": "resumed", "step": 20}, 20, None), ({"kind": "checkpoint", "step": 5}, 20, None),
        ({"kind": "note"}, 20, None),
    ],
)  # fmt: skip
def test_the_step_before_a_repeated_one_is_found(given, last, expected):
    assert step_before(given, last) == expected


def test_the_log_is_read_on_as_it_grows_also_within_a_line(tmp_path):
    found = history(tmp_path, line(1, 3.0))
    text = json.dumps(line(2, 2.0)).encode() + b"\n"
    append(tmp_path, text[:9])
    assert found.read(1.0) and found.step == 1
    append(tmp_path, text[9:])
    assert found.read(1.0) and found.step == 2
    assert not found.read(1.0)
    assert found.curves["loss"].points() == [(1, 3.0), (2, 2.0)] and found.damaged == 0


def test_a_log_that_is_replaced_is_read_from_its_beginning(tmp_path):
    found = history(tmp_path, line(1, 3.0), line(2, 2.0))
    (tmp_path / LOG).unlink()
    append(tmp_path, line(1, 8.0))
    assert found.read(1.0)
    assert found.curves["loss"].points() == [(1, 8.0)]
    (tmp_path / LOG).write_bytes(b"")
    assert found.read(1.0)
    assert found.curves["loss"].points() == [] and found.step == 0


def test_a_long_log_is_read_over_several_answers_and_within_its_time(tmp_path):
    text = b"".join(json.dumps(line(step, 1.0 / step)).encode() + b"\n" for step in range(1, 200_001))
    append(tmp_path, text)
    found, rounds = History(tmp_path), 0
    while found.read(0.05) and found.unread:
        rounds += 1
    assert rounds >= 2
    assert found.step == 200_000 and found.damaged == 0
    begin = time.monotonic()
    assert len(found.curves["loss"].points()) <= 3 * STRETCHES
    assert time.monotonic() - begin < 0.5


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    found = history(
        tmp_path,
        line(1), b"{half\n", b"\xff\xfe\n", b"[1]\n", b'{"kind": "step", "step": "two", "loss": 1}\n',
        b'{"kind": "step", "step": -1}\n', b'{"kind": ["step"], "step": 2}\n', b'{"kind": "step", "step": true}\n',
        b'{"kind": "step", "step": 2, "loss": NaN, "lr": 1e400, "grad_norm": "x", "mfu": [1], "memory_mib": true}\n',
        b"[" * 5000 + b"\n", line(3),
    )  # fmt: skip
    assert found.damaged == 8
    assert [step for step, _ in found.curves["loss"].points()] == [1, 3]
    assert all(found.curves[name].points() == [] for name in ("lr", "grad_norm", "mfu", "memory_mib"))


def test_the_highest_step_is_found_at_the_end_of_the_log(tmp_path):
    assert highest_step(tmp_path) == 0
    append(tmp_path, *(line(step) for step in range(1, 30_001)), {"kind": "resumed", "step": 29_000}, line(29_001))
    assert highest_step(tmp_path) == 30_000


# -- train.yaml ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("format: 1\nasked: [", "is damaged"),
        ("format: 1\nasked: {}\nstrategies: []\n", "strategies must be a list"),
        ("format: 2\nasked: {}\nstrategies: [1]\n", "has format 2"),
        ("a: &a [1]\nb: [" + "*a, " * 200_000 + "]", "is damaged: it has more than 100,000 values"),
        ("x" * (LARGEST_DOCUMENT + 1), "larger than 2 MiB"),
    ],
)
def test_a_damaged_train_yaml_is_refused_in_words(tmp_path, text, match):
    (tmp_path / DOCUMENT).write_text(text)
    with pytest.raises(StudyError, match=match):
        read_document(tmp_path)


def test_a_line_without_an_end_costs_no_memory(tmp_path):
    append(tmp_path, line(1), b'{"kind": "' + b"x" * (3 * LONGEST_LINE) + b'"}\n', line(2))
    found = History(tmp_path)
    while found.read(1.0) or found.unread:
        assert len(found._reader._rest) <= LONGEST_LINE
    assert found.step == 2 and found.damaged == 1
