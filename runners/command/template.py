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
from ...space.expression import Expression, Operation
from ...space.grammar import CONSTANTS, parse
from ...space.values import FLAG

PLACEHOLDERS = {
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
"""A text in quotation marks, in which ` if ` and ` else ` have no meaning, or one other character."""
_CHOICE = re.compile(rf"(?P<if_true>{_QUOTED}+?)\sif\s(?P<condition>{_QUOTED}+?)\selse\s(?P<if_false>.+)", re.DOTALL)
_SHELL = re.compile(r"&&?|\|\|?|\S*;|<|&?>>?|[012]?>>?[^>=]+")
"""Unquoted words that are shell syntax."""
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
"""The beginning of a word that sets an environment variable."""
_MARK = 0xE000
"""First of the private Unicode characters that replace braced parts while a command is split into words."""


@dataclass(frozen=True)
class _TrialValue:
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
    if_true: "_Piece"
    if_false: "_Piece"

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.condition.names, *self.if_true.names, *self.if_false.names)

    @property
    def literals(self) -> tuple[str, ...]:
        """The literals among its pieces that are options."""
        literals: tuple[str, ...] = ()
        for piece in (self.if_true, self.if_false):
            if isinstance(piece, _Choice):
                literals += piece.literals
            elif _is_options(piece, {}):
                literals += (value_text(piece.evaluate({})),)
        return literals

    def selected(self, values: Mapping[str, Any]) -> "_Piece":
        """Returns the piece that the conditions select, which is not a choice itself."""
        piece = self.if_true if self.condition.evaluate(values) is True else self.if_false
        return piece.selected(values) if isinstance(piece, _Choice) else piece

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        return self.selected(values).evaluate(values)


@dataclass(frozen=True)
class _AsPython:
    """A value written as Python does."""

    piece: "_Piece"
    write: Callable[[Any], str]

    @property
    def names(self) -> tuple[str, ...]:
        return self.piece.names

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        return self.write(self.piece.evaluate(values))


_Piece = Expression | _TrialValue | _Choice | _AsPython


def _is_options(piece: _Piece, values: Mapping[str, Any]) -> bool:
    """True if the selected piece is a literal that starts with a hyphen. The value of a knob remains one word."""
    if isinstance(piece, _Choice):
        return _is_options(piece.selected(values), values)
    return not piece.names and value_text(piece.evaluate(values)).startswith("-")


def _may_lack_value(expression: Expression) -> bool:
    return isinstance(expression, Operation) and (
        expression.operator.sign in ("/", "//", "%", "**") or any(map(_may_lack_value, expression.arguments))
    )


@dataclass(frozen=True)
class Template:
    """A text with expressions in it."""

    pieces: tuple[str | _Piece, ...]
    optional: bool = False
    """True for a word of a command that is left out if its text is empty."""

    @classmethod
    def read(cls, text: str, knobs: Mapping[str, Expression], subject: str) -> "Template":
        """Parses a text. `subject` names it in errors.

        Raises:
            UsageError: an expression is invalid or contains an unknown knob, or a brace is unbalanced.
        """
        pieces: list[str | _Piece] = []
        end = 0
        for match in _BRACES.finditer(text):
            pieces.append(text[end : match.start()])
            end = match.end()
            if match["stray"]:
                raise UsageError(
                    f"{subject}: the brace '{match[0]}' has no counterpart in '{text}'; write {{{{ or }}}} for a literal one"
                )
            if match["inside"] is not None:
                pieces.append(_expression(match["inside"], knobs, subject))
            else:
                pieces.append(match[0][0] if match[0] in ("{{", "}}") else match[0])
        pieces.append(text[end:])
        return cls(tuple(_joined(pieces)))

    @property
    def names(self) -> frozenset[str]:
        """The knobs and names of `PLACEHOLDERS` that it uses."""
        return frozenset(name for piece in self.pieces if not isinstance(piece, str) for name in piece.names)

    @property
    def divisions(self) -> tuple[Expression, ...]:
        """Its expressions that may have no value, as after a division by zero."""
        return tuple(piece for piece in self.pieces if isinstance(piece, Expression) and _may_lack_value(piece))

    def value(self, values: Mapping[str, Any]) -> Any:
        """Returns the value of a text that is a single expression, otherwise the filled text."""
        if len(self.pieces) == 1 and not isinstance(only := self.pieces[0], str):
            return only.evaluate(values)
        return self.text(values)

    def text(self, values: Mapping[str, Any]) -> str:
        """Returns the text with expressions replaced by values."""
        return "".join(piece if isinstance(piece, str) else value_text(piece.evaluate(values)) for piece in self.pieces)


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
        # Words of a list were separated by the caller: none is shell syntax, none is left out if it is empty.
        words = _split(command) if isinstance(command, str) else [(word, False) for word in command]
        environment = []
        if syntax := next((word for word, bare in words if bare and _SHELL.fullmatch(word)), None):
            raise UsageError(f"the command: '{syntax}' is shell syntax; quote it, or start a shell: sh -c '...'")
        if isinstance(command, str):
            # As in a shell, `NAME=value` in front of a command sets a variable.
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
        """The knobs and names of `PLACEHOLDERS` that it uses."""
        return frozenset(name for template in self._templates for name in template.names)

    @property
    def divisions(self) -> tuple[Expression, ...]:
        """Its expressions that may have no value."""
        return tuple(expression for template in self._templates for expression in template.divisions)

    @property
    def _templates(self) -> tuple[Template, ...]:
        return *self.words, *(value for _, value in self.environment)

    def shown(self, values: Mapping[str, Any], variables: Sequence[tuple[str, str]]) -> str:
        """Returns the command for a shell, with environment variables in front."""
        assigned = [(name, template.text(values)) for name, template in self.environment]
        words = [f"{name}={shlex.quote(value)}" for name, value in (*variables, *assigned)]
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


def is_expression(text: str, knobs: Mapping[str, Expression]) -> bool:
    """True if a text is a valid expression."""
    if text.strip().isidentifier():
        return text.strip() in knobs or text.strip() in PLACEHOLDERS
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
    braced: list[str] = []

    def mark(match: re.Match[str]) -> str:
        braced.append(match[0])
        return chr(_MARK + len(braced) - 1)

    # shlex would split an expression at its spaces and remove its quotation marks.
    marked = _BRACES.sub(mark, command)
    try:
        words = shlex.split(marked)
    except ValueError as error:
        raise UsageError(f"the command cannot be split into words: {str(error).lower()}") from None
    back = re.compile(f"[{chr(_MARK)}-{chr(_MARK + max(0, len(braced) - 1))}]")
    bare = set(marked.split())
    return [
        (back.sub(lambda match: braced[ord(match[0]) - _MARK], word) if braced else word, word in bare)
        for word in words
    ]


def _expression(text: str, knobs: Mapping[str, Expression], subject: str) -> _Piece:
    name = text.strip()
    # A choice first: it may contain anything below, and the grammar of rules has no conditional expression.
    if choice := _CHOICE.fullmatch(text):
        condition = _expression(choice["condition"], knobs, subject)
        if not isinstance(condition, Expression) or condition.kind not in (FLAG, None):
            raise UsageError(f"{subject}: {{{text}}}: `{choice['condition'].strip()}` is not a condition")
        if_true, if_false = (_expression(choice[group], knobs, subject) for group in ("if_true", "if_false"))
        return _Choice(condition, if_true, if_false)
    if name.endswith(("!s", "!r")):
        piece = _expression(name[:-2], knobs, subject)
        return piece if isinstance(piece, _AsPython) else _AsPython(piece, str if name.endswith("s") else repr)
    if name in knobs:
        return knobs[name]
    if name in PLACEHOLDERS:
        return _TrialValue(name)
    if name.isidentifier() and name not in CONSTANTS:
        problem = unknown(
            "placeholder", f"{{{name}}}", [f"{{{placeholder}}}" for placeholder in (*knobs, *PLACEHOLDERS)]
        )
        raise UsageError(f"{subject}: {problem} Write literal braces as {{{{ and }}}}.")
    try:
        return parse(text, knobs)
    except SpaceError as error:
        raise UsageError(f"{subject}: {{{text}}}: {error} Write literal braces as {{{{ and }}}}.") from None


def _joined(pieces: Sequence[str | _Piece]) -> Iterator[str | _Piece]:
    """Joins successive texts and leaves out empty ones; yields at least one piece."""
    joined, yielded = "", False
    for piece in pieces:
        if isinstance(piece, str):
            joined += piece
            continue
        if joined:
            yield joined
        yield piece
        joined, yielded = "", True
    if joined or not yielded:
        yield joined
