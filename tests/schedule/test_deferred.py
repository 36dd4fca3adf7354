"""deferred: weights and buffers equal those of the constructor in place, bit for bit."""

import copy
import functools
import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule, deferred, replay, verify
from redline.schedule.deferred import unmaterialised
from redline.schedule.materialise import materialise
from redline.schedule.parallel.collectives import PlannedMesh
from redline.schedule.recording import Unrecordable
from redline.training.training import seeded
from same_model import assert_same, held
from torch import nn
from torch.nn.utils import parametrizations

CPU = torch.device("cpu")
REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def in_place(make, seed=3):
    with seeded(seed, CPU), CPU:
        return make()


def late(make, seed=3, meta=True):
    with seeded(seed, CPU), deferred():
        model = make()
    assert any(each.is_meta for each in held(model).values()) is meta and not unmaterialised(model)
    return build(create_schedule(model), seed=seed)[0]


class Holder(nn.Module):
    """A module with the content that a function adds."""

    def __init__(self, fill):
        super().__init__()
        fill(self)


def of(fill):
    return functools.partial(Holder, fill)


# -- formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("dtype", [torch.bool, *WHOLE, *REAL, *COMPLEX], ids=str)
def test_buffers_of_every_format_have_the_constructor_s_values(dtype, persistent):
    def fill(self):
        def register(name, tensor):
            self.register_buffer(name, tensor, persistent=persistent)

        register("counted", torch.arange(12).to(dtype))
        register("causal", torch.tril(torch.ones(5, 5)).to(dtype))
        register("drawn", torch.randint(0, 2, (4, 3)).to(dtype))
        register("filled", torch.full((3,), 1, dtype=dtype))
        register("listed", torch.tensor([0, 1, 1, 0], dtype=dtype))
        register("from_numpy", torch.from_numpy(np.eye(3)).to(dtype))
        register("computed", self.causal.logical_not().to(dtype))
        register("assigned", torch.zeros(4, 4, dtype=dtype))
        self.assigned[1:3, 2] = 1
        register("scalar", torch.ones((), dtype=dtype))
        register("empty", torch.zeros(0, 3, dtype=dtype))

    made = late(of(fill))
    assert_same(made, in_place(of(fill)))
    assert made.causal.count_nonzero() == 15 and made.assigned.count_nonzero() == 2
    assert list(made.state_dict()) == (list(dict(made.named_buffers())) if persistent else [])


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=str)
def test_parameters_of_every_format_have_the_constructor_s_values(dtype):
    def fill(self):
        self.drawn = nn.Parameter(torch.randn(5, 7, dtype=dtype))
        self.by_hand = nn.Parameter(torch.full((3, 3), 0.5, dtype=dtype))
        self.frozen = nn.Parameter(torch.randn(17, dtype=dtype), requires_grad=False)
        self.listed = nn.Parameter(torch.tensor([1.5, -2.0], dtype=dtype))
        self.cast = nn.Parameter(torch.randn(9).to(dtype))
        with torch.no_grad():
            self.by_hand[0] += self.drawn[0, :3]
            self.by_hand[:, 2].mul_(3)

    assert_same(late(of(fill)), in_place(of(fill)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_parameters_without_gradient_need_no_floating_format(dtype):
    def fill(self):
        self.table = nn.Parameter(torch.randint(2, (4, 4)).to(dtype), requires_grad=False)

    assert_same(late(of(fill)), in_place(of(fill)))


# -- initialisation ------------------------------------------------------------------------------------------


def masks(self):
    self.register_buffer("mask", torch.tril(torch.ones(6, 6)).bool())
    self.register_buffer("bias", torch.zeros(6, 6).masked_fill(~self.mask, float("-inf")), persistent=False)
    self.register_buffer("window", self.mask & ~torch.tril(self.mask, -3))
    self.register_buffer("packed", self.mask.view(torch.uint8) << 3)


def computed_from_weights(self):
    self.linear = nn.Linear(6, 6)
    with torch.no_grad():
        self.register_buffer("norms", self.linear.weight.norm(dim=1))
        self.register_buffer("signs", self.linear.weight > 0)
        self.register_buffer("sorted", self.linear.weight.flatten().sort().indices)
        self.register_buffer("rounded", (self.linear.weight * 100).to(torch.int8))
        self.turned = nn.Parameter(self.linear.weight.half().t().contiguous())
        q, r = torch.linalg.qr(self.linear.weight)
        self.register_buffer("r", r)
        self.linear.weight.copy_(q)


def aliases(self):
    self.linear = nn.Linear(4, 6)
    self.register_buffer("rows", self.linear.weight.detach()[1:3])
    self.register_buffer("turned", self.linear.weight.detach().t())
    self.register_buffer("base", torch.randn(8))
    self.part = nn.Parameter(self.base[2:6])
    self.base.add_(1)


def ties(self):
    self.embedding = nn.Embedding(9, 4, padding_idx=0)
    self.head = nn.Linear(4, 9, bias=False)
    self.head.weight = self.embedding.weight
    self.shared = self.head
    self.register_buffer("buffer", torch.randn(3))
    self.register_buffer("again", self.buffer)


def set_by_hand(self):
    self.linear = nn.Linear(4, 4)
    self.linear.weight.data.fill_(0.25)
    self.linear.bias.data = torch.full((4,), 2.5)
    self.other = nn.Linear(4, 4).to(torch.float64)
    self.other.weight.data = self.other.weight.data.new_ones(4, 4) * 2
    self.gain = nn.Parameter(torch.ones(4) * 0.1)
    self.last = nn.Linear(4, 4)
    nn.init.zeros_(self.last.weight)
    nn.init.uniform_(self.last.bias, -2, 2)
    self.linear.requires_grad_(False)


def drawn_in_every_way(self):
    for number, init in enumerate(
        (nn.init.normal_, nn.init.uniform_, nn.init.xavier_uniform_, nn.init.xavier_normal_, nn.init.kaiming_normal_,
         nn.init.kaiming_uniform_, nn.init.orthogonal_, nn.init.eye_, functools.partial(nn.init.sparse_, sparsity=0.3))
    ):  # fmt: skip
        self.register_parameter(f"init{number}", nn.Parameter(torch.empty(7, 5)))
        init(self.get_parameter(f"init{number}"))
    self.permuted = nn.Parameter(torch.randn(8)[torch.randperm(8)])
    self.register_buffer("coins", torch.bernoulli(torch.full((40,), 0.3)).bool())
    self.register_buffer("picked", torch.multinomial(torch.ones(9), 4))
    self.register_buffer("exponential", torch.empty(20).exponential_())
    self.register_buffer("alike", torch.rand_like(self.coins, dtype=torch.float32))
    self.register_buffer("around", torch.normal(torch.arange(20.0), torch.ones(20)))
    self.register_buffer("dropped", nn.functional.dropout(torch.ones(50)))
    self.after = nn.Linear(3, 3)


def truncated(self):
    # At these bounds many values are drawn again, so the following numbers depend on how many.
    self.narrow = nn.Parameter(torch.zeros(50))
    nn.init.trunc_normal_(self.narrow, std=1.0, a=-0.3, b=0.3)
    self.far = nn.Parameter(torch.zeros(20))
    nn.init.trunc_normal_(self.far, mean=0.0, std=1.0, a=2.0, b=4.0)
    self.after = nn.Linear(3, 3)


def library(self):
    self.attention = nn.MultiheadAttention(8, 2)
    self.lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True)
    self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.RMSNorm(4)])
    self.convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose1d(3, 4, 2), nn.Bilinear(2, 3, 4))
    self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    self.copied = nn.ModuleList(copy.deepcopy(self.norms[0]) for _ in range(2))
    self.weighted = parametrizations.weight_norm(nn.Linear(4, 3))
    self.spectral = parametrizations.spectral_norm(nn.Linear(4, 3))
    self.pretrained = nn.Embedding.from_pretrained(torch.from_numpy(np.random.rand(5, 3)).float())
    self.parameters_ = nn.ParameterList([nn.Parameter(torch.randn(n + 1)) for n in range(3)])


def of_other_generators(self):
    self.drawn = nn.Linear(2, 2)
    self.register_buffer("numpy", torch.tensor(np.random.rand(4)))
    self.register_buffer("python", torch.tensor([random.random() for _ in range(3)]))
    own = torch.Generator().manual_seed(7)
    self.register_buffer("own", torch.randn(5, generator=own))
    self.register_buffer("own_too", torch.randperm(5, generator=own))
    nn.init.constant_(self.drawn.bias, random.random())


def seeds_itself(self):
    self.before = nn.Linear(3, 3)
    torch.manual_seed(11)
    self.fixed = nn.Linear(3, 3)
    torch.manual_seed(11)
    self.alike = nn.Linear(3, 3)


def asks_where_it_is(self):
    self.linear = nn.Linear(3, 3)
    device = self.linear.weight.device
    assert device == CPU and not self.linear.weight.is_meta and self.linear.weight.is_cpu
    assert torch.ones(2).to("cpu").device == device and self.linear.weight.get_device() == -1
    same = torch.ones(3)
    same.to("cpu").mul_(2)
    same.cpu().add_(1)
    same.to(torch.device("cpu"), torch.float32).add_(1)
    self.register_buffer("same", same)
    other = torch.ones(3)
    other.to("cpu", copy=True).mul_(5)
    self.register_buffer("other", other)
    self.register_buffer("there", torch.full((2,), 3, device=device))
    self.register_buffer("new", self.linear.weight.new_tensor([1.0, 2.0]))
    self.register_buffer("real", torch.arange(3, device=device) * 2)


class Scale(nn.Parameter):
    """A parameter of a custom class."""


def attributes(self):
    self.scale = Scale(torch.randn(3))
    self.scale.no_decay = True
    self.register_buffer("nothing", None)
    self.register_parameter("none", None)


@pytest.mark.parametrize(
    "fill",
    [masks, computed_from_weights, aliases, ties, set_by_hand, drawn_in_every_way, truncated, library,
     of_other_generators, seeds_itself, asks_where_it_is, attributes],
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, 12345678901])
def test_a_model_made_late_is_the_one_made_in_place(fill, seed):
    assert_same(late(of(fill), seed), in_place(of(fill), seed))


def test_python_attributes_of_a_parameter_stay():
    assert late(of(attributes)).scale.no_decay is True


def test_memory_that_nothing_sets_is_left_as_torch_leaves_it():
    def fill(self):
        self.unset = nn.Parameter(torch.empty(5))
        self.register_buffer("partly", torch.empty(4, dtype=torch.int16))
        self.partly[1:3] = 7

    torch.use_deterministic_algorithms(True)  # values that nothing sets are then equal everywhere
    try:
        assert_same(late(of(fill)), in_place(of(fill)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_part_of_a_model_is_made_as_in_the_whole():
    def make():
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), of(truncated)(), nn.Linear(8, 2))

    whole = in_place(make)
    for number in range(len(whole)):
        with deferred():
            model = make()
        part = model[number]
        materialise(part, CPU, seed=3)
        assert_same(part, whole[number])
        assert all(each.is_meta for index, other in enumerate(model) if index != number for each in other.parameters())


# -- scheduled models ----------------------------------------------------------------------------------------


def test_sharded_weights_are_never_materialised_whole(monkeypatch):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            return x + self.down(self.up(x).relu())

    def make():
        model = nn.Sequential(*(Block() for _ in range(8)))
        for each in model.modules():  # drawn again, as transformers does
            if isinstance(each, nn.Linear):
                nn.init.normal_(each.weight, std=0.02)
        return model

    held, play = [], replay._Player.play

    def watched(self, operation):
        play(self, operation)
        held.append(sum(each.nbytes() for each in self.storages.values()))

    monkeypatch.setattr(replay._Player, "play", watched)
    with deferred():
        model = make()
    sch = create_schedule(model, PlannedMesh(tp=4))
    for block in sch:
        block["up"].shard(["weight", "bias"], axis=0)
        block["down"].shard("weight", axis=1)
        block["down"].sync("fwd_post", "all_reduce")
    built, _ = build(sch, seed=3)
    kept = sum(each.numel() * each.itemsize for each in built.parameters())
    weight = 64 * 256 * 4
    assert max(held) < kept + 3 * weight and kept < 16 * weight / 3
    expected = in_place(make)
    for number, block in enumerate(built):
        assert torch.equal(block.up.weight, expected[number].up.weight[:64])
        assert torch.equal(block.down.weight, expected[number].down.weight[:, :64])
        assert torch.equal(block.down.bias, expected[number].down.bias)


class Doubled(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([old.weight, old.weight * 2]).detach())
        self.register_buffer("mask", old.weight.detach() > 0)
        self.extra = nn.Linear(3, 3)


def test_factories_that_read_weights_compute_the_same_values():
    def make():
        return nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})

    def scheduled(model):
        sch = create_schedule(model)
        with pytest.warns(UserWarning, match="not kept"):
            sch["first"].replace(Doubled)
        return build(sch, seed=3)[0]

    with deferred():
        model = make()
    made = scheduled(model)
    with seeded(3, CPU):
        expected = scheduled(make())
    assert_same(made, expected)


def test_a_failing_factory_changes_nothing():
    with deferred():
        model = nn.ModuleDict({"first": nn.Linear(4, 4)})
    sch = create_schedule(model)
    with pytest.raises(ZeroDivisionError):
        sch["first"].replace(lambda old: 1 / 0)
    assert_same(build(sch, seed=3)[0], in_place(lambda: nn.ModuleDict({"first": nn.Linear(4, 4)})))


def test_copies_of_a_schedule_and_verify_know_the_weights(mlp):
    def make():
        model = type(mlp)()
        model.fc1.weight.data.fill_(0.125)
        return model

    with deferred():
        model = make()
    sch = create_schedule(model)
    with verify(sch, torch.randn(4, 8)):
        sch["fc1"].checkpoint()
    expected = in_place(make)
    assert_same(build(sch.copy(), seed=3)[0], expected)
    assert_same(build(sch, seed=3)[0], expected)


def test_the_random_state_outside_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with deferred():
        model = Holder(drawn_in_every_way)
    assert torch.equal(torch.get_rng_state(), before)
    build(create_schedule(model), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


# -- unknown values ------------------------------------------------------------------------------------------


def caught(look):
    def fill(self):
        drawn = torch.randn(4)
        with suppress(RuntimeError, TypeError, ValueError):
            look(drawn)
        self.register_buffer("guess", torch.zeros(1))

    return fill


def sets_the_state_back(self):
    self.first = nn.Linear(2, 2)
    with torch.random.fork_rng():
        self.second = nn.Linear(2, 2)
    self.third = nn.Linear(2, 2)


def forks_and_seeds(self):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        self.first = nn.Linear(2, 2)
    self.second = nn.Linear(2, 2)


def draws_into_a_real_tensor(self):
    self.register_buffer("counted", torch.arange(4.0))
    self.counted.normal_()


def sets_a_real_tensor_by_a_weight(self):
    self.register_buffer("counted", torch.arange(4.0))
    self.counted[1:3] = torch.randn(2)


def draws_by_a_generator_of_its_own(self):
    self.weight = nn.Parameter(torch.empty(3))
    nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(1))


def as_many_as_are_drawn(self):
    self.register_buffer("found", torch.randn(9).relu().nonzero())


def gives_a_weight_memory_at_hand(self):
    self.linear = nn.Linear(3, 3)
    self.linear.bias.data = torch.arange(3.0)


def has_no_form_without_values(self):
    self.orthogonal = parametrizations.orthogonal(nn.Linear(3, 3))


LOOKS = {
    "item": lambda drawn: drawn[0].item(),
    "tolist": lambda drawn: drawn.tolist(),
    "bool": lambda drawn: bool(drawn.sum() > 0),
    "float": lambda drawn: float(drawn[0]),
    "numpy": lambda drawn: drawn.numpy(),
    "asarray": np.asarray,
    "equal": lambda drawn: torch.equal(drawn, drawn),
    "nonzero": lambda drawn: drawn.nonzero(),
    "select": lambda drawn: drawn[drawn > 0],
    "pointer": lambda drawn: drawn.data_ptr(),
    "list of tensors": lambda drawn: torch.tensor([drawn[0], drawn[1]]),
    "index by a list": lambda drawn: drawn[[0, 2]],
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_reading_values_ends_the_recording_even_if_caught(look):
    with pytest.raises(Unrecordable, match="cannot be made without memory"), deferred():
        Holder(caught(look))
    in_place(of(caught(look)))


@pytest.mark.parametrize(
    "fill",
    [sets_the_state_back, forks_and_seeds, draws_into_a_real_tensor, sets_a_real_tensor_by_a_weight,
     draws_by_a_generator_of_its_own, as_many_as_are_drawn, gives_a_weight_memory_at_hand, has_no_form_without_values],
)  # fmt: skip
def test_reads_of_unknown_values_are_refused(fill):
    with pytest.raises(Unrecordable, match="cannot be made without memory"), deferred():
        Holder(fill)
    in_place(of(fill))


def test_a_constructor_s_own_error_is_raised():
    with pytest.raises(Unrecordable, match="ZeroDivisionError: division by zero"), deferred():
        Holder(lambda self: 1 / 0)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda weight: weight * 2, "made has a gradient to pass on"),
        (lambda weight: torch.complex(weight, weight).detach().conj(), "a lazy conjugate or negative"),
    ],
    ids=["gradient", "conjugate"],
)
def test_a_buffer_that_is_more_than_its_values_is_refused_by_build(made, message):
    def fill(self):
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("made", made(self.weight))

    with deferred():
        model = Holder(fill)
    with pytest.raises(ScheduleError, match=message):
        build(create_schedule(model))


def test_a_tensor_that_came_otherwise_is_not_guessed():
    with deferred():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.device("meta"):
        model.append(nn.Linear(2, 2))
    with pytest.raises(ScheduleError, match=r"2\.weight is on the meta device, and nothing is known"):
        build(create_schedule(model))
    with pytest.raises(Unrecordable, match="has no values"), deferred():
        torch.ones(2) + torch.ones(2, device="meta")


def test_tensors_in_other_attributes_get_their_values_and_stay_what_they_are():
    def fill(self):
        self.linear = nn.Linear(3, 3)
        self.plain = torch.randn(4)
        self.several = [1, {"deep": (torch.tril(torch.ones(2, 2)).bool(), self.linear.weight)}, self.plain]
        self.tables = [torch.full((2,), number) for number in range(3)]

    made, expected = late(of(fill)), in_place(of(fill))
    assert_same(made, expected)
    assert torch.equal(made.plain, expected.plain) and made.several[2] is made.plain
    mask, weight = made.several[1]["deep"]
    assert mask.tolist() == [[True, False], [True, True]] and weight is made.linear.weight
    assert [each.tolist() for each in made.tables] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize(
    "keep",
    [
        lambda self, tensor: KEPT.append(tensor),
        lambda self, tensor: setattr(self, "function", lambda: tensor),
        lambda self, tensor: setattr(self, "other", torch.empty(2, device="meta")),
    ],
    ids=["elsewhere", "closure", "on the meta device for itself"],
)
def test_a_tensor_that_would_be_left_without_memory_is_found(keep):
    def fill(self):
        self.linear = nn.Linear(2, 2)
        keep(self, torch.zeros(2))

    KEPT.clear()
    with deferred():
        model = Holder(fill)
    assert unmaterialised(model)
    with deferred():
        assert not unmaterialised(nn.Linear(2, 2))


KEPT = []


# -- models created on the meta device ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_a_buffer_that_no_rule_sets_is_named_whatever_its_format(dtype):
    def fill(self):
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(4, 4).to(dtype))

    with torch.device("meta"):
        model = Holder(fill)
    with pytest.raises(ScheduleError, match="nothing initialises mask"):
        build(create_schedule(model))


def test_a_tensor_that_a_rule_sets_in_part_is_named():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4))

        def reset_parameters(self):
            with torch.no_grad():
                self.weight[3:] = 1

    with torch.device("meta"):
        model = Partly()
    with pytest.raises(ScheduleError, match="nothing initialises weight"):
        build(create_schedule(model))


def test_a_rule_may_set_buffers_of_every_format_and_compute_one_from_another():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))
            self.register_buffer("mask", torch.empty(4, 4, dtype=torch.bool))
            self.register_buffer("count", torch.empty(4, dtype=torch.uint8))

        def reset_parameters(self):
            nn.init.trunc_normal_(self.weight, a=-0.5, b=0.5)
            self.mask.copy_(torch.tril(torch.ones(4, 4)).bool())
            self.count.copy_(self.mask.sum(1))

    with torch.device("meta"):
        model = Masked()
    built, _ = build(create_schedule(model))
    assert built.mask.tolist() == torch.tril(torch.ones(4, 4)).bool().tolist()
    assert built.count.tolist() == [1, 2, 3, 4] and built.weight.abs().max() <= 0.5 and built.weight.std() > 0.1
