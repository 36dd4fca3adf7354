"""build: seeded weights, tied weights, names, copies."""

import copy
import pickle

import pytest
import torch
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule

FAMILIES = ["gpt2", "bert", "llama"]


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
