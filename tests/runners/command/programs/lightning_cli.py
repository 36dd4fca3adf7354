"""A training by LightningCLI.

python lightning_cli.py fit --trainer.max_steps 40 --trainer.accumulate_grad_batches 4 --data.batch_size 8
"""

from lightning.pytorch.cli import LightningCLI
from lightning_net import Classifier, Samples, StepTimes


def main() -> None:
    defaults = {"accelerator": "cpu", "devices": 1, "max_steps": 40, "callbacks": [StepTimes()]}
    LightningCLI(Classifier, Samples, trainer_defaults=defaults, seed_everything_default=0)


if __name__ == "__main__":
    main()
