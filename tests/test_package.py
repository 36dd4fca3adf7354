"""Contents of the package, public names, and the cost of an import."""

import configparser
import importlib
import pkgutil
import re
import shutil
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


def test_packages_that_torch_chooses_have_no_tested_version():
    """CUDA builds of torch require one exact version each, and cannot be installed beside another."""
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    assert [
        line for line in pinned if line.startswith(("triton", "cuda", "nvidia-")) and "nvidia-ml-py" not in line
    ] == []


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


USER = """\
import redline as rl

space = rl.Space()
space.choice("tp", [1, 2])
result = rl.tune(lambda config: 1.0, space, trials=1)
ratio: str = result.gain
rl.tune("gpt2", trials="three")
"""


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_type_checkers_find_redline_in_an_editable_install(tmp_path, checker):
    """In a fresh environment with the Makefile's links they find exactly the two mistakes of a script."""
    program = shutil.which(checker, path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip(f"{checker} is not installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')  # pyright's default
    python = tmp_path / "venv" / "bin" / "python"
    more = (
        ["--python-executable", str(python)] if checker == "mypy" else ["--pythonpath", str(python), "--level", "error"]
    )

    def found():
        done = subprocess.run([program, *more, "user.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        return re.findall(r"user\.py:(\d+)[^\n]*error", done.stdout)

    assert found() != ["6", "7"]
    subprocess.run(["make", "-C", ROOT, "types", f"VENV={tmp_path / 'venv'}"], check=True, timeout=60)
    assert found() == ["6", "7"]
    (stubs,) = (tmp_path / "venv").rglob("redline-stubs")
    root = "a tool that follows links to the root, where .venv is, does not end"
    assert ROOT.resolve() not in {each.resolve() for each in (stubs, *stubs.iterdir())}, root
    code = "import importlib.util as u; print(u.find_spec('redline') and u.find_spec('redline').origin)"
    shown = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "None", "the links are for type checkers alone"
