"""One request: `redline.tune`, its help and the command line have the same fields, defaults and words."""

import re
from dataclasses import fields
from inspect import signature

import pytest
import redline as rl
from redline.base.errors import UsageError
from redline.cli.main import redline
from redline.frameworks.autotuners import FORMATS
from redline.frameworks.launch import LAUNCHES
from redline.frameworks.registry import LAUNCHERS
from redline.models.layouts.find import LAYOUTS
from redline.runners.registry import RUNNERS
from redline.training.hyperparameters import LR_SCHEDULES
from redline.tuner.loggers import logger_names
from redline.tuner.request import SEARCH_RUNNERS, SECTIONS, Request
from redline.tuner.samplers import sampler_names

PYTHON_ONLY = {"prior", "isolate", "listener"}


def test_the_sections_are_the_request_in_the_order_of_its_constructor():
    assert [each.name for section in SECTIONS for each in fields(section)] == [each.name for each in fields(Request)]
    assert sorted(signature(rl.tune).parameters) == sorted(each.name for each in fields(Request))
    by_place = [name for name, each in signature(rl.tune).parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert by_place == ["target", "space"]


def test_every_field_is_documented_once():
    told = re.findall(
        r"^    (\w+): ", rl.tune.__doc__.partition("\nArgs:\n")[2].partition("\nReturns:")[0], re.MULTILINE
    )
    assert sorted(told) == sorted(each.name for each in fields(Request)) and len(set(told)) == len(told)


def test_the_command_line_has_every_field_but_those_for_python_alone():
    command = redline.get_command(None, "tune")
    options = {each.name: each for each in command.params}
    assert {each.name for each in fields(Request)} - set(options) == PYTHON_ONLY
    assert set(options) - {each.name for each in fields(Request)} == {
        *("workload", "as_json", "command_file", "dry", "server", "token"),
        *(each.name for each in fields(rl.Command)),
    }
    parsed = command.make_context("tune", ["gpt2-tiny"], parent=redline.make_context("redline", ["tune"])).params
    for each in fields(Request):
        if each.name in options and each.name != "target" and not options[each.name].multiple:
            assert parsed[each.name] == each.default, each.name


@pytest.mark.parametrize(
    ("command", "option", "names"),
    [
        ("tune", "sampler", sampler_names()),
        ("tune", "runner", SEARCH_RUNNERS),
        ("tune", "launcher", LAUNCHERS),
        ("tune", "log_to", logger_names()),
        ("tune", "taken_from", [each.name for each in FORMATS]),
        ("train", "runner", RUNNERS),
        ("train", "log_to", logger_names()),
        ("train", "lr_schedule", LR_SCHEDULES),
        ("convert", "to", LAYOUTS),
        ("export", "launch", LAUNCHES),
    ],
)
def test_the_help_of_an_option_names_all_that_it_takes(command, option, names):
    (help_of,) = (each.help for each in redline.get_command(None, command).params if each.name == option)
    assert len(list(names)) > 2
    assert [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", help_of)] == []


def test_what_is_given_is_what_is_not_the_default():
    asked = Request("gpt2-tiny", trial_timeout="5m", concurrency=2, memory_limit=None)
    assert asked.given("trial_timeout", "concurrency", "memory_limit", "ray_address") == {"concurrency": 2}
    assert Request("gpt2-tiny", trial_timeout=None).given("trial_timeout") == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trials": 0}, "trials must be at least 1"),
        ({"time": "soon"}, "such as 90s"),
        ({"memory_limit": "big"}, "such as 8GiB"),
        ({"trial_timeout": "-1s"}, "trial timeout must be more than 0"),
        ({"measure_time": 0}, "measure time must be more than 0"),
        ({"runner": "rays"}, "did you mean 'ray'"),
        ({"space": "no_such.yaml"}, "no_such.yaml"),
        ({"isolate": False}, "isolate=False belongs to a callable"),
    ],
)
def test_what_can_be_seen_to_be_wrong_is_refused_before_anything_is_looked_at(options, words):
    with pytest.raises(UsageError, match=words):
        Request("no model of this name", **options).check_values()
