"""Trial 0 is a conventional configuration that is predicted to fit; its reason is stated."""

import csv

import pytest
import redline as rl
import yaml
from predicted_runner import predicted
from redline.cli import main
from redline.estimator import Estimator, Shape, TrainingSetup
from redline.results import Measurement, Status, Trial
from redline.space import Config, Space
from redline.tuner.budget import Budget
from redline.tuner.first_trial import first_trial, ladder
from redline.tuner.search import Search

LLAMA_8B = Shape(name="8B", layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocabulary=128256)
HEADROOM = 0.05


def make_space(devices=64, total=512, micro_batch=8):
    """The standard knobs as in a default space on GPUs, lossy values allowed."""
    space = Space()
    if devices > 1:
        degrees = [each for each in (1, 2, 4, 8) if each <= devices]
        tp, pp = space.choice("tp", degrees), space.choice("pp", degrees)
        dp = space.derive("dp", devices // (tp * pp))
        space.require(tp * pp * dp == devices)
        space.choice("zero", [0, 1, 2, 3], when=dp > 1)
    micro = space.choice("micro_batch", [1, 2, 4, 8, 16], default=micro_batch)
    space.choice("checkpoint_ratio", [0.0, 0.5, 1.0])
    space.choice("precision", ["fp32", "bf16_pure", "bf16"])
    space.choice("offload", ["none", "optimizer"])
    together = micro * dp if devices > 1 else micro
    accumulate = space.derive("grad_accum", total // together)
    space.require(together * accumulate == total, "global batch")
    return space


def estimator(devices=64, total=512, hardware="h100-80gb", limit=None, seq_len=8192):
    setup = TrainingSetup(devices=devices, seq_len=seq_len, global_batch=total, memory_limit_mib=limit)
    return Estimator(LLAMA_8B, hardware, setup)


def needs(estimate, configs):
    return estimate.table(configs).fullest_memory_mib


def test_the_default_is_kept_where_it_is_predicted_to_fit():
    space = make_space(devices=1, total=32)
    small = Estimator(
        Shape(name="small", layers=4, hidden=512, heads=8, vocabulary=32000),
        "h100-80gb",
        TrainingSetup(seq_len=512, global_batch=32),
    )
    found = first_trial(space, small, HEADROOM)
    assert (found.config, found.note) == (space.default(), "")
    assert found.config["micro_batch"] == 8 and found.fallback["micro_batch"] == 1


def test_a_default_that_cannot_fit_gives_way_to_the_first_rung_that_does_and_the_reason_is_stated():
    space, estimate = make_space(), estimator()
    room = (1 - HEADROOM) * estimate.memory_limit_mib
    default = space.default()
    assert needs(estimate, [default])[0] > 10 * room
    found = first_trial(space, estimate, HEADROOM)
    assert found.config in space and needs(estimate, [found.config])[0] <= room
    walked = [config for rung in ladder(space) for config in rung]
    before = walked[: walked.index(found.config)]
    assert before and (needs(estimate, before) > room).all()
    need, limit = needs(estimate, [default])[0] / 1024, estimate.memory_limit_mib / 1024
    needed = f"the default itself is predicted to need {need:,.0f} of {limit:.0f} GiB"
    assert found.note.endswith(f"otherwise the default configuration, because {needed}")
    assert found.note.startswith("trial 0 is zero=3 micro_batch=2 checkpoint_ratio=1 precision=bf16, ")
    assert "tp=" not in found.note and "grad_accum=" not in found.note
    assert found.fallback == space.config({**free(space, found.config), "micro_batch": 1})


def free(space, config):
    return {knob.name: config[knob.name] for knob in space.knobs if not knob.derived and knob.name in config}


def test_the_ladder_has_its_order_and_is_never_lossy():
    space = make_space()
    rungs = list(ladder(space))
    changed = ["precision", "zero", "checkpoint_ratio", "tp", "offload", "pp"]
    firsts = [(rung[0]["precision"], rung[0].get("zero", 0), rung[0]["checkpoint_ratio"], rung[0]["tp"],
               rung[0]["offload"], rung[0]["pp"]) for rung in rungs]  # fmt: skip
    assert [dict(zip(changed, each)) for each in firsts[:6]] == [
        dict(zip(changed, each))
        for each in (
            ("fp32", 0, 0.0, 1, "none", 1), ("bf16", 0, 0.0, 1, "none", 1), ("bf16", 2, 0.0, 1, "none", 1),
            ("bf16", 3, 0.0, 1, "none", 1), ("bf16", 3, 1.0, 1, "none", 1), ("bf16", 3, 1.0, 2, "none", 1),
        )
    ]  # fmt: skip
    assert [each[3:] for each in firsts[6:]] == [
        (4, "none", 1), (8, "none", 1), (8, "optimizer", 1), (8, "optimizer", 2), (8, "optimizer", 4),
        (8, "optimizer", 8),
    ]  # fmt: skip
    for rung in rungs:
        sizes = [config["micro_batch"] for config in rung]
        assert sizes == sorted(sizes, reverse=True) and max(sizes) <= 8
        assert all(config in space and config["precision"] != "bf16_pure" for config in rung)
    assert rungs[0][0]["micro_batch"] == 4, "the default itself was looked at before"
    second = list(ladder(make_space(micro_batch=2)))[1]
    assert second[0]["micro_batch"] == 8, "each rung begins with the Trainer's micro-batch"


def test_the_smallest_is_taken_with_a_note_if_none_is_predicted_to_fit():
    space, estimate = make_space(devices=1, total=16), estimator(devices=1, total=16, limit=8192.0)
    found = first_trial(space, estimate, HEADROOM)
    walked = [config for rung in ladder(space) for config in rung]
    assert needs(estimate, [found.config])[0] == min(needs(estimate, walked))
    assert "it is not predicted to fit either" in found.note and "of 8 GiB" in found.note


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A search of predictions in which the Trainer's default does not fit."""
    out = tmp_path_factory.mktemp("runs") / "tight"
    how = predicted(
        "gpt2-tiny", "a100-40gb", devices=8, global_batch=256, seq_len=512, memory_limit="500MiB", patience=0,
        fix={"attention": "sdpa", "fusion": False},
    )  # fmt: skip
    return rl.tune("gpt2-tiny", trials=4, out=out, **how), out, how


def test_a_search_begins_with_it_and_has_a_gain_to_report(finished, capsys):
    result, out, _ = finished
    rows = list(csv.DictReader((out / "trials.csv").open()))
    assert (rows[0]["sampler"], rows[0]["status"]) == ("default", "ok")
    assert float(rows[0]["predicted_memory_mib"]) <= 0.95 * 500
    assert [row["sampler"] for row in rows].count("default") == 1
    assert result.gain is not None and result.default.trial.number == 0
    (note,) = [each for each in result.notes if each.startswith("trial 0 is ")]
    assert "otherwise the default configuration, because the default itself is predicted to need" in note
    assert yaml.safe_load((out / "run.yaml").read_text())["asked"]["first_trial"] == note
    with pytest.raises(SystemExit):
        main(["show", str(out)])
    assert note in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_search_keeps_its_trial_0(finished, monkeypatch):
    _, out, how = finished
    # The estimate of a measured machine may have changed since.
    monkeypatch.setattr("redline.tuner.setup.first_trial", lambda space, *rest: first_trial(space, None))
    result = rl.tune("gpt2-tiny", trials=5, out=out, resume=True, **how)
    assert [trial.sampler for trial in result.all_trials].count("default") == 1
    assert len(result.all_trials) == 5


def test_the_fallback_follows_a_failed_first_trial():
    config, smaller = Config(micro_batch=2), Config(micro_batch=1)
    oom = Measurement(status=Status.OOM, reason="out of memory")
    search = Search(
        run_folder=None, sampler=None, runner=None, budget=Budget(trials=3), first=(config,), fallback=smaller
    )
    assert search._choose([]) == (config, "default")
    failed = Trial(number=0, config=config, sampler="default", measurement=oom)
    assert search._choose([failed]) == (smaller, "fallback")


def test_a_space_without_standard_knobs_is_left_alone():
    space = Space()
    space.choice("width", [1, 2])
    assert first_trial(space, estimator(), HEADROOM).config == space.default()
