"""Models that loop over the sequence in Python: traces of them are bounded."""

import pytest
import torch
from redline.base.errors import WorkloadError
from redline.estimator.facts.traced import trace_facts
from redline.models import Workload
from redline.models.data import TokenBatches
from redline.models.flops import count_flops
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


def test_a_trace_of_a_loop_over_the_sequence_ends_at_its_bound_with_the_reason():
    Looping.steps = 0
    found = count_flops(looping(LONG))
    assert found.per_sample is None and Looping.steps < LONG
    assert "calls torch more than 3,120 times, as a loop over the sequence does" in found.reason


@pytest.mark.slow
def test_an_estimate_of_a_loop_over_the_sequence_is_refused_at_the_bound(tmp_path):
    Looping.steps = 0
    with pytest.raises(WorkloadError, match="calls torch more than .* as a loop over the sequence does"):
        trace_facts(looping(LONG), folder=tmp_path)
    assert Looping.steps < LONG
