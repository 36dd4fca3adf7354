"""What is packaged, what is public, and what an import costs."""

import configparser
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import redline
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(redline.__file__).parent
OUTSIDE = {"tests", "bench", "examples", "docs", "build", "dist", "runs"}


def test_every_folder_of_the_package_is_installed():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    listed = set(settings["options"]["packages"].split())
    found = {"redline"}
    for init in ROOT.rglob("__init__.py"):
        parts = init.relative_to(ROOT).parts[:-1]
        if parts and parts[0] not in OUTSIDE and not parts[0].startswith("."):
            found.add(".".join(("redline", *parts)))
    assert listed == found


def test_every_requirement_has_a_tested_version_within_its_range():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lists = [settings["options"]["install_requires"], *settings["options.extras_require"].values()]
    wanted = [Requirement(line) for each in lists for line in each.splitlines() if line and not line.startswith("#")]
    pinned = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    versions = {canonicalize_name(each.name): next(iter(each.specifier)).version for each in pinned}
    unmet = [str(each) for each in wanted if versions.get(canonicalize_name(each.name), "") not in each.specifier]
    assert [each for each in unmet if not each.startswith("megatron-core")] == []  # needs Python 3.12


def test_import_is_quick_because_it_loads_next_to_nothing():
    code = "import sys; before = set(sys.modules); import redline; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in out.split()}
    assert loaded - set(sys.stdlib_module_names) == {"redline", "lazy_loader"}
    assert [name for name in out.split() if name.startswith("redline.")] == []


def test_every_package_has_the_names_that_it_lists():
    packages = [each for each in pkgutil.walk_packages([str(ROOT)], "redline.") if each.ispkg]
    rooms = [each.name for each in packages if each.name.split(".")[1] not in OUTSIDE]
    modules = [importlib.import_module(name) for name in rooms]
    missing = [f"{m.__name__}.{name}" for m in modules for name in getattr(m, "__all__", ()) if not hasattr(m, name)]
    assert missing == [] and "redline.models.families" in rooms


@pytest.mark.parametrize("name", [name for name in redline.__all__ if name != "__version__"])
def test_every_public_name_is_there_and_documented(name):
    assert getattr(redline, name).__doc__


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="tunes"):
        redline.tunes
