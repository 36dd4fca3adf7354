"""A training on Lightning; its only output is a progress bar.

python fit.py --batch 16 --devices 2 --strategy ddp --precision bf16-mixed
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True)
        self.net = nn.Sequential(
            nn.Embedding(256, 128), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 256)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (tokens,) = batch
        return nn.functional.cross_entropy(self.net(tokens).flatten(0, 1).float(), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--folder", default=".")
    options = parser.parse_args()
    loader = DataLoader(TensorDataset(torch.randint(256, (8192, 128))), batch_size=options.batch)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=options.devices,
        strategy=options.strategy,
        precision=options.precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=options.folder,
        # The default bar is rich's where that is installed, which shows nothing but in a terminal.
        callbacks=[TQDMProgressBar()],
    )
    trainer.fit(Net(), loader)


if __name__ == "__main__":
    main()
