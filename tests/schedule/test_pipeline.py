"""Pipelines on real ranks: values, gradients, training steps, tied weights, refusals."""

import re

import numeric
import pytest
import torch
import torch.distributed as dist
from ranks import device as rank_device, mesh
from redline.base.errors import ScheduleError
from redline.knobs.meaning import Placement
from redline.models.families import schedule_of
from redline.schedule import build, create_schedule, verify
from redline.schedule.comparison import allowance, loss_allowance
from redline.schedule.parallel import partition
from torch import nn


def contexts_of_stages(make):
    """Returns, for each stage of this rank, the number of its parts and of their communication contexts."""
    blocks = schedule_of("gpt2").blocks(sch := create_schedule(make("gpt2", layers=8), mesh(pp=2, dp=2)))
    for index in (1, 3, 5):
        blocks[index].cut_pipeline_stage()
    model, _ = build(sch.pipeline("interleaved", 2).shard_data(zero=3), device=rank_device())
    found = {}
    for unit in model.pipeline.units:
        if hasattr(unit.module, "_get_fsdp_state"):
            found.setdefault(unit.stage, []).append(id(unit.module._get_fsdp_state()._comm_ctx))
    assert len({each for contexts in found.values() for each in contexts}) == len(found), "stages have their own"
    return {stage: (len(contexts), len(set(contexts))) for stage, contexts in found.items()}


def test_the_parts_of_a_stage_free_the_buffers_of_their_gradients_one_after_the_other(four, make_transformer):
    for found in four.run(contexts_of_stages, make_transformer):
        assert len(found) == 2
        assert all(parts >= 2 and contexts == 1 for parts, contexts in found.values())


class Layer(nn.Module):
    """Takes and returns several values, by position, by keyword, in tuples and mappings."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, *, state, scale):
        y = torch.relu(self.fc(x)) * scale
        return {"x": y, "extra": (state + y, "label", 3)}


class Tuples(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.drop = nn.Dropout(0.0)
        self.leave = nn.Linear(8, 2)

    def forward(self, x, scale=2.0):
        half = x.mean(-1, keepdim=True)
        y = self.enter(x)
        state = y * 0
        for layer in self.layers:
            out = layer(y, state=state, scale=scale)
            y, (state, label, number) = out["x"], out["extra"]
            assert label == "label" and number == 3
        return self.leave(self.drop(y + state + half))


def check_tuples(seed):
    torch.manual_seed(seed)
    x = torch.randn(6, 8)
    sch = create_schedule(Tuples(), mesh(pp=2))
    with verify(sch, {"x": x}, loss=lambda out: out.pow(2).mean()):
        sch["layers.1"].cut_pipeline_stage()
        sch.pipeline("gpipe", 3)
    plain = sch.copy().module
    model, _ = build(sch, loss=lambda out, target: (out - target).pow(2).mean())
    target = torch.randn(6, 2, generator=torch.Generator().manual_seed(seed))
    allowed = allowance(plain, x.numel())
    # Gradients of two batches are summed.
    for part in (x, x * 2):
        loss = model.pipeline.step(part, target=target)
        expected = (plain(part) - target).pow(2).mean()
        expected.backward()
        departs = abs(loss.item() - expected.item()) / expected.item()
        numeric.within(departs, loss_allowance(allowed, target.numel()), "the loss")
    numeric.same(numeric.gradients(model), numeric.gradients(plain), allowed)
    # Outputs are kept only on request: logits of all micro-batches need much memory.
    assert model.pipeline.outputs == []
    model.pipeline.keep_outputs = True
    # Another batch size gives other shapes.
    assert torch.isfinite(model.pipeline.step(x[:3], target=target[:3]))
    with pytest.raises(ScheduleError, match="3 micro-batches must divide the batch, but it has 4"):
        model.pipeline.step(x[:4], target=target[:4])
    with pytest.raises(ScheduleError, match=r"pipeline\.step"):
        model(x)
    if dist.get_rank() == 1:
        # Both ranks check and raise, although only the last stage has the loss.
        return model.pipeline.outputs[-1].shape
    return None


def test_tuples_mappings_and_keywords_cross_the_cut(two, seed):
    assert two.run(check_tuples, seed)[1] == (1, 2)


class Aside(nn.Module):
    """Returns a view, one of its arguments, and a function of a weight only."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x, kept, aside):
        return torch.tanh(self.fc(x) + aside + kept).view_as(x), kept, torch.sin(self.shift)


class Asides(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Aside() for _ in range(4)])
        self.leave = nn.Linear(8, 2)

    def forward(self, x):
        y = kept = self.enter(x)
        aside = torch.zeros(8)
        for layer in self.layers:
            y, kept, aside = layer(y, kept, aside)
        return self.leave(y + kept) + aside.sum()


def check_asides(kind, seed, leave=partition.leave):
    torch.manual_seed(seed)
    x, target = torch.randn(8, 8), torch.randn(8, 2)
    sch = create_schedule(Asides(), mesh(pp=2))
    plain = sch.copy().module
    for index in range(3):
        sch[f"layers.{index}"].cut_pipeline_stage()
    sch.pipeline(kind, 4)
    model, _ = build(sch, loss=lambda out, target: (out - target).pow(2).mean())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redline.schedule.parallel.pipeline.leave", leave)
        for _ in range(2):
            model.pipeline.step(x, target=target)
            (plain(x) - target).pow(2).mean().backward()
    return numeric.gradients(model), numeric.gradients(plain), allowance(plain, x.numel())


@pytest.mark.parametrize("kind", ["interleaved", "zero_bubble", "zbv"])
def test_weights_that_meet_nothing_a_stage_received_have_gradients(two, seed, kind):
    for found, expected, allowed in two.run(check_asides, kind, seed):
        numeric.same(found, expected, allowed)


def test_a_backward_has_two_parts_where_each_weight_hangs_on_one_place():
    torch.manual_seed(0)
    first, second, table = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(8, 4)
    x = torch.randn(3, 4, requires_grad=True)
    alone = table(torch.arange(3))
    assert partition.splits([second(torch.relu(first(x)))], [x])
    assert partition.splits([second(first(x) + alone)], [x])
    # A weight, or a function of weights only, is used twice.
    assert not partition.splits([first(torch.relu(first(x)))], [x])
    assert not partition.splits([second(first(x) + alone) * alone], [x])
    # A function of weights only has no gradient path to the received tensor, unless `leave` adds one.
    assert partition.splits([partition.leave(each, [x]) for each in (first(x), torch.sin(alone))], [x])
    assert not partition.splits([partition.leave(each, [x]) for each in (first(x) + alone, alone)], [x])
    assert partition.splits([x.detach()], [x]) and partition.splits([], [])


def test_stages_lie_where_torch_runs_them():
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    for ranks in (1, 2, 3, 8):
        for laps in (1, 2, 3):
            for style in ("loop", "v"):
                made = Placement(ranks * laps, ranks, style == "v")
                expected = generate_stage_to_rank_mapping(ranks, ranks * laps, style)
                assert {stage: made.rank(stage) for stage in range(ranks * laps)} == expected
                for rank in range(ranks):
                    assert made.held(rank) == [stage for stage in expected if expected[stage] == rank]


class Bypass(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        first = self.a(x)
        second = self.b(torch.relu(first))
        return second + self.after(first)

    def after(self, first):
        return first


class Early(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        skipped = self.enter(x)
        return self.b(self.a(x)) + skipped


class Backwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(self.b(x))


def check_values():
    def run(model):
        torch.manual_seed(0)
        sch = create_schedule(model, mesh(pp=2))
        sch["a"].cut_pipeline_stage()
        built, _ = build(sch, loss=lambda out, target: out.sum())
        try:
            built.pipeline.step(torch.randn(4, 4))
        except (ScheduleError, RuntimeError) as error:
            return f"{error} {error.__cause__}"
        return "ran"

    return run(Bypass())


def test_stage_outputs_may_be_used_several_times(two):
    assert two.run(check_values) == ["ran", "ran"]


def check_order(kind):
    """Both ranks find the error without waiting for each other."""
    sch = create_schedule(kind(), mesh(pp=2))
    sch["a"].cut_pipeline_stage()
    built, _ = build(sch, loss=lambda out, target: out.sum())
    board, units = built.pipeline.board, built.pipeline.units
    x = torch.randn(4, 4)
    if kind is Backwards:
        if dist.get_rank() == 1:
            return "stage 1"
        board.stage = 0
        with pytest.raises(ScheduleError, match=r"'b' belongs to pipeline stage 1 .* called in stage 0"):
            built(x)
        return "refused"
    if dist.get_rank() == 0:
        return [unit.path for unit in units]
    # The stage after the cut gets the input that stage 0 would send.
    built.pipeline._prepare({"x": x}, 4)
    stage = built.pipeline.schedule._stage.submod
    with pytest.raises(ScheduleError, match=r"uses a value from before its cut"):
        stage(torch.randn(2, 4), x=x[:2])
    return "refused"


class LateNorm(nn.Module):
    """Calls a norm after its blocks that it registers before them, as OPT does."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.norm(self.b(self.a(self.enter(x))))


class SkipsInto(nn.Module):
    """Gives a module after the cut a value from before it."""

    def __init__(self):
        super().__init__()
        self.enter, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        skipped = self.enter(x)
        return self.b(self.a(x) + skipped)


def check_lacking(kind):
    sch = create_schedule(kind(), mesh(pp=2))
    sch["a"].cut_pipeline_stage()
    built, _ = build(sch, loss=lambda out, target: out.sum())
    if dist.get_rank() == 0:
        return "the other rank runs alone"
    x = torch.randn(4, 4)
    built.pipeline._prepare({"x": x}, 4)
    stage = built.pipeline.schedule._stage.submod

    def step(*args, **kwargs):
        """Runs the stage on the input that stage 0 would send, and wraps its error as torch does."""
        try:
            stage(torch.randn(2, 4), x=x[:2])
        except ScheduleError as error:
            raise RuntimeError("[Stage 1] failed to run forward") from error

    built.pipeline.schedule.step = step
    with pytest.raises(ScheduleError) as caught:
        built.pipeline.step(x)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (LateNorm, "the output of 'norm', which the model registers before .*; cut_pipeline_stage.late=.'norm'"),
        (SkipsInto, "that 'a' does not return: 'b' gets it, or a value computed from it; cut elsewhere"),
    ],
)
def test_the_module_that_lacks_a_value_is_named_in_place_of_torch_s_error(two, kind, message):
    _, last = two.run(check_lacking, kind)
    assert last.startswith("pipeline stage 1 uses a value from before its cut") and re.search(message, last)


def test_values_that_by_pass_the_cut_are_noticed(two):
    assert two.run(check_order, Early) == [["enter", "a", "b"], "refused"]


def test_modules_called_out_of_order_are_noticed(two):
    assert two.run(check_order, Backwards) == ["refused", "stage 1"]


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.inner(x) + self.shift


def check_refusals(make):
    axis = mesh(pp=2)

    def refused(sch, reason, call):
        before = (list(sch.tree.cuts), str(sch), sch.tree.pipeline)
        with pytest.raises(ScheduleError, match=reason):
            call(sch)
        assert before == (sch.tree.cuts, str(sch), sch.tree.pipeline)

    def gpt2():
        return create_schedule(make("gpt2", layers=4), axis)

    refused(gpt2(), "below the root", lambda s: s.cut_pipeline_stage())
    sch = gpt2()
    sch["transformer.h.1"].cut_pipeline_stage()
    refused(sch, "is cut here already", lambda s: s["transformer.h.1"].cut_pipeline_stage())
    refused(sch, "inside a module that is cut too", lambda s: s["transformer"].cut_pipeline_stage())
    refused(sch, "inside a module that is cut too", lambda s: s["transformer.h.1.mlp"].cut_pipeline_stage())
    sch["transformer.h.0"].cut_pipeline_stage()
    assert sch.tree.cuts == ["transformer.h.0", "transformer.h.1"]
    refused(sch, r"must divide the number of stages, but there are 3 \(2 cuts\)", build)

    shared = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    refused(
        create_schedule(nn.Sequential(shared, nn.Linear(4, 4), shared), axis),
        "occurs several times, but '0' is also 2",
        lambda s: s["0.0"].cut_pipeline_stage(),
    )
    sch = gpt2()
    sch["transformer.h.1"].checkpoint()
    refused(sch, "'transformer.h.1' has checkpoint", lambda s: s["transformer.h.1.mlp"].cut_pipeline_stage())
    sch = gpt2()
    sch["transformer.h.1"].cut_pipeline_stage()
    sch["transformer"].compile()
    refused(sch, "'transformer' has compile; apply it to the modules below", build)
    sch = create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())), axis)
    sch["1"].trace()
    refused(sch, "traced or fused module, but '1' is one", lambda s: s["1.0"].cut_pipeline_stage())
    refused(
        create_schedule(Holding(), axis), "must have no parameter of its own, but has shift",
        lambda s: s["inner.0"].cut_pipeline_stage(),
    )  # fmt: skip
    refused(gpt2(), "did you mean 'gpipe'", lambda s: s.pipeline("gpip"))
    refused(gpt2(), "at least 1, but got 0", lambda s: s.pipeline("gpipe", 0))
    refused(gpt2(), "on the root", lambda s: s["lm_head"].pipeline())
    refused(gpt2().pipeline(), "set already", lambda s: s.pipeline("gpipe"))
    refused(
        create_schedule(make("gpt2"), mesh(dp=2)),
        "axis named pp",
        lambda s: s["lm_head"].cut_pipeline_stage(),
    )
    for cuts, kind, count, reason in [
        ([], "1f1b", 2, "pipeline has no stages: call cut_pipeline_stage"),
        ([0], "1f1b", 1, "as many micro-batches as ranks, 2, or more, but got 1"),
        ([0, 1, 2], "gpipe", 4, "takes one stage a rank, but there are 4 on 2 ranks; use 'interleaved'"),
        ([0, 1, 2], "interleaved", 3, "2 ranks must divide the micro-batches, but got 3"),
        ([0], "interleaved", 4, "takes 2 stages a rank or more, but there are 2 on 2 ranks; use '1f1b'"),
        ([0], "zbv", 4, "takes 2 stages a rank, but there are 2 on 2 ranks; use '1f1b'"),
        ([0], "zero_bubble", 3, "2 ranks must divide the micro-batches, but got 3"),
        ([0, 1, 2], "zbv", 1, "as many micro-batches as ranks, 2, or more, but got 1"),
    ]:
        sch = gpt2().pipeline(kind, count)
        for index in cuts:
            sch[f"transformer.h.{index}"].cut_pipeline_stage()
        refused(sch, reason, build)
    for reason, spoil in [
        ("compile.* on 'transformer.h.1': .* of a compiled block", lambda s: s["transformer.h.1"].compile()),
        ("checkpoint.* on 'transformer.h.1': .* recompute a block", lambda s: s["transformer.h.1"].checkpoint()),
        ("fused_loss.* on 'lm_head': .* gradients are formed once", lambda s: s["lm_head"].fused_loss()),
    ]:
        sch = gpt2().pipeline("zero_bubble", 4)
        sch["transformer.h.1"].cut_pipeline_stage()
        spoil(sch)
        refused(sch, f"schedule zero_bubble does not go with {reason}", build)
    sch = create_schedule(make("gpt2", layers=4), mesh(pp=2, dp=1)).pipeline("zero_bubble", 4)
    sch["transformer.h.1"].cut_pipeline_stage()
    refused(
        sch.shard_data(zero=2), r"does not go with shard_data\(zero=2\) on 'GPT2LMHeadModel': .* ZeRO 2 and 3", build
    )


def test_impossible_cuts_are_refused_and_change_nothing(two, make_transformer):
    two.run(check_refusals, make_transformer)
