"""Text is parsed by a grammar and never run; errors have a line and a column."""

import pickle

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
        ("007 * tp", "7 * tp"),
    ],
)
def test_text_is_read_as_python_would_group_it(knobs, text, canonical):
    assert str(parse(text, knobs)) == canonical


@pytest.mark.parametrize(
    ("text", "line", "column", "problem"),
    [
        ("__import__('os').system('true')", 1, 1, "'__import__' cannot be called: only min"),
        ("tp.values", 1, 3, "attribute access is not part of the grammar"),
        ("tp.__class__ == 1", 1, 3, "attribute access"),
        ("().__class__", 1, 2, "expected a knob, a number or a text, but got .\\)"),
        ("eval('1')", 1, 1, "'eval' cannot be called"),
        ("tp(1)", 1, 1, "'tp' cannot be called"),
        ("(tp)(1)", 1, 5, "only min"),
        ("tp[0] == 1", 1, 3, "there is no indexing"),
        ("[1, 2]", 1, 1, "a list may only follow 'in'"),
        ("lambda tp: tp", 1, 1, "'lambda' is not part of the grammar"),
        ("tp if fusion else pp", 1, 4, "unexpected 'if'"),
        ("tp := 1", 1, 4, "unexpected ':'"),
        ("tp = 1", 1, 4, "write == to compare"),
        ("tp; pp", 1, 3, "unexpected ';'"),
        ("tp >", 1, 5, "but got the end"),
        ("(tp > 1", 1, 8, "expected '\\)' to close the parenthesis, but got the end"),
        ("tp > 1)", 1, 7, "unexpected '\\)'"),
        ("", 1, 1, "an expression is empty"),
        ("   ", 1, 1, "an expression is empty"),
        ("tp pp", 1, 4, "unexpected 'pp'"),
        ("tp +\n  * pp", 2, 3, "expected a knob"),
        ("tp == 1 and\n\n  ttp == 2", 3, 3, "unknown knob 'ttp'; did you mean 'tp'"),
        ("1 < tp < 8", 1, 8, "do not chain"),
        ("tp in [1] in [2]", 1, 11, "do not chain"),
        ("tp in 3", 1, 7, "expected a list"),
        ("tp in []", 1, 8, "expected a value"),
        ("tp in [pp]", 1, 8, "expected a value, but got 'pp'"),
        ("tp in [-'a']", 1, 8, "'-' needs a number"),
        ("tp not 3", 1, 8, "expected 'in' after 'not'"),
        ("precision == bf16", 1, 14, "'bf16' is a value of precision: texts need quotes"),
        ("precision == 'bf16", 1, 14, "no closing quote"),
        ("precision == 'a\\q'", 1, 16, "unknown escape"),
        ("precision + 1", 1, 11, "needs numbers"),
        ("tp > 1 & pp > 1", 1, 8, "put comparisons in parentheses"),
        ("tp == 'x'", 1, 4, "never equal"),
        ("tp in ['x']", 1, 4, "is an integer, but got 'x'"),
        ("min(tp)", 1, 1, "two or more"),
        ("min tp", 1, 5, "expected '\\(' after 'min'"),
        ("min()", 1, 5, "expected a knob"),
        ("tp < 99999999999999999999", 1, 6, "must fit 64 bits"),
        ("tp < 9223372036854775808", 1, 6, "must fit 64 bits"),
        ("tp < 1e999", 1, 6, "must be finite"),
        ("tp ** -1", 1, 4, "exponent of at least 0"),
        ("2tp", 1, 2, "unexpected .t. after the number 2"),
        ("tp ^ 2", 1, 4, "write \\*\\* for a power"),
        ("!fusion", 1, 1, "write ~ or not"),
        ("{tp}", 1, 1, "braces"),
        ("tp == ½", 1, 7, "unexpected '½'"),
        ("tp == ٣", 1, 7, "unexpected"),
        ("+tp", 1, 1, "needs no '\\+'"),
        ("tp is None", 1, 4, "unexpected 'is'"),
        ("async", 1, 1, "not part of the grammar"),
        ("tp # comment", 1, 4, "unexpected '#'"),
        ("tp > 1 # more\n  and fusion", 1, 8, "unexpected '#'"),
        ("tp > 1 \\\n and fusion", 1, 8, "unexpected '\\\\"),
        ("precision == 'a' 'b'", 1, 18, "unexpected ''b''"),
        ("precision == r'a'", 1, 14, "unknown knob 'r'"),
        ("\U0001d42d\U0001d429 == 1", 1, 1, "unexpected '\U0001d42d'"),  # tp in mathematical letters
        ("precision == 'é' and ttp", 1, 22, "unknown knob 'ttp'"),
        ("tp == 0x10", 1, 8, "unexpected 'x' after the number 0"),
        ("tp == 1_0", 1, 8, "unexpected '_' after the number 1"),
        ("tp\x00", 1, 3, "unexpected '.x00'"),
        ("tp in [1] | fusion", 1, 11, "unexpected '\\|'"),
        ("fusion or tp in [1] | fusion", 1, 21, "unexpected '\\|'"),
        ("not tp in [1] + 2", 1, 15, "unexpected '\\+'"),
        ("tp in ([1, 2])", 1, 8, "expected a value"),
        ("`tp`", 1, 1, "unexpected '`'"),
        ("tp @ pp", 1, 4, "unexpected '@'"),
        ("f'{tp}'", 1, 1, "unknown knob 'f'"),
    ],
)
def test_text_outside_the_grammar_is_refused_with_its_position(knobs, text, line, column, problem):
    with pytest.raises(GrammarError, match=problem) as caught:
        parse(text, knobs)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert str(caught.value).startswith(f"line {line}, column {column}: ")
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
