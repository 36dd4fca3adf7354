"""Examples of the README run unmodified."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import redline
from pseudo_terminal import Terminal

README = (Path(redline.__file__).parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_python_examples():
    assert len(BLOCKS) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[0])
def test_every_python_example_runs_in_a_terminal(block, tmp_path):
    (tmp_path / "example.py").write_text(block)
    shown = Terminal([sys.executable, "example.py"], cwd=tmp_path, columns=100)
    assert shown.wait(570) == 0, shown.text
    assert shown.text.strip() and "Traceback" not in shown.text


def test_every_option_the_readme_names_exists():
    out = subprocess.run(
        [sys.executable, "-m", "redline.cli", "tune", "-h"], capture_output=True, text=True, check=True
    ).stdout
    for line in re.findall(r"\$ redline tune (.*)", README):
        words = shlex.split(line, comments=True)  # the tuned command is one word
        for option in [word for word in words if word.startswith("--")]:
            assert option in out, f"`redline tune {line}` names {option}"


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_every_file_the_readme_links_to_exists(link):
    assert (Path(redline.__file__).parent / link).exists()
