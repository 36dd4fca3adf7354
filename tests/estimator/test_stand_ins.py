"""Stand-ins for blocks while a step is traced, and models whose operators need values."""

from typing import ClassVar

import pytest
import redline as rl
import torch
from redline.estimator.facts.traced import trace_facts
from redline.estimator.facts.tracing import Layout, trace_step
from redline.models.presets import PRESETS
from tiers import tiered
from torch import nn


def both(workload, **variant):
    layout = Layout.of(workload)
    return [trace_step(workload, layout, every_block=every, **variant) for every in (True, False)]


@pytest.mark.parametrize(
    "name, variant",
    tiered(
        [
            ("mixtral-tiny", {"precision": "bf16"}),  # a mixture of experts
            ("t5-tiny", {"precision": "bf16"}),  # two stacks, whose first blocks have the bias of all
        ],
        [
            ("llama-tiny", {"precision": "bf16"}),
            ("llama-tiny", {"precision": "fp32", "attention": "eager", "device_type": "cpu"}),
            ("gpt2-tiny", {"precision": "bf16_pure"}),  # tied
        ],
    ),
)
def test_tracing_three_blocks_of_a_kind_equals_tracing_all(name, variant):
    every, few = both(rl.workload(name), **variant)
    assert few == every


class Block(nn.Module):
    """Keeps an additional tensor if `wide` is set, and records that it ran."""

    ran: ClassVar[list[int]] = []

    def __init__(self, number: int, wide: bool) -> None:
        super().__init__()
        self.layer_idx, self.wide = number, wide
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        Block.ran.append(self.layer_idx)
        return x + (torch.relu(self.inner(x)).exp() if self.wide else torch.relu(self.inner(x)))


class Stack(nn.Module):
    def __init__(self, wide: tuple[bool, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(number, each) for number, each in enumerate(wide))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.mean()


def blocks_of(count):
    return Layout(tuple(f"blocks.{number}" for number in range(count)), {})


def stack(*wide: bool):
    return rl.Workload(
        model=lambda: Stack(wide),
        batch=lambda size, seed: (torch.zeros(size, 4), torch.zeros(size)),
        loss=lambda output, batch: output,
    )


def test_three_blocks_of_a_kind_run_and_the_rest_do_not():
    Block.ran = []
    trace_step(stack(*8 * [False]), blocks_of(8))
    assert Block.ran == [0, 1, 7]


def test_blocks_that_differ_in_what_they_do_are_kinds_of_their_own():
    wide = (False, True, False, True, False, True, False, True)
    workload, layout = stack(*wide), blocks_of(8)
    Block.ran = []
    few = trace_step(workload, layout)
    assert Block.ran == [0, 1, 2, 3, 6, 7]
    kept = [segment.saved.total for segment in few.segments if segment.block]
    assert kept[0::2] == 4 * [kept[0]] and kept[1::2] == 4 * [kept[1]] and kept[1] > kept[0]
    assert few == trace_step(workload, layout, every_block=True)


def test_per_layer_settings_of_the_configuration_distinguish_blocks():
    class Configured(Stack):
        def __init__(self) -> None:
            super().__init__(6 * (False,))
            self.config = type("Config", (), {"to_dict": lambda self: vars(self)})()
            self.config.layer_types = ["full", "sliding"] * 3
            for block in self.blocks:
                block.config = self.config

    workload = rl.Workload(
        model=Configured, batch=lambda size, seed: (torch.zeros(size, 4), torch.zeros(size)),
        loss=lambda output, batch: output,
    )  # fmt: skip
    Block.ran = []
    trace_step(workload, blocks_of(6))
    assert Block.ran == [0, 1, 2, 3, 4, 5]


def test_experts_count_with_the_rows_routed_to_them(tmp_path):
    facts = trace_facts(rl.workload("mixtral-tiny"), precision="fp32", folder=tmp_path)
    block = next(part for part in facts.parts if part.role == "block")
    experts = {(each.k, each.n): each for each in block.matmuls if each.count == 4}
    # 4 experts, 2 per token, gate and up projection together; 64 wide, 128 inside.
    assert {shape: (each.split, each.rows) for shape, each in experts.items()} == {
        (64, 256): ("column", 0.5), (128, 64): ("row", 0.5),
    }  # fmt: skip
    workload = rl.workload("mixtral-tiny")
    assert facts.parameters == sum(each.numel() for each in workload.build_model(workload.probe).parameters())


def test_a_model_whose_weights_are_drawn_by_values_is_traced(tmp_path):
    facts = trace_facts(rl.workload("vit-tiny"), precision="bf16", folder=tmp_path)
    assert facts.notes == () and facts.blocks == 6


def test_the_learned_bias_of_positions_gets_its_gradient(tmp_path):
    facts = trace_facts(rl.workload("t5-tiny"), attention="sdpa", folder=tmp_path)
    assert not [note for note in facts.notes if "backward" in note]


def test_parameters_of_unreached_blocks_are_known(tmp_path):
    class Stops(Stack):
        def forward(self, x):
            x = self.blocks[0](self.first(x))
            return self.blocks[1](x) if x.sum().item() > 0 else x

    workload = rl.Workload(
        model=lambda: Stops(5 * (False,)), batch=lambda size, seed: (torch.zeros(size, 4), torch.zeros(size)),
        loss=lambda output, batch: output,
    )  # fmt: skip
    with pytest.raises(rl.WorkloadError, match=f"{4 * 8 + 8 + 5 * (64 + 8)} parameters in 5 repeated blocks"):
        trace_facts(workload, folder=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_traced_forward_and_backward_and_has_all_its_parameters(name, tmp_path):
    workload = rl.workload(name)
    facts = trace_facts(workload, precision="bf16", folder=tmp_path)
    assert not [note for note in facts.notes if "cannot be traced" in note]
    with torch.device("meta"):
        named = workload.build_model(workload.probe).parameters()
    assert facts.parameters == sum(each.numel() for each in named)
    assert facts.blocks >= 4
