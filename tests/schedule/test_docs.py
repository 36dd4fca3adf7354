"""docs/schedule.md: every example runs, and every primitive has an example."""

import re
from pathlib import Path

import torch
from redline.schedule import Schedule, list_primitives

PAGE = Path(__file__).parents[2] / "docs" / "schedule.md"


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def execute(code):
    space = {}
    for block in code:
        exec(compile(block, str(PAGE), "exec"), space)
    return True


def test_the_examples_on_one_device_run():
    one, _, _ = PAGE.read_text().partition("## Several devices")
    torch.manual_seed(0)
    try:
        assert execute(blocks(one))
    finally:
        del Schedule.freeze


def test_the_examples_on_several_devices_run(two):
    _, _, several = PAGE.read_text().partition("## Several devices")
    header = "import torch\nimport redline as rl\nfrom torch import nn\nfrom torch.nn import functional as F\n"
    assert two.run(execute, [header, *blocks(several)]) == [True, True]


def test_every_primitive_has_an_example():
    code = "\n".join(blocks(PAGE.read_text()))
    missing = [name for name in list_primitives(name_only=True) if not re.search(rf"\.{name}\(", code)]
    assert not missing


def test_every_example_is_listed():
    _, _, table = PAGE.read_text().partition("## Examples")
    listed = set(re.findall(r"^\| `(\w+\.py)` \|", table, re.M))
    assert listed == {path.name for path in (PAGE.parents[1] / "examples").glob("*.py")}
