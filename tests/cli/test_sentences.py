"""Messages say what to do, in the user's own terms."""

import pytest
import redline as rl
import torch
from command_line import run
from redline.base.device import Device
from redline.base.errors import SpaceError, UsageError, WorkloadError
from redline.cli.outcome import print_result
from redline.knobs.rules import RULES, RuleContext
from redline.models.batches import make_batch
from redline.models.resolve import workload as resolved
from redline.models.source import FileSource
from redline.models.spaces import default_space, fix_knob
from redline.results import Measurement, Status, Trial, summary
from redline.tuner.budget import parse_duration, parse_memory
from redline.tuner.request import in_python
from redline.tuner.result import make_result

CPU = Device(type="cpu", name="a CPU", count=1, memory_mib=8192, capability=None, features=frozenset())


@pytest.mark.parametrize("name", ["zero", "tp", "hsdp"])
def test_a_knob_of_several_devices_asks_for_them(name):
    space = default_space(resolved("gpt2-tiny"), CPU, 1)
    with pytest.raises(SpaceError, match=f"^{name} needs two devices or more: --devices 2$"):
        fix_knob(space, name, 2)


@pytest.fixture
def space():
    made = rl.Space()
    made.choice("a", [4, 8])
    return made


def test_parameters_of_a_rule_are_names_of_knobs(space):
    with pytest.raises(
        SpaceError, match=r"unknown knob 'c'.* The parameters of a callable are knobs, or one named config"
    ):
        space.require(lambda c: c["a"] > 1)


def test_a_name_has_ascii_letters(space):
    with pytest.raises(SpaceError, match="ASCII letters, digits and underscores, but got 'größe'"):
        space.choice("größe", [1])


def test_values_of_different_kinds_are_named(space):
    with pytest.raises(SpaceError, match=r"None and 1 .an integer. are of different kinds"):
        space.choice("b", [None, 1])


@pytest.mark.parametrize("function", [int, float, round, range])
def test_a_knob_has_no_value_yet(space, function):
    with pytest.raises(SpaceError, match=r"`a / 2` has no value yet.*use // .* a // 2"):
        function(space["a"] / 2)


def test_a_missing_kind_of_knob_is_a_list_of_values(space):
    with pytest.raises(
        AttributeError,
        match=r"no method 'float'; choice, integer, flag and derive declare knobs; .*give a list of values: space",
    ):
        space.float("lr", 1e-5, 1e-3)
    assert not hasattr(space, "__array__")


def test_only_workloads_of_a_file_are_listed(tmp_path):
    (tmp_path / "train.py").write_text(
        "import redline as rl, torch\nclass Bad(torch.nn.Module): pass\ndef g(): return 1\n"
        "net = torch.nn.Linear(1, 1)\n"
        "workload = rl.Workload(model=lambda config: net, batch=lambda size, seed: {}, loss=None, global_batch=1)\n"
    )
    with pytest.raises(WorkloadError, match="unknown workload 'nope'. Known: workload.$"):
        FileSource.read(tmp_path / "train.py", "nope").load()


def test_space_lists_what_is_to_try_and_no_texts_without_end(capsys, tmp_path):
    code, out, _ = run(capsys, "space", "gpt2-tiny", "-o", tmp_path / "space.yaml")
    assert code == 0 and "without strategy" not in out
    assert out.splitlines()[2].endswith(" configurations to try")
    assert "micro_batch * grad_accum must equal the global batch" in out and "* dp *" not in out
    code, out, _ = run(capsys, "space", "gpt2-tiny", "--space", tmp_path / "space.yaml", "--fix", "micro_batch=1")
    assert code == 0 and "without " not in out, "a space of one's own leaves nothing out"


def test_a_knob_that_is_left_out_has_its_reason(capsys):
    code, out, _ = run(capsys, "space", "vit-tiny")
    assert code == 0 and "without kernels: the model has no projection to a vocabulary" in out


def test_the_rule_of_the_batch_has_the_knobs_of_the_space():
    (rule,) = [rule for rule in RULES if rule.name == "global batch"]
    words = [rule.reason(RuleContext(devices=devices, global_batch=8)) for devices in (1, 2)]
    assert words == [f"micro_batch * {each}grad_accum must equal the global batch (8)" for each in ("", "dp * ")]


def trial(number, status, reason="", **more):
    measured = Measurement(status=status, reason=reason, **more)
    return Trial(number=number, config={"a": number}, sampler="random" if number else "default", measurement=measured)


def test_a_gain_within_the_noise_is_no_measurable_gain(capsys):
    spread = {"throughput": 100.0, "throughput_spread": 6.0, "unit": "samples/s"}
    trials = [trial(0, Status.OK, **spread), trial(1, Status.OK, **{**spread, "throughput": 106.0})]
    assert str(summary.gain(trials)) == "no measurable gain (1.06x ± 0.09)"
    print_result(make_result(trials, ["a"], folder=None, ended="done", interrupted=False))
    assert "\nno measurable gain (1.06x ± 0.09)\n" in capsys.readouterr().out


@pytest.mark.parametrize("launcher", ["", None])
def test_the_same_crash_everywhere_is_shown_with_the_end_of_its_log(capsys, tmp_path, launcher):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "0.log").write_text("Traceback:\n" + "  a line\n" * 20 + "RuntimeError: no such head\n")
    trials = [trial(number, Status.CRASH, "RuntimeError: no such head", log="logs/0.log") for number in range(2)]
    print_result(make_result(trials, ["a"], folder=tmp_path, ended="done", interrupted=False), launcher=launcher)
    out = capsys.readouterr().out
    what = "model" if launcher == "" else "command"
    assert f"Your {what} fails in every configuration: RuntimeError: no such head" in " ".join(out.split())
    *_, last, path = out.splitlines()
    assert last == "  RuntimeError: no such head" and path == f"next     read {tmp_path}/logs/0.log"
    other = [*trials[:1], trial(1, Status.OOM, "too large")]
    assert summary.fails_everywhere(other) is None


def test_the_end_of_a_log_is_that_of_the_rank_that_failed(capsys, tmp_path):
    (tmp_path / "logs").mkdir()
    lines = ["[rank 1] ScheduleError: 'norm' is late", *("[rank 0] Connection closed by peer" for _ in range(20))]
    (tmp_path / "logs" / "0.log").write_text("\n".join(lines))
    trials = [trial(0, Status.CRASH, "rank 1: ScheduleError: 'norm' is late", log="logs/0.log")]
    print_result(make_result(trials, ["a"], folder=tmp_path, ended="done", interrupted=False))
    out = capsys.readouterr().out
    assert "  [rank 1] ScheduleError: 'norm' is late\n" in out and "Connection closed" not in out


def test_a_nested_batch_is_to_be_flattened():
    workload = rl.Workload(
        model=lambda config: torch.nn.Linear(1, 1),
        batch=lambda size, seed: ({"image": torch.ones(size)}, torch.ones(size)),
        loss=lambda output, batch: output.mean(),
        global_batch=1,
    )
    with pytest.raises(
        WorkloadError, match="entry 0 must be a tensor, but is dict; flatten the batch into one dict of tensors"
    ):
        make_batch(workload, 1, 0)


def test_an_unknown_model_names_three_near_ones():
    with pytest.raises(WorkloadError) as raised:
        resolved("gpt2-tinny")
    text = str(raised.value)
    assert text.startswith("unknown model 'gpt2-tinny'; did you mean 'gpt2-tiny' or ") and text.count("' or '") == 2
    assert "`redline models` lists the names" in text and "llama2-7b" not in text


def test_a_run_that_exists_is_continued_by_the_whole_command(tmp_path, capsys):
    (tmp_path / "trials.csv").write_text("trial,status,throughput\n")
    code, _, err = run(capsys, "tune", "gpt2-tiny", "--out", tmp_path)
    assert code == 2 and f"continue it with --resume (`redline tune --out {tmp_path} --resume`), or give" in err
    assert "continue it with resume=True, or give another out" in in_python(err)


@pytest.mark.parametrize(("parse", "units"), [(parse_duration, "5s or 5m"), (parse_memory, "5GiB or 5MiB")])
def test_amounts_have_a_unit(parse, units):
    with pytest.raises(UsageError, match=rf"must be an amount with a unit: {units}\?"):
        parse("5")
    assert parse(5) == 5.0, "numbers of Python have the unit that is documented"


def test_samples_of_an_image_model_are_images(capsys):
    code, out, _ = run(capsys, "estimate", "vit-tiny", "--hardware", "h100", "--devices", "1")
    assert code == 0 and ", images of " in " ".join(out.split()) and "None" not in out
