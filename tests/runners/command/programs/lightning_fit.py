"""A training by Lightning's Trainer.

python lightning_fit.py --batch 8 --accumulate 2
"""

import argparse

import lightning
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning_net import Classifier, Samples, StepTimes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        val_check_interval=options.accumulate * options.steps // 2,
        check_val_every_n_epoch=None,
        logger=False,
        enable_checkpointing=False,
        callbacks=[TQDMProgressBar(), StepTimes()],
    )
    train_samples = options.batch * options.accumulate * options.steps * options.devices
    trainer.fit(Classifier(), datamodule=Samples(options.batch, train_samples))


if __name__ == "__main__":
    main()
