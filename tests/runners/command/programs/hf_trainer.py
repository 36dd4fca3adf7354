"""A language model trained with transformers.Trainer.

python hf_trainer.py --output_dir out --per_device_train_batch_size 8 --max_steps 40 --use_cpu
"""

import os
from dataclasses import dataclass

import torch
from clock import Clock
from small import pause
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

LENGTH = 16


@dataclass
class Limits:
    largest_batch: int = 1024
    """A larger batch raises torch.OutOfMemoryError."""


class Llama(LlamaForCausalLM):
    largest_batch = 1024

    def forward(self, input_ids=None, labels=None, **inputs):
        if self.training and len(input_ids) > self.largest_batch:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        pause(len(input_ids))
        return super().forward(input_ids=input_ids, labels=labels, **inputs)


class Text(Dataset):
    def __init__(self, count: int) -> None:
        tokens = torch.tensor(list(b"The quick brown fox jumps over the lazy dog. " * count))
        self.pieces = tokens.split(LENGTH)[:-1]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


class StepTimes(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.clock.step(state.train_batch_size * args.gradient_accumulation_steps * args.world_size)


class TimedTrainer(Trainer):
    def __init__(self, clock: Clock, *args, **kwargs) -> None:
        super().__init__(*args, callbacks=[StepTimes(clock)], **kwargs)
        self.clock = clock

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        result = super().compute_loss(model, inputs, return_outputs, **kwargs)
        if model.training:
            self.clock.loss(result[0] if return_outputs else result)
        return result

    def evaluate(self, *args, **kwargs):
        with self.clock.apart("evaluation"):
            return super().evaluate(*args, **kwargs)


def main() -> None:
    limits, arguments = HfArgumentParser((Limits, TrainingArguments)).parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = Llama(config)
    model.largest_batch = limits.largest_batch
    clock = Clock(int(os.environ.get("RANK", 0)))
    trainer = TimedTrainer(clock, model, arguments, train_dataset=Text(500), eval_dataset=Text(12))
    trainer.train()


if __name__ == "__main__":
    main()
