"""Options shared by several commands, and parsing of their values."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from typing import Any

import click

from ..base.errors import UsageError
from ..base.option import Option, options_of as declared
from ..base.reading import with_power
from ..runners.command.command import Command
from ..tuner.request.options import Request

TRAINERS = ("redline", "fsdp", "megatron", "megatron-bridge", "libai", "nanotron", "deepspeed", "torchtitan", "trainer")
"""Trainers whose facts an estimate can assume, from `redline.estimator.trainers`, which commands do not import for
their help.
"""

LISTED = "`redline models` lists the predefined models"

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def options_of(*sections: type, without: Collection[str] = (), help: Mapping[str, str] | None = None) -> Decorator:
    """Returns a decorator that adds MODEL and the options of request sections, except some; see `request_of`."""
    target_options: list[Decorator] = [
        click.argument("target", metavar="[MODEL]", required=False),
        click.option("--workload", metavar="FILE:NAME", help="A redline.Workload in a Python file, instead of MODEL."),
    ]
    return options_for(*sections, first_decorators=target_options, without=without, help=help)


METAVARS: dict[type | None, str] = {int: "N", float: "X"}
"""Metavariable of an option without one of its own; that of text is NAME."""


class GroupedCommand(click.Command):
    """A command whose help lists options by group; options without a group come last, as advanced ones.

    Args:
        groups: titles, each with the names of its parameters.
    """

    def __init__(self, *args: Any, groups: Mapping[str, Collection[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in (*self.groups, "Advanced")}
        for option in (option for option in self.get_params(ctx) if isinstance(option, click.Option)):
            title = next((title for title, names in self.groups.items() if option.name in names), "Advanced")
            if (row := option.get_help_record(ctx)) is not None:
                rows[title].append(row)
        for title, records in rows.items():
            with formatter.section(title):
                formatter.write_dl(records)


def options_for(
    *sections: type,
    first_decorators: Sequence[Decorator] = (),
    without: Collection[str] = (),
    help: Mapping[str, str] | None = None,
) -> Decorator:
    """Returns a decorator that adds an option for each declared field of the sections, except some, after
    `first_decorators`.

    Args:
        help: help texts that differ from the declared ones, by field.
    """
    decorators = list(first_decorators)
    for section in sections:
        for field, option in declared(section):
            if field.name not in without and not option.in_file:
                decorators.append(_option(field, replace(option, help=(help or {}).get(field.name, option.help))))

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(decorators):
            command = option(command)
        return command

    return decorate


def file_fields(*sections: type) -> str:
    """Returns lines with the fields that only a request's YAML file has, and their help texts, for a command's epilog."""
    rows = {}
    for field, option in (pair for section in sections for pair in declared(section) if pair[1].in_file):
        default = "" if field.default in (None, (), False) else f"  [default: {json.dumps(field.default)}]"
        rows[field.name] = option.help + default
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {help_text}" for name, help_text in rows.items())


def _option(field: Field[Any], option: Option) -> Decorator:
    flag = f"--{(option.flag or field.name).replace('_', '-')}"
    if field.default is False:
        return click.option(flag, field.name, is_flag=True, help=option.help)
    if field.default is True:
        flags_of_both = flag if "/" in flag else f"{flag}/--no-{flag[2:]}"
        return click.option(flags_of_both, field.name, default=True, help=option.help)
    shared: dict[str, Any] = {"help": option.help, "metavar": option.metavar or METAVARS.get(option.type, "NAME")}
    flags = ("-o", flag) if flag == "--out" else (flag,)
    if option.many:
        return click.option(flag, field.name, multiple=True, **shared)
    if field.default not in (None, MISSING):
        shared |= {"default": field.default, "show_default": True}
    return click.option(*flags, field.name, type=option.type, **shared)


def request_of(option_values: dict[str, Any], target: Any = None) -> dict[str, Any]:
    """Returns the values of `options_of` as the fields of a request; other values stay in
    `option_values`.

    Args:
        option_values: values by field name; `target` is MODEL; and `workload`.
        target: replaces these two.

    Raises:
        UsageError: neither or both of MODEL and `--workload` are given, or the values of a knob are malformed.
    """
    target_names = option_values.pop("target"), option_values.pop("workload")
    if target is not None and any(target_names):
        raise UsageError(f"give one target to tune, but got '{target_names[0] or target_names[1]}' as well")
    values = {"target": target if target is not None else target_of(*target_names)}
    values["override"] = values_of(option_values.pop("override"), "--set")
    values["fix"] = fixes_of(option_values.pop("fix"))
    request_fields = {field.name for field in fields(Request)}
    values |= {name: option_values.pop(name) for name in list(option_values) if name in request_fields}
    return values


def target_of(model: str | None, workload: str | None) -> str:
    """Returns the target from MODEL or `--workload`.

    Raises:
        UsageError: neither or both are given, or the workload has no name.
    """
    if model is not None and workload is None:
        return model
    if model is not None or workload is None:
        raise UsageError(f"give either MODEL or --workload FILE:NAME; {LISTED}")
    if ":" not in workload:
        raise UsageError(f"--workload must be FILE:NAME, such as train.py:workload, but got '{workload}'")
    return workload


def values_of(pairs: tuple[str, ...], option: str) -> dict[str, list[Any]]:
    """Returns `knob=a,b,c` pairs as lists of values, each parsed as a YAML scalar.

    Raises:
        UsageError: a pair is malformed, or a knob is given twice.
    """
    import yaml

    from ..knobs.strategy import BLOCK_KNOBS

    values: dict[str, list[Any]] = {}
    for pair in pairs:
        name, equals, values_text = pair.partition("=")
        name = name.strip()
        # A value of a knob that names blocks contains commas, so that semicolons separate its values.
        items = [item.strip() for item in values_text.split(";" if name in BLOCK_KNOBS else ",")]
        if not equals or not name or not all(items):
            example = "micro_batch=4,8" if option == "--set" else "micro_batch=8"
            raise UsageError(f"{option} must look like {example}, but got '{pair}'")
        if name in values:
            raise UsageError(f"{option} names the knob '{name}' twice")
        try:
            values[name] = items if name in BLOCK_KNOBS else [_scalar(item) for item in items]
        except yaml.YAMLError:
            raise UsageError(f"{option} {pair}: the values must be numbers, true, false or texts") from None
    return values


def _scalar(scalar: str) -> Any:
    """Returns a YAML scalar, except that `no`, `off` and the like are text and `1e-4` is a number."""
    import yaml

    value = with_power(yaml.safe_load(scalar))
    return scalar if isinstance(value, bool) and scalar.lower() not in ("true", "false") else value


def fixes_of(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Returns `knob=v` pairs as a mapping.

    Raises:
        UsageError: a pair is malformed or has several values.
    """
    values = values_of(pairs, "--fix")
    for name, knob_values in values.items():
        if len(knob_values) != 1:
            raise UsageError(f"--fix {name} takes one value, but got {len(knob_values)}; use --set for several")
    return {name: knob_values[0] for name, knob_values in values.items()}


def names_of(names_text: str | None, option: str) -> tuple[str, ...]:
    """Returns `a,b,c` as names; empty if the option was not given.

    Raises:
        UsageError: a name is missing.
    """
    if names_text is None:
        return ()
    names = tuple(name.strip() for name in names_text.split(","))
    if not all(names):
        raise UsageError(f"{option} must look like a,b,c, but got '{names_text}'")
    return names


def command_of(options: dict[str, Any], file: str | None) -> Command | None:
    """Removes the options of a command from `options` and returns the command; None for a model.

    Raises:
        UsageError: options of a command are given without one, or beside a file that contains them.
    """
    command_values = {field.name: options.pop(field.name) for field in fields(Command) if field.name in options}
    extra = next((f"--{name.replace('_', '-')}" for name, value in command_values.items() if value), None)
    if file is not None:
        if extra is not None:
            raise UsageError(f"--command-file defines the command; write the value of {extra} into it")
        return Command.from_yaml(file)
    if command_values["command"] is not None:
        return Command(**command_values)
    if extra is not None:
        raise UsageError(f"{extra} is an option of a command; give it with --command or --command-file")
    if not any(options[name] for name in ("target", "workload")):
        raise UsageError(f"give MODEL, --workload FILE:NAME or --command; {LISTED}")
    return None
