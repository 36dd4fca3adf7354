"""Rules as text: Python's expressions over knobs, of which only the nodes listed here are accepted.

A text is parsed by Python's `ast` and translated; nothing is ever evaluated as Python. Accepted are numbers, texts, True,
False, None, knobs, `min(...)` and `max(...)`, the operators + - * / // % **, comparisons (without chaining), `in` and
`not in` with a list of values, and the conditions & | ~, also written `and`, `or`, `not`.

The text of an expression can be parsed here: `parse(expression.text, knobs)` is the same tree.
"""

import ast
import keyword
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ..base.errors import SpaceError, unknown
from .expression import Constant, Expression, maximum, membership, minimum, operation
from .values import Value

MAX_LENGTH = 10_000
"""Largest number of characters of an expression."""
MAX_NESTING = 50
"""Deepest nesting of an expression; a sum or product of many terms counts once."""

CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False}
"""Words for values."""
_FUNCTIONS = {"min": minimum, "max": maximum}
_RESERVED = frozenset({*keyword.kwlist, *CONSTANTS, *_FUNCTIONS})
_BINARY = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|",
}  # fmt: skip
_COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_PREFIXED = {ast.USub: "neg", ast.Invert: "~", ast.Not: "~"}
_UNKNOWN_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*(\\[^\\'\"ntrxuU\n])")
_ADVICE: dict[type, str] = {
    ast.Attribute: "attributes cannot be read",
    ast.Subscript: "there is no indexing; a list may only follow 'in'",
    ast.List: "a list may only follow 'in'",
    ast.Tuple: "a list may only follow 'in'",
    ast.Set: "write a list as [1, 2]",
    ast.BitXor: "there is no ^; write ** for a power",
}
"""Advice for nodes that are not accepted."""


class GrammarError(SpaceError):
    """A text is not an expression. `line` and `column` count from 1; `problem` is the message without them."""

    def __init__(self, problem: str, text: str, line: int, column: int) -> None:
        self.problem, self.text, self.line, self.column = problem, text, line, column
        excerpt = text if len(text) <= 200 else text[:200] + "..."
        place = f"line {line}, column {column}" if "\n" in text else f"column {column}"
        super().__init__(f"{place}: {problem}, in `{excerpt}`")

    def __reduce__(self) -> tuple[Any, ...]:
        return GrammarError, (self.problem, self.text, self.line, self.column)


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
        raise GrammarError(f"an expression has at most {MAX_LENGTH} characters, but got {len(text)}", text, 1, 1)
    if not text.strip():
        raise GrammarError("an expression is empty", text, 1, 1)
    if escape := _UNKNOWN_ESCAPE.search(text):  # Python warns of it, once
        preceding = text[: escape.start(1)].split("\n")
        raise GrammarError(f"unknown escape {escape[1]}", text, len(preceding), len(preceding[-1]) + 1)
    try:
        # In parentheses, so that an expression may start with spaces and go over several lines.
        tree = ast.parse(f"(\n{text}\n)", mode="eval")
    except SyntaxError as error:
        lines = text.split("\n")
        line, column = (error.lineno or 2) - 1, error.offset or 1
        if not 1 <= line <= len(lines):  # at the parenthesis
            line, column = len(lines), len(lines[-1]) + 1
        raise GrammarError(f"not an expression: {error.msg.partition(' (detected')[0]}", text, line, column) from None
    except (ValueError, RecursionError, MemoryError):  # a null character; a deep nesting
        raise GrammarError("not an expression, or nested too deep", text, 1, 1) from None
    return _Translation(text, knobs).expression(tree.body)


class _Translation:
    """Translates the nodes of one text."""

    def __init__(self, text: str, knobs: Mapping[str, Expression]) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.knobs = knobs

    def fail(self, problem: str, node: Any) -> NoReturn:
        line = node.lineno - 1
        preceding = self.lines[line - 1].encode()[: node.col_offset] if 1 <= line <= len(self.lines) else b""
        raise GrammarError(problem, self.text, line, len(preceding.decode(errors="ignore")) + 1)

    def refuse(self, node: Any, kind: type | None = None) -> NoReturn:
        source = ast.get_source_segment(f"(\n{self.text}\n)", node) or ""
        advice = _ADVICE.get(kind or type(node))
        detail = f"'{source[:60]}'" + (f": {advice}" if advice else "")
        self.fail(f"not part of the grammar: {detail}", node)

    def build(self, node: Any, make: Any, *arguments: Any) -> Expression:
        try:
            expression: Expression = make(*arguments)
        except SpaceError as error:
            self.fail(str(error), node)
        return expression

    def expression(self, node: Any, depth: int = 0) -> Expression:
        if depth > MAX_NESTING:
            self.fail(f"nested more than {MAX_NESTING} deep", node)
        match node:
            case ast.Constant():
                return self.build(node, Constant, self.value(node))
            case ast.Name():
                return self.name(node)
            case ast.BinOp():
                return self.joined(node, depth)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _PREFIXED:
                return self.build(node, operation, _PREFIXED[type(op)], self.expression(operand, depth + 1))
            case ast.BoolOp(op=op, values=values):
                sign = "&" if isinstance(op, ast.And) else "|"
                joined = self.expression(values[0], depth + 1)
                for condition in values[1:]:
                    joined = self.build(condition, operation, sign, joined, self.expression(condition, depth + 1))
                return joined
            case ast.Compare():
                return self.compared(node, depth)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
                return self.build(node, _FUNCTIONS[name], *(self.expression(arg, depth + 1) for arg in arguments))
            case ast.Call():
                self.fail("only min(...) and max(...) can be called", node)
        self.refuse(node)

    def joined(self, node: Any, depth: int) -> Expression:
        """Translates operators between operands; those of a long sum without recursion."""
        later = []
        while isinstance(node, ast.BinOp):
            if type(node.op) not in _BINARY:
                self.refuse(node, type(node.op))
            later.append(node)
            node = node.left
        joined = self.expression(node, depth + 1)
        for operator in reversed(later):
            right = self.expression(operator.right, depth + 1)
            joined = self.build(operator, operation, _BINARY[type(operator.op)], joined, right)
        return joined

    def compared(self, node: ast.Compare, depth: int) -> Expression:
        operator, right = node.ops[0], node.comparators[0]
        left = self.expression(node.left, depth + 1)
        if len(node.ops) > 1:
            self.expression(right, depth + 1)  # tp > 1 & pp > 1 parses as a chain; the error is in its operand 1 & pp
            self.fail("comparisons do not chain; write (1 < tp) & (tp < 8) for 1 < tp < 8", node)
        if isinstance(operator, (ast.In, ast.NotIn)):
            if not isinstance(right, (ast.List, ast.Tuple)):
                self.fail("expected a list such as [1, 2] after 'in'", right)
            contained = self.build(node, membership, left, [self.value(element) for element in right.elts])
            return contained if isinstance(operator, ast.In) else self.build(node, operation, "~", contained)
        if type(operator) not in _COMPARED:
            self.refuse(node)
        return self.build(node, operation, _COMPARED[type(operator)], left, self.expression(right, depth + 1))

    def name(self, node: ast.Name) -> Expression:
        if node.id in CONSTANTS:
            return self.build(node, Constant, CONSTANTS[node.id])
        knob = self.knobs.get(node.id)
        if knob is None:
            problem = unknown("knob", node.id, self.knobs).rstrip(".")
            owners = [name for name, owner in self.knobs.items() if node.id in getattr(owner, "values", ())]
            hint = f". '{node.id}' is a value of {owners[0]}: texts need quotes" if owners else ""
            self.fail(problem + hint, node)
        return knob

    def value(self, node: Any) -> Value:
        """The value that a node writes: a number, a text, True, False or None."""
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if not isinstance(
                number, bool
            ):
                return -number
            case ast.Constant(value=int() as number) if abs(number) >= 1 << 63:
                self.fail("an integer must fit 64 bits", node)
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.Name(id=word) if word in CONSTANTS:
                return CONSTANTS[word]
        self.fail("expected a value: a number, a text in quotes, True, False or None", node)
