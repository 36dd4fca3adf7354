"""Tiny models for the schedule's tests."""

import pytest
import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


def transformer(name: str, device: str = "meta", dropout: float = 0.0, layers: int = 2):
    """A tiny GPT-2, BERT or Llama with a language-model head."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if name == "gpt2":
        config = GPT2Config(
            n_layer=layers,
            n_embd=32,
            n_head=4,
            vocab_size=96,
            n_positions=32,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **special,
        )
        cls = GPT2LMHeadModel
    elif name == "bert":
        config = BertConfig(
            num_hidden_layers=layers,
            hidden_size=32,
            num_attention_heads=4,
            intermediate_size=64,
            vocab_size=96,
            max_position_embeddings=32,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            **special,
        )
        cls = BertForMaskedLM
    else:
        config = LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            vocab_size=96,
            max_position_embeddings=32,
            attention_dropout=dropout,
            **special,
        )
        cls = LlamaForCausalLM
    with torch.device(device):
        return cls(config)


@pytest.fixture
def mlp(request):
    # Numeric tests draw weights from their seed.
    torch.manual_seed(request.getfixturevalue("seed") if "seed" in request.fixturenames else 0)
    return MLP()


@pytest.fixture
def make_transformer():
    return transformer


@pytest.fixture
def tokens(request):
    number = request.getfixturevalue("seed") if "seed" in request.fixturenames else 0
    return torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1 + number))
