"""The primitives that need neither a trace nor a mesh."""

import copy

import numeric
import pytest
import torch
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule
from redline.schedule.comparison import allowance, loss_allowance
from torch import nn


def loss_and_gradients(model, tokens):
    torch.manual_seed(3)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def same(a, b):
    gradients = all(torch.equal(a[1][k], b[1][k]) for k in a[1])
    return torch.equal(a[0], b[0]) and gradients and a[1].keys() == b[1].keys()


# checkpoint


def count_calls(model, kind, run):
    """Counts runs of modules whose class name contains `kind`."""
    calls = []
    handles = [
        each.register_forward_hook(lambda *_: calls.append(1))
        for each in model.modules()
        if kind in type(each).__name__
    ]
    run()
    for each in handles:
        each.remove()
    return len(calls)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_checkpoint_is_exact_with_dropout_and_recomputes(make_transformer, tokens, name):
    plain, _ = build(create_schedule(make_transformer(name, dropout=0.2)))
    sch = create_schedule(make_transformer(name, dropout=0.2))
    path = {"gpt2": "transformer.h", "bert": "bert.encoder.layer", "llama": "model.layers"}[name]
    for each in sch.select(f"{path}.*"):
        each.checkpoint()
    built, _ = build(sch)
    assert same(loss_and_gradients(plain, tokens), loss_and_gradients(built, tokens))
    calls = [count_calls(m, "Norm", lambda m=m: loss_and_gradients(m, tokens)) for m in (plain, built)]
    # Each of the two blocks has two norms; PyTorch stops recomputation when nothing more is needed.
    assert 2 <= calls[1] - calls[0] <= 4


def test_checkpoint_keeps_what_the_policy_names(make_transformer, tokens):
    plain, _ = build(create_schedule(make_transformer("llama")))
    sch = create_schedule(make_transformer("llama"))
    for each in sch.select("model.layers.*"):
        each.checkpoint(policy=[torch.ops.aten.mm.default])
    built, _ = build(sch)
    assert same(loss_and_gradients(plain, tokens), loss_and_gradients(built, tokens))

    def saved(model):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(input_ids=tokens)
        return total

    assert saved(built) < saved(plain)


def test_checkpoint_refuses_a_second_time_and_a_strange_policy(mlp):
    sch = create_schedule(mlp)
    with pytest.raises(ScheduleError, match="policy must be None"):
        sch["fc1"].checkpoint(policy="mm")
    sch["fc1"].checkpoint()
    with pytest.raises(ScheduleError, match="checkpointed already"):
        sch["fc1"].checkpoint()
    assert [str(step) for step in sch.tree.steps] == ["checkpoint()"]


def test_without_gradients_a_checkpointed_model_keeps_its_cache(make_transformer, tokens):
    sch = create_schedule(make_transformer("gpt2"))
    for each in sch.select("transformer.h.*"):
        each.checkpoint()
    built, _ = build(sch)
    with torch.no_grad():
        assert built(tokens, use_cache=True).past_key_values.get_seq_length() == 16


# replace


class Slow(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


def test_replace_keeps_parameters_ties_hooks_and_mode(mlp, seed):
    seen = []
    mlp.fc1.register_forward_hook(lambda *a: seen.append(1))
    mlp.fc1.users_hooks = ["an attribute of the user's"]
    mlp.fc2.weight = nn.Parameter(mlp.fc1.weight.detach().T.contiguous())
    mlp.tied = nn.Linear(8, 16, bias=False)
    mlp.tied.weight = mlp.fc1.weight
    mlp.eval()
    x = torch.randn(3, 8)
    expected, weight = mlp(x), mlp.fc1.weight
    seen.clear()
    sch = create_schedule(mlp)
    sch["fc1"].replace(lambda old: Slow(old.in_features, old.out_features))
    assert type(mlp.fc1) is Slow and mlp.fc1.weight is weight is mlp.tied.weight
    assert not mlp.fc1.training
    numeric.same(mlp(x), expected, allowance(mlp, x.numel()))
    assert seen == [1]


def test_replace_says_what_it_could_not_keep(mlp):
    sch = create_schedule(mlp)
    with pytest.warns(UserWarning, match=r"not kept: bias \(16,\) is not in Linear"):
        sch["fc1"].replace(nn.Linear(8, 16, bias=False))
    with pytest.warns(UserWarning, match=r"weight is \(4, 16\) now, not \(8, 16\)"):
        sch["fc2"].replace(nn.Linear(16, 4))
    fixed = nn.Module()
    fixed.register_buffer("weight", torch.ones(16, 8))
    with pytest.warns(UserWarning, match=r"weight is a buffer now"):
        sch["fc1"].replace(fixed)
    assert torch.equal(mlp.fc1.weight, torch.ones(16, 8)) and not list(mlp.fc1.parameters())


def test_replace_reaches_every_place_of_a_shared_module_and_the_root(mlp):
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    sch = create_schedule(model)
    sch["0"].replace(lambda old: Slow(8, 8))
    assert model[0] is model[2] and type(model[0]) is Slow
    with pytest.warns(UserWarning, match="0.weight"):
        sch.replace(mlp)
    assert sch.module is mlp


def test_replace_refuses_what_is_no_module(mlp):
    sch = create_schedule(mlp)
    for bad in (3, lambda old: old.weight):
        with pytest.raises(ScheduleError, match="module"):
            sch["fc1"].replace(bad)
    assert type(mlp.fc1) is nn.Linear and not sch.tree.steps


def test_replace_all_replaces_all_or_none(make_transformer):
    model = make_transformer("gpt2")
    sch = create_schedule(model)
    made = []

    def fails_late(old):
        made.append(old)
        return nn.LayerNorm(32) if len(made) < 5 else "nothing"

    with pytest.raises(ScheduleError, match="returned str"):
        sch.replace_all(nn.LayerNorm, fails_late)
    assert [m for m in model.modules() if isinstance(m, nn.LayerNorm)] == made
    sch["transformer"].replace_all(nn.LayerNorm, lambda old: nn.LayerNorm(32))
    assert not set(made) & set(model.modules())
    with pytest.raises(ScheduleError, match="unknown module type 'Conv2d'"):
        sch.replace_all(nn.Conv2d, lambda old: old)
    with pytest.raises(ScheduleError, match="needs a new module"):
        sch.replace_all(nn.LayerNorm, nn.LayerNorm(32))


# cast, compile, fuse, hook, annotate


def test_cast_turns_weights_and_keeps_the_surroundings(make_transformer, tokens, seed):
    sch = create_schedule(make_transformer("llama"))
    sch["model.layers.0"].cast(torch.bfloat16)
    built, _ = build(sch, seed=seed)
    assert {p.dtype for p in built.model.layers[0].parameters()} == {torch.bfloat16}
    assert {p.dtype for p in built.model.layers[1].parameters()} == {torch.float32}
    reference, _ = build(create_schedule(make_transformer("llama")), seed=seed)
    out, expected = built(tokens).logits, reference(tokens).logits
    assert out.dtype == torch.float32
    assert not torch.equal(out, expected)
    allowed = allowance(reference, tokens.numel(), {"model.layers.0": torch.bfloat16})
    numeric.same(out, expected, allowed)
    loss_and_gradients(built, tokens)


def test_casting_the_whole_model_keeps_rotary_frequencies_exact(make_transformer, tokens):
    sch = create_schedule(make_transformer("llama"))
    sch.cast(torch.bfloat16)
    built, _ = build(sch)
    assert built.model.rotary_emb.inv_freq.dtype == torch.float32
    assert built(tokens).logits.dtype == torch.bfloat16


def test_cast_refuses_what_cannot_compute(mlp):
    sch = create_schedule(mlp)
    for bad in (torch.int8, "bf16", torch.float8_e4m3fn):
        with pytest.raises(ScheduleError, match="cast on 'fc1'"):
            sch["fc1"].cast(bad)
    assert not sch.tree.steps and not sch.tree.deferred


def test_compile_is_in_place_and_exact(make_transformer, tokens, seed):
    plain, _ = build(create_schedule(make_transformer("gpt2")), seed=seed)
    sch = create_schedule(make_transformer("gpt2"))
    for each in sch.select("transformer.h.*"):
        each.checkpoint().compile(backend="aot_eager", fullgraph=True)
    built, _ = build(sch, seed=seed)
    torch.compiler.reset()
    ours, theirs = loss_and_gradients(built, tokens), loss_and_gradients(plain, tokens)
    allowed = allowance(plain, tokens.numel())
    numeric.same(ours[0], theirs[0], loss_allowance(allowed, tokens.numel()), "the loss")
    numeric.same(ours[1], theirs[1], allowed)
    with pytest.raises(ScheduleError, match="did you mean 'fullgraph'"):
        create_schedule(make_transformer("gpt2")).compile(full_graph=True)


def test_fuse_hands_a_subgraph_to_the_compiler(mlp, seed):
    x = torch.randn(2, 8)
    expected = mlp(x)
    given = []

    def compiler(function):
        given.append(function)
        return lambda *args: function(*args) * 2

    sch = create_schedule(mlp).trace()
    sch.fuse(sch.find("fc2"), compiler=compiler)
    built, _ = build(sch)
    assert torch.equal(built(x), expected * 2) and len(given) == 1
    copied = copy.deepcopy(built)
    copied.fc2.bias.data.add_(1)
    numeric.same(copied(x), expected * 2 + 2, allowance(mlp, x.numel()))
    assert torch.equal(built(x), expected * 2)
    with pytest.raises(ScheduleError, match="unknown compiler 'inductr'; did you mean 'inductor'"):
        create_schedule(mlp)["fc1"].fuse(compiler="inductr")


def test_hooks_of_every_kind_act(mlp, seed):
    x = torch.randn(2, 8, requires_grad=True)
    sch = create_schedule(mlp)
    seen = []
    sch["fc2"].hook("fwd_pre", lambda m, args: (seen.append("fwd_pre"), (args[0] * 2,))[1])
    sch["fc2"].hook("fwd_post", lambda m, args, out: seen.append("fwd_post"))
    sch["fc2"].hook("bwd_pre", lambda m, grad: (seen.append("bwd_pre"), (grad[0] * 3,))[1])
    sch["fc2"].hook("bwd_post", lambda m, gin, gout: seen.append("bwd_post"))
    reference = copy.deepcopy(mlp)
    for each in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(reference.fc2, each).clear()
    built, _ = build(sch)
    built(x).sum().backward()
    assert seen == ["fwd_pre", "fwd_post", "bwd_pre", "bwd_post"]
    (reference.fc2(reference.act(reference.fc1(x)) * 2).sum() * 3).backward()
    numeric.same(built.fc1.weight.grad, reference.fc1.weight.grad, allowance(mlp, x.numel()))
    with pytest.raises(ScheduleError, match="did you mean 'fwd_pre'"):
        create_schedule(reference)["fc1"].hook("fwd_prep", print)
    with pytest.raises(ScheduleError, match="callable"):
        create_schedule(reference)["fc1"].hook("fwd_pre", 3)


def test_annotations_survive_materialisation_and_replacement(make_transformer):
    sch = create_schedule(make_transformer("gpt2"))
    sch["transformer.ln_f"].annotate("weight", "no_decay", True)
    assert sch["transformer.ln_f"].module.weight.no_decay
    sch["transformer.ln_f"].replace(lambda old: nn.LayerNorm(32))
    built, _ = build(sch)
    assert built.transformer.ln_f.weight.no_decay is True
    with pytest.raises(ScheduleError, match="did you mean 'weight'"):
        create_schedule(built)["transformer.ln_f"].annotate("wieght", "a", 1)
    with pytest.raises(ScheduleError, match="got 'grad'"):
        create_schedule(built)["transformer.ln_f"].annotate("weight", "grad", 1)
