"""build: seeded weights, tied weights, names, copies."""

import copy
import pickle

import pytest
import torch
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule
from torch import nn

FAMILIES = ["gpt2", "bert", "llama"]


@pytest.mark.parametrize("name", FAMILIES)
def test_same_seed_gives_bit_equal_weights_and_another_seed_others(make_transformer, name):
    first, second, other = (
        build(create_schedule(make_transformer(name)), seed=seed)[0].state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_follow_the_models_own_initialisation(make_transformer, name):
    built, _ = build(create_schedule(make_transformer(name)))
    torch.manual_seed(0)
    eager = make_transformer(name, device="cpu")
    for key, value in eager.state_dict().items():
        mine = built.state_dict()[key]
        assert mine.dtype == value.dtype and mine.device.type == "cpu"
        # 0.02 is the initial deviation; two samples of n differ by at most five standard errors.
        error = 5 * 0.02 * (2 / value.numel()) ** 0.5
        assert abs(mine.std() - value.std()) < error and abs(mine.mean() - value.mean()) < error, key
    for (key, value), (_, mine) in zip(eager.named_buffers(), built.named_buffers()):
        assert torch.equal(value, mine), key


def test_gpt2_residual_projections_keep_their_scaled_initialisation(make_transformer):
    built, _ = build(create_schedule(make_transformer("gpt2", layers=8)))
    plain = torch.cat([block.mlp.c_fc.weight.flatten() for block in built.transformer.h])
    scaled = torch.cat([block.mlp.c_proj.weight.flatten() for block in built.transformer.h])
    # 1 / sqrt(2 * layers), within five standard errors of a ratio of deviations.
    error = 5 * plain.numel() ** -0.5
    assert scaled.std().item() / plain.std().item() == pytest.approx(1 / 4, rel=error)


def test_ties_hold_after_materialisation(make_transformer):
    built, _ = build(create_schedule(make_transformer("gpt2")))
    assert built.lm_head.weight is built.transformer.wte.weight
    bert, _ = build(create_schedule(make_transformer("bert")))
    assert bert.cls.predictions.decoder.weight is bert.bert.embeddings.word_embeddings.weight
    assert bert.cls.predictions.decoder.bias is bert.cls.predictions.bias


def test_the_global_random_state_is_left_alone(make_transformer):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    build(create_schedule(make_transformer("gpt2")))
    assert torch.equal(torch.get_rng_state(), before)


def test_plain_modules_are_initialised_by_reset_parameters():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.MultiheadAttention(64, 2))
    built, _ = build(create_schedule(model))
    assert built[0].weight.abs().max() <= 1 / 8 and built[0].weight.std() > 0.05
    assert torch.equal(built[1].running_var, torch.ones(64)) and built[1].num_batches_tracked == 0
    assert all(torch.isfinite(each).all() for each in built.state_dict().values())


def test_weights_that_nothing_initialises_are_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    with pytest.raises(ScheduleError, match=r"nothing initialises 1\.gain"):
        build(create_schedule(model))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    built, _ = build(create_schedule(model), init=lambda m: isinstance(m, Scale) and [m.gain.fill_(2)])
    assert built[1].gain.tolist() == [2, 2, 2]


def test_real_weights_keep_their_values_and_their_objects(mlp, make_transformer):
    weight, value = mlp.fc1.weight, mlp.fc1.weight.clone()
    built, _ = build(create_schedule(mlp))
    assert built.fc1.weight is weight and torch.equal(weight, value)
    model = make_transformer("gpt2", device="cpu")
    kept = model.transformer.h[0].mlp.c_proj.weight.clone()
    with torch.device("meta"):
        model.transformer.h[0].mlp.c_fc = type(model.transformer.h[0].mlp.c_fc)(128, 32)
    built, _ = build(create_schedule(model))
    assert torch.equal(built.transformer.h[0].mlp.c_proj.weight, kept)
    fresh = built.transformer.h[0].mlp.c_fc.weight
    assert fresh.std().item() == pytest.approx(0.02, rel=5 * (2 * fresh.numel()) ** -0.5)


def test_the_optimizer_gets_the_parameters(mlp):
    module, optimizer = build(create_schedule(mlp), optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in module.parameters()}
    assert build(create_schedule(copy.deepcopy(mlp)))[1] is None


def test_a_primitive_after_build_is_refused_and_build_happens_once(mlp):
    sch = create_schedule(mlp)
    build(sch)
    with pytest.raises(ScheduleError, match="checkpoint on 'fc1': a primitive must come before build"):
        sch["fc1"].checkpoint()
    with pytest.raises(ScheduleError, match="built already"):
        build(sch)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_copies_and_pickles_of_a_scheduled_model(make_transformer, tokens, name):
    model = make_transformer(name)
    names = list(model.state_dict())
    sch = create_schedule(model)
    blocks = [s for s in sch.select("**.[01]") if s.path.endswith((".0", ".1"))]
    blocks[0].checkpoint().cast(torch.bfloat16)
    blocks[1].compile(backend="eager")
    built, _ = build(sch)
    assert list(built.state_dict()) == names
    copied, unpickled = copy.deepcopy(built), pickle.loads(pickle.dumps(built))
    for other in (copied, unpickled):
        assert torch.equal(other(tokens).logits, built(tokens).logits)
        other.load_state_dict(make_transformer(name, device="cpu").state_dict())
        assert not torch.equal(other(tokens).logits, built(tokens).logits)
    layer = copied.get_submodule(blocks[0].path)
    assert layer.forward.module is layer
