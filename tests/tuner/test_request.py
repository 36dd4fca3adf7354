"""`redline.tune`, its help and the command line have the same fields, defaults and words."""

import re

import pytest
import redline as rl
from redline.base.device import Device
from redline.base.errors import SpaceError, StudyError
from redline.cli.main import main, redline
from redline.frameworks.registry import LAUNCHERS
from redline.models.request import TrainingRequest
from redline.runners.registry import RUNNERS
from redline.trainer.convert import LAYOUTS
from redline.tuner.request.options import SEARCH_RUNNERS
from redline.tuner.request.target import resolve_task
from redline.tuner.samplers import sampler_names
from redline.tuner.trackers import TRACKERS

CPU = Device(type="cpu", name="cpu", count=1, memory_mib=8000)


@pytest.mark.parametrize(
    ("command", "option", "names"),
    [
        ("tune", "sampler", sampler_names()),
        ("tune", "runner", SEARCH_RUNNERS),
        ("tune", "launcher", LAUNCHERS),
        ("tune", "log_to", TRACKERS),
        ("train", "runner", RUNNERS),
        ("train", "log_to", TRACKERS),
        ("convert", "to", LAYOUTS),
    ],
)
def test_the_help_of_an_option_names_all_that_it_takes(command, option, names):
    (help_of,) = (each.help for each in redline.get_command(None, command).params if each.name == option)
    assert len(list(names)) > 1
    assert [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", help_of)] == []


def test_a_knob_that_no_model_has_is_refused_before_a_model_is_built(monkeypatch):
    import redline.models.request as asked

    monkeypatch.setattr(asked, "resolve_workload", lambda *args, **sizes: pytest.fail("a model was built"))
    for more in ({"fix": {"bananas": 3}}, {"override": {"micro_bach": [1, 2]}}):
        with pytest.raises(SpaceError, match="unknown knob '(bananas'|micro_bach'; did you mean 'micro_batch')"):
            rl.tune("gpt2", **more)
    from redline.estimator.request import estimate_request

    with pytest.raises(SpaceError, match="unknown knob 'bananas'"):
        estimate_request("gpt2", "h100-80gb", fix={"bananas": 3})


def test_every_knob_of_a_default_space_is_known_beforehand():
    from redline.estimator.request import estimate_request
    from redline.knobs.strategy import BLOCK_KNOBS, STANDARD

    space = estimate_request("mixtral-tiny", "h100-80gb", devices=16, allow="lossy").space
    assert {knob.name for knob in space.knobs} <= {*STANDARD, *BLOCK_KNOBS}


def test_errors_of_the_function_name_its_arguments_and_those_of_the_command_its_options(tmp_path, capsys):
    with pytest.raises(TypeError, match=r"tune\(\) got an unknown argument 'trails'; did you mean 'trials'\?"):
        rl.tune("gpt2", trails=3)
    rl.tune(lambda config: 1.0, _one_knob(), trials=1, out=tmp_path / "a")
    with pytest.raises(StudyError, match="continue it with resume=True, or give another `out` for a new one"):
        rl.tune(lambda config: 1.0, _one_knob(), trials=1, out=tmp_path / "a")
    with pytest.raises(SystemExit):
        main(["tune", "gpt2", "--out", str(tmp_path / "a"), "--space", str(tmp_path / "none.yaml")])
    assert "none.yaml" in capsys.readouterr().err


def _one_knob():
    space = rl.Space()
    space.choice("a", [1])
    return space


@pytest.mark.parametrize(
    "fields",
    [
        {"command": "train {32 // micro_batch}"},
        {"command": "train {tp} {micro_batch}", "env": ("STEPS={1 + 32 // micro_batch}",)},
        {"command": "train {micro_batch > 0}", "render": ("ds.json:steps={32 / micro_batch}",)},
        {"command": "train {micro_batch}", "samples": "{32 % micro_batch}"},
    ],
)
def test_a_configuration_for_which_an_expression_of_the_command_has_no_value_is_left_out(fields, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text("{}")
    values = {"micro_batch": [0, 2, 4], "tp": [1, 2]}
    used = {name: values[name] for name in values if f"{{{name}" in str(fields) or name in str(fields)}
    task = resolve_task(TrainingRequest(rl.Command(**fields), override=used, devices=1), device=CPU)
    assert {config["micro_batch"] for config in task.space} == {2, 4}
    assert task.space.default()["micro_batch"] == 2


def test_expressions_that_always_have_a_value_do_not_join_knobs_of_a_space():
    """Sets of independent knobs are counted without being listed."""
    values = {"a": list(range(5000)), "b": list(range(5000))}
    command = rl.Command(command="train {a + b} {a > 3}")
    task = resolve_task(TrainingRequest(command, override=values, devices=1), device=CPU)
    assert len(task.space) == 25_000_000


def test_the_option_of_another_name_is_told_by_its_argument():
    with pytest.raises(TypeError, match="the option --set is the argument override"):
        rl.tune("gpt2-tiny", set={"micro_batch": [1]})
