"""Output while a search runs, also while it resumes and while it measures leaders."""

import io
from types import SimpleNamespace

import pytest
from redline.base import device
from redline.base.errors import UsageError
from redline.cli.outcome import print_result
from redline.cli.progress import LineListener, TerminalListener
from redline.results import Measurement, RunFolder, Status, Trial, summary
from redline.space import Config
from redline.tuner import rank_memory
from redline.tuner.listener import SearchListener, SearchPlan
from redline.tuner.result import make_result
from redline.tuner.search import Search


def trial(number, throughput, **more):
    measured = Measurement(status=Status.OK, throughput=throughput, unit="tokens/s", **more)
    return Trial(number=number, config={"a": number}, sampler="random", measurement=measured)


def plan(*earlier):
    return SearchPlan(
        name="m", where="cpu", valid=9, trials=8, seconds=None, sampler="random", runner="local", earlier=earlier
    )


def shown(listener):
    """The text of the live view."""
    console = listener._console
    with console.capture() as captured:
        console.print(listener._view())
    return captured.get()


def test_the_footer_of_a_resumed_run_counts_its_earlier_trials():
    listener = TerminalListener(io.StringIO())
    listener.on_start(plan(trial(0, 482.0), trial(1, 300.0)))
    listener.on_trial_end(trial(2, 462.0))
    text = shown(listener)
    assert "3 of 8 trials" in text and "best 482 tokens/s (trial 0)" in text and "3 ok" in text


def test_measuring_the_leaders_again_has_a_clock_and_an_end(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("redline.cli.progress.time.monotonic", lambda: now[0])
    listener = TerminalListener(io.StringIO())
    listener.on_start(plan())
    listener.on_remeasure([trial(3, 1.0), trial(0, 1.0)], 1, 4, 120.0)
    now[0] += 42.0
    assert "0:42 measuring the leaders again: turn 2 of 4, about 1:18 left (trials 3, 0)" in shown(listener)
    now[0] += 100.0
    assert "2:22 measuring the leaders again: turn 2 of 4, longer than expected (trials 3" in shown(listener)
    listener.on_remeasure([trial(3, 1.0), trial(0, 1.0)], 4, 4)
    assert "measuring" not in shown(listener)
    lines = io.StringIO()
    LineListener(lines).on_remeasure([trial(3, 1.0)], 0, 2, 160.0)
    assert lines.getvalue() == "measuring the leaders again: turn 1 of 2, about 2:40 left: trial 3\n"


def test_an_interrupt_is_acknowledged_before_what_runs_is_ended():
    events = []

    class Listener(SearchListener):
        def on_wait(self, what):
            events.append(what)

    class Runner:
        confirms, slots = True, 1

        def close(self):
            events.append("closed")

    search = Search(run_folder=SimpleNamespace(), sampler=None, runner=Runner(), budget=SimpleNamespace(seconds=None))
    search.listener = Listener()

    def interrupted():
        raise KeyboardInterrupt

    search._confirmation = interrupted
    with pytest.raises(KeyboardInterrupt):
        search.confirm()
    assert events == ["interrupted: ending the running trials", "closed"]


def test_a_resumed_run_keeps_its_memory_limit_or_is_refused_with_both(tmp_path, monkeypatch):
    request = SimpleNamespace(limit_mib=None, runner=None, concurrency=None, runs_on="local", out="runs/a")
    task = SimpleNamespace(own=object(), emulated=False, devices=2, device=SimpleNamespace(type="cpu"))
    monkeypatch.setattr(device, "available_memory_mib", lambda: 16000)
    assert rank_memory.memory_of_rank(request, task) == 7200.0
    monkeypatch.setattr(rank_memory, "available_memory_mib", lambda: 16000)
    assert rank_memory.memory_of_rank(request, task, earlier_mib=7799.0) == 7799.0
    monkeypatch.setattr(rank_memory, "available_memory_mib", lambda: 7388)
    with pytest.raises(UsageError, match=r"'runs/a' had 7,799 MiB a rank, but this host has 3,694 MiB a rank left"):
        rank_memory.memory_of_rank(request, task, earlier_mib=7799.0)
    with RunFolder.open(tmp_path / "a", {"rank_memory_mib": 7799.0}, knobs={"a": [1]}):
        pass
    assert RunFolder.asked(tmp_path / "a")["rank_memory_mib"] == 7799.0
    assert RunFolder.asked(tmp_path / "none") == {}


def ended(*measured):
    """Returns the output at the end of a search with these measurements; the first is the default's."""
    trials = [
        Trial(
            number=n,
            config=Config(a=n, precision="bf16" if n else "fp32"),
            sampler="random" if n else "default",
            measurement=each,
        )
        for n, each in enumerate(measured)
    ]
    print_result(make_result(trials, ["a", "precision"], folder=None, ended="all trials are done", interrupted=False))


def ok(throughput, spread=0.01, **more):
    return Measurement(
        status=Status.OK, throughput=throughput, unit="tokens/s", step_ms=1.0, step_ms_spread=spread, devices=1, **more
    )


def test_the_end_counts_failures_with_the_first_reason_and_does_not_praise_the_default(capsys):
    crash = Measurement(status=Status.CRASH, reason="OSError: file too short")
    ended(ok(1.0), crash, ok(0.9), crash)
    out = capsys.readouterr().out
    assert "gain     none: the default configuration is the winner" in out
    assert "trials   2 ok, 2 crash; trial 1 ended as crash: OSError: file too short" in out
    ended(ok(1.0), crash)
    assert "gain     none: every other trial failed" in capsys.readouterr().out
    ended(ok(1.0))
    assert "gain     none: only the default configuration was tried" in capsys.readouterr().out


def test_a_default_that_failed_is_named_with_its_reason(capsys):
    ended(Measurement(status=Status.OOM, reason="no room for the logits"), ok(2.0))
    assert "default  oom (no room for the logits)" in capsys.readouterr().out


def test_the_end_has_a_gain_with_its_interval_and_names_one_that_is_not_shown(capsys):
    ended(ok(627.4, 0.068), ok(763.8, 0.2))
    assert "no measurable gain (1.22x ± 0.26)" in capsys.readouterr().out
    ended(ok(627.4, 0.01), ok(763.8, 0.02))
    assert "gain     1.22x ± 0.03" in capsys.readouterr().out


def failed(number, status, reason, **more):
    measurement = Measurement(status=status, reason=reason, **more)
    return Trial(
        number=number, config={"a": number}, sampler="random" if number else "default", measurement=measurement
    )


@pytest.mark.parametrize("of_command", [False, True])
def test_the_same_crash_everywhere_is_shown_with_the_end_of_its_log(capsys, tmp_path, of_command):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "0.log").write_text("Traceback:\n" + "  a line\n" * 20 + "RuntimeError: no such head\n")
    trials = [failed(number, Status.CRASH, "RuntimeError: no such head", log="logs/0.log") for number in range(2)]
    print_result(make_result(trials, ["a"], folder=tmp_path, ended="done", interrupted=False), of_command=of_command)
    out = capsys.readouterr().out
    what = "command" if of_command else "model"
    assert f"Your {what} fails in every configuration: RuntimeError: no such head" in " ".join(out.split())
    *_, last, path = out.splitlines()
    assert last == "  RuntimeError: no such head" and path == f"next     read {tmp_path}/logs/0.log"
    other = [*trials[:1], failed(1, Status.OOM, "too large")]
    assert summary.fails_everywhere(other) is None
