"""The tree: addressing, selection, drawing, the registry."""

import inspect
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch
from redline.base.errors import ScheduleError
from redline.schedule import Schedule, create_schedule, list_primitives, primitives, register_primitive


def test_paths_address_the_modules_of_the_model(make_transformer):
    model = make_transformer("gpt2")
    sch = create_schedule(model)
    assert sch.path == "" and sch.module is model
    assert sch["transformer.h.0.mlp"].module is model.transformer.h[0].mlp
    assert list(sch["transformer"]["h"])[-1].path == "transformer.h.1"
    assert [each.path for each in sch["transformer.h"]] == ["transformer.h.0", "transformer.h.1"]
    assert "transformer.h.0" in sch and "transformer.h.7" not in sch


def test_select_matches_components_and_spans(make_transformer):
    sch = create_schedule(make_transformer("bert"))
    assert [s.path for s in sch.select("bert.encoder.layer.*.attention")] == [
        "bert.encoder.layer.0.attention",
        "bert.encoder.layer.1.attention",
    ]
    assert len(sch.select("**.dense")) == 7
    assert [s.path for s in sch["bert.encoder"].select("layer.[1-9]")] == ["bert.encoder.layer.1"]
    with pytest.raises(ScheduleError, match=r"nearest path is 'bert.encoder.layer.\*.attention'"):
        sch.select("encoder.layer.*.attention")


def test_drawing_shows_what_was_applied_where_and_folds_equal_blocks(make_transformer):
    sch = create_schedule(make_transformer("gpt2", layers=4))
    sch["transformer.h.0"].checkpoint()
    sch["transformer.h.1.mlp"].cast(torch.bfloat16)
    lines = str(sch).splitlines()
    assert any(line.endswith("0: GPT2Block  [checkpoint()]") for line in lines)
    assert any(line.endswith("mlp: GPT2MLP  [cast(torch.bfloat16)]") for line in lines)
    assert any(line.endswith("2-3: GPT2Block  x2") for line in lines)


def test_methods_have_the_primitives_own_signature_and_docstring(mlp):
    sch = create_schedule(mlp)
    files = [import_module(f"{primitives.__name__}.{each.name}") for each in iter_modules(primitives.__path__)]
    found = {name: each for file in files for name, each in vars(file).items() if _is_primitive(name, each)}
    for name, function in found.items():
        method = getattr(sch, name)
        own = list(inspect.signature(getattr(function, "__wrapped__", function)).parameters)[1:]
        assert own == list(inspect.signature(method).parameters)
        assert method.__doc__ == function.__doc__ and method.__doc__
    assert {*found, "find"} == set(list_primitives())  # `find` only reads, so it is a plain function


def _is_primitive(name, value):
    return getattr(value, "__qualname__", "") == f"Schedule.{name}"


def test_a_user_can_register_a_primitive(mlp):
    try:

        @register_primitive
        def freeze(sch, name: str = "weight") -> None:
            """Stops the training of a parameter."""
            getattr(sch.module, name).requires_grad_(False)

        sch = create_schedule(mlp)
        assert sch["fc1"].freeze().path == "fc1"
        assert not mlp.fc1.weight.requires_grad and mlp.fc2.weight.requires_grad
        assert "[freeze()]" in str(sch)
        with pytest.raises(ScheduleError, match="'freeze' is taken"):
            register_primitive(freeze)
    finally:
        del Schedule.freeze
    with pytest.raises(ScheduleError, match="'module' is taken"):
        register_primitive(lambda sch: None, name="module")


def test_unknown_primitive_names_the_nearest(mlp):
    with pytest.raises(AttributeError, match="did you mean 'checkpoint'"):
        create_schedule(mlp).chekpoint()
