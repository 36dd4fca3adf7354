"""Text to expression: a tokenizer and a precedence-climbing parser. Nothing is ever evaluated as Python.

    expression  : or-test
    or-test     : and-test ('or' and-test)*            'or', 'and', 'not' are read as |, &, ~
    and-test    : not-test ('and' not-test)*
    not-test    : 'not' not-test | comparison
    comparison  : sum [('<' | '<=' | '>' | '>=' | '==' | '!=') sum | ['not'] 'in' list]      no chaining
    sum         : operands joined by  |  &  + -  * / // %  (loosest first), signs - ~, and **, as in Python
    operand     : number | 'text' | True | False | None | knob | min(...) | max(...) | '(' expression ')'
    list        : '[' value (',' value)* ']' | '(' value (',' value)* ')'

What an expression prints as is what is read here: `parse(expression.text, knobs)` is the same tree.
"""

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from ..errors import SpaceError, unknown
from .expression import Constant, Expression, Membership, maximum, minimum, operation
from .operators import COMPARISON, OPERATORS, UNARY
from .values import Value

MAX_LENGTH = 10_000
"""Longest text of an expression, characters."""
MAX_NESTING = 50
"""Deepest nesting of parentheses and signs in a text."""

_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False}
_FUNCTIONS = {"min": minimum, "max": maximum}
_RESERVED = frozenset({*keyword.kwlist, *_CONSTANTS, *_FUNCTIONS})
_WORDS = frozenset({"and", "or", "not", "in"})
_COMPARISONS = frozenset({"<", "<=", ">", ">=", "==", "!="})
_BINARY = {sign: each.precedence for sign, each in OPERATORS.items() if COMPARISON < each.precedence < UNARY}

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<text>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")
      | (?P<sign>\*\*|//|<=|>=|==|!=|[-+*/%<>&|~()\[\],])""",
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
    """A text is no expression. `line` and `column` count from 1; `problem` is the message without them."""

    def __init__(self, problem: str, text: str, offset: int) -> None:
        self.problem = problem
        self.text = text
        self.offset = offset
        self.line = text.count("\n", 0, offset) + 1
        self.column = offset - (text.rfind("\n", 0, offset) + 1) + 1
        shown = text if len(text) <= 200 else text[:200] + "..."
        super().__init__(f"line {self.line}, column {self.column}: {problem}, in `{shown}`")

    def __reduce__(self) -> tuple:
        return GrammarError, (self.problem, self.text, self.offset)


def check_name(name: str) -> str:
    """`name` itself, where it can name a knob.

    Raises:
        SpaceError: not an ASCII identifier, or a word that the grammar or Python keeps for itself.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise SpaceError(f"a knob's name is made of letters, digits and underscores, but got {name!r}")
    if name in _RESERVED:
        raise SpaceError(f"'{name}' is a reserved word; name the knob otherwise")
    return name


def parse(text: str, knobs: Mapping[str, Expression]) -> Expression:
    """The expression that `text` writes, over the given knobs.

    Raises:
        GrammarError: the text is not in the grammar, names an unknown knob, or joins kinds that do not fit;
            it says at which line and column.
    """
    if not isinstance(text, str):
        raise SpaceError(f"an expression is written as text, but got {text!r}")
    if len(text) > MAX_LENGTH:
        raise GrammarError(f"an expression has at most {MAX_LENGTH} characters, but got {len(text)}", text, 0)
    return _Parser(text, knobs).whole()


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    offset: int


class _Parser:
    def __init__(self, text: str, knobs: Mapping[str, Expression]) -> None:
        self.text = text
        self.knobs = knobs
        self.tokens = self._tokens()
        self.at = 0
        self.nesting = 0

    def fail(self, problem: str, offset: int) -> NoReturn:
        last = self.tokens[-1]
        if last.kind == "stray" and last.offset == offset:
            problem = last.text
        raise GrammarError(problem, self.text, offset)

    def _tokens(self) -> list[_Token]:
        tokens, offset = [], 0
        while offset < len(self.text):
            match = _TOKEN.match(self.text, offset)
            if match is None:
                character = self.text[offset]
                advice = _ADVICE.get(character)
                # What is wrong before this place is said first.
                problem = f"unexpected {character!r}" + (f": {advice}" if advice else "")
                return [*tokens, _Token("stray", problem, offset)]
            if match.lastgroup == "number" and self.text[match.end() : match.end() + 1].isidentifier():
                problem = f"unexpected {self.text[match.end()]!r} after the number {match.group()}"
                return [*tokens, _Token("stray", problem, match.end())]
            if match.lastgroup != "space":
                tokens.append(_Token(match.lastgroup, match.group(), offset))
            offset = match.end()
        return [*tokens, _Token("end", "", len(self.text))]

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def take(self) -> _Token:
        token = self.token
        self.at += token.kind not in ("end", "stray")
        return token

    def sees(self, *texts: str) -> bool:
        return self.token.kind in ("sign", "name") and self.token.text in texts

    def expect(self, text: str, why: str) -> None:
        if not self.sees(text):
            self.fail(f"expected '{text}' {why}, but got {self._shown(self.token)}", self.token.offset)
        self.take()

    @staticmethod
    def _shown(token: _Token) -> str:
        return "the end" if token.kind == "end" else f"'{token.text}'"

    def build(self, offset: int, make, *arguments) -> Expression:
        try:
            return make(*arguments)
        except GrammarError:
            raise
        except SpaceError as error:
            self.fail(str(error), offset)

    # -- the grammar -----------------------------------------------------------------------------------------

    def whole(self) -> Expression:
        if self.token.kind == "end":
            self.fail("an expression is empty", 0)
        out = self.either()
        if self.token.kind != "end":
            self.leftover(self.token)
        return out

    def leftover(self, token: _Token) -> NoReturn:
        if token.text == "(":
            self.fail("unexpected '(': only min(...) and max(...) can be called", token.offset)
        if token.text == "[":
            self.fail("unexpected '[': there is no indexing; a list may only follow 'in'", token.offset)
        self.fail(f"unexpected {self._shown(token)}", token.offset)

    def either(self) -> Expression:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            self.fail(f"nested more than {MAX_NESTING} deep", self.token.offset)
        left = self.both()
        while self.sees("or"):
            offset = self.take().offset
            left = self.build(offset, operation, "|", left, self.both())
        self.nesting -= 1
        return left

    def both(self) -> Expression:
        left = self.negation()
        while self.sees("and"):
            offset = self.take().offset
            left = self.build(offset, operation, "&", left, self.negation())
        return left

    def negation(self) -> Expression:
        offsets = []
        while self.sees("not"):
            offsets.append(self.take().offset)
        out = self.comparison()
        for offset in reversed(offsets):
            out = self.build(offset, operation, "~", out)
        return out

    def comparison(self) -> Expression:
        left = self.joined(COMPARISON + 1)
        token = self.token
        if self.sees(*_COMPARISONS):
            self.take()
            left = self.build(token.offset, operation, token.text, left, self.joined(COMPARISON + 1))
        elif self.sees("in", "not"):
            negated = self.take().text == "not"
            if negated:
                self.expect("in", "after 'not'")
            left = self.build(token.offset, Membership, left, self.values())
            if negated:
                left = self.build(token.offset, operation, "~", left)
        if self.sees(*_COMPARISONS, "in"):
            self.fail("comparisons do not chain; write (1 < tp) & (tp < 8) for 1 < tp < 8", self.token.offset)
        return left

    def joined(self, least: int) -> Expression:
        left = self.signed()
        while self.token.kind == "sign" and _BINARY.get(self.token.text, -1) >= least:
            token = self.take()
            level = _BINARY[token.text]
            left = self.build(token.offset, operation, token.text, left, self.joined(level + 1))
        return left

    def signed(self) -> Expression:
        """A sign binds tighter than every joining operator but `**`."""
        signs = []
        while self.sees("-", "~"):
            signs.append(self.take())
            if len(signs) > MAX_NESTING:
                self.fail(f"nested more than {MAX_NESTING} deep", self.token.offset)
        if self.sees("+"):
            self.fail("a number needs no '+' before it", self.token.offset)
        out = self.power()
        for token in reversed(signs):
            out = self.build(token.offset, operation, "neg" if token.text == "-" else "~", out)
        return out

    def power(self) -> Expression:
        base = self.operand()
        if self.sees("**"):
            token = self.take()
            self.nesting += 1
            if self.nesting > MAX_NESTING:
                self.fail(f"nested more than {MAX_NESTING} deep", token.offset)
            base = self.build(token.offset, operation, "**", base, self.signed())
            self.nesting -= 1
        return base

    def operand(self) -> Expression:
        token = self.token
        if token.kind in ("number", "text") or (token.kind == "name" and token.text in _CONSTANTS):
            return self.build(token.offset, Constant, self.literal())
        if token.kind == "name" and token.text not in _WORDS:
            self.take()
            return self.call(token) if token.text in _FUNCTIONS or self.sees("(") else self.knob(token)
        if token.text == "(":
            self.take()
            inner = self.either()
            self.expect(")", "to close the parenthesis")
            return inner
        if token.text == "[":
            self.leftover(token)
        self.fail(f"expected a knob, a number or a text, but got {self._shown(token)}", token.offset)

    def call(self, token: _Token) -> Expression:
        if token.text not in _FUNCTIONS:
            self.fail(f"'{token.text}' cannot be called: only min(...) and max(...) can", token.offset)
        self.expect("(", f"after '{token.text}'")
        arguments = [self.either()]
        while self.sees(","):
            self.take()
            arguments.append(self.either())
        self.expect(")", f"to close '{token.text}('")
        return self.build(token.offset, _FUNCTIONS[token.text], *arguments)

    def knob(self, token: _Token) -> Expression:
        if token.text in _RESERVED:
            self.fail(f"'{token.text}' is not part of the grammar", token.offset)
        found = self.knobs.get(token.text)
        if found is None:
            problem = unknown("knob", token.text, self.knobs).rstrip(".")
            owner = next(
                (name for name, each in self.knobs.items() if token.text in getattr(each, "values", ())), ""
            )
            hint = f". '{token.text}' is a value of {owner}: texts need quotes" if owner else ""
            self.fail(problem + hint, token.offset)
        return found

    def values(self) -> list[Value]:
        opening = self.token
        if not self.sees("[", "("):
            self.fail(
                f"expected a list such as [1, 2] after 'in', but got {self._shown(opening)}", opening.offset
            )
        self.take()
        closing = "]" if opening.text == "[" else ")"
        values = [self.literal()]
        while self.sees(","):
            self.take()
            if not self.sees(closing):
                values.append(self.literal())
        self.expect(closing, "to close the list")
        return values

    def literal(self) -> Value:
        minus = self.sees("-") and self.take()
        token = self.take()
        value: Value
        if token.kind == "number":
            if token.text.isdigit() and len(token.text) > 19:
                self.fail(f"an integer must fit 64 bits, but got {token.text[:30]}", token.offset)
            value = int(token.text) if token.text.isdigit() else float(token.text)
        elif token.kind == "text":
            value = self.unquoted(token)
        elif token.kind == "name" and token.text in _CONSTANTS:
            value = _CONSTANTS[token.text]
        else:
            self.fail(f"expected a value, but got {self._shown(token)}", token.offset)
        if minus:
            if token.kind != "number":
                self.fail(f"'-' needs a number, but got {self._shown(token)}", minus.offset)
            value = -value
        return value

    def unquoted(self, token: _Token) -> str:
        def character(match: re.Match) -> str:
            code = match[1] or match[2] or match[3]
            if code and int(code, 16) <= 0x10FFFF:
                return chr(int(code, 16))
            if match[4] in _ESCAPED:
                return _ESCAPED[match[4]]
            self.fail(f"unknown escape {match[0]!r} in a text", token.offset + match.start() + 1)

        return _ESCAPE.sub(character, token.text[1:-1])
