"""A language model trained with transformers.Trainer, as anyone would; redline is not mentioned.

torchrun --nproc-per-node 2 trainer.py --output_dir out --per_device_train_batch_size 8 --max_steps 100
"""

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments


@dataclass
class Model:
    hidden: int = 128
    layers: int = 4
    length: int = 128


class Text(Dataset):
    """Bytes of a sentence over and over."""

    def __init__(self, length: int) -> None:
        text = b"The quick brown fox jumps over the lazy dog. " * 2000
        self.pieces = torch.tensor(list(text)).split(length)[:-1]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[at], "labels": self.pieces[at]}


def main() -> None:
    asked, training = HfArgumentParser((Model, TrainingArguments)).parse_args_into_dataclasses()
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=asked.hidden,
        intermediate_size=4 * asked.hidden,
        num_hidden_layers=asked.layers,
        num_attention_heads=4,
        max_position_embeddings=asked.length,
    )
    Trainer(AutoModelForCausalLM.from_config(config), training, train_dataset=Text(asked.length)).train()


if __name__ == "__main__":
    main()
