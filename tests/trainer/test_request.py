"""A training is found and continued from any folder, with its original arguments."""

import pytest
from redline.base.errors import UsageError
from redline.models.layouts.dcp import dcp_tensors
from redline.trainer.checkpoint.saver import CheckpointFolder
from redline.trainer.request import TrainRequest, taken_up
from train_commands import SIZES, curve, settings, trained
from trainings import unequal

pytestmark = pytest.mark.timeout(900)


def _taken_up(request, was):
    return taken_up(request, was, step=0)[0]


def kept(folder):
    return [each.step for each in CheckpointFolder(folder / "checkpoints").all()]


def tensors_of(folder):
    """Tensors of the latest checkpoint."""
    held = dcp_tensors(CheckpointFolder(folder / "checkpoints").all()[0].path)
    return {name: each.read() for name, each in held.items()}


def test_a_training_continues_from_another_working_directory(run, here, tmp_path, monkeypatch):
    """Paths of the model, the data and the training's folder are relative to where it started."""
    constant = {"lr": 1e-3, "lr_schedule": "constant", "save_every": 1}
    code, out, err = run(*trained("train", "./llama", "begun-here", *settings(here, **constant, keep=2), steps=3))
    assert code == 0 and kept(here / "begun-here") == [3, 2], out + err
    monkeypatch.chdir(tmp_path)
    # An explicit argument counts even if it equals the default, as 3 does.
    code, out, err = run(
        "train", here / "begun-here", "--resume", "--steps", 6, "--settings", here / settings(here, keep=3)[1]
    )
    assert code == 0 and "continuing from step-00000003" in out, out + err
    assert kept(here / "begun-here") == [6, 5, 4]
    assert [*tmp_path.iterdir()] == []
    whole = trained(
        "train", here / "llama", tmp_path / "whole", "--settings", here / settings(here, **constant)[1], steps=6
    )
    whole[whole.index("corpus.txt")] = here / "corpus.txt"
    code, out, err = run(*whole)
    assert code == 0, out + err
    assert curve(here / "begun-here") == curve(tmp_path / "whole"), "bit for bit"
    one, other = (tensors_of(folder) for folder in (here / "begun-here", tmp_path / "whole"))
    assert {name.partition("/")[0] for name in one} == {"model", "optimizer"}
    assert unequal(one, other) == []
    code, out, err = run("convert", here / "begun-here", tmp_path / "hf")
    assert code == 0 and (tmp_path / "hf" / "model.safetensors").is_file(), out + err


def test_paths_are_absolute_from_the_first_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = TrainRequest(source="gpt2-tiny", paths=("a.txt", "/b"), tokenizer="tokens", weights="../base")
    assert asked.paths == (f"{tmp_path}/a.txt", "/b")
    assert asked.tokenizer == f"{tmp_path}/tokens" and asked.weights == f"{tmp_path}/../base"
    assert asked.given() == {
        "paths": [f"{tmp_path}/a.txt", "/b"], "tokenizer": f"{tmp_path}/tokens", "weights": f"{tmp_path}/../base",
    }  # fmt: skip


def test_the_same_data_by_another_path_is_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    was = TrainRequest(source="gpt2-tiny", paths=("a.txt",)).given()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = TrainRequest(source="here", resume=True, paths=(f"{tmp_path}/a.txt",))
    assert _taken_up(again, was).paths == (f"{tmp_path}/a.txt",)
    with pytest.raises(
        UsageError, match=r"has paths=\['.*/a\.txt'\], and cannot continue with \['.*/elsewhere/a\.txt'\]"
    ):
        _taken_up(TrainRequest(source="here", resume=True, paths=("a.txt",)), was)


def test_an_explicit_default_counts_as_given():
    was = TrainRequest(source="gpt2-tiny", steps=500, keep=2, lr_schedule="linear", seed=3).given()
    silent = _taken_up(TrainRequest(source="here", resume=True), was)
    assert (silent.steps, silent.keep, silent.lr_schedule, silent.seed) == (500, 2, "linear", 3)
    assert _taken_up(TrainRequest(source="here", resume=True, keep=4), was).keep == 4
    assert _taken_up(TrainRequest(source="here", resume=True, steps=1000, stated=("steps",)), was).steps == 1000
    message = "has lr_schedule=linear, and cannot continue with 'cosine'"
    with pytest.raises(UsageError, match=message):
        _taken_up(TrainRequest(source="here", resume=True, lr_schedule="cosine", stated=("lr_schedule",)), was)
    # Repeats the command, as a launcher does.
    plain = TrainRequest(source="gpt2-tiny", seed=0, stated=("seed",))
    assert _taken_up(plain, TrainRequest(source="gpt2-tiny").given()).seed == 0


def test_relative_paths_of_an_older_training_resolve_in_its_start_folder(here, monkeypatch):
    """Relative paths in an older train.yaml are resolved in the folder where the training started."""
    monkeypatch.chdir(here)
    assert TrainRequest.again("x", {"paths": ["corpus.txt"], "steps": 3}).paths == (str(here / "corpus.txt"),)


def test_data_of_an_empty_name_is_refused(run):
    code, _, err = run("train", "llama", "--data", "", *SIZES, "--devices", 1)
    assert code == 2 and "the data must be files or folders, but one is an empty text" in " ".join(err.split())


def test_fixed_knobs_are_added_to_those_of_before():
    was = TrainRequest(source="llama-tiny", fix={"micro_batch": 4, "fusion": False}).given()
    again = _taken_up(TrainRequest(source="here", resume=True, fix={"precision": "bf16", "fusion": True}), was)
    assert again.fix == {"micro_batch": 4, "precision": "bf16", "fusion": True}
    assert _taken_up(TrainRequest(source="here", resume=True), was).fix == {"micro_batch": 4, "fusion": False}


def test_a_request_of_another_version_is_refused_by_its_fields():
    assert TrainRequest.again("run", {"steps": 7, "soak": False}).steps == 7
    with pytest.raises(UsageError, match=r"another version of redline, with average, which this one does not have"):
        TrainRequest.again("run", {"steps": 7, "average": 0.99})
