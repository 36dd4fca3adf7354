"""Templates of commands and of files: knobs and expressions are inserted, typed and quoted; wrong ones are refused."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from redline.base.errors import UsageError
from redline.runners.command.command import Command
from redline.runners.command.files import read_files
from redline.runners.command.template import CommandLine, Template
from redline.runners.command.work import Commands
from redline.space import Space


@pytest.fixture
def space():
    made = Space()
    made.choice("micro_batch", [1, 2, 8])
    made.choice("precision", ["fp32", "bf16"])
    made.choice("name", ["plain", "two words", "it's"])
    made.choice("rate", [1e-4, 0.5])
    made.flag("fusion")
    return made


VALUES = {"micro_batch": 8, "precision": "bf16", "name": "two words", "rate": 1e-4, "fusion": True}
GIVEN = {"trial": 3, "trial_dir": "/runs/a b/3", "devices": 2, "hosts": 1, "master_port": 4000}


def words(text, space, **changed):
    line = CommandLine.read(text, space.by_name)
    return line.texts({**VALUES, **GIVEN, **changed})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train --batch {micro_batch}", ["train", "--batch", "8"]),
        ("train --batch={micro_batch * 2} {micro_batch}x", ["train", "--batch=16", "8x"]),
        ("train --bf16 {precision == 'bf16'}", ["train", "--bf16", "true"]),
        ('train --bf16 {precision == "fp32"}', ["train", "--bf16", "false"]),
        ("train '--name={name}' {name}", ["train", "--name=two words", "two words"]),
        ("train --lr {rate} --half {micro_batch / 2}", ["train", "--lr", "0.0001", "--half", "4"]),
        ("train {fusion} -o {trial_dir}/out", ["train", "true", "-o", "/runs/a b/3/out"]),
        ("train '{{\"a\": {micro_batch}}}'", ["train", '{"a": 8}']),
        ("train ${HOME} {min(micro_batch, 4)}", ["train", "${HOME}", "4"]),
        (
            "train {'inductor' if fusion else 'no'} {'a if b' if not fusion else micro_batch}",
            ["train", "inductor", "8"],
        ),
        ("train {1 if fusion and micro_batch > 8 else 2 if micro_batch == 8 else name}", ["train", "2"]),
        ("train -o {trial_dir if fusion else 'out'}", ["train", "-o", "/runs/a b/3"]),
        ("train a\\ b \"c 'd'\"", ["train", "a b", "c 'd'"]),
        ("train {fusion!s} {name!s} {rate!s} {micro_batch > 8!s}", ["train", "True", "two words", "0.0001", "False"]),
        ("train \"o={{'n': {name!r}, 'f': {fusion!r}}}\"", ["train", "o={'n': 'two words', 'f': True}"]),
    ],
)
def test_values_are_inserted_in_place_and_words_stay_separate(space, text, expected):
    assert words(text, space) == expected


def test_a_command_of_several_hosts_takes_what_differs_from_variables(space):
    text = "torchrun --node-rank {node_rank} --at={master_addr}:{master_port} {name} {micro_batch} -n {hosts}"
    text += " --nproc-per-node {devices_per_host}"
    work = Commands(Command(command=text), _only(space, "name", "micro_batch"), devices=4)
    shown = work.training_command({"name": "two words", "micro_batch": 8}, 0, Path("/o"), hosts=2)
    done = subprocess.run(
        ["sh", "-c", f"MASTER_ADDR='a b'; NODE_RANK=1; set -- {shown}; printf '%s\\n' \"$@\""],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        *("torchrun", "--node-rank", "1", "--at=a b:29500", "two words", "8", "-n", "2", "--nproc-per-node", "2"),
    ]


def _only(space, *names):
    """A space of some knobs of another one."""
    made = Space()
    for name in names:
        made.choice(name, space[name].values)
    return made


def test_a_chosen_literal_with_several_options_is_several_words(space):
    choice = "{'--amp --amp-dtype bfloat16' if fusion else ''}"
    text = f'train {choice} "{choice}" --x={choice} {{name}}'
    options = "--amp --amp-dtype bfloat16"
    assert words(text, space) == ["train", *options.split(), options, f"--x={options}", "two words"]
    assert words(text, space, fusion=False) == ["train", "", "--x=", "two words"]
    assert words(["train", choice], space) == ["train", options], "a word of a list is one word"
    nested = "train {'-a \"x y\"' if micro_batch > 8 else '-b -c' if fusion else name}"
    assert words(nested, space) == ["train", "-b", "-c"]
    assert words(nested, space, micro_batch=16) == ["train", "-a", "x y"]
    assert words(nested, space, fusion=False, name="-d e") == ["train", "-d e"], "a knob's value is one word"
    with pytest.raises(UsageError, match="'-a \"x' cannot be split into words .no closing quotation"):
        words("train {'-a \"x' if fusion else ''}", space)


def test_variables_in_front_of_a_command_are_its_environment(space):
    line = CommandLine.read("A=1 OMP_NUM_THREADS={micro_batch} train --x=1", space.by_name)
    assert line.texts(VALUES) == ["train", "--x=1"]
    assert [(name, each.text(VALUES)) for name, each in line.environment] == [("A", "1"), ("OMP_NUM_THREADS", "8")]
    assert line.names == {"micro_batch"}


@pytest.mark.parametrize("name", ["plain", "two words", "it's", "$(rm -rf /)", "; exit 1"])
def test_shown_commands_are_quoted_for_a_shell(space, name):
    import subprocess

    shown = CommandLine.read("printf '%s|' {name} end", space.by_name).shown({**VALUES, "name": name}, [])
    assert subprocess.run(["/bin/sh", "-c", shown], capture_output=True, text=True).stdout == f"{name}|end|"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train {micro_bach}", r"unknown placeholder '\{micro_bach\}'; did you mean '\{micro_batch\}'\?"),
        ("train {1 if micro_batch else 2}", "`micro_batch` is not a condition"),
        ("train {1 if fusion else}", r"\{1 if fusion else\}: .*column"),
        ("train {1 if trial else 2}", "`trial` is not a condition"),
        ("train {micro_batch +}", r"\{micro_batch \+\}: .*column"),
        ("train {micro_batch", r"the brace '\{' has no counterpart in '\{micro_batch'"),
        ("train }", r"the brace '\}' has no counterpart"),
        ('train {"a": 1}', "Write literal braces as"),
        ("train 'a", "cannot be split into words: no closing quotation"),
        ("", "the command is empty"),
        ("A=1", "the command is empty"),
        ("cd sub && train {micro_batch}", "'&&' is shell syntax; quote it, or start a shell: sh -c"),
        ("cd sub; train {micro_batch}", "'sub;' is shell syntax"),
        ("train {micro_batch} | tee log", r"'\|' is shell syntax"),
        ("train {micro_batch} > log.txt", "'>' is shell syntax"),
        ("train {micro_batch} >{trial_dir}/log", r"'>\{trial_dir\}/log' is shell syntax"),
        ("train {micro_batch} 2>&1", "'2>&1' is shell syntax"),
    ],
)
def test_invalid_templates_are_refused_with_the_position(space, text, says):
    with pytest.raises(UsageError, match=says):
        CommandLine.read(text, space.by_name)


def test_a_template_that_is_one_expression_keeps_its_kind(space):
    def value(text):
        return Template.read(text, space.by_name, "here").value(VALUES)

    assert value("{micro_batch}") == 8 and value("{fusion}") is True and value("{rate}") == 1e-4
    assert value("{precision}") == "bf16" and value("x{micro_batch}") == "x8" and value("none") == "none"


def rendered(tmp_path, space, *asked):
    (file,) = read_files(asked, space.by_name)
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    path = file.write(out, {**VALUES, **GIVEN})
    return path, file


def test_a_yaml_file_gets_numbers_and_truth_values(tmp_path, space):
    source = tmp_path / "train.yaml.in"
    source.write_text(
        "# a comment\nbatch: {micro_batch}\nquoted: '{micro_batch}'\nbf16: \"{precision == 'bf16'}\"\n"
        "list: [1, '{rate}', {fusion}]\nnested:\n  text: run-{micro_batch}\n  left:\n  as: {is: null}\n"
    )
    path, file = rendered(tmp_path, space, str(source))
    assert path.name == "train.yaml" and file.names == {"micro_batch", "precision", "rate", "fusion"}
    assert yaml.safe_load(path.read_text()) == {
        "batch": 8, "quoted": 8, "bf16": True, "list": [1, 1e-4, True],
        "nested": {"text": "run-8", "left": None, "as": {"is": None}},
    }  # fmt: skip
    assert source.read_text().startswith("# a comment")


def test_values_are_put_at_paths(tmp_path, space):
    source = tmp_path / "ds.json"
    source.write_text('{"zero_optimization": {"stage": 0}, "steps": [1, 2], "a.b": 1, "text": "{{kept}}"}')
    path, _ = rendered(
        tmp_path, space,
        f"{source}:zero_optimization.stage={{micro_batch}}", f"{source}:steps.1={{fusion}}",
        f"{source}:train.batch={{micro_batch * 2}}", f"{source}:a\\.b={{rate}}",
    )  # fmt: skip
    assert json.loads(path.read_text()) == {
        "zero_optimization": {"stage": 8}, "steps": [1, True], "a.b": 1e-4, "text": "{kept}", "train": {"batch": 16},
    }  # fmt: skip


def test_a_toml_file_stays_what_it_is(tmp_path, space):
    toml = tmp_path / "job.toml.tmpl"
    toml.write_text('[training]\nbatch = "{micro_batch}"\nname = "{name}"\nsteps = 3\n')
    path, _ = rendered(tmp_path, space, str(toml))
    assert path.name == "job.toml" and tomllib.loads(path.read_text()) == {
        "training": {"batch": 8, "name": "two words", "steps": 3}
    }


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("missing.yaml", "missing.yaml, cannot be read: No such file"),
        ("train.sh", "must be FILE or FILE:PATH=VALUE with a YAML, JSON or TOML file"),
        ("broken.json", "broken.json, is not valid JSON"),
        ("good.json:a.b={micro_batch}", "a.b leads into a int, which has no keys"),
        ("good.json:list.7={micro_batch}", "list.7 leads into a list of 2, where '7' is not a position"),
        ("good.json:a={macro}", "good.json: a: unknown placeholder"),
        ("placeholder.json", r"placeholder.json: deep: list\[0\]: unknown placeholder"),
    ],
)
def test_a_file_that_cannot_be_rendered_is_refused(tmp_path, space, monkeypatch, asked, says):
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    Path("good.json").write_text('{"a": 1, "list": [1, 2]}')
    Path("placeholder.json").write_text('{"deep": {"list": ["{macro}"]}}')
    with pytest.raises(UsageError, match=says):
        read_files([asked], space.by_name)
