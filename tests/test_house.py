"""The layers of docs/architecture.md: packages import only from lower layers, without import cycles."""

import re

import pytest
from house import ROOT, graph, importers, lost, sources

LAYERS = (
    ("base", "knobs"),
    ("space", "schedule", "results"),
    ("frameworks",),
    ("models", "views"),
    ("training", "estimator"),
    ("runners",),
    ("tuner",),
    ("testing", "trainer", "service"),
    ("cli",),
    ("errors",),
)
"""Packages by layer, lowest first: each imports from lower layers. Single files of the lowest may import each other."""


def package(name):
    """The top-level package of a module, or the name of a top-level module."""
    return (name.split(".") + [""])[1]


def upward(found):
    """Returns imports from a package of a higher layer, or of another package of the same one."""
    layer = {each: number for number, packages in enumerate(LAYERS) for each in packages}
    out = []
    for name, others in found.items():
        for other in sorted(others):
            mine, its = package(name), package(other)
            if not mine or not its or mine == its or layer[mine] == layer[its] == 0:
                continue
            if layer[mine] <= layer[its]:
                out.append(f"{name} imports {other}")
    return out


def cycles(found):
    """Returns import cycles: strongly connected components, by Tarjan's algorithm."""
    index, low, stack, out = {}, {}, [], []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(found[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            members = stack[at:]
            del stack[at:]
            if len(members) > 1:
                out.append(sorted(members))

    for name in found:
        if name not in index:
            visit(name)
    return out


@pytest.fixture(scope="module")
def house():
    return graph(ROOT)


def test_every_package_has_its_layer(house):
    known = {each for packages in LAYERS for each in packages}
    assert {package(name) for name in house} - {""} == known


def test_no_import_goes_up(house):
    assert upward(house) == []


def test_every_relative_import_leads_to_a_module_of_the_package(tmp_path):
    known = sources(ROOT)
    assert [each for name, path in known.items() for each in lost(name, path, known)] == []
    (tmp_path / "serve.py").write_text("def f():\n    from ...tuner.budget import parse\n    from ..gone import x")
    found = list(lost("redline.cli.serve", tmp_path / "serve.py", known))
    assert found == ["serve.py:2 imports ...tuner.budget", "serve.py:3 imports ..gone"]


def test_imports_inside_the_package_are_relative():
    # These run with -m or are loaded by Alembic from their path, and must use their import path.
    ran = {"runners/host/agent.py", "runners/place/ray_driver.py"}
    assert importers("redline") <= ran | {"service/migrations/versions/first.py"}


@pytest.mark.parametrize(
    ("package", "allowed"), [("ray", ("runners/place/ray", "service/local_ray")), ("hebo", "tuner/samplers/hebo")]
)
def test_optional_packages_are_imported_in_one_place_only(package, allowed):
    users = importers(package)
    assert users, f"nothing imports {package}"
    assert all(user.startswith(allowed) for user in users)


def test_there_are_no_import_cycles(house):
    assert cycles(house) == []


def test_upward_imports_and_cycles_are_found(tmp_path):
    files = {
        "space/__init__.py": "from .knob import Knob",
        "space/knob.py": "def f():\n    from ..models import workload",
        "models/__init__.py": "",
        "models/workload.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .batches import ForwardPass",
        "models/batches.py": "from ..models import workload",
        "schedule/__init__.py": "",
        "schedule/calls.py": "from importlib import import_module\nimport_module(f'..tuner.{name}', __package__)",
        "tuner/__init__.py": "",
        "tuner/search.py": "import_module('redline.tuner.loop')",
        "tuner/loop.py": "from .search import x",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = graph(tmp_path)
    assert set(upward(found)) == {
        "redline.space.knob imports redline.models.workload",
        "redline.schedule.calls imports redline.tuner.loop",
        "redline.schedule.calls imports redline.tuner.search",
    }
    assert sorted(cycles(found)) == [
        ["redline.models.batches", "redline.models.workload"],
        ["redline.tuner.loop", "redline.tuner.search"],
    ]


def test_the_glossary_names_files_that_are_there_and_no_word_twice():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^`]+)` \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert len(rows) > 30
    assert [where for _, where in rows if not (ROOT / where).exists()] == []
    assert len({word for word, _ in rows}) == len(rows)


def test_the_lines_of_a_knob_are_those_of_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text()
    lines = re.findall(r"^(\w+/\w+\.py) +(.*fused_optimizer.*)$", page, re.M)
    found = [
        (str(path.relative_to(ROOT)), line)
        for path in sources(ROOT).values()
        for line in path.read_text().splitlines()
        if re.search(r"\bfused_optimizer\b", line) and path.relative_to(ROOT).parts[0] != "frameworks"
    ]
    assert len(lines) == len(found) >= 8
    for name, text in lines:
        assert any(path == name and text in line for path, line in found), (name, text)
