"""No value of a request becomes a path or an import when a searcher resolves it, however the request arrived."""

import json

import pytest
from redline.base.device import Device
from redline.base.errors import UsageError, WorkloadError
from redline.models.architecture import Architecture
from redline.models.presets import ServerModel
from redline.service.request import arguments
from redline.tuner.request.options import Request
from redline.tuner.request.target import resolve_task

CPU = Device(type="cpu", name="cpu", count=1, memory_mib=1000)
X = {"x": [1, 2]}


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A Python file that leaves a mark when it is run, in the server's working directory."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nworkload = None\n")
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8}))
    (tmp_path / "conf.yaml").write_text("model: gpt2-tiny\n")
    (tmp_path / "events").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resolved(request, folder, **more):
    """Resolves a request from the database as a searcher does."""
    given = arguments({"devices": 1, **request}, folder / "asked", **more)
    return resolve_task(Request(given.pop("target"), **given), device=CPU)


@pytest.mark.parametrize(
    "of_file", ["{}/evil.py:workload", "evil.py:workload", "{}/owner/name", "owner/name/config.json"]
)
def test_a_model_s_name_is_never_a_file(evil, of_file):
    name = of_file.format(evil)
    for request in (
        {"target": name},
        {"command": {"command": ["echo", "{x}"], "model": name}, "override": X},
    ):
        with pytest.raises(UsageError, match="unknown model"):
            resolved(request, evil)
    for option in ("--model_name_or_path", "--model", "--config-name"):
        task = resolved({"command": {"command": f"echo {option} {name} {{x}}"}, "override": X}, evil)
        assert task.workload is None
    assert not (evil / "ran").exists()


def test_a_hub_id_is_asked_of_the_hub_though_a_folder_here_has_its_name(evil):
    with pytest.raises(WorkloadError, match="or in the local Hugging Face cache"):
        resolved({"target": "owner/name"}, evil)
    task = resolved({"command": {"command": "echo --model owner/name {x}"}, "override": X}, evil)
    assert task.workload is None


def test_files_that_a_command_names_are_not_read_by_a_searcher(evil):
    """`conf.yaml` names a model for an estimate."""
    task = resolved({"command": {"command": "echo conf.yaml {x}"}, "override": X}, evil)
    assert task.workload is None
    known = resolved({"command": {"command": "echo --model gpt2-tiny {x}"}, "override": X}, evil)
    assert known.workload.name == "gpt2-tiny"
    with pytest.raises(UsageError, match="cannot be sent"):
        arguments({"command": {"command": "echo {x}", "render": ["conf.yaml"]}}, evil)["target"].__class__(
            command="echo", render=("conf.yaml",)
        )


def test_hardware_names_are_never_files(evil):
    (evil / "mine").write_text("name: mine\n")
    with pytest.raises(UsageError, match="unknown hardware 'mine'"):
        arguments({"target": "gpt2-tiny", "hardware": "mine"}, evil)


def test_a_space_has_the_attention_that_fix_takes_and_no_kernel_of_the_hub_s(evil):
    def space(*values):
        named = {"name": "attention", "type": "choice", "values": list(values)}
        size = {"name": "micro_batch", "type": "choice", "values": [1]}
        return {"target": "gpt2-tiny", "global_batch": 1, "space": {"knobs": [size, named]}}

    assert resolved(space("sdpa", "eager"), evil).space["attention"].values == ("sdpa", "eager")
    for strange in ("evil/kernel", "evil/kernel:forward", "paged|sdpa", "flash_attention_9"):
        with pytest.raises(UsageError, match="unknown attention"):
            resolved(space("sdpa", strange), evil)
        with pytest.raises(UsageError):
            resolved({"target": "gpt2-tiny", "fix": {"attention": strange}}, evil)


def test_a_configuration_cannot_choose_a_kernel():
    """Neither a key of the model's configuration, at any depth, nor the knob's value can name one."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 10, "n_positions": 8}
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        made = Architecture(model_type="gpt2", arguments={**sizes, key: "evil/kernel"}, task="causal")
        assert "evil" not in str(vars(made.configuration()))
    text = {"text_config": {"_attn_implementation": "evil/kernel", "num_hidden_layers": 1}}
    made = Architecture(model_type="gemma3", arguments=text, task="causal")
    assert "evil" not in str(vars(made.configuration().text_config))
    with pytest.raises(WorkloadError, match="code of the hub's is not loaded"):
        Architecture(model_type="gpt2", arguments=sizes, task="causal")({"attention": "evil/kernel"})


@pytest.mark.parametrize("key", ["backbone", "use_timm_backbone"])
def test_contents_that_load_another_model_by_name_are_refused(key):
    with pytest.raises(WorkloadError, match="from elsewhere"):
        ServerModel.of({"model_type": "llama", "vision_config": [{"x": {key: "local-dir:/etc"}}]})


@pytest.mark.parametrize("number", ["\u00b2", "9" * 5000, "0"])
def test_numbers_in_a_command_s_text_that_are_none_are_passed_over(evil, number):
    task = resolved(
        {"command": {"command": f"echo --seq-length {number} --num-layers {number} {{x}}"}, "override": X}, evil
    )
    assert task.workload is None
