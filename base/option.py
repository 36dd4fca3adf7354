"""Options: declarations of a request's fields, from which their command-line option, their check and their type in the HTTP
API follow.

    @dataclass(frozen=True, kw_only=True)
    class SearchRequest:
        trials: Annotated[int | None, Option("Trials in all.", type=int, least=1)] = None

Type and default are those of the field, and the documentation of a Python function is that of its request's sections.
"""

import math
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields
from functools import cache
from numbers import Integral, Real
from typing import Any, get_type_hints

from .errors import UsageError, unknown


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a request, in the annotation of its field; a field without it is only available in Python."""

    help: str
    """Help text."""
    flag: str = ""
    """Name of the command-line option, if it differs from the field's; for a switch that is on by default `on/off`."""
    type: Any = None
    """Type of a number, or of each of several, `int` or `float`; None for text and switches."""
    least: float | None = None
    """Smallest value of a number."""
    above: float | None = None
    """Number that the value exceeds."""
    most: float | None = None
    """Largest value of a number."""
    below: float | None = None
    """Number that exceeds the value."""
    choices: Collection[str] = ()
    """Names of which the value is one."""
    check: Callable[[Any, str], Any] | None = None
    """Raises UsageError for an invalid value, given with its name in words; for text."""
    metavar: str | None = None
    """Placeholder for its value on the command line."""
    many: bool = False
    """True if it can be given several times."""
    in_file: bool = False
    """True if it is given in the YAML file of a request instead of on the command line."""

    @property
    def rule(self) -> str:
        """Rule for a number, in words."""
        if self.type is int:
            least = self.least or 0
            return f"a whole number {f'of at least {least:g}' if self.most is None else f'from {least:g} to {self.most:g}'}"
        least, above, most, below = self.least or 0, self.above, self.most, self.below
        if above is None:
            if below is not None:
                return f"at least {least:g} and below {below:g}"
            return f"at least {least:g}" if most is None else f"a share from {least:g} to {most:g}"
        if most is not None:
            return f"a share above {above:g}, of at most {most:g}"
        return f"above {above:g}" if below is None or below == math.inf else f"a share between {above:g} and {below:g}"

    def allows(self, value: Any) -> bool:
        """True if a number is within the bounds."""
        if isinstance(value, bool) or not isinstance(value, Integral if self.type is int else Real):
            return False
        number = float(value)
        return (
            (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )


COMMAND_LINE = "REDLINE_COMMAND_LINE"
"""Variable of a command's environment: processes that it starts write errors that it shows."""
_FLAGS = {"override": "set"}
"""Names of options by their field, if they differ."""


@contextmanager
def on_command_line() -> Iterator[None]:
    """Makes `option` name options instead of arguments."""
    before = os.environ.get(COMMAND_LINE)
    os.environ[COMMAND_LINE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[COMMAND_LINE]


def option(field: str, value: object = None) -> str:
    """Names the field of a request in a message as its user gives it, with a value if there is one.

    >>> option("out"), option("runner", "local"), option("resume", True)
    ('`out`', "runner='local'", 'resume=True')
    >>> with on_command_line():
    ...     option("out"), option("runner", "local"), option("resume", True)
    ('--out', '--runner local', '--resume')
    """
    if COMMAND_LINE not in os.environ:
        return f"`{field}`" if value is None else f"{field}={value!r}"
    flag = f"--{_FLAGS.get(field, field).replace('_', '-')}"
    return flag if value is None or value is True else f"{flag} {shlex.quote(str(value))}"


def either(names: Iterable[str]) -> str:
    """Formats names for a help text.

    >>> either(["ray", "local", "emulate"])
    'ray, local or emulate'
    """
    *most, final = names
    return f"{', '.join(most)} or {final}" if most else final


@cache
def options_of(section: Any) -> tuple[tuple[Field[Any], Option], ...]:
    """Returns the fields of a request, or of a section of one, that are options."""
    types = get_type_hints(section, include_extras=True)
    return tuple(
        (field, option)
        for field in fields(section)
        for option in getattr(types[field.name], "__metadata__", ())
        if isinstance(option, Option)
    )


def check_options(request: Any) -> None:
    """Raises UsageError if the value of an option is invalid by itself. None is not checked."""
    section: Any = type(request)
    for field, option in options_of(section):
        value = getattr(request, field.name)
        if value is None:
            continue
        if option.type is not None:
            several = isinstance(field.default, tuple)
            if not all(option.allows(number) for number in (value if several else (value,))):
                raise UsageError(f"{field.name} must be {option.rule}, but got {value!r}")
        elif option.choices and value not in option.choices:
            raise UsageError(unknown(field.name, value, option.choices))
        elif option.check is not None:
            option.check(value, field.name.replace("_", " "))
