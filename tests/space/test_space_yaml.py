"""Spaces as files: readable, complete, parsed instead of run, and refused with file and line."""

import os
import re
import textwrap

import pytest
from redline.base.errors import SpaceError, UsageError
from redline.space import Space

TP = "knobs:\n- {name: tp, values: [1, 2]}\n"
FILE = """\
knobs:
- name: tp
  values: [1, 2, 4, 8]
  default: 2
  help: tensor-parallel degree
  monotone_memory: -1
- name: layers
  type: integer
  low: 4
  high: 48
  step: 4
- name: ratio
  values: [0.0, 0.5, 1.0e-05]
- name: precision
  values: [bf16, 'no', null]
  others: [fp8]
- name: fusion
  type: flag
  default: true
  when: dp > 1
derived:
- name: dp
  value: 8 // tp
  help: replicas
constraints:
- require: tp * layers <= 96
  reason: why, for people
- require: (precision != 'no') | (ratio > 0)
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "space.yaml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def test_a_file_reads_as_the_space_it_writes(write):
    path = write(FILE)
    space = Space.from_yaml(path)
    tp, layers, ratio, precision, fusion, dp = space.knobs
    assert tp.values == (1, 2, 4, 8) and tp.default == 2 and tp.help == "tensor-parallel degree"
    assert tp.monotone_memory == -1
    assert layers.values == tuple(range(4, 49, 4)) and ratio.values == (0.0, 0.5, 1e-5)
    assert precision.values == ("bf16", "no", None) and precision.others == ("fp8",)
    assert fusion.values == (False, True) and fusion.default is True and str(fusion.when) == "dp > 1"
    assert dp.derived and dp.help == "replicas"
    assert [each.reason for each in space.constraints] == ["why, for people", ""]
    space.to_yaml(path)
    assert path.read_text(encoding="utf-8") == FILE
    assert list(Space.from_yaml(path)) == list(space)


def test_numbers_with_a_power_are_numbers_and_texts_like_them_stay_texts(write):
    space = Space.from_yaml(
        write("knobs: [{name: lr, values: [1e-4, 3E+5, -2.e3, 0.5]}, {name: tag, values: ['1e-4', 1e-4x]}]")
    )
    lr, tag = space.knobs
    assert lr.values == (1e-4, 3e5, -2e3, 0.5) and tag.values == ("1e-4", "1e-4x")
    path = write("")
    space.to_yaml(path)
    assert [each.values for each in Space.from_yaml(path).knobs] == [lr.values, tag.values]


def test_awkward_values_survive(tmp_path):
    space = Space()
    space.choice("text", ["yes", "1", "null", "a: b", "it's", '"', "é\n", "", "~", "0x1", "1e3", "# x"])
    space.choice("number", [1.0, -0.5, 1e-300, 1e300])
    space.choice("big", [-(2**63) + 1, 2**63 - 1, 0])
    space.require(space["text"].isin(["it's", '"', "é\n", "a: b"]), "reason: with a colon # and more")
    path = tmp_path / "space.yaml"
    space.to_yaml(path)
    again = Space.from_yaml(path)
    assert again.to_dict() == space.to_dict() and list(again) == list(space)


def test_callables_are_refused_saying_which_and_what_to_do(tmp_path):
    path = tmp_path / "space.yaml"
    for declare, message in [
        (
            lambda s: s.require(lambda tp: tp.bit_count() > 0, "parallel"),
            "the constraint 'parallel', `lambda tp: tp.bit_count() > 0`, is a Py",
        ),
        (
            lambda s: s.derive("dp", lambda tp: hash(tp)),
            "the rule of derived knob 'dp', `lambda tp: hash(tp)`",
        ),
        (lambda s: s.flag("x", when=lambda tp: hash(tp) > 1), "when= of knob 'x', `lambda tp: hash(tp) > 1`"),
    ]:
        space = Space()
        space.choice("tp", [1, 2])
        declare(space)
        with pytest.raises(SpaceError, match=re.escape(message)) as caught:
            space.to_yaml(path)
        assert "write it as an expression" in str(caught.value)
        assert not path.exists() and list(tmp_path.iterdir()) == []
        recorded = space.to_dict(describe_callables=True)
        assert "lambda tp: " in str(recorded)
        with pytest.raises(SpaceError, match="a file is never run as Python"):
            Space.from_dict(recorded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            TP + "constraints:\n- require: __import__('os').system('true') == 0\n",
            r"constraints\[0\].require: column 1: only min",
        ),
        (
            TP + "constraints:\n- require: 'tp.values == 1'\n",
            r"constraints\[0\].require: column 1: .* attributes cannot be read",
        ),
        (
            TP + "constraints:\n- require: |\n    tp > 0 and\n      tpp < 3\n",
            r"constraints\[0\].require: line 2, column 3: unknown knob 'tpp'; did you mean 'tp'",
        ),
        (
            TP + "constraints:\n- require: tp > 0 and\n    tpp < 3\n",
            r"constraints\[0\].require: column 12: unknown knob 'tpp'",
        ),
        (
            TP + "- {name: x, type: flag, when: tp >}\n",
            r"knobs\[1\].when: column 5: not an expression",
        ),
        (
            TP + "derived:\n- {name: dp, value: 8 / / tp}\n",
            r"derived\[0\].value: column 5: not an expression",
        ),
        ("knobs: [", r"not valid YAML: line [12], column \d: "),
        ("", "is empty"),
        ("3", "a space is a mapping with the keys knobs, derived, constraints, but got 3"),
        ("{}", "the key 'knobs' is missing"),
        ("knobs: 3", "'knobs' must be a list, but got 3"),
        (
            "knobs: [{name: a, values: [1]}]\nconstraints: [a * 2 <= 8]",
            r"an entry of 'constraints' is a mapping, but got 'a \* 2 <= 8'; write require: a \* b <= 8",
        ),
        ("knob: []\n", "unknown key 'knob'; did you mean 'knobs'"),
        ("knobs: []\nconstraints: {a: 1}\n", "constraints: 'constraints' must be a list"),
        ("knobs:\n- {values: [1]}\n", r"knobs\[0\]: the key 'name' is missing"),
        ("knobs:\n- {name: tp}\n", r"knobs\[0\]: knob 'tp' needs 'values'"),
        ("knobs:\n- {name: tp, values: []}\n", r"knobs\[0\]: knob 'tp' has no values"),
        ("knobs:\n- {name: tp, values: [1], value: [2]}\n", "unknown key 'value'; did you mean 'values'"),
        ("knobs:\n- {name: tp, type: int, values: [1]}\n", "unknown type 'int'; did you mean 'integer'"),
        ("knobs:\n- {name: tp, low: 4, high: 1}\n", r"knobs\[0\]: knob 'tp': low <= high must hold"),
        ("knobs:\n- {name: tp, values: [1, 2], default: 3}\n", "has no value 3; the nearest is 2"),
        (
            "knobs:\n- {name: tp, values: [1, 2], default: 1, default: 2}\n",
            "line 2: key 'default' is given twice",
        ),
        (
            "knobs:\n- {name: tp, values: [1, 2], when: later}\n- {name: later, type: flag}\n",
            "unknown knob 'later'",
        ),
        ("knobs:\n- {name: tp, values: [1, 2], when: tp > 1}\n", "unknown knob 'tp'"),
        (
            TP + "derived:\n- {name: a, value: b + 1}\n- {name: b, value: a + tp}\n",
            "derived knobs depend on each other: a -> b -> a",
        ),
        (
            TP + "constraints:\n- {require: tp > 4, reason: large}\n",
            r"constraints\[0\].require: constraint `tp > 4` \(large\) can never hold: tp is one of 1, 2",
        ),
        (
            TP + "constraints:\n- {require: tp > 1}\n- {require: tp < 2}\n",
            r"constraints\[1\].require: constraint `tp < 2` leaves no valid configuration: it contradicts `tp > 1`",
        ),
        ("knobs: !!python/object/apply:os.system ['true']\n", "not valid YAML: line 1, column 8"),
        ("[" * 3000, "nest"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_place(write, text, message):
    path = write(text)
    with pytest.raises(SpaceError, match=message) as caught:
        Space.from_yaml(path)
    assert str(caught.value).startswith(str(path))


def test_bad_data_is_refused_with_its_place():
    with pytest.raises(SpaceError, match=r"^constraints\[0\].require: column 6: not an expression"):
        Space.from_dict({"knobs": [{"name": "tp", "values": [1]}], "constraints": [{"require": "tp > "}]})
    with pytest.raises(SpaceError, match=r"^knobs\[0\]: knob 'tp' has no values"):
        Space.from_dict({"knobs": [{"name": "tp", "values": []}]})
    with pytest.raises(SpaceError, match="unknown key '3'"):
        Space.from_dict({"knobs": [], 3: 4})
    for data in (None, 3, [], "knobs"):
        with pytest.raises(SpaceError, match="a space is a mapping"):
            Space.from_dict(data)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path):
    with pytest.raises(SpaceError, match=r"cannot read the space from .*nowhere.yaml: No such file"):
        Space.from_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(SpaceError, match="cannot read the space"):
        Space.from_yaml(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"knobs: \xff\xfe\n")
    with pytest.raises(SpaceError, match=r"not valid YAML: it is not UTF-8 at 7"):
        Space.from_yaml(tmp_path / "binary.yaml")
    (tmp_path / "control.yaml").write_bytes(b"knobs: \x00\n")
    with pytest.raises(SpaceError, match=r"control\.yaml.*not valid YAML"):
        Space.from_yaml(tmp_path / "control.yaml")
    space = Space()
    space.choice("tp", [1])
    with pytest.raises(SpaceError, match="cannot write the space to"):
        space.to_yaml(tmp_path / "nowhere" / "space.yaml")
    with pytest.raises(SpaceError, match="cannot write the space to"):
        space.to_yaml(tmp_path / "binary.yaml" / "space.yaml")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpaceError, match="cannot write the space to"):
        space.to_yaml(tmp_path / "folder")
    with pytest.raises(UsageError, match="cannot be that of a file: embedded null byte"):
        space.to_yaml("space\0.yaml")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["binary.yaml", "control.yaml", "folder"]


def test_a_file_is_replaced_whole_and_readable_by_others(tmp_path):
    path = tmp_path / "space.yaml"
    space = Space()
    space.choice("tp", [1, 2])
    space.to_yaml(str(path))
    first = path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    assert first == 0o666 & ~mask
    space.require(lambda tp: tp.bit_length() > 1)
    before = path.read_text()
    with pytest.raises(SpaceError):
        space.to_yaml(path)
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


def test_a_lambda_that_means_something_else_as_text_is_refused(tmp_path):
    limit = 2
    for rule in (
        lambda pp: 8 // pp > 4 or pp == 0,  # Python divides by zero before it gets to pp == 0
        lambda tp: tp <= limit,  # a variable that is not a knob
        lambda tp: tp & 3,  # bits, not conditions
        lambda tp, pp: tp and pp,  # numbers, not conditions
        lambda tp: 1 < tp < 8,
        lambda tp: tp % 2 == 0 if tp else True,
        lambda tp: tp // 2,
        lambda tp: tp > 1 if tp else False,
    ):
        space = Space()
        space.choice("tp", [0, 1, 2, 4])
        space.choice("pp", [0, 1])
        space.require(rule)
        with pytest.raises(SpaceError, match="cannot be written in the grammar"):
            space.to_yaml(tmp_path / "space.yaml")


def test_a_range_of_floats_is_read_and_written_as_its_values(write, tmp_path):
    text = """\
        knobs:
        - {name: lr_scale, type: number, low: 1e-4, high: 1e-1, log: true, count: 4}
        - {name: share, low: 0.5, high: 1, count: 3}
        """
    space = Space.from_yaml(write(text))
    assert space["lr_scale"].values == (1e-4, 1e-3, 1e-2, 1e-1) and space["share"].values == (0.5, 0.75, 1.0)
    space.to_yaml(tmp_path / "again.yaml")
    assert list(Space.from_yaml(tmp_path / "again.yaml")) == list(space)
    with pytest.raises(SpaceError, match=r"knobs\[0\].log: 'log' is true or false"):
        Space.from_yaml(write("knobs:\n- {name: x, low: 1.0, high: 2.0, log: 1}\n"))
