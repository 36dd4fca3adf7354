"""Texts from strangers: none moves a terminal's cursor, none becomes a formula in a spreadsheet."""

import asyncio
import csv
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
from redline.cli.progress import LineListener, TerminalListener, trial_line
from redline.results import Measurement, Status, Trial, read_table
from redline.results.columns import header, line, row
from redline.views.dashboard.serve import Guard

WILD = "\x1b]0;owned\x07\x1b[2J\x9b31m\x00\r\nnext"
FORMULAS = ["=1+1", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1", "'=1", "''-x", "'", "=", "-"]


def failed(reason):
    return Trial(
        number=0,
        config={"a": reason},
        sampler=reason,
        measurement=Measurement(status=Status.CRASH, reason=reason, unit=reason),
    )


def is_plain(text):
    return not [each for each in text if (ord(each) < 32 and each != "\n") or 127 <= ord(each) < 160]


def test_live_output_shows_control_characters_escaped():
    for narrow in (False, True):
        assert is_plain(trial_line(failed(WILD), narrow=narrow).plain)
    out = io.StringIO()
    LineListener(out).on_message(WILD)
    LineListener(out).on_trial_end(failed(WILD))
    assert is_plain(out.getvalue()) and "\\x1b" in out.getvalue()
    out = io.StringIO()
    listener = TerminalListener(out)
    listener.on_message(WILD)
    listener.on_trial_end(failed(WILD))
    assert is_plain(out.getvalue()) and "\\x1b" in out.getvalue()


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_is_a_formula_and_all_round_trip(text, tmp_path):
    trial = failed(text)
    data = line(header(["a"])) + row(trial, ["a"])
    (tmp_path / "trials.csv").write_text(data)
    for cell in next(iter(list(csv.reader(io.StringIO(data)))[1:])):
        assert not cell.startswith(("=", "+", "-", "@", "\t")), cell
    frame = read_table(tmp_path / "trials.csv")
    assert [frame[name][0] for name in ("reason", "sampler", "unit", "knob.a")] == [text] * 4


@pytest.mark.parametrize(
    ("host", "let_in"),
    [
        ("localhost", True), ("LOCALHOST:8420", True), ("127.0.0.1:1", True), ("[::1]:8420", True), ("[::1]", True),
        ("[::1]evil.example", False), ("[::1].evil.example:80", False), ("localhost:80.evil.example", False),
        ("localhost.evil.example", False), ("localhost:", False), ("", False), ("evil@localhost", False), ("localhost/x", False),
    ],
)  # fmt: skip
def test_the_host_check_compares_whole_names(host, let_in):
    answered = []

    async def app(scope, receive, send):
        answered.append("in")

    async def send(message):
        answered.append(message.get("status"))

    guard = Guard(app)
    scope = {"type": "http", "path": "/", "query_string": b"", "headers": [(b"host", host.encode())]}
    # In a thread of its own: a browser's driver may have left an event loop running in this one.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, guard(scope, None, send)).result()
    assert answered[0] == ("in" if let_in else 400)
