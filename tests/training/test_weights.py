"""Presets and transformers' architectures: weights by rules have the values and the spread that constructors give them.

Architectures are made small from their configuration classes alone: numbers of layers, vocabularies and experts are
reduced to a few, and widths are divided by a common factor, so that heads still fit their widths. The first of FACTORS
with which transformers builds the model is used. An architecture that cannot be reduced in this way is skipped with the
reason.
"""

import random
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from redline.base._transformers import quiet
from redline.models import Workload, workload
from redline.models.presets import PRESETS
from redline.schedule import build, create_schedule, full_state_dict
from redline.schedule.materialise import uninitialised
from redline.training import Training
from redline.training.training import seeded
from same_model import assert_same, held
from tiers import diagonal
from torch import nn

CPU = torch.device("cpu")
FACTORS = (16, 8, 4, 32, 2, 1)
MOST_PARAMETERS = 20_000_000
TASKS = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),
}
QUICK = (
    "causal/falcon", "causal/gptj", "causal/mamba", "image/swin", "image/vit", "masked/deberta-v2",
    "masked/mobilebert", "seq2seq/fsmt", "seq2seq/t5",
)  # fmt: skip
"""One for each way to make weights: alibi and masks, sinusoids, by hand, truncated, ties."""

_LAYERS = re.compile(r"(^|_)(layers?|blocks|depth)$|n_layer$")
_EXPERTS = re.compile(r"experts$")
_WIDTHS = re.compile(r"channels|d_ff|d_inner|d_kv|d_model|dim|embd|embed|ffn|ffw|hidden|inner|intermediate|rank|width")
_NO_WIDTHS = re.compile(
    r"base|conv|drop|every|factor|groups|heads|image_size|interval|kernel|patch|per|period|start|state|step|theta|top"
)


def all_architectures():
    with quiet():
        from transformers.models.auto import modeling_auto
    return [f"{task}/{name}" for task, (names, _) in TASKS.items() for name in getattr(modeling_auto, names)]


def reduced(name, value, factor):
    """Returns a configuration's number reduced, or unchanged."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if "vocab" in name:
        return min(value, 160)
    if name.endswith("token_id"):
        return value if value < 150 else 3
    if _LAYERS.search(name) and "shared" not in name:
        return min(value, 2)
    if _EXPERTS.search(name):
        return min(value, 8)
    width = _WIDTHS.search(name) and not _NO_WIDTHS.search(name)
    return max(value // factor, 4) if width and value >= 32 and value % factor == 0 else value


def small_configuration(kind, factor, **arguments):
    """Returns a configuration of a class with its numbers reduced."""
    from transformers import PretrainedConfig

    changed = {}
    for name, value in vars(kind(**arguments)).items():
        if isinstance(value, PretrainedConfig):
            changed[name] = small_configuration(type(value), factor).to_dict()
        elif name == "depths":
            changed[name] = type(value)(1 for _ in value)
        elif name == "attention_types":  # types of GPT-Neo's layers, with a repeat count
            changed[name] = [[["global", "local"], 1]]
        elif isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
            small = [reduced(name, each, factor) for each in value]
            if _WIDTHS.search(name):
                changed[name] = type(value)(small)
        elif not isinstance(value, (list, tuple, dict)) and reduced(name, value, factor) != value:
            changed[name] = reduced(name, value, factor)
    return kind(**{**arguments, **changed})


def small(name):
    """Returns a function that makes an architecture from a small configuration, or a text with the reason against it."""
    import transformers

    task, _, kind = name.partition("/")
    if kind not in transformers.CONFIG_MAPPING:
        return f"transformers has no configuration of {kind}"
    kind, reason = transformers.CONFIG_MAPPING[kind], []
    auto = getattr(transformers, TASKS[task][1])
    for factor in FACTORS:
        try:
            with torch.device("meta"):
                model = auto.from_config(small_configuration(kind, factor))
        except Exception as error:  # a library of 300 models may raise anything on unexpected sizes
            reason.append(f"{type(error).__name__}: {error}")
            continue
        if sum(each.numel() for each in model.parameters()) < MOST_PARAMETERS:
            return lambda: auto.from_config(small_configuration(kind, factor), dtype=torch.float32)
        reason.append("it is too large")
    return f"no small configuration: {' '.join(reason[0].split())[:120]}"


def check(make, seed=5):
    """Checks that constants and computed buffers are equal, and that drawn weights have the same spread."""
    with seeded(seed, CPU), CPU, quiet():
        expected = held(make())
    with torch.device("meta"), quiet():
        model = make()
    assert all(each.is_meta for each in model.parameters())
    if (path := uninitialised(model)) is not None:
        return path
    made = held(build(create_schedule(model), seed=seed)[0])
    assert list(made) == list(expected)
    for name, tensor in made.items():
        values, constructed = tensor.detach().double(), expected[name].detach().double()
        assert tensor.dtype == expected[name].dtype and values.shape == constructed.shape, name
        drawn = isinstance(expected[name], nn.Parameter) and constructed.numel() > 1 and constructed.std() > 0
        if drawn and not torch.equal(values, constructed):
            # The standard error of a standard deviation, of a uniform or normal distribution, is below 0.71 by sqrt(n).
            assert values.std() == pytest.approx(float(constructed.std()), rel=0.02 + 7 / constructed.numel() ** 0.5), (
                name
            )
        else:
            assert torch.equal(values, constructed), name
    return None


BY_CONSTRUCTORS: dict[str, str] = {}
"""Architectures that are built on the CPU, with a tensor that no rule of theirs sets."""


# -- presets and named architectures -------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_weights_as_its_constructor_gives(name):
    model = workload(name).model
    if PRESETS[name].model_type == "wide_resnet":
        assert check(model if name.endswith("tiny") else partial(model, width=1)) is None
    elif name.endswith("tiny"):
        assert check(lambda: model({})) is None
    else:
        kind = type(model.configuration())
        hidden, heads = (model.arguments.get(each, 0) for each in ("hidden_size", "num_attention_heads"))
        odd = heads and hidden // 16 % heads  # Gemma 3 refuses a width that its heads do not divide
        factor = 12 if odd and hidden % 12 == 0 and hidden // 12 % heads == 0 else 16
        configuration = small_configuration(kind, factor, **model.arguments)
        assert check(lambda: replace(model, arguments=configuration.to_dict())({})) is None


@pytest.mark.parametrize("name", QUICK)
def test_an_architecture_has_weights_as_its_constructor_gives(name):
    make = small(name)
    assert callable(make), make
    assert check(make) == BY_CONSTRUCTORS.get(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted({*all_architectures()} - set(QUICK)))
def test_every_architecture_has_weights_as_its_constructor_gives(name):
    make = small(name)
    if isinstance(make, str):
        pytest.skip(make)
    assert check(make) == BY_CONSTRUCTORS.get(name)


# -- weights in training -------------------------------------------------------------------------------------


class Net(nn.Module):
    """A model that creates weights in more ways than rules cover."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).bool())
        self.register_buffer("steps", torch.full((8,), 3, dtype=torch.uint8), persistent=False)
        self.gain = nn.Parameter(torch.full((8,), 0.5))
        self.register_buffer("noise", torch.tensor(np.random.rand(8), dtype=torch.float32))
        self.shift = random.random()
        self.blocks[0].weight.data *= random.random()

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) @ self.mask.float() * self.gain / self.steps + self.noise
        return x + self.shift


class Looking(Net):
    """A model whose constructor reads the weights that it has drawn."""

    def __init__(self):
        super().__init__()
        self.gain.data.mul_(self.blocks[1].weight.max().item())


def pairs(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 8, generator=generator)


def of_model(model):
    return Workload(
        model=model,
        batch=pairs,
        loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]),
        global_batch=8,
    )


@pytest.mark.parametrize("model", [Net, Looking])
def test_training_starts_from_the_weights_of_a_constructor_of_ones_own(model):
    made = [Training(of_model(model), {"micro_batch": 8}, CPU, seed=seed).model for seed in (7, 7, 8)]
    with seeded(7, CPU), CPU:
        expected = model()
    assert_same(made[0], expected)
    assert_same(made[1], expected)
    assert made[0].shift == expected.shift and made[0].mask.sum() == 36 and made[0].steps.tolist() == [3] * 8
    assert not any(torch.equal(a, b) for a, b in zip(made[0].blocks.parameters(), made[2].blocks.parameters()))


def weights(made, spread):
    """Whole parameters, and buffers, of a rank."""
    import torch.distributed as dist

    distributed = {"rank": dist.get_rank(), "world_size": 2} if spread else {}
    model = Training(made, {"micro_batch": 2, **spread}, CPU, seed=5, **distributed).model
    return {**full_state_dict(model), **dict(model.named_buffers())}


@pytest.mark.parametrize(
    ("family", "spread"),
    [*diagonal(["gpt2", "llama"], [{"tp": 2}, {"pp": 2}, {"zero": 3}]), (Net, {"zero": 3}), (Net, {"zero": 1})],
    ids=str,
)
def test_ranks_have_their_parts_of_the_same_weights(two, small, family, spread):
    made = of_model(Net) if family is Net else small(family)
    expected = weights(made, {})
    found = two.run(weights, made, spread)
    assert set().union(*found) == set(expected)
    for rank in found:
        assert all(torch.equal(value.cpu(), expected[name]) for name, value in rank.items())


def test_adapters_are_initialised_as_by_peft(small):
    pytest.importorskip("peft")
    from redline.models.lora import Lora, with_lora

    made = with_lora(small("llama"), Lora(r=4, target=("all-linear",)))
    with seeded(5, CPU), CPU:
        expected = held(made.build_model({}))
    found = held(Training(made, {"micro_batch": 4}, CPU, seed=5).model)
    adapters = [name for name in expected if "lora_" in name]
    assert list(found) == list(expected) and adapters
    for name in adapters:
        assert found[name].shape == expected[name].shape and found[name].requires_grad
        spread = expected[name].detach().double().std()
        assert float(found[name].detach().double().std()) == pytest.approx(float(spread), rel=0.4), name
        assert bool(spread) is ("lora_A" in name)
