"""trials.csv: the header is fixed, values are plain, and come back as a frame."""

import math
import re
from pathlib import Path

import numpy
import pandas
import pytest
import redline
from hypothesis import given, settings, strategies as st
from redline.base.errors import StudyError
from redline.results import Measurement, Status, Trial, read_table, table_frame
from redline.results.columns import FIXED, fold, number, row, unquoted
from redline.results.table import Table

HEADER = (
    "trial,status,reason,throughput,unit,samples_per_second,tokens_per_second,step_ms,step_ms_spread,"
    "peak_memory_mib,memory_limit_mib,tflops_per_device,mfu,predicted_throughput,predicted_memory_mib,devices,"
    "sampler,loss,expert_load,expert_dropped,started,seconds_total,seconds_overhead,seconds_build,seconds_warmup,seconds_measure,"
    "emulated_ranks,seconds_modelled,log"
)

TEXTS = st.text(st.characters(), max_size=60)


def trial(number=0, config=None, measurement=None, **more):
    measurement = measurement or Measurement(status=Status.OK, throughput=1.5)
    return Trial(number=number, config=config or {}, measurement=measurement, **more)


def write(path, knobs, *each):
    Table(path, knobs).write(each)
    return path


def test_the_header_is_the_designs_before_the_first_trial(tmp_path):
    path = write(tmp_path / "trials.csv", ["tp", "micro_batch"])
    assert path.read_text() == HEADER + ",knob.tp,knob.micro_batch\n"
    frame = read_table(path)
    assert len(frame) == 0
    assert list(frame.columns) == [*HEADER.split(","), "knob.tp", "knob.micro_batch"]


def test_a_row_says_everything_plainly():
    outcome = Measurement(
        status=Status.OK,
        reason="slow, but sure",
        throughput=numpy.float32(123456.789),
        unit="tokens/s",
        samples_per_second=numpy.float64(64.0),
        step_ms=0.000123456789,
        peak_memory_mib=81234.5,
        devices=numpy.int64(8),
        loss=10.82543278,
        started=1763692062.123456,
        log="logs/3.log",
    )
    config = {"tp": numpy.int64(4), "ratio": 0.25, "flag": numpy.bool_(True), "off": False, "name": 'a "b"'}
    text = row(
        trial(3, config, outcome, sampler="gp", predicted_throughput=1e5, predicted_memory_mib=None),
        ["tp", "ratio", "flag", "off", "name", "absent"],
    )
    assert text == (
        '3,ok,"slow, but sure",123456.8,tokens/s,64,,0.0001234568,,81234.5,,,,100000,,8,gp,10.8254328,'
        ',,1763692062.123,,,,,,,,logs/3.log,4,0.25,true,false,"a ""b""",\n'
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1 / 3, "0.3333333"),
        (123456789.0, "123456789"),
        (1.5e12, "1500000000000"),
        (1e-9, "1e-09"),
        (-2.5, "-2.5"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_have_no_exponent_unless_they_must(value, text):
    assert number(value) == text


@given(TEXTS)
def test_a_folded_text_is_one_printable_line_and_folding_again_changes_nothing(text):
    folded = fold(text)
    assert folded.splitlines() in ([folded], [])
    folded.encode()
    assert fold(folded) == folded


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            lambda status, reason, value, unit, log, sampler, text, count, ratio, flag: (
                Measurement(
                    status=status,
                    reason=reason,
                    throughput=value,
                    unit=unit,
                    log=log,
                    devices=count,
                    loss=value,
                ),
                {"text": text, "count": count, "ratio": ratio, "flag": flag},
                sampler,
            ),
            st.sampled_from(Status),
            TEXTS,
            st.floats(allow_nan=False, allow_infinity=False),
            TEXTS,
            TEXTS,
            TEXTS,
            TEXTS.filter(lambda text: fold(text) and not text.lstrip("+-").replace(".", "").isalnum()),
            st.integers(0, 2**40),
            st.sampled_from([0.0, 0.25, 0.5, 1e-7, 1.0]),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_hostile_values_come_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "trials.csv"
    knobs = ["text", "count", "ratio", "flag"]
    given_trials = [trial(i, config, outcome, sampler=sampler) for i, (outcome, config, sampler) in enumerate(rows)]
    write(path, knobs, *given_trials)
    assert path.read_text().count("\n") == len(rows) + 1
    frame = read_table(path)
    assert list(frame["trial"]) == list(range(len(rows)))
    for i, (outcome, config, sampler) in enumerate(rows):
        seen = frame.iloc[i]
        assert seen["status"] == outcome.status
        for name in ("reason", "unit", "log"):
            assert seen[name] == fold(getattr(outcome, name))
        assert seen["sampler"] == fold(sampler)
        assert seen["throughput"] == pytest.approx(outcome.throughput, rel=1e-6, abs=1e-300)
        assert seen["loss"] == pytest.approx(outcome.loss, rel=1e-8, abs=1e-300)
        assert seen["devices"] == outcome.devices
        assert seen["knob.text"] == fold(config["text"])
        assert (seen["knob.count"], seen["knob.ratio"]) == (config["count"], config["ratio"])
        assert bool(seen["knob.flag"]) is config["flag"]
    by_pandas = pandas.read_csv(path, keep_default_na=False, dtype={"reason": str})
    # A value that starts a formula gets an apostrophe prefix.
    assert list(map(unquoted, by_pandas["reason"])) == [fold(outcome.reason) for outcome, _, _ in rows]


def test_columns_may_be_missing_or_foreign_or_moved(tmp_path):
    path = tmp_path / "trials.csv"
    path.write_text(
        "\ufeffnote,throughput,status,knob.tp,trial\r\nhello,2.5,ok,4,0\r\n,,oom,,1\r\n",
        encoding="utf-8",
        newline="",
    )
    frame = read_table(path)
    assert list(frame.columns) == ["note", "throughput", "status", "knob.tp", "trial"]
    assert list(frame["status"]) == ["ok", "oom"]
    assert frame["knob.tp"][0] == 4 and math.isnan(frame["knob.tp"][1])
    assert frame["throughput"][0] == 2.5 and math.isnan(frame["throughput"][1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "No columns to parse"),
        ("trial,status\n0,ok\n", "no column throughput"),
        ("a;b;c\n", "no column trial, status, throughput"),
        ("trial,status,throughput\n0,ok,fast\n", "fast"),
        ('trial,status,throughput\n0,ok,"1\n', "as a table of trials"),
    ],
)
def test_other_csv_files_are_refused_with_the_missing_columns(tmp_path, text, words):
    path = tmp_path / "trials.csv"
    path.write_text(text)
    with pytest.raises(StudyError, match=words):
        read_table(path)


def test_a_frame_of_trials_is_what_reading_their_table_gives(tmp_path):
    knobs = ["tp", "ratio", "flag", "name", "sometimes"]
    config = {"tp": 2, "ratio": 0, "flag": True, "name": "=sdpa", "sometimes": 3}
    given_trials = [
        trial(0, config, sampler="default"),
        trial(
            1,
            {"tp": 4, "ratio": 0.5, "flag": False, "name": "nan"},
            Measurement(status=Status.OOM, reason="full", devices=2),
        ),
        Trial(number=2, config=config),
    ]
    frame = table_frame(given_trials, knobs)
    path = write(tmp_path / "trials.csv", knobs, *given_trials)
    pandas.testing.assert_frame_equal(frame, read_table(path))
    kinds = {"tp": "int64", "ratio": "float64", "flag": "bool", "sometimes": "float64"}
    assert {name: str(frame[f"knob.{name}"].dtype) for name in kinds} == kinds
    assert list(frame["knob.name"]) == ["=sdpa", "nan"] and list(frame["reason"]) == ["", "full"]
    assert str(frame["devices"].dtype) == "Int64" and frame["devices"][1] == 2


def test_the_documentation_lists_every_column():
    page = (Path(redline.__file__).parent / "docs" / "reading-results.md").read_text()
    section = page.partition("## Columns of trials.csv")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert tuple(re.findall(r"`(\w+)`", "".join(rows))) == FIXED
