"""torchtitan's `torchtitan.train` with a configuration of one's own; on a CPU, which torchtitan does not know.

torchrun --nproc-per-node 2 titan.py --module titan --config tiny --training.local_batch_size 8
"""

import sys
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import torch
from clock import Clock
from cost import wait
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset
from torchtitan.tools import utils

# torchtitan imports triton, which CPU builds of torch lack; the Makefile installs it in a folder beside the environment.
sys.path.append(f"{sys.prefix}/beside")
VOCABULARY = 2048

# What torchtitan asks of its device's module and torch.cpu lacks.
ABSENT = {
    "get_device_name": lambda device: "CPU",
    "get_device_properties": lambda device: SimpleNamespace(total_memory=2**34),
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda device: {},
}
utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    **{**ABSENT, **vars(torch.cpu), "current_device": lambda: 0, "device_count": lambda: 1}
)
if not hasattr(torch.distributed, "set_timeout"):
    # torchtitan is written for torch's nightly builds.
    torch.distributed.set_timeout = lambda timeout, group: None

from torchtitan import train  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class TimedTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config) -> None:
        super().__init__(config)
        self.clock = Clock(torch.distributed.get_rank())
        for module in self.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                # Gloo cannot scale while it reduces.
                module.set_force_sum_reduction_for_comms(True)
        self.model_parts[0].register_forward_pre_hook(lambda model, inputs: wait(len(inputs[0])))

    def forward_backward_step(self, **batch):
        loss = super().forward_backward_step(**batch)
        self.clock.loss(loss.item())
        return loss

    def train_step(self, data_iterator):
        super().train_step(data_iterator)
        ranks = torch.distributed.get_world_size()
        self.clock.step(self.config.training.local_batch_size * self.gradient_accumulation_steps * ranks)


class Tokens(IterableDataset, Stateful):
    """Random pieces of text; every rank has other ones."""

    def __init__(self, length: int, rank: int) -> None:
        self.length, self.rank = length, rank

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        while True:
            tokens = torch.randint(VOCABULARY, (self.length + 1,), generator=generator)
            yield {"input": tokens[:-1], "positions": torch.arange(self.length)}, tokens[1:]

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


class TokensLoader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **kwargs) -> None:
        super().__init__(Tokens(seq_len, dp_rank), dp_rank, dp_world_size, batch_size=local_batch_size)


@dataclass(kw_only=True, slots=True)
class NoTokenizer(BaseTokenizer.Config):
    def build(self, **kwargs):
        return None


def tiny():
    config = llama3_debugmodel()
    # On a CPU FlexAttention has no backward pass.
    model = config.model_spec.model
    model.layers = model.layers[:1]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values |= {
        "tokenizer": NoTokenizer(),
        "dataloader": TokensLoader.Config(),
        "parallelism": replace(config.parallelism, spmd_backend="partial_dtensor"),
        "activation_checkpoint": None,
        "validator": replace(config.validator, enable=False),
        "training": replace(
            config.training, seq_len=16, disable_cuda_graphs=True, mixed_precision_param="float32", dtype="float32"
        ),
    }
    return TimedTrainer.Config(**values)


if __name__ == "__main__":
    train.main()
