"""A user's own loops: modules, data, an optimizer, and the same training in plain PyTorch."""

import torch
from torch import nn

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "vocab_size": 97, "max_position_embeddings": 40,
}  # fmt: skip
SAMPLES, TOKENS, GLOBAL_BATCH, STEPS = 20, 16, 8, 5
CLIP = 0.5


def make_optimizer(params):
    # With the usual epsilon of 1e-8 mere rounding of gradients would move weights.
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-2)


def make_llama(seed=0, **changed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **changed))


def make_data(ignored=True):
    """Returns samples of tokens that ignore varying numbers of labels, so that micro-batches have different weights."""
    generator = torch.Generator().manual_seed(1)
    out = []
    for number in range(SAMPLES):
        ids = torch.randint(SIZES["vocab_size"], (TOKENS,), generator=generator)
        skipped = torch.arange(TOKENS) < (number % 9 if ignored else 0)
        out.append({"input_ids": ids, "labels": torch.where(skipped, -100, ids)})
    return out


class Net(nn.Module):
    """A module that is not a Hugging Face model: it has no loss of its own, and samples are tuples."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for each in self.layers:
            x = torch.relu(each(x))
        return self.head(x)


def cross_entropy(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def make_points():
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(6, generator=generator), number % 3) for number in range(SAMPLES)]


def plain(model, dataset, loss_of, steps=STEPS, clip=CLIP):
    """Runs the loop in plain PyTorch on one process and returns losses and weights."""
    from redline.trainer.data import FromDataset

    samples, optimizer, losses = FromDataset(dataset), make_optimizer(model.parameters()), []
    for step in range(steps):
        loss = loss_of(model, samples(step * GLOBAL_BATCH, GLOBAL_BATCH))
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: each.detach().clone() for name, each in model.state_dict().items()}


def own_loss(model, batch):
    return model(**batch).loss
