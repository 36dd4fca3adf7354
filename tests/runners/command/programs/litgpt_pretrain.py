"""LitGPT's command with data and an optimizer of one's own, which have the clock: LitGPT has no callbacks.

python litgpt_pretrain.py pretrain pythia-14m --data litgpt_pretrain.Tokens --optimizer litgpt_pretrain.TimedAdamW

Its loss is not passed to an optimizer; the sum of the gradients is recorded in its place.
"""

import sys
from typing import ClassVar

import torch
from clock import Clock
from cost import wait
from litgpt.__main__ import main
from litgpt.data import DataModule
from torch.utils.data import DataLoader, default_collate

VOCABULARY, LENGTH = 128, 16


def collate(pieces: list[torch.Tensor]) -> torch.Tensor:
    # LitGPT compiles its model, so the known cost is in the batches.
    wait(len(pieces))
    return default_collate(pieces)


def collate_for_training(pieces: list[torch.Tensor]) -> torch.Tensor:
    TimedAdamW.batches.append(len(pieces))
    return collate(pieces)


class Tokens(DataModule):
    def connect(self, tokenizer=None, batch_size: int = 1, max_seq_length: int | None = None, **kwargs) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        tokens = torch.randint(VOCABULARY, (4096, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        return DataLoader(list(tokens), batch_size=self.batch_size, collate_fn=collate_for_training)

    def val_dataloader(self) -> DataLoader:
        tokens = torch.randint(VOCABULARY, (16, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        return DataLoader(list(tokens), batch_size=4, collate_fn=collate)


class TimedAdamW(torch.optim.AdamW):
    batches: ClassVar[list[int]] = []
    """Samples of the batches since the last step."""

    def __init__(self, params, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)
        self.clock = Clock()

    def step(self, closure=None):
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        self.clock.loss(sum(gradient.double().sum() for gradient in gradients))
        result = super().step(closure)
        self.clock.step(sum(self.batches))
        self.batches.clear()
        return result


if __name__ == "__main__":
    # LitGPT imports the classes by name.
    sys.modules["litgpt_pretrain"] = sys.modules["__main__"]
    main()
