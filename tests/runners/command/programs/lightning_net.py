"""What the two programs on Lightning train, and their clock as a callback."""

import lightning
import torch
from clock import Clock
from lightning.pytorch.callbacks import Callback
from small import Net, samples
from torch import nn
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = Net()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Samples(lightning.LightningDataModule):
    def __init__(self, batch_size: int = 8, train_samples: int = 4096) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.train_samples = train_samples

    def train_dataloader(self) -> DataLoader:
        return DataLoader(samples(self.train_samples), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(samples(self.batch_size * 3), batch_size=self.batch_size)


class StepTimes(Callback):
    def on_fit_start(self, trainer, pl_module):
        self.clock = Clock(trainer.global_rank)
        self.steps = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        # Lightning gives the loss divided by the accumulated batches.
        self.clock.loss(outputs["loss"].item())
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self.clock.step(len(batch[0]) * trainer.accumulate_grad_batches * trainer.world_size)

    def on_validation_start(self, trainer, pl_module):
        self.validation = self.clock.apart("evaluation")
        self.validation.__enter__()

    def on_validation_end(self, trainer, pl_module):
        self.validation.__exit__(None, None, None)
