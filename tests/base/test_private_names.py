"""Private names of torch, transformers and Optuna are in one file per library, and exist."""

import ast
import re
from importlib import import_module

import pytest
from house import ROOT, sources
from redline.base import _optuna, _torch, _transformers
from redline.base.errors import MissingDependency

FILES = {"_torch.py", "_transformers.py", "_optuna.py"}
OF_OTHERS = {*_torch.OF_MODULES, *_transformers.OF_MODELS, "_erased", "_schema", "_study_id", "_trial_id"}
"""Private attributes of other libraries' objects."""


@pytest.mark.parametrize(
    ("names", "name"),
    [(_torch, name) for name in _torch.NAMES],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_name_is_there(names, name):
    assert getattr(names, name) is not None


def test_modules_models_and_samplers_have_what_is_asked_of_them():
    import transformers
    from torch import nn

    missing = [name for name in _torch.OF_MODULES if not hasattr(nn.Linear(1, 1), name)]
    missing += [name for name in _transformers.OF_MODELS if not hasattr(transformers.PreTrainedModel, name)]
    for path, method in _optuna.OVERRIDDEN.items():
        module, _, cls = path.rpartition(".")
        missing += [] if hasattr(getattr(import_module(module), cls), method) else [f"{path}.{method}"]
    assert missing == []


def test_all_types_and_classes_of_transformers_are_listed_in_the_source_of_its_tables():
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    tables = [table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    entries = [each for table in tables for each in table.values()]
    classes = {name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)}
    assert len(classes) > 1000 and {*CONFIG_MAPPING, *classes} <= _transformers.listed_names()


def test_a_name_that_is_gone_is_told_in_words(monkeypatch):
    monkeypatch.setitem(_torch.NAMES, "gone", ("torch.utils._no_such_module", "gone"))
    with pytest.raises(
        MissingDependency, match=r"torch \S+ has no torch.utils._no_such_module.gone, .* install torch 2.11 to"
    ):
        _ = _torch.gone
    with pytest.raises(AttributeError, match="no attribute 'never'"):
        _ = _torch.never


def private(text):
    """Private names of torch, transformers and Optuna in a file's text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            if node.attr in OF_OTHERS and ast.unparse(node.value) != "self":
                yield ast.unparse(node)
        else:
            continue
        for name in names:
            if re.fullmatch(r"(torch|nn|dist|transformers|optuna)\.([\w.]+\.)?_[A-Za-z][\w.]*", name):
                yield name


def test_no_other_file_takes_such_a_name():
    found = {
        path.relative_to(ROOT).as_posix(): sorted(set(private(path.read_text(encoding="utf-8"))))
        for path in sources(ROOT).values()
        if path.name not in FILES
    }
    assert {name: names for name, names in found.items() if names} == {}
