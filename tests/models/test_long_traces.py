"""Models that loop over the sequence in Python: traces of them are bounded, and their operations follow from short samples."""

import pytest
import torch
from redline.estimator.facts.traced import TracingError, trace_facts
from redline.models import Workload
from redline.models.architecture import Architecture
from redline.models.data import TokenBatches
from redline.models.flops import count_flops
from redline.models.huggingface import hugging_face_workload
from redline.models.kernels import kernels_obstacle
from redline.models.skeleton import with_tokens
from torch import nn
from torch.nn import functional as F

LONG, WIDTH, VOCABULARY = 3000, 8, 32


class Looping(nn.Module):
    """A recurrent network in Python, and attention over its states."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, labels=None):
        x, states = self.embed(input_ids), []
        state = torch.zeros_like(x[:, 0])
        for position in range(x.shape[1]):
            Looping.steps += 1
            state = torch.tanh(self.inner(state) + x[:, position])
            states.append(state)
        found = torch.stack(states, 1)
        logits = self.head(torch.softmax(found @ found.transpose(1, 2), -1) @ found)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def looping(tokens):
    batch = TokenBatches(task="causal", seq_len=tokens, vocab_size=VOCABULARY)
    return Workload(model=Looping, batch=batch, loss=lambda output, batch: output["loss"], seq_len=tokens)


def test_operations_of_a_loop_over_the_sequence_follow_from_short_samples():
    """Products of the loop are linear in the tokens, those of attention quadratic: the extrapolation is exact."""
    Looping.steps = 0
    found = count_flops(looping(LONG)).per_sample
    assert Looping.steps < LONG, "the trace ended at its bound"
    # Forward and backward; the first state is zero, so that it has no gradient.
    linear = 3 * 2 * WIDTH * (WIDTH + VOCABULARY) * LONG - 2 * WIDTH**2
    attention = 3 * 2 * 2 * WIDTH * LONG**2
    assert found == linear + attention
    assert count_flops(with_tokens(looping(LONG), 100)).per_sample == count_flops(looping(100)).per_sample


def test_samples_of_a_fixed_length_are_answered_with_the_reason():
    tokens = TokenBatches(task="causal", seq_len=LONG, vocab_size=VOCABULARY)
    workload = Workload(
        model=Looping,
        batch=lambda size, seed: tokens(size, seed),
        loss=lambda output, batch: output["loss"],
        seq_len=LONG,
    )
    assert with_tokens(workload, 16) is None
    found = count_flops(workload)
    assert found.per_sample is None
    assert "calls torch more than 3,120 times, as a loop over the sequence does" in found.reason


@pytest.mark.slow
def test_the_space_of_a_small_mamba_does_not_wait_for_its_scan(monkeypatch):
    tokens = 2048
    arguments = {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 4, "vocab_size": 500}
    made = hugging_face_workload(
        Architecture(model_type="mamba", arguments=arguments, task="causal"), name="mamba", spec="mamba", seq_len=tokens
    )
    calls = []
    matmul = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda *args, **kwargs: (calls.append(1), matmul(*args, **kwargs))[1])
    assert kernels_obstacle(made) is None
    assert 0 < len(calls) < tokens // 2, "there is one for each position and block"


@pytest.mark.slow
def test_an_estimate_of_a_loop_over_the_sequence_is_refused_at_the_bound(tmp_path):
    Looping.steps = 0
    with pytest.raises(TracingError, match="calls torch more than .* as a loop over the sequence does"):
        trace_facts(looping(LONG), folder=tmp_path)
    assert Looping.steps < LONG
