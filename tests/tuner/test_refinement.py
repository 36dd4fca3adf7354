"""The winner refined block by block: tried at the end like any other trial, and best only if it measures so."""

import csv
from dataclasses import replace

import pytest
import redline as rl
from listeners import RecordingListener
from memory_folder import MemoryFolder
from predicted_runner import predicted
from redline.base.errors import UsageError
from redline.estimator import Estimator, Shape, TrainingSetup
from redline.knobs.layers import of_blocks
from redline.results import Measurement, Status, Trial, summary
from redline.results.measurement import REFINEMENT
from redline.runners import Runner
from redline.space import Config, Space
from redline.tuner.budget import Budget
from redline.tuner.history import leaders_of
from redline.tuner.refinement import refiner
from redline.tuner.search import Refinement, Search


def folder_of(throughputs):
    folder = MemoryFolder()
    for number, throughput in enumerate(throughputs):
        folder.start(Config(checkpoint_ratio=number / 4), sampler="bayes" if number else "default")
        folder.finish(number, Measurement(status=Status.OK, throughput=throughput))
    return folder


class Measures(Runner):
    """Measures a refined configuration at this throughput, and others as recorded."""

    name = "measures"

    def __init__(self, folder, outcome):
        self._folder, self._outcome, self.order = folder, outcome, []

    def run(self, request):
        self.order.append(request.number)
        known = self._folder.trials()[request.number].measurement
        if known is not None and "strategy" not in request.config:
            return known
        return self._outcome


def searched(throughputs, outcome, found="0-3:ckpt"):
    folder, listener = folder_of(throughputs), RecordingListener()
    runner = Measures(folder, outcome)
    search = Search(run_folder=folder, sampler=None, runner=runner, budget=Budget(trials=1), listener=listener)
    made = found and Refinement(config=Config(strategy=found), predicted_throughput=150.0, summary="so many more")
    search.refine(lambda trials: made)
    search.confirm()
    return folder.trials(), runner.order, listener


def test_a_refined_configuration_that_is_faster_wins_after_being_measured_beside_the_uniform_winner():
    trials, order, listener = searched([60.0, 100.0, 90.0], Measurement(status=Status.OK, throughput=110.0))
    assert order[0] == 3 and {1, 3} <= set(order[1:])
    assert trials[3].sampler == REFINEMENT and trials[3].predicted_throughput == 150.0
    assert summary.best(trials).number == 3
    assert listener.messages == ["so many more"] and listener.ended_trials == [3]


@pytest.mark.parametrize(
    "outcome",
    [
        Measurement(status=Status.OK, throughput=99.0),
        Measurement(status=Status.OOM, reason="too much"),
        Measurement(status=Status.WRONG, reason="another loss"),
    ],
)
def test_a_slower_or_failed_refinement_leaves_the_uniform_winner(outcome):
    trials, _, _ = searched([60.0, 100.0, 80.0], outcome)
    assert summary.best(trials).number == 1
    assert trials[3].measurement.status is outcome.status


def test_no_refinement_is_tried_without_an_expected_gain():
    trials, order, listener = searched([60.0, 100.0], None, found=None)
    assert len(trials) == 2 and set(order) == {0, 1}
    assert listener.messages == [], "the refiner gives the reason"


@pytest.mark.parametrize(("known", "reason"), [(False, "there is no estimate"), (True, "cannot be traced")])
def test_without_predictions_the_winner_is_not_refined_with_a_reason(known, reason):
    class Untraceable:
        def facts(self, **variant):
            raise UsageError("the model cannot be traced")

    setup = TrainingSetup(devices=1, seq_len=1024, global_batch=8, precision="bf16")
    space = Space()
    space.choice("checkpoint_ratio", [0.0, 1.0])
    winner = Trial(number=0, config=space.at(0), measurement=Measurement(status=Status.OK, throughput=1.0))
    messages = []
    estimator = Estimator(Untraceable(), "a100-80gb", setup) if known else None
    assert refiner(estimator, space, 0.05, messages.append)([winner]) is None
    assert len(messages) == 1 and "not refined layer by layer" in messages[0] and reason in messages[0]


def test_callables_and_schedules_that_do_not_follow_blocks_are_refused():
    space = rl.Space()
    space.choice("micro_batch", [1, 2])
    with pytest.raises(UsageError, match="needs a workload"):
        rl.tune(lambda config: 1.0, space, layerwise=True)
    own = replace(rl.workload("gpt2-tiny"), schedule=lambda sch, config: None)
    with pytest.raises(UsageError, match="has its own"):
        rl.tune(own, layerwise=True)
    with pytest.raises(UsageError, match="none of these knobs"):
        rl.tune(rl.workload("gpt2-tiny"), space, layerwise=True)


def test_blocks_can_be_fixed_so_that_a_winner_can_be_measured_again():
    from redline.cli.options import fixes_of
    from redline.models.request import TrainingRequest
    from redline.tuner.request.target import resolve_task

    task = resolve_task(TrainingRequest("gpt2-tiny", fix=fixes_of(("micro_batch=8", "strategy=0-1:ckpt 2:- 3-5:ckpt"))))
    config = task.space.default()
    assert (config["strategy"], config["checkpoint_ratio"], config["micro_batch"]) == ("0-1:ckpt 2:- 3-5:ckpt", 0.0, 8)
    with pytest.raises(UsageError, match="blocks are a number or a range"):
        resolve_task(TrainingRequest("gpt2-tiny", fix={"strategy": "the first"}))
    with pytest.raises(UsageError, match="for 5 blocks, but the model has 6"):
        resolve_task(TrainingRequest("gpt2-tiny", fix={"strategy": "0-4:ckpt"}))


def test_a_search_refines_its_winner(tmp_path):
    out = tmp_path / "run"
    fix = {
        "tp": 1, "pp": 1, "zero": 1, "micro_batch": 2, "precision": "bf16", "attention": "sdpa", "fusion": False,
        "offload": "none", "fused_optimizer": True, "kernels": False,
    }  # fmt: skip
    asked = predicted(
        "gpt2-medium", "a100-40gb", devices=8, seq_len=1024, global_batch=64, memory_limit="5427MiB", fix=fix,
        override={"checkpoint_ratio": [0.0, 1.0]}, patience=0, out=out,
    )  # fmt: skip
    result = rl.tune("gpt2-medium", trials=2, layerwise=True, **asked)
    uniform, refined = result.trials[result.trials.sampler != REFINEMENT], result.all_trials[-1]
    assert len(uniform) == 2 and "ok" in list(uniform.status)
    assert refined.sampler == REFINEMENT and "checkpoint_ratio" not in refined.config
    assert 0 < sum(each.ckpt for each in of_blocks(refined.config["strategy"], 24)) < 24
    assert refined.predicted_throughput > uniform.throughput.max() and refined.predicted_memory_mib < 5427
    if refined.ok:
        assert refined.measurement.throughput == pytest.approx(refined.predicted_throughput, rel=0.5)
    # The table lists the refined trial, an earlier version's reader ignores it, and the run resumes with or without it.
    rows = list(csv.DictReader((out / "trials.csv").open()))
    assert rows[-1]["knob.strategy"] == refined.config["strategy"]
    assert "strategy" not in {name for config in leaders_of([out]) for name in config}
    again = rl.tune("gpt2-medium", trials=2, resume=True, **asked)
    assert len(again.all_trials) == 3 and "knob.strategy" in again.trials


def test_a_uniform_refinement_is_tried_only_if_it_was_not_measured():
    setup = TrainingSetup(devices=1, seq_len=1024, global_batch=8, precision="bf16")
    estimator = Estimator(Shape(layers=24, hidden=1024, heads=16, vocabulary=50000), "a100-80gb", setup)
    space = Space()
    space.choice("micro_batch", [8])
    space.choice("checkpoint_ratio", [0.0, 0.5, 1.0])
    none, half, _ = space

    def measured(number, config, throughput):
        return Trial(number=number, config=config, measurement=Measurement(status=Status.OK, throughput=throughput))

    messages = []
    refined = refiner(estimator, space, 0.05, messages.append)
    # Such a device needs no recomputation, whatever the measurements are.
    winner = measured(0, half, estimator(half).throughput)
    found = refined([winner])
    assert found.config == {"micro_batch": 8, "strategy": "0-23:-"}
    assert found.predicted_throughput > winner.measurement.throughput
    slower = measured(1, none, 0.9 * winner.measurement.throughput)
    assert messages == []
    assert refined([winner, slower]) is None
    assert messages == ["the winner is not refined layer by layer: no gain is expected"]
    assert refined([replace(winner, sampler=REFINEMENT)]) is None and len(messages) == 1
