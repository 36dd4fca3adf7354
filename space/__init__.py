"""Spaces: knobs, expressions, constraints, and the set of valid configurations."""

from .enumeration import Choices
from .expression import Expression, maximum, minimum
from .grammar import GrammarError, parse
from .knob import Knob
from .rules import Constraint
from .space import Space
from .values import Config, Value

__all__ = [
    "Choices",
    "Config",
    "Constraint",
    "Expression",
    "GrammarError",
    "Knob",
    "Space",
    "Value",
    "maximum",
    "minimum",
    "parse",
]
