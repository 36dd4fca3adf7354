"""The house: what is packaged, what imports what, and what an import costs."""

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest
import redline

ROOT = Path(redline.__file__).parent
PACKAGES = ("space", "schedule", "results", "models", "runners", "tuner")
FLOORS = {"space": 0, "schedule": 0, "results": 0, "models": 1, "runners": 2, "tuner": 3}
NOT_SOURCE = {"tests", "bench", "examples", "docs", "build", "dist", "runs"}


def sources():
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def imports(path):
    """Absolute dotted names that a file imports, relative ones resolved."""
    package = ("redline", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            if node.module:
                yield f"{base}.{node.module}" if base else node.module, node
            else:
                for alias in node.names:
                    yield f"{base}.{alias.name}", node


def test_every_folder_of_the_package_is_installed():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    listed = set(settings["options"]["packages"].split())
    found = {"redline"}
    for init in ROOT.rglob("__init__.py"):
        parts = init.relative_to(ROOT).parts[:-1]
        if parts and parts[0] in PACKAGES:
            found.add(".".join(("redline", *parts)))
    assert listed == found


def test_no_floor_imports_from_a_higher_one_or_its_neighbour():
    wrong = []
    for path in sources():
        own = path.relative_to(ROOT).parts[0]
        for name, _ in imports(path):
            parts = name.split(".")
            if parts[0] == "redline" and len(parts) > 1 and parts[1] in FLOORS:
                if parts[1] != own and FLOORS[parts[1]] >= FLOORS[own]:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_imports_inside_the_package_are_relative():
    absolute = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            if any(name.split(".")[0] == "redline" for name in names):
                absolute.append(str(path.relative_to(ROOT)))
    # Run with -m, these must know themselves by their import path.
    assert set(absolute) <= {"runners/agent.py", "runners/ray_driver.py"}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [("ray", "runners/ray"), ("hebo", "tuner/samplers/hebo")],
)
def test_optional_packages_are_imported_in_one_place_only(package, allowed):
    users = {
        str(path.relative_to(ROOT))
        for path in sources()
        for name, _ in imports(path)
        if name.split(".")[0] == package
    }
    assert users, f"nothing imports {package}"
    assert all(user.startswith(allowed) for user in users)


def test_files_stay_near_one_idea():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: lines for name, lines in long.items() if lines > 500} == {}


def test_import_is_quick_because_it_loads_next_to_nothing():
    code = "import sys; before = set(sys.modules); import redline; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in out.split()}
    assert loaded - set(sys.stdlib_module_names) == {"redline"}
    assert [name for name in out.split() if name.startswith("redline.")] == []


@pytest.mark.parametrize("name", [name for name in redline.__all__ if name != "__version__"])
def test_every_public_name_is_there_and_documented(name):
    assert getattr(redline, name).__doc__


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="tunes"):
        redline.tunes
