"""Documentation examples work: Python blocks and commands run, and links resolve.

Python blocks of a page run unmodified, in order, in a separate process. Commands (lines that start with `$ ` in
`console` blocks) run in a shell, in order, with `SHIM` for redline; `scaled` makes searches small. A block that
cannot run here has `<!-- not run: REASON -->` on the line before.
"""

import configparser
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import redline
from pseudo_terminal import Terminal
from redline.cli.main import redline as command_line

ROOT = Path(redline.__file__).parent
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n+)?^```(python|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# tests/test_readme.py runs the first alone; tests/schedule/test_docs.py and tests/training/test_numerics.py
# run the others, parts of which need two ranks.
ELSEWHERE = {"README.md", "schedule.md", "add-a-model.md"}

CONFIG = (
    '{"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 512, "n_positions": 128,'
    ' "bos_token_id": 0, "eos_token_id": 0, "architectures": ["GPT2LMHeadModel"]}'
)

SHIM = """#!{python}
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/support"]
from test_docs import scaled
from redline.cli import main
main(scaled(sys.argv[1:]))
"""

TINY = {"gpt2": "gpt2-tiny", "bert": "bert-tiny", "roberta": "bert-tiny"}


def blocks(page, kind):
    """The blocks of a kind on a page, except those with a reason not to run."""
    return [text for skipped, found, text in BLOCK.findall(PAGES[page]) if found == kind and not skipped]


def commands(page):
    """The commands of a page, in order."""
    return [line[2:] for text in blocks(page, "console") for line in text.splitlines() if line.startswith("$ ")]


def scaled(arguments):
    """Returns the command that the tests run instead of a documented one.

    A search has one trial (two with --set, so that a later search has something to learn from; one more with --resume),
    short measurements and two devices at most, and runs without Ray. A workload without its own batch gets a small
    one, and a full-size model is replaced by its family's tiny one. All other arguments are unchanged.
    """
    if arguments[:1] not in (["tune"], ["space"]):
        return arguments
    name, *given = arguments
    small = []
    for place, each in enumerate(given):
        if given[place - 1 : place] == ["--devices"]:
            each = str(min(2, int(each)))
        elif place == 0 and find_model(each) and not each.endswith("-tiny"):
            each = TINY.get(each.partition("-")[0], "llama-tiny")
        small.append(each)
    if name == "tune":
        trials = 1 + ("--set" in given) + ("--resume" in given)
        small += ["--runner", "local", "--measure-time", "50ms", "--trials", str(trials)]
    if "--workload" not in given and name == "tune":
        small += ["--seq-len", "16", "--global-batch", "8"]
    return [name, *small]


def find_model(name):
    """True if a preset has this name."""
    from redline.models.presets import PRESETS

    return name in PRESETS


def redline_commands(line):
    """The arguments of each call of redline in a shell command line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    found, current = [], None
    for word in words:
        if set(word) <= set("();<>|&"):
            current = None
        elif word == "redline" and current is None:
            current = []
            found.append(current)
        elif current is not None:
            current.append(word)
    return found


EVERY_CALL = [(page, arguments) for page in PAGES for line in commands(page) for arguments in redline_commands(line)]


def test_there_is_something_to_check():
    assert len(EVERY_CALL) > 30
    assert {page for page, _ in EVERY_CALL} >= {
        "README.md",
        "quickstart.md",
        "exports.md",
        "out-of-memory.md",
    }


@pytest.mark.parametrize(
    ("page", "arguments"),
    EVERY_CALL,
    ids=lambda value: value if isinstance(value, str) else "-".join(value)[:60],
)
def test_every_command_and_option_that_is_named_exists(page, arguments):
    # Created like the group's: click keeps a command's help option from its first context.
    parent = click.Context(command_line, info_name="redline", **command_line.context_settings)
    if arguments[0].startswith("-"):
        return
    command = command_line.get_command(parent, arguments[0])
    assert command is not None, f"{page}: there is no command {arguments[0]}"
    try:
        command.make_context(arguments[0], list(arguments[1:]), parent=parent)
    except click.exceptions.Exit:
        return  # -h and --list print and exit


INTERPRETER = """
import os, runpy, sys
import redline, torch, transformers
for folder in iter(sys.stdin.readline, ""):
    page = os.fork()
    if not page:
        os.chdir(folder.strip())
        output = os.open("output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.argv, sys.path[0] = ["page.py"], folder.strip()
        runpy.run_path("page.py", run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(page, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def interpreter():
    """A process that runs `page.py` in each folder that it reads, in a fork with torch already imported.

    It prints the exit code; the page's output is in the file `output`.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", INTERPRETER], stdin=pipe, stdout=pipe, text=True) as process:
        yield process


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if re.search(r"\btune\(", text) else ())
        for page in PAGES
        if page not in ELSEWHERE and (text := "\n".join(blocks(page, "python")))
    ],
)
def test_the_python_of_a_page_runs(page, interpreter, tmp_path):
    (tmp_path / "page.py").write_text("\n\n".join(blocks(page, "python")))
    interpreter.stdin.write(f"{tmp_path}\n")
    interpreter.stdin.flush()
    assert interpreter.stdout.readline() == "0\n", (tmp_path / "output").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        page if page == "README.md" else pytest.param(page, marks=pytest.mark.exhaustive)
        for page in PAGES
        if commands(page)
    ],
)
def test_the_commands_of_a_page_run_in_a_terminal(page, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    write_tool(tools / "redline", SHIM.format(python=sys.executable, tests=str(Path(__file__).parent)))
    write_tool(tools / "python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    # These would take minutes and a network; their existence is checked below.
    for name in ("make", "pip"):
        write_tool(tools / name, "#!/bin/sh\nexit 0\n")
    place = tmp_path / "work"
    (place / "path" / "to").mkdir(parents=True)
    (place / "path" / "to" / "config.json").write_text(CONFIG)
    own = [text for text in blocks(page, "python") if re.search(r"^workload = ", text, re.MULTILINE)]
    if own:
        (place / "train.py").write_text(own[0])
    script = "set -euo pipefail\n" + "\n".join(commands(page))
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    shown = Terminal(["bash", "-xc", script], cwd=place, env=environment, columns=120)
    assert shown.wait(850) == 0, shown.text[-6000:]
    assert "Traceback" not in shown.text


def write_tool(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    "line", sorted({each for page in PAGES for each in commands(page) if re.match(r"(make|pip)\b", each)})
)
def test_targets_and_extras_that_are_named_exist(line):
    text = line.partition("#")[0]
    for target in re.findall(r"\bmake (\w+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    for extras in re.findall(r"(?:redline|\.)\[([\w,]+)\]", text):
        for extra in extras.split(","):
            assert extra in settings["options.extras_require"]


def test_a_search_is_scaled_by_its_rule():
    assert scaled(["show", "runs/a"]) == ["show", "runs/a"]
    small = scaled(["tune", "llama2-7b", "--devices", "8", "--trials", "30", "--resume"])
    assert small[:4] == ["tune", "llama-tiny", "--devices", "2"]
    assert small[-6:] == ["--trials", "2", "--seq-len", "16", "--global-batch", "8"]
    assert "--seq-len" not in scaled(["tune", "--workload", "train.py:workload"])


def test_every_extra_of_the_pages_exists():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    for text in PAGES.values():
        for extra in re.findall(r"redline\[(\w+)\]", text):
            assert extra in settings["options.extras_require"]


def test_the_api_page_has_every_public_name():
    listed = re.findall(r"^::: (\S+)", PAGES["python-api.md"], re.MULTILINE)
    for module in (ROOT / "__init__.pyi").read_text().split("from ."):
        for name in re.findall(r"(\w+) as (?=\w)", module):
            where = f"redline.{module.split(' import')[0]}"
            assert any(each.endswith(f".{name}") for each in listed) or where == "redline.base.errors", name
    assert all(pkgutil.resolve_name(each) for each in listed)


@pytest.mark.slow
def test_the_site_builds_and_no_link_is_broken(tmp_path):
    if find_spec("mkdocs") is None or find_spec("material") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs-material and mkdocstrings are not installed: pip install 'redline[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=570, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    built = tmp_path / "site"
    for page in PAGES:
        name = page.removesuffix(".md")
        if page != "README.md":
            assert (built / ("index.html" if name == "index" else f"{name}/index.html")).exists()
    text = (built / "cli" / "index.html").read_text()
    for command in command_line.list_commands(click.Context(command_line, **command_line.context_settings)):
        assert f"redline {command}" in text
    api = (built / "python-api" / "index.html").read_text()
    assert "trial_timeout" in api and "steps_ms" not in api
