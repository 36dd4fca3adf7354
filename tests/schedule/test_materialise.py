"""Models on the meta device: weights by rules, the same for every schedule, and never more of them at once than needed."""

import pytest
import torch
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule, materialise
from redline.schedule.materialise import uninitialised
from redline.schedule.parallel.collectives import PlannedMesh
from same_model import assert_same
from torch import nn


def on_meta(make):
    with torch.device("meta"):
        return make()


def built(make, schedule=lambda sch: None, mesh=None, **options):
    sch = create_schedule(on_meta(make), mesh)
    schedule(sch)
    return build(sch, seed=3, **options)[0]


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 4 * width),
            nn.LayerNorm(4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)).relu())


def stack():
    return nn.Sequential(*(Block() for _ in range(8)))


def test_sharded_weights_are_those_of_the_whole_model_and_never_all_whole(monkeypatch):
    expected = built(stack)
    held, allocate = [0], materialise._Values.allocate
    give = materialise._Values.give

    def allocated(self, key):
        held.append(held[-1] + (key not in self.live) * key.numel() * 4)
        allocate(self, key)

    def given(self, key):
        give(self, key)
        held.append(held[-1] - key.numel() * 4)

    monkeypatch.setattr(materialise._Values, "allocate", allocated)
    monkeypatch.setattr(materialise._Values, "give", given)

    def cut(sch):
        for block in sch:
            block["up"].shard(["weight", "bias"], axis=0)
            block["norm"].shard(["weight", "bias"], axis=0)
            block["down"].shard("weight", axis=1)
            block["down"].sync("fwd_post", "all_reduce")

    pieces = built(stack, cut, PlannedMesh(tp=4))
    assert max(held) < 2 * 64 * 256 * 4 and held[-1] == 0
    for piece, whole in zip(pieces, expected):
        assert torch.equal(piece.up.weight, whole.up.weight[:64])
        assert torch.equal(piece.down.weight, whole.down.weight[:, :64])
        assert torch.equal(piece.down.bias, whole.down.bias)
    assert not torch.equal(expected[0].up.weight, expected[1].up.weight)


def test_seeds_and_paths_determine_the_weights_and_the_random_state_outside_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = built(stack), built(stack)
    assert_same(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    other, _ = build(create_schedule(on_meta(stack)), seed=4)
    assert not torch.equal(first[0].up.weight, other[0].up.weight)
    part, _ = build(create_schedule(on_meta(stack))[0], seed=3)
    assert float(part.up.weight.detach().std()) == pytest.approx(float(first[0].up.weight.detach().std()), rel=0.05)


# -- rules ---------------------------------------------------------------------------------------------------


def test_a_tensor_that_a_rule_sets_in_part_is_named():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4))

        def reset_parameters(self):
            with torch.no_grad():
                self.weight[3:] = 1

    with pytest.raises(ScheduleError, match=r"nothing initialises 0\.weight"):
        built(lambda: nn.Sequential(Partly()))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_a_buffer_that_no_rule_sets_is_named_whatever_its_format(dtype):
    def make():
        model = nn.Sequential(nn.Linear(2, 2))
        model.register_buffer("mask", torch.ones(4, 4).to(dtype))
        model.register_buffer("nothing", torch.ones(0, 4).to(dtype))
        return model

    with pytest.raises(ScheduleError, match="nothing initialises mask;"):
        built(make)
    assert uninitialised(on_meta(make)) == "mask"
    assert uninitialised(on_meta(stack)) is None


def test_a_tensor_without_memory_outside_of_parameters_and_buffers_is_named():
    def make():
        model = nn.Sequential(nn.LSTM(2, 2))
        model[0].tables = [torch.zeros(2)]
        return model

    assert uninitialised(on_meta(make)) == "0.tables"
    assert uninitialised(on_meta(lambda: nn.LSTM(2, 2))) is None
    lstm = built(lambda: nn.LSTM(2, 2))
    assert all(listed is param for listed, param in zip(lstm._flat_weights, lstm.parameters(), strict=True))


def test_tied_weights_have_the_values_of_the_first_module_and_stay_tied():
    def make():
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
        model[1].weight = model[0].weight
        return model

    model = built(make)
    assert model[1].weight is model[0].weight and torch.equal(model[0].weight, built(lambda: make()[:1])[0].weight)
    assert model[0].weight.std() > 0.7  # an embedding's, not a linear layer's
    assert model[1].bias.isfinite().all()


# -- replaced modules ----------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A norm without a rule."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Fused(nn.Module):
    """Computes its weights from those of the module that it replaces, and has a layer that is initialised by hand."""

    def __init__(self, old):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([old.up.weight, old.down.weight.t() * 2]).detach())
        self.register_buffer("positive", old.up.weight.detach() > 0)
        self.added = nn.Linear(3, 3)
        nn.init.constant_(self.added.weight, 0.25)


class Wrapped(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.old, self.scale = old, nn.Parameter(torch.full((64,), 0.5))

    def forward(self, x):
        return self.old(x) * self.scale


def test_replacements_have_the_weights_of_what_they_replace():
    def schedule(sch):
        sch.replace_all(nn.LayerNorm, lambda old: Plain(*old.normalized_shape))
        sch["2.norm"].replace(on_meta(lambda: Plain(256)))
        with pytest.warns(UserWarning, match="not kept"):
            sch["3"].replace(Fused)
        sch["4"].replace(Wrapped)

    expected, model = built(stack), built(stack, schedule)
    assert all(model[number].norm.weight.eq(1).all() and model[number].norm.bias.eq(0).all() for number in (0, 1, 2))
    assert torch.equal(model[1].up.weight, expected[1].up.weight)
    up, down = expected[3].up.weight, expected[3].down.weight
    assert torch.equal(model[3].weight, torch.cat([up, down.t() * 2])) and torch.equal(model[3].positive, up > 0)
    assert model[3].added.weight.eq(0.25).all() and model[3].added.bias.isfinite().all()
    assert model[4].scale.eq(0.5).all()
    assert_same(model[4].old, expected[4])
    assert not any("_replaces" in vars(each) for each in model.modules())


def test_a_replacement_is_cut_as_the_original_would_be():
    class Columns(nn.Module):
        def __init__(self, old):
            super().__init__()
            self.weight = nn.Parameter(old.weight.detach().clone() * 2)

        def forward(self, x):
            return nn.functional.linear(x, self.weight)

    def schedule(sch):
        sch["0"].replace(Columns)
        sch["0"].shard("weight", axis=0)

    make = lambda: nn.Sequential(nn.Linear(4, 8, bias=False))  # noqa: E731
    half = built(make, schedule, PlannedMesh(tp=2))
    # A tensor of the same name and shape is kept, whatever the factory computes.
    assert torch.equal(half[0].weight, built(make)[0].weight[:4])
