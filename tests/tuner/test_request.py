"""`redline.tune`, its help and the command line have the same fields, defaults and words."""

import re

import pytest
import redline as rl
from redline.base.errors import SpaceError, StudyError
from redline.cli.main import main, redline
from redline.frameworks.registry import LAUNCHERS
from redline.models.layouts.find import LAYOUTS
from redline.runners.registry import RUNNERS
from redline.tuner.request.options import SEARCH_RUNNERS
from redline.tuner.samplers import sampler_names
from redline.tuner.trackers import TRACKERS


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
    with pytest.raises(StudyError, match="continue it with resume=True, or give another out for a new one"):
        rl.tune(lambda config: 1.0, _one_knob(), trials=1, out=tmp_path / "a")
    with pytest.raises(SystemExit):
        main(["tune", "gpt2", "--out", str(tmp_path / "a"), "--space", str(tmp_path / "none.yaml")])
    assert "none.yaml" in capsys.readouterr().err


def _one_knob():
    space = rl.Space()
    space.choice("a", [1])
    return space
