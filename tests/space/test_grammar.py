"""Text is parsed by a part of Python's grammar and never run; errors have a line and a column."""

import pickle
import re

import pytest
from redline.base.errors import SpaceError
from redline.space import GrammarError, Space, parse


@pytest.fixture
def knobs():
    space = Space()
    space.choice("tp", [1, 2, 4, 8])
    space.choice("pp", [1, 2, 4])
    space.choice("precision", ["fp32", "bf16"])
    space.flag("fusion")
    return space.by_name


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("tp*pp<=8", "tp * pp <= 8"),
        (" ( tp ) ", "tp"),
        ("8//(tp*pp)", "8 // (tp * pp)"),
        ("tp > 1 or not fusion", "(tp > 1) | ~fusion"),
        ("tp > 1 and pp > 1 or fusion", "(tp > 1) & (pp > 1) | fusion"),
        ("not tp == 1 and fusion", "~(tp == 1) & fusion"),
        ("not not fusion", "~~fusion"),
        ("tp in (1, 2)", "tp in [1, 2]"),
        ("tp in [1, 2,]", "tp in [1, 2]"),
        ("tp not in [-1]", "tp not in [-1]"),
        ('precision == "bf16"', "precision == 'bf16'"),
        ("fusion == true", "fusion == True"),
        ("min(tp, max(pp, 2)) == 1", "min(tp, max(pp, 2)) == 1"),
        ("tp * .5 + 1. == 1e2", "tp * 0.5 + 1.0 == 100.0"),
        ("2 ** tp ** 2", "2 ** tp ** 2"),
        ("-tp ** 2", "-tp ** 2"),
        ("2 ** -tp < 1", "2 ** -tp < 1"),
        ("tp - -1", "tp - -1"),
        ("tp\n  * pp\n  <= 8", "tp * pp <= 8"),
        ("(tp > 1) | (pp > 1) & fusion", "(tp > 1) | (pp > 1) & fusion"),
        ("tp > 1 # more\n  and fusion", "(tp > 1) & fusion"),
    ],
)
def test_text_is_read_as_python_would_group_it(knobs, text, canonical):
    assert str(parse(text, knobs)) == canonical


@pytest.mark.parametrize(
    ("text", "line", "column", "problem"),
    [
        ("__import__('os').system('true')", 1, 1, "only min(...) and max(...) can be called"),
        ("eval('1')", 1, 1, "only min(...) and max(...) can be called"),
        ("tp(1)", 1, 1, "can be called"),
        ("min(tp, pp, key=tp)", 1, 1, "can be called"),
        ("min(*tp)", 1, 5, "not part of the grammar"),
        ("tp.__class__ == 1", 1, 1, "attributes cannot be read"),
        ("().__class__", 1, 1, "attributes cannot be read"),
        ("tp[0] == 1", 1, 1, "there is no indexing"),
        ("[1, 2]", 1, 1, "a list may only follow 'in'"),
        ("{tp}", 1, 1, "write a list as [1, 2]"),
        ("[tp for tp in pp]", 1, 1, "not part of the grammar"),
        ("lambda tp: tp", 1, 1, "not part of the grammar"),
        ("tp if fusion else pp", 1, 1, "not part of the grammar"),
        ("tp := 1", 1, 1, "not part of the grammar"),
        ("tp @ pp", 1, 1, "not part of the grammar"),
        ("tp is None", 1, 1, "not part of the grammar"),
        ("+tp", 1, 1, "not part of the grammar"),
        ("f'{tp}'", 1, 1, "not part of the grammar"),
        ("b'tp' == tp", 1, 1, "expected a value"),
        ("tp == 1j", 1, 7, "expected a value"),
        ("...", 1, 1, "expected a value"),
        ("(yield)", 1, 2, "not part of the grammar"),
        ("tp = 1", 1, 1, "Maybe you meant '=='"),
        ("tp; pp", 1, 3, "invalid syntax"),
        ("tp >", 1, 5, "invalid syntax"),
        ("(tp > 1", 1, 8, "was never closed"),
        ("tp > 1)", 1, 8, "unmatched ')'"),
        ("", 1, 1, "an expression is empty"),
        ("   ", 1, 1, "an expression is empty"),
        ("tp pp", 1, 1, "invalid syntax"),
        ("tp +\n  * pp", 2, 3, "invalid syntax"),
        ("tp == 1 and\n\n  ttp == 2", 3, 3, "unknown knob 'ttp'; did you mean 'tp'"),
        ("precision == 'é' and ttp", 1, 22, "unknown knob 'ttp'"),
        ("1 < tp < 8", 1, 1, "do not chain"),
        ("tp in 3", 1, 7, "expected a list"),
        ("tp in [1] | fusion", 1, 7, "expected a list"),
        ("tp in []", 1, 1, "never one of no values"),
        ("tp in [pp]", 1, 8, "expected a value"),
        ("tp in [-'a']", 1, 8, "expected a value"),
        ("tp in ['x']", 1, 1, "is an integer, but got 'x'"),
        ("precision == bf16", 1, 14, "'bf16' is a value of precision: texts need quotes"),
        ("precision == 'bf16", 1, 14, "unterminated string literal"),
        ("precision == 'a\\q'", 1, 16, "unknown escape \\q"),
        ("precision + 1", 1, 1, "needs numbers"),
        ("tp > 1 & pp > 1", 1, 6, "put comparisons in parentheses"),
        ("tp == 'x'", 1, 1, "never equal"),
        ("min(tp)", 1, 1, "two or more"),
        ("tp < 9223372036854775808", 1, 6, "must fit 64 bits"),
        ("tp < 1e999", 1, 6, "must be finite"),
        ("tp ** -1", 1, 1, "exponent of at least 0"),
        ("2tp", 1, 1, "invalid decimal literal"),
        ("tp ^ 2", 1, 1, "write ** for a power"),
        ("!fusion", 1, 1, "invalid syntax"),
        ("tp == ½", 1, 7, "invalid character"),
        ("tp\x00", 1, 1, "null bytes"),
    ],
)
def test_text_outside_the_grammar_is_refused_with_its_position(knobs, text, line, column, problem):
    with pytest.raises(GrammarError, match=re.escape(problem)) as caught:
        parse(text, knobs)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert f"column {column}: " in str(caught.value) and (f"line {line}, " in str(caught.value)) is ("\n" in text)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000 + "tp" + ")" * 5000,
        "-" * 5000 + "tp",
        "~" * 300 + "fusion",
        "tp" + " ** tp" * 1000,
        "tp" + " + tp" * 1000,
        "min(" * 500 + "tp",
        "not " * 1500 + "fusion",
        "9" * 9000,
        "tp" * 9000,
    ],
)
def test_a_hostile_text_is_refused_and_does_not_overflow_the_stack(knobs, text):
    with pytest.raises(SpaceError):
        parse(text, knobs)


def test_long_texts_are_refused_before_they_are_read(knobs):
    with pytest.raises(GrammarError, match="at most 10000 characters, but got 20002") as caught:
        parse("tp" + " " * 20_000, knobs)
    assert len(str(caught.value)) < 500


def test_only_text_is_parsed(knobs):
    with pytest.raises(SpaceError, match="written as text, but got 3"):
        parse(3, knobs)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "2tp",
        "a-b",
        "a b",
        "tp.x",
        "é",
        "min",
        "max",
        "in",
        "and",
        "True",
        "true",
        "lambda",
        "class",
        None,
        3,
    ],
)
def test_a_name_that_no_text_could_mention_is_refused(name):
    with pytest.raises(SpaceError, match=r"reserved word|letters, digits and underscores"):
        Space().choice(name, [1, 2])
