"""Texts with `{expression}` in them, over knobs, in the grammar of a space's rules, and over values of the trial.

`{a if condition else b}` chooses between two expressions. As in Python's f-strings, `!s` and `!r` write a value as
Python does: `True` for `{flag!s}`, and `{name!r}` with its quotes. `{{` and `}}` are literal braces, and `${...}` is
left unchanged for the shell.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...base.errors import SpaceError, UsageError, unknown
from ...knobs.text import value_text
from ...space.expression import Expression
from ...space.grammar import CONSTANTS, parse
from ...space.values import FLAG

GIVEN = {
    "trial": "the trial's number",
    "trial_dir": "the trial's folder",
    "devices": "devices of the trial, over all hosts",
    "global_batch": "samples per step, the value of --global-batch",
    "devices_per_host": "devices on each of its hosts",
    "hosts": "hosts of the trial",
    "node_rank": "number of this host among them, from 0",
    "master_addr": "address of the first of them",
    "master_port": "a free port on it, different for every trial",
}
"""Placeholders for values of the trial."""
_BRACES = re.compile(r"\$\{[^}]*\}|\{\{|\}\}|\{(?P<inside>(?:'[^'\n]*'|\"[^\"\n]*\"|[^{}'\"])*)\}|(?P<stray>[{}])")
_QUOTED = r"(?:'[^'\n]*'|\"[^\"\n]*\"|[^'\"])"
_CHOICE = re.compile(rf"(?P<one>{_QUOTED}+?)\sif\s(?P<condition>{_QUOTED}+?)\selse\s(?P<other>.+)", re.DOTALL)
_SHELL = re.compile(r"&&?|\|\|?|\S*;|<|&?>>?|[012]?>>?[^>=]+")
"""Unquoted words that are shell syntax."""
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
_MARK = 0xE000
"""First of the private Unicode characters that replace braced parts while a command is split into words."""


@dataclass(frozen=True)
class _Given:
    """A value of the trial."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        return values[self.name]


@dataclass(frozen=True)
class _Choice:
    """One of two pieces, chosen by a condition."""

    condition: Expression
    one: "_Piece"
    other: "_Piece"

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.condition.names, *self.one.names, *self.other.names)

    @property
    def literals(self) -> tuple[str, ...]:
        """The literals among its pieces that are options."""
        literals: tuple[str, ...] = ()
        for piece in (self.one, self.other):
            if isinstance(piece, _Choice):
                literals += piece.literals
            elif _is_options(piece, {}):
                literals += (value_text(piece.evaluate({})),)
        return literals

    def chosen(self, values: Mapping[str, Any]) -> "_Piece":
        """Returns the piece that the conditions choose, which is not a choice itself."""
        piece = self.one if self.condition.evaluate(values) is True else self.other
        return piece.chosen(values) if isinstance(piece, _Choice) else piece

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        return self.chosen(values).evaluate(values)


@dataclass(frozen=True)
class _AsPython:
    """A value written as Python does."""

    of: "_Piece"
    how: Callable[[Any], str]

    @property
    def names(self) -> tuple[str, ...]:
        return self.of.names

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        return self.how(self.of.evaluate(values))


_Piece = Expression | _Given | _Choice | _AsPython


def _is_options(piece: _Piece, values: Mapping[str, Any]) -> bool:
    """True if a chosen piece is a literal that starts with a hyphen. The value of a knob remains one word."""
    if isinstance(piece, _Choice):
        return _is_options(piece.chosen(values), values)
    return not piece.names and value_text(piece.evaluate(values)).startswith("-")


@dataclass(frozen=True)
class Template:
    """A text with expressions in it."""

    pieces: tuple[str | _Piece, ...]
    optional: bool = False
    """True for a word of a command that is left out if its text is empty."""

    @classmethod
    def read(cls, text: str, knobs: Mapping[str, Expression], where: str) -> "Template":
        """Parses a text, which errors call `where`.

        Raises:
            UsageError: an expression is invalid, contains an unknown knob, or a brace is unbalanced.
        """
        pieces: list[str | _Piece] = []
        end = 0
        for match in _BRACES.finditer(text):
            pieces.append(text[end : match.start()])
            end = match.end()
            if match["stray"]:
                raise UsageError(
                    f"{where}: the brace '{match[0]}' has no counterpart in '{text}'; write {{{{ or }}}} for a literal one"
                )
            if match["inside"] is not None:
                pieces.append(_expression(match["inside"], knobs, where))
            else:
                pieces.append(match[0][0] if match[0] in ("{{", "}}") else match[0])
        pieces.append(text[end:])
        return cls(tuple(_joined(pieces)))

    @property
    def names(self) -> frozenset[str]:
        """The knobs and names of `GIVEN` that it uses."""
        return frozenset(name for each in self.pieces if not isinstance(each, str) for name in each.names)

    def value(self, values: Mapping[str, Any]) -> Any:
        """Returns the value of a text that is a single expression, otherwise the filled text."""
        if len(self.pieces) == 1 and not isinstance(only := self.pieces[0], str):
            return only.evaluate(values)
        return self.text(values)

    def text(self, values: Mapping[str, Any]) -> str:
        """Returns the text with expressions replaced by values."""
        return "".join(each if isinstance(each, str) else value_text(each.evaluate(values)) for each in self.pieces)


@dataclass(frozen=True)
class CommandLine:
    """A command as words, with the environment variables set in front of it."""

    words: tuple[Template, ...]
    environment: tuple[tuple[str, Template], ...] = ()
    """The `NAME=value` words in front of the command."""

    @classmethod
    def read(cls, command: str | Sequence[str], knobs: Mapping[str, Expression]) -> "CommandLine":
        """Parses a command, given as in a shell or as a list of words.

        Raises:
            UsageError: it is empty, has shell syntax, a quotation mark is unbalanced, or an expression is invalid.
        """
        words = _split(command) if isinstance(command, str) else [(word, False) for word in command]
        environment = []
        if syntax := next((word for word, bare in words if bare and _SHELL.fullmatch(word)), None):
            raise UsageError(
                f"the command: '{syntax}' is shell syntax; write `shell: true` into --command-file, or quote it"
            )
        if isinstance(command, str):
            while words and (match := _ASSIGNMENT.match(words[0][0])):
                value = words.pop(0)[0][match.end() :]
                environment.append((match[1], Template.read(value, knobs, "the command")))
        if not words:
            raise UsageError("the command is empty")
        templates = tuple(replace(Template.read(word, knobs, "the command"), optional=bare) for word, bare in words)
        for template in templates:
            if template.optional and isinstance(choice := template.pieces[0], _Choice):
                _check_options(choice)
        return cls(templates, tuple(environment))

    @property
    def names(self) -> frozenset[str]:
        """The knobs and names of `GIVEN` that it uses."""
        templates = (*self.words, *(value for _, value in self.environment))
        return frozenset(name for each in templates for name in each.names)

    def shown(self, values: Mapping[str, Any], variables: Sequence[tuple[str, str]]) -> str:
        """Returns the command for a shell, with environment variables in front."""
        own = [(name, each.text(values)) for name, each in self.environment]
        words = [f"{name}={shlex.quote(value)}" for name, value in (*variables, *own)]
        return " ".join([*words, *map(shlex.quote, self.texts(values))])

    def texts(self, values: Mapping[str, Any]) -> list[str]:
        """Returns the words of the command, without optional ones that are empty. A chosen literal with several options
        is several words.
        """
        texts: list[str] = []
        for word in self.words:
            text, piece = word.text(values), word.pieces[0]
            if word.optional and len(word.pieces) == 1 and isinstance(piece, _Choice) and _is_options(piece, values):
                texts += shlex.split(text)
            elif text or not word.optional:
                texts.append(text)
        return texts


@dataclass(frozen=True)
class ShellLine:
    """A command for a shell, in which values are quoted."""

    template: Template

    @property
    def names(self) -> frozenset[str]:
        """The knobs and names of `GIVEN` that it uses."""
        return self.template.names

    def shown(self, values: Mapping[str, Any], variables: Sequence[tuple[str, str]]) -> str:
        """Returns the command for a shell, with environment variables in front."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables), self.text(values)])

    def text(self, values: Mapping[str, Any]) -> str:
        """Returns the text for the shell."""

        pieces = self.template.pieces

        def quoted(at: int, piece: _Piece) -> str:
            value = value_text(piece.evaluate(values))
            before, after = pieces[at - 1] if at else "", pieces[at + 1] if at + 1 < len(pieces) else ""
            apart = isinstance(before, str) and isinstance(after, str) and f"{before[-1:]}{after[:1]}".strip() == ""
            if apart and isinstance(piece, _Choice) and _is_options(piece, values):
                return shlex.join(shlex.split(value))
            return shlex.quote(value) if value else ""

        return "".join(piece if isinstance(piece, str) else quoted(at, piece) for at, piece in enumerate(pieces))


def read_command(
    command: str | Sequence[str], knobs: Mapping[str, Expression], *, shell: bool
) -> CommandLine | ShellLine:
    """Parses a command, for a shell if requested.

    Raises:
        UsageError: it is empty, cannot be split into words, or an expression is invalid.
    """
    if not shell:
        return CommandLine.read(command, knobs)
    if not isinstance(command, str):
        raise UsageError("a command for a shell must be one text, not a list of words")
    return ShellLine(Template.read(command, knobs, "the command"))


def is_expression(text: str, knobs: Mapping[str, Expression]) -> bool:
    """True if a text is a valid expression."""
    if text.strip().isidentifier():
        return text.strip() in knobs or text.strip() in GIVEN
    try:
        return bool(_expression(text, knobs, "").names)
    except UsageError:
        return False


def _check_options(choice: _Choice) -> None:
    """Refuses literals of a choice that cannot be split into words.

    Raises:
        UsageError: a quotation mark in one is unbalanced.
    """
    for literal in choice.literals:
        try:
            shlex.split(literal)
        except ValueError as error:
            raise UsageError(
                f"the command: '{literal}' cannot be split into words ({str(error).lower()}); put quotation marks around "
                "the braces to keep it one word"
            ) from None


def split_words(command: str) -> list[str]:
    """Splits a command into words as a shell does; braced parts stay together.

    Raises:
        UsageError: a quotation mark is unbalanced.
    """
    return [word for word, _ in _split(command)]


def _split(command: str) -> list[tuple[str, bool]]:
    """Returns the words of a command, each with True if it has no quotation marks or backslashes."""
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return chr(_MARK + len(kept) - 1)

    marked = _BRACES.sub(keep, command)
    try:
        words = shlex.split(marked)
    except ValueError as error:
        raise UsageError(f"the command cannot be split into words: {str(error).lower()}") from None
    back = re.compile(f"[{chr(_MARK)}-{chr(_MARK + max(0, len(kept) - 1))}]")
    bare = set(marked.split())
    return [
        (back.sub(lambda match: kept[ord(match[0]) - _MARK], word) if kept else word, word in bare) for word in words
    ]


def _expression(text: str, knobs: Mapping[str, Expression], where: str) -> _Piece:
    name = text.strip()
    if choice := _CHOICE.fullmatch(text):
        condition = _expression(choice["condition"], knobs, where)
        if not isinstance(condition, Expression) or condition.kind not in (FLAG, None):
            raise UsageError(f"{where}: {{{text}}}: `{choice['condition'].strip()}` is not a condition")
        one, other = (_expression(choice[each], knobs, where) for each in ("one", "other"))
        return _Choice(condition, one, other)
    if name.endswith(("!s", "!r")):
        of = _expression(name[:-2], knobs, where)
        return of if isinstance(of, _AsPython) else _AsPython(of, str if name.endswith("s") else repr)
    if name in knobs:
        return knobs[name]
    if name in GIVEN:
        return _Given(name)
    if name.isidentifier() and name not in CONSTANTS:
        problem = unknown("placeholder", f"{{{name}}}", [f"{{{each}}}" for each in (*knobs, *GIVEN)])
        raise UsageError(f"{where}: {problem} Write literal braces as {{{{ and }}}}.")
    try:
        return parse(text, knobs)
    except SpaceError as error:
        raise UsageError(f"{where}: {{{text}}}: {error} Write literal braces as {{{{ and }}}}.") from None


def _joined(pieces: Sequence[str | _Piece]) -> Iterator[str | _Piece]:
    """Joins successive texts and leaves out empty ones; yields at least one piece."""
    text, some = "", False
    for each in pieces:
        if isinstance(each, str):
            text += each
            continue
        if text:
            yield text
        yield each
        text, some = "", True
    if text or not some:
        yield text
