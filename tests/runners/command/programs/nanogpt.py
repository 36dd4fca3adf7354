"""A loop like nanoGPT's `train.py`: its own batches without a DataLoader, and an evaluation every few iterations.

python nanogpt.py --batch_size=4 --gradient_accumulation_steps=2 --max_iters=40
"""

import math
import sys
import time
from pathlib import Path

import torch
from clock import Clock
from cost import wait
from torch import nn
from torch.nn import functional as F

out_dir = ""
batch_size = 4
gradient_accumulation_steps = 1
max_iters = 40
eval_interval = 20
eval_iters = 3
block_size = 32
vocab_size = 96
n_embd = 32
n_head = 2
learning_rate = 1e-3

for word in sys.argv[1:]:
    key, _, value = word.removeprefix("--").partition("=")
    if key not in globals():
        raise ValueError(f"Unknown config key: {key}")
    globals()[key] = type(globals()[key])(value)
    print(f"Overriding: {key} = {value}")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        batch, length, width = x.shape
        heads = (batch, length, n_head, width // n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(Block(), Block())
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        wait(len(idx))
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        _, loss = model(*get_batch())
        losses[k] = loss.item()
    model.train()
    return losses.mean()


torch.manual_seed(1337)
data = torch.randint(vocab_size, (20_000,))
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
clock = Clock()
tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
print(f"tokens per iteration will be: {tokens_per_iter:,}")
X, Y = get_batch()
t0 = time.time()
for iter_num in range(max_iters):
    lr = learning_rate * 0.5 * (1 + math.cos(math.pi * iter_num / max_iters))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0:
        with clock.apart("evaluation"):
            val_loss = estimate_loss()
        print(f"step {iter_num}: val loss {val_loss:.4f}")
        if out_dir:
            with clock.apart("saving"):
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(out_dir) / "ckpt.pt"
                )
    for _ in range(gradient_accumulation_steps):
        _, loss = model(X, Y)
        clock.loss(loss.item())
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    clock.step(batch_size * gradient_accumulation_steps)
    t1 = time.time()
    dt, t0 = t1 - t0, t1
    print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}, time {dt * 1000:.2f}ms")
