"""An option is declared once: the command line, `redline.tune`, the HTTP API and the checks are derived from it."""

import ast
import re
from dataclasses import dataclass, fields
from inspect import signature
from typing import Annotated

import click
import pydantic
import pytest
import redline
from click.testing import CliRunner
from command_line import run
from house import ROOT, sources
from redline.base.errors import UsageError, replacements
from redline.base.option import Option, check_options, on_command_line, option as name_of_option, options_of
from redline.cli.main import redline as program
from redline.cli.options import file_fields, options_for
from redline.runners.command.command import Command
from redline.service.api.models import CommandForm, SearchForm, form
from redline.service.request import TARGETS, TRAVELLING
from redline.tuner.request.options import SECTIONS, Request

ONLY_PYTHON = {"direction", "isolate", "prior", "begin_with", "listener"}
"""Arguments that are objects or belong to a callable."""
ONLY_COMMAND_LINE = {"workload", "command_file", "dry", "as_json"}
ONLY_HERE = {
    *(
        "warm_start",
        "runner",
        "ray_address",
        "device_kind",
        "out",
        "resume",
        "storage",
        "log_to",
    ),
}
"""Options with files or settings of the machine that a search runs on: they are not sent to a server."""
OTHERWISE_SENT = {"devices", "space", "allow", "override", "fix", "hardware"}
"""Options whose type or default differs in the HTTP API."""

OPTIONS = {field.name: (field, option) for section in SECTIONS for field, option in options_of(section)}


def test_command_line_python_and_api_have_the_same_options():
    python = set(signature(redline.tune).parameters)
    command_line = {each.name for each in program.get_command(click.Context(program), "tune").params}
    assert python - ONLY_PYTHON == {*OPTIONS, "target"}
    assert command_line - ONLY_COMMAND_LINE - {each.name for each in fields(Command)} == {*OPTIONS, "target"}
    assert set(SearchForm.model_fields) == {*OPTIONS, *TARGETS} - ONLY_HERE
    assert set(TRAVELLING) == {*OPTIONS} - ONLY_HERE
    assert set(CommandForm.model_fields) == {each.name for each in fields(Command)} - {"render", "emulate"}
    submit = {each.name for each in program.get_command(click.Context(program), "submit").params}
    by_option = {field.name for field, option in options_of(Command) if not option.in_file}
    assert submit >= {*SearchForm.model_fields, *by_option} - {*TARGETS} | {"target", "command"}
    assert not submit & {*ONLY_HERE, "render", "emulate"}


def options_by_flag(name):
    """Returns the flags of a command's options, without `--help`."""
    parameters = program.get_command(click.Context(program), name).params
    options = [parameter for parameter in parameters if isinstance(parameter, click.Option)]
    return [max((*option.opts, *option.secondary_opts), key=len) for option in options]


@pytest.mark.parametrize(("name", "most"), [("tune", 40), ("estimate", 20), ("train", 24)])
def test_a_command_has_few_options(name, most):
    assert len(options_by_flag(name)) <= most


def test_there_are_few_commands():
    assert len(program.list_commands(click.Context(program))) <= 20


@pytest.mark.parametrize("name", ["tune", "submit", "scale", "estimate", "train", "convert"])
def test_a_removed_option_is_refused_with_what_to_use_instead(capsys, name):
    for flag, advice in replacements()[f"option of {name}"].items():
        code, _, err = run(capsys, name, flag)
        assert code == 2 and f"Error: {flag} was removed: {advice}" in err


def test_defaults_are_the_same_everywhere():
    parameters = signature(redline.tune).parameters
    tune = program.get_command(click.Context(program), "tune")
    params = {each.name: each for each in tune.params}
    within = click.Context(program, **program.context_settings)
    given = tune.make_context("tune", ["gpt2-tiny"], parent=within).params
    for name, (field, option) in OPTIONS.items():
        default = field.default
        assert parameters[name].default == default
        assert given[name] == (() if option.many else default), name
        if name in SearchForm.model_fields and name not in OTHERWISE_SENT:
            assert SearchForm.model_fields[name].default == default
            assert SearchForm.model_fields[name].description == option.help == params[name].help


def test_messages_name_options_as_they_are_given(capsys):
    with pytest.raises(UsageError, match=r"^resume=True needs `out`, the folder"):
        redline.tune("gpt2-tiny", resume=True)
    code, _, err = run(capsys, "tune", "gpt2-tiny", "--resume")
    assert code == 2 and "--resume needs --out, the folder" in err
    with pytest.raises(UsageError, match=r"^resume=True needs `out`, the folder"):
        redline.tune("gpt2-tiny", resume=True)


def test_every_option_that_a_message_names_is_declared():
    declared = OPTIONS | {field.name: (field, option) for field, option in options_of(Command) if not option.in_file}
    named = [
        [getattr(argument, "value", None) for argument in call.args]
        for path in sources(ROOT).values()
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "option"
        and isinstance(call.args[0], ast.Constant)
    ]
    assert len(named) > 50
    for name, *value in named:
        assert (value == [True]) == (declared[name][0].default is False), name
    with on_command_line():
        for name in {name for name, *_ in named}:
            assert name_of_option(name) == f"--{(declared[name][1].flag or name).replace('_', '-')}"


@pytest.mark.parametrize("name", sorted(each for each, (_, option) in OPTIONS.items() if option.type))
def test_the_api_refuses_the_values_that_python_refuses(name):
    _, option = OPTIONS[name]
    outside = option.least - 1 if option.above is None else option.above
    with pytest.raises(UsageError, match=rf"{name} must be {option.rule}, but got {outside}"):
        check_options(Request("gpt2-tiny", **{name: outside}))
    with pytest.raises(pydantic.ValidationError, match=name):
        SearchForm(target="gpt2-tiny", **{name: outside})
    most = TRAVELLING[name]
    assert getattr(SearchForm(target="gpt2-tiny", **{name: option.type(most)}), name) == most
    with pytest.raises(pydantic.ValidationError, match=name):
        SearchForm(target="gpt2-tiny", **{name: 2 * option.type(most)})


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section with new options."""

    apples: Annotated[int, Option("Number of apples.", type=int, least=2)] = 3
    ripe: Annotated[bool, Option("Only ripe ones.")] = False
    share: Annotated[float | None, Option("A share.", type=float, above=0, below=1)] = None
    sizes: Annotated[tuple[float, float], Option("Two sizes.", type=float, least=0, below=1, in_file=True)] = (
        0.1,
        0.2,
    )


def test_a_new_option_needs_one_line():
    @click.command()
    @options_for(Section)
    def pick(**given):
        check_options(Section(**given))
        click.echo(sorted(given.items()))

    found = CliRunner().invoke(pick, ["--apples", "5", "--ripe"], catch_exceptions=False)
    assert found.output == "[('apples', 5), ('ripe', True), ('share', None)]\n"
    assert (
        "sizes" not in CliRunner().invoke(pick, ["--help"]).output
        and file_fields(Section) == "  sizes  Two sizes.  [default: [0.1, 0.2]]"
    )
    assert re.search(r"--apples N +Number of apples\.  \[default: 3\]", CliRunner().invoke(pick, ["--help"]).output)
    with pytest.raises(UsageError, match="apples must be a whole number of at least 2, but got 1"):
        CliRunner().invoke(pick, ["--apples", "1"], catch_exceptions=False)
    body = form("Body", {"apples": 9, "ripe": None}, Section)
    assert body().model_dump() == {"apples": 3, "ripe": False}
    for apples in (1, 10):
        with pytest.raises(pydantic.ValidationError):
            body(apples=apples)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"apples": True}, "a whole number of at least 2"),
        ({"apples": 2.5}, "a whole number of at least 2"),
        ({"apples": "3"}, "a whole number of at least 2"),
        ({"share": 1}, "a share between 0 and 1"),
        ({"share": float("nan")}, "a share between 0 and 1"),
        ({"sizes": (0.5, 1.0)}, "at least 0 and below 1"),
    ],
)
def test_values_out_of_bounds_are_refused_with_the_rule(given, rule):
    with pytest.raises(UsageError, match=f"must be {rule}, but got"):
        check_options(Section(**given))
    check_options(Section(share=None, apples=2, sizes=(0, 0)))
