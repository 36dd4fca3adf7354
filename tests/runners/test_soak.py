"""The steps of a soak: their lengths and data, and that every form of parallelism supports them."""

import math
from dataclasses import replace

import pytest
import torch
from redline.models.data import ImageBatches
from redline.models.huggingface import hugging_face_workload
from redline.models.workload import Workload
from redline.runners.trial.soak import SoakPlan, SoakReport, soak
from redline.training import Training

CPU = torch.device("cpu")


def workload(seq_len=32, **changed):
    from redline.models.architecture import Architecture

    arguments = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "intermediate_size": 64, "vocab_size": 300, "max_position_embeddings": 64, "bos_token_id": None,
                 "eos_token_id": None}  # fmt: skip
    model = Architecture(model_type="llama", arguments={**arguments, **changed}, task="causal")
    return hugging_face_workload(model, name="small", spec="small", seq_len=seq_len, global_batch=8)


def images():
    return Workload(
        model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)),
        batch=lambda size, seed: tuple(ImageBatches(channels=3, height=2, width=2, classes=3)(size, seed).values()),
        loss=lambda output, batch: torch.nn.functional.cross_entropy(output, batch[1]),
        global_batch=8,
    )


class Seen:
    """Records the batches that a training gets."""

    def __init__(self, training):
        self.batches, passes = [], training.passes

        def noted(batches=None, watch=None):
            self.batches.append(batches)
            return passes(batches, watch)

        training.passes = noted


def test_lengths_vary_between_an_eighth_and_the_whole_with_the_longest_first_and_last():
    lengths = SoakPlan().lengths(workload(64), seed=3)
    assert len(lengths) == 202 and lengths[0] == lengths[-1] == 64
    assert min(lengths) == 8 and max(lengths) == 64 and len(set(lengths)) > 50
    assert lengths == SoakPlan().lengths(workload(64), seed=3) != SoakPlan().lengths(workload(64), seed=4)


@pytest.mark.parametrize("seq_len", [2, 3, 9])
def test_no_length_is_too_short_to_predict_a_token(seq_len):
    lengths = [each or seq_len for each in SoakPlan().lengths(workload(seq_len), seed=0)]
    assert min(lengths) >= 2 and max(lengths) == seq_len


def test_samples_of_one_length_only_are_drawn_afresh():
    assert SoakPlan(steps=3).lengths(images(), seed=0) == [None] * 5
    training = Training(images(), {"micro_batch": 4}, CPU)
    seen = Seen(training)
    found = soak(training, SoakPlan(steps=3), 0, lambda: 0.0)
    pixels = [float(batches[0][0].sum()) for batches in seen.batches]
    assert len(set(pixels)) == 5 and found.summary == "5 steps of fresh data"


def test_batches_are_shorter_not_padded_and_cut_into_the_micro_batches_of_the_configuration():
    training = Training(workload(), {"micro_batch": 2}, CPU)
    seen = Seen(training)
    before = [each.detach().clone() for each in training.model.parameters()]
    found = soak(training, SoakPlan(steps=6), 1, lambda: 0.0)
    lengths = SoakPlan(steps=6).lengths(workload(), 1)
    shapes = [[tuple(each["input_ids"].shape) for each in batches] for batches in seen.batches]
    assert shapes == [[(2, length)] * 4 for length in lengths]
    assert (found.steps, found.shortest, found.longest) == (8, min(lengths), 32)
    assert any((a != b).any() for a, b in zip(before, training.model.parameters())), "the optimizer steps"
    assert all(each.grad is None for each in training.model.parameters())


def test_a_non_finite_loss_in_any_step_is_reported():
    training = Training(workload(), {"micro_batch": 8}, CPU)
    passes, number = training.passes, iter(range(100))
    training.passes = lambda batches: passes(batches) * (math.nan if next(number) == 2 else 1.0)
    assert math.isnan(soak(training, SoakPlan(steps=4), 0, lambda: 0.0).loss)


def test_compilations_during_the_soak_are_counted():
    training = Training(workload(), {"micro_batch": 8}, CPU)
    compiled = [0.0, 0.0, 1.5, 1.5, 1.5, 1.5, 4.0, 4.0, 4.0, 4.0]
    found = soak(training, SoakPlan(steps=2), 0, lambda: compiled.pop(0))
    assert (found.compiled, found.seconds_compile) == (2, 4.0)
    assert found.summary.endswith(", 2 of them with 4 s of compilation")


def test_lengths_beyond_the_recompilation_limit_are_reported():
    def schedule(sch, config):
        sch["model.layers.0"].compile(backend="eager", dynamic=False)

    def found(steps):
        torch.compiler.reset()
        training = Training(replace(workload(), schedule=schedule), {"micro_batch": 8}, CPU)
        training.step()
        return soak(training, SoakPlan(steps=steps), 0, lambda: 0.0)

    few, many = found(4), found(20)
    assert (few.refused, many.refused) == (False, True)
    assert "further lengths ran uncompiled" in many.summary and "uncompiled" not in few.summary


def soaked(config):
    training = Training(workload(), config, CPU, rank=torch.distributed.get_rank(), world_size=2)
    seen = Seen(training)
    found = soak(training, SoakPlan(steps=6), 0, lambda: 0.0)
    return found, [batches[0]["input_ids"] for batches in seen.batches]


@pytest.mark.parametrize(
    "config",
    [
        {"tp": 2, "micro_batch": 4, "sequence_parallel": True},
        {"pp": 2, "micro_batch": 2},
        {"dp": 2, "zero": 3, "micro_batch": 2},
        {"dp": 2, "micro_batch": 4},
    ],
    ids=str,
)
def test_ranks_soak_together(two, config):
    (first, mine), (second, others) = two.run(soaked, config)
    assert isinstance(first, SoakReport) and math.isfinite(first.loss)
    assert first.loss == pytest.approx(second.loss)
    lengths = [each.shape[1] for each in mine]
    assert lengths == [each.shape[1] for each in others] and len(set(lengths)) > 3
    if config.get("sequence_parallel"):
        assert all(length % 2 == 0 for length in lengths)
    equal = [bool((a == b).all()) for a, b in zip(mine, others)]
    assert equal == [config.get("dp", 1) == 1] * 8, "replicas have samples of their own"
