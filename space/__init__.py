"""What may vary: knobs, expressions, constraints, and the set of valid configurations."""

from .config import Config
from .expression import Expression, maximum, minimum
from .grammar import GrammarError, parse
from .knob import Knob
from .rules import Constraint
from .space import Space
from .values import Value

__all__ = [
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
