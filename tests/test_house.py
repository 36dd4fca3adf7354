"""The house as docs/architecture.md draws it: rooms stand on floors, and no files import each other in a circle."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTSIDE = ("tests", "bench", "docs", "examples")
"""Folders of the repository that are not of the package's house."""
FLOORS = (
    ("errors", "interrupts", "orders", "reading", "device", "host_memory", "lock", "scratch", "writing"),
    ("space", "schedule", "results"),
    ("models",),
    ("training",),
    ("estimator",),
    ("runners",),
    ("tuner",),
)
"""Rooms, lowest first: each imports from its own floor and from those below."""


def sources(root):
    """Every module of the package and its file: `{"redline.space.knob": Path}`."""
    out = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in OUTSIDE or any(part.startswith((".", "build")) for part in parts):
            continue
        out[".".join(("redline", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return out


def imports(name, path, known):
    """Modules of the package that one names, in whatever function, for types too."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for each in node.names:
                found = f"{target}.{each.name}" if f"{target}.{each.name}" in known else target
                if found in known:
                    yield found


def graph(root):
    """What each module imports, itself left out."""
    known = sources(root)
    return {name: {each for each in imports(name, path, known) if each != name} for name, path in known.items()}


def room(name):
    """The package at the top that a module is in, or the module itself where it stands there."""
    return (name.split(".") + [""])[1]


def upward(found):
    """Imports of a room on a higher floor."""
    floor = {each: number for number, rooms in enumerate(FLOORS) for each in rooms}
    return [
        f"{name} imports {other}"
        for name, others in found.items()
        for other in sorted(others)
        if room(name) and room(other) and floor[room(name)] < floor[room(other)]
    ]


def circles(found):
    """Modules that import each other in a circle: strongly connected components, by Tarjan's algorithm."""
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


def test_every_room_has_its_floor(house):
    known = {each for rooms in FLOORS for each in rooms}
    assert {room(name) for name in house} - {""} == known


def test_no_import_runs_up(house):
    assert upward(house) == []


def test_no_files_import_each_other_in_a_circle(house):
    assert circles(house) == []


def test_what_runs_up_or_in_a_circle_is_found(tmp_path):
    files = {
        "space/__init__.py": "from .knob import Knob",
        "space/knob.py": "def f():\n    from ..models import workload",
        "models/__init__.py": "",
        "models/workload.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .batches import Step",
        "models/batches.py": "from ..models import workload",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = graph(tmp_path)
    assert upward(found) == ["redline.space.knob imports redline.models.workload"]
    assert circles(found) == [["redline.models.batches", "redline.models.workload"]]
