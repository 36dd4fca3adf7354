"""Rules as text: a grammar of Python's operators over knobs. Nothing is ever evaluated as Python.

    expression  : or-test
    or-test     : and-test ('or' and-test)*            'or', 'and', 'not' are read as |, &, ~
    and-test    : not-test ('and' not-test)*
    not-test    : 'not' not-test | comparison
    comparison  : sum [('<' | '<=' | '>' | '>=' | '==' | '!=') sum | ['not'] 'in' list]      no chaining
    sum         : operands joined by  |  &  + -  * / // %  (loosest first), signs - ~, and **, as in Python
    operand     : number | 'text' | True | False | None | knob | min(...) | max(...) | '(' expression ')'
    list        : '[' value (',' value)* ']' | '(' value (',' value)* ')'

The text of an expression can be parsed here: `parse(expression.text, knobs)` is the same tree. Python's own `ast` is
not suitable: it does not record operators' places, drops comments, joins 'a' 'b', and accepts 0x10 and letters of
other scripts (docs/decisions.md).
"""

import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..base.errors import SpaceError, unknown
from .expression import Constant, Expression, maximum, membership, minimum, operation
from .operators import ATOM, COMPARISON, OPERATORS, POWER, UNARY
from .values import Value

MAX_LENGTH = 10_000
"""Largest number of characters of an expression."""
MAX_NESTING = 50
"""Deepest nesting of parentheses and powers in a text, and largest number of signs before an operand."""

CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False}
"""Words for values."""
_FUNCTIONS = {"min": minimum, "max": maximum}
_RESERVED = frozenset({*keyword.kwlist, *CONSTANTS, *_FUNCTIONS})
_WORDS = frozenset({"and", "or", "not", "in"})
_OR, _AND, _NOT = 1, 2, 3
_LEVELS = {"or": _OR, "and": _AND, "not": COMPARISON} | {
    sign: each.precedence for sign, each in OPERATORS.items() if each.precedence not in (UNARY, ATOM)
}
"""Precedence of binary operators, as in Python; `not` here is that of `not in`."""
_JOINED = {"or": "|", "and": "&"}
_PREFIXED = {"not": "~", "~": "~", "-": "neg"}

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<text>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")
      | (?P<sign>\*\*|//|<=|>=|==|!=|[-+*/%<>&|~()\[\],])
      | (?P<end>\Z)
      | (?P<stray>.))""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_ADVICE = {
    "=": "'=' assigns; write == to compare",
    ".": "attribute access is not part of the grammar",
    "!": "write ~ or not to negate, != to compare",
    "^": "there is no ^; write ** for a power",
    "{": "braces are not part of the grammar; write a list as [1, 2]",
    "'": "the text has no closing quote",
    '"': "the text has no closing quote",
}


class GrammarError(SpaceError):
    """A text is not an expression. `line` and `column` count from 1; `problem` is the message without them."""

    def __init__(self, problem: str, text: str, offset: int) -> None:
        self.problem = problem
        self.text = text
        self.offset = offset
        self.line = text.count("\n", 0, offset) + 1
        self.column = offset - (text.rfind("\n", 0, offset) + 1) + 1
        shown = text if len(text) <= 200 else text[:200] + "..."
        super().__init__(f"line {self.line}, column {self.column}: {problem}, in `{shown}`")

    def __reduce__(self) -> tuple[Any, ...]:
        return GrammarError, (self.problem, self.text, self.offset)


def check_name(name: str) -> str:
    """Returns `name` if it can name a knob.

    Raises:
        SpaceError: not an ASCII identifier, or a reserved word of the grammar or of Python.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise SpaceError(f"a knob's name is made of ASCII letters, digits and underscores, but got {name!r}")
    if name in _RESERVED:
        raise SpaceError(f"'{name}' is a reserved word; name the knob otherwise")
    return name


def parse(text: str, knobs: Mapping[str, Expression]) -> Expression:
    """Parses `text` to an expression over the given knobs.

    Raises:
        GrammarError: the text is not in the grammar, names an unknown knob, or combines incompatible kinds; the
            message has line and column.
    """
    if not isinstance(text, str):
        raise SpaceError(f"an expression is written as text, but got {text!r}")
    if len(text) > MAX_LENGTH:
        raise GrammarError(f"an expression has at most {MAX_LENGTH} characters, but got {len(text)}", text, 0)
    return _Parser(text, knobs).whole()


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """`number`, `name`, `text`, `sign`, `end`, or `stray` for anything else."""
    text: str
    """As written; for a stray token, the problem."""
    offset: int

    def __str__(self) -> str:
        return "the end" if self.kind == "end" else f"'{self.text}'"


class _Parser:
    """Parses from left to right with one token of lookahead, by operator precedence."""

    def __init__(self, text: str, knobs: Mapping[str, Expression]) -> None:
        self.text = text
        self.knobs = knobs
        self.nesting = 0
        self.token = self._read(0)
        self.level = self._level()

    # -- tokens ----------------------------------------------------------------------------------------------

    def _read(self, offset: int) -> _Token:
        found = _TOKEN.match(self.text, offset)
        assert found is not None and found.lastgroup is not None  # any text matches at least stray
        kind = found.lastgroup
        text, start, end = found[kind], found.start(kind), found.end()
        if kind == "stray":
            advice = _ADVICE.get(text)
            return _Token(kind, f"unexpected {text!r}" + (f": {advice}" if advice else ""), start)
        if kind == "number" and self.text[end : end + 1].isidentifier():
            return _Token("stray", f"unexpected {self.text[end]!r} after the number {text}", end)
        return _Token(kind, text, start)

    def _level(self) -> int:
        return _LEVELS.get(self.token.text, 0) if self.token.kind in ("sign", "name") else 0

    def take(self) -> _Token:
        token = self.token
        self.token = self._read(token.offset + len(token.text))
        self.level = self._level()
        return token

    def sees(self, *texts: str) -> bool:
        return self.token.text in texts and self.token.kind in ("sign", "name")

    def expect(self, text: str, reason: str) -> None:
        if not self.sees(text):
            self.fail(f"expected '{text}' {reason}, but got {self.token}", self.token)
        self.take()

    def fail(self, problem: str, token: _Token, inside: int = 0) -> NoReturn:
        raise GrammarError(token.text if token.kind == "stray" else problem, self.text, token.offset + inside)

    def build(self, token: _Token, make: Callable[..., Expression], *arguments: Any) -> Expression:
        try:
            return make(*arguments)
        except SpaceError as error:
            self.fail(str(error), token)

    # -- the grammar -----------------------------------------------------------------------------------------

    def whole(self) -> Expression:
        if self.token.kind == "end":
            raise GrammarError("an expression is empty", self.text, 0)
        out = self.nested()
        if self.token.kind != "end":
            self.leftover()
        return out

    def leftover(self) -> NoReturn:
        reason = ""
        if self.token.text == "(":
            reason = ": only min(...) and max(...) can be called"
        elif self.token.text == "[":
            reason = ": there is no indexing; a list may only follow 'in'"
        self.fail(f"unexpected {self.token}{reason}", self.token)

    def nested(self, least: int = _OR) -> Expression:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            self.fail(f"nested more than {MAX_NESTING} deep", self.token)
        out = self.expression(least)
        self.nesting -= 1
        return out

    def expression(self, least: int) -> Expression:
        """Parses an operand and all operators of at least this precedence after it."""
        most = POWER  # after an operator only operators of at most its precedence can follow: the rest is parsed
        if least <= _NOT and self.sees("not"):
            left, most = self.prefixed(("not",), COMPARISON), _NOT
        elif least <= UNARY and self.sees("-", "~"):
            left = self.prefixed(("-", "~"), POWER)
        else:
            left = self.operand()
        while least <= self.level <= most:
            level, token = self.level, self.take()
            if level == COMPARISON:
                left, most = self.compared(left, token), _NOT
            elif level == POWER:  # binds less tightly than a sign on its right
                left = self.build(token, operation, token.text, left, self.nested(UNARY))
            else:
                right, most = self.expression(level + 1), level
                left = self.build(token, operation, _JOINED.get(token.text, token.text), left, right)
        return left

    def prefixed(self, signs: tuple[str, ...], least: int) -> Expression:
        tokens = []
        while self.sees(*signs):
            tokens.append(self.take())
            if len(tokens) > MAX_NESTING:
                self.fail(f"nested more than {MAX_NESTING} deep", self.token)
        out = self.expression(least)
        for token in reversed(tokens):
            out = self.build(token, operation, _PREFIXED[token.text], out)
        return out

    def compared(self, left: Expression, token: _Token) -> Expression:
        if token.text in ("in", "not"):
            if token.text == "not":
                self.expect("in", "after 'not'")
            out = self.build(token, membership, left, self.values())
            if token.text == "not":
                out = self.build(token, operation, "~", out)
        else:
            out = self.build(token, operation, token.text, left, self.expression(COMPARISON + 1))
        if self.level == COMPARISON and not self.sees("not"):
            self.fail("comparisons do not chain; write (1 < tp) & (tp < 8) for 1 < tp < 8", self.token)
        return out

    def operand(self) -> Expression:
        token = self.token
        if token.kind in ("number", "text") or (token.kind == "name" and token.text in CONSTANTS):
            return self.build(token, Constant, self.literal())
        if token.kind == "name" and token.text not in _WORDS:
            self.take()
            return self.call(token) if token.text in _FUNCTIONS or self.sees("(") else self.knob(token)
        if self.sees("("):
            self.take()
            inner = self.nested()
            self.expect(")", "to close the parenthesis")
            return inner
        if self.sees("["):
            self.leftover()
        if self.sees("+"):
            self.fail("a number needs no '+' before it", token)
        self.fail(f"expected a knob, a number or a text, but got {token}", token)

    def call(self, token: _Token) -> Expression:
        if token.text not in _FUNCTIONS:
            self.fail(f"'{token.text}' cannot be called: only min(...) and max(...) can", token)
        self.expect("(", f"after '{token.text}'")
        arguments = [self.nested()]
        while self.sees(","):
            self.take()
            arguments.append(self.nested())
        self.expect(")", f"to close '{token.text}('")
        return self.build(token, _FUNCTIONS[token.text], *arguments)

    def knob(self, token: _Token) -> Expression:
        if token.text in _RESERVED:
            self.fail(f"'{token.text}' is not part of the grammar", token)
        found = self.knobs.get(token.text)
        if found is None:
            problem = unknown("knob", token.text, self.knobs).rstrip(".")
            owners = [name for name, each in self.knobs.items() if token.text in getattr(each, "values", ())]
            hint = f". '{token.text}' is a value of {owners[0]}: texts need quotes" if owners else ""
            self.fail(problem + hint, token)
        return found

    # -- values ----------------------------------------------------------------------------------------------

    def values(self) -> list[Value]:
        if not self.sees("[", "("):
            self.fail(f"expected a list such as [1, 2] after 'in', but got {self.token}", self.token)
        closing = "]" if self.take().text == "[" else ")"
        values = [self.literal()]
        while self.sees(","):
            self.take()
            if not self.sees(closing):
                values.append(self.literal())
        self.expect(closing, "to close the list")
        return values

    def literal(self) -> Value:
        minus = self.take() if self.sees("-") else None
        token = self.token
        value: Value
        if token.kind == "number":
            magnitude = self.number(token)
            value = -magnitude if minus else magnitude
        elif token.kind == "text":
            value = self.unquoted(token)
        elif token.kind == "name" and token.text in CONSTANTS:
            value = CONSTANTS[token.text]
        else:
            self.fail(f"expected a value, but got {token}", token)
        if minus and token.kind != "number":
            self.fail(f"'-' needs a number, but got {token}", minus)
        self.take()
        return value

    def number(self, token: _Token) -> int | float:
        if not token.text.isdigit():
            return float(token.text)
        if len(token.text) > 19:
            self.fail(f"an integer must fit 64 bits, but got {token.text[:30]}", token)
        return int(token.text)

    def unquoted(self, token: _Token) -> str:
        def character(match: re.Match[str]) -> str:
            code = match[1] or match[2] or match[3]
            if code and int(code, 16) <= 0x10FFFF:
                return chr(int(code, 16))
            if match[4] in _ESCAPED:
                return _ESCAPED[match[4]]
            self.fail(f"unknown escape {match[0]!r} in a text", token, match.start() + 1)

        return _ESCAPE.sub(character, token.text[1:-1])
