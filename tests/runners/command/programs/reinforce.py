"""REINFORCE on a policy that generates tokens, as trainers of language models do: generate, score, update.

python reinforce.py --batch 8 --updates 2
"""

import argparse

import torch
from clock import Clock
from cost import wait
from torch import nn

VOCABULARY, LENGTH = 16, 6


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCABULARY, 32), nn.Dropout(0.1)
        self.rnn, self.head = nn.GRU(32, 32, batch_first=True), nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        hidden, _ = self.rnn(self.dropout(self.embedding(tokens)))
        return self.head(hidden)


@torch.no_grad()
def generate(policy: Policy, batch: int) -> torch.Tensor:
    policy.eval()
    tokens = torch.zeros(batch, 1, dtype=torch.long)
    for _ in range(LENGTH):
        wait(1)
        probabilities = policy(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
    policy.train()
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8, help="sequences of an update")
    parser.add_argument("--updates", type=int, default=2, help="of each generation")
    parser.add_argument("--steps", type=int, default=40, help="updates in all")
    options = parser.parse_args()
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    clock = Clock()
    for iteration in range(options.steps // options.updates):
        with clock.apart("generation"):
            tokens = generate(policy, options.batch * options.updates)
        reward = (tokens[:, 1:] == 3).float().sum(1)
        advantage = reward - reward.mean()
        for sequences, weight in zip(tokens.split(options.batch), advantage.split(options.batch)):
            wait(len(sequences))
            log_probabilities = policy(sequences[:, :-1]).log_softmax(-1)
            chosen = log_probabilities.gather(-1, sequences[:, 1:, None]).squeeze(-1).sum(1)
            loss = -(weight * chosen).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.loss(loss.item())
            clock.step(len(sequences))
        print(f"iteration {iteration} reward {reward.mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
