"""A damaged checkpoint is refused with a message, and the previous one is used."""

import json
import os
import random
import shutil

import pytest
from redline.base.errors import StudyError, WorkloadError
from redline.models.lora import Lora, with_lora
from redline.training.checkpoint.folder import MANIFEST, Checkpoint, CheckpointFolder, _sealed
from redline.training.checkpoint.restoring import latest
from redline.training.hyperparameters import Hyperparameters
from trainings import part, unequal

HYPER = Hyperparameters(steps=6, lr=1e-3)


@pytest.fixture(scope="module")
def saved(small, tmp_path_factory):
    """Checkpoints of steps 2, 4 and 6."""
    where = tmp_path_factory.mktemp("saved") / "checkpoints"
    part(small("llama"), {"micro_batch": 8}, HYPER, save=where, save_every=2)
    return where


@pytest.fixture
def here(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints")
    return CheckpointFolder(tmp_path / "checkpoints")


def flip(path):
    data = bytearray(path.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 1
    path.write_bytes(data)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def swap(path):
    """Puts a file of another checkpoint in its place, with the same size and other contents."""
    other = path.parent.with_name("step-00000004") / path.name
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "its checksum is not the one it was saved with"),
        (cut, "bytes, and had"),
        (swap, "its checksum is not the one it was saved with"),
        (lambda path: path.unlink(), "cannot be read: No such file or directory"),
        (lambda path: path.write_bytes(b""), "it has 0 bytes, and had"),
    ],
    ids=["one bit", "cut off", "another step's", "gone", "emptied"],
)
def test_a_file_that_is_not_what_it_was_is_refused_and_the_one_before_taken(small, here, damage, message):
    newest = here.all()[0]
    for name in newest.files():
        shutil.copytree(newest.path, newest.path.with_name("spare"))
        damage(newest.path / name)
        if (newest.path / name).exists() and damage is swap and name == ".metadata":
            shutil.rmtree(newest.path)
            newest.path.with_name("spare").rename(newest.path)
            continue  # files with the same description have the same bytes
        notes = []
        assert latest(here, None, notes.append).step == 4
        assert len(notes) == 1 and "checkpoint step-00000006 is passed over" in notes[0]
        assert f"{newest.path.name}/{name}'" in notes[0] and message in notes[0]
        shutil.rmtree(newest.path)
        newest.path.with_name("spare").rename(newest.path)
    assert newest.files() == (".metadata", "__0_0.distcp")


MANIFESTS = {
    "cut": lambda text: text[:100],
    "empty": lambda text: "",
    "bytes": lambda text: b"\xff\xfe\x00",
    "no object": lambda text: "[1, 2]",
    "later version": lambda text: text.replace('"format": 1', '"format": 2'),
    "no files": lambda text: json.dumps({**json.loads(text), "files": None}),
    "a file elsewhere": lambda text: text.replace("__0_0.distcp", "../__0_0.distcp"),
    "no checksum": lambda text: text.replace('"sha256"', '"md5"'),
    "deep": lambda text: "[" * 100_000,
    "no samples": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "samples"}),
    "another step": lambda text: text.replace('"step": 6', '"step": 3'),
    "samples that are none": lambda text: text.replace('"samples": 48', '"samples": "many"'),
}


FORMS = ("later version", "no files", "a file elsewhere", "no checksum", "another step")
"""Refused for what they contain, even under a valid seal."""


@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_manifest_that_says_nothing_of_use_is_a_damaged_checkpoint(here, damage):
    path = here.all()[0].path / MANIFEST
    made = MANIFESTS[damage](path.read_text())
    if damage in FORMS:
        made = json.dumps(_sealed(json.loads(made)))
    path.write_bytes(made if isinstance(made, bytes) else made.encode())
    notes = []
    assert latest(here, None, notes.append).step == 4
    assert len(notes) == 1 and "step-00000006" in notes[0] and MANIFEST in notes[0]


@pytest.mark.parametrize("number", range(12))
def test_no_bit_of_a_manifest_may_differ(here, number):
    """The manifest's numbers define where the training resumes: an altered one must be detected."""
    path = here.all()[0].path / MANIFEST
    data = bytearray(path.read_bytes())
    at = next(at for at in random.Random(number).choices(range(len(data)), k=1000) if not chr(data[at]).isspace())
    data[at] ^= 1 << number % 7
    path.write_bytes(data)
    notes = []
    assert latest(here, None, notes.append).step == 4 and len(notes) == 1


def test_only_damaged_checkpoints_refuse_to_start_again(here):
    for each in here.all():
        flip(each.path / "__0_0.distcp")
    notes = []
    with pytest.raises(StudyError, match="no checkpoint in '.*' is whole: '.*step-00000006/__0_0.distcp' is damaged"):
        latest(here, None, notes.append)
    assert len(notes) == 3


def test_weights_that_are_kept_once_are_checked_with_each_checkpoint(small, tmp_path):
    """Adapters are useless without the frozen weights."""
    adapted, where = with_lora(small("llama"), Lora(r=4)), tmp_path / "here"
    part(adapted, {"micro_batch": 8}, HYPER, until=2, save=where, save_every=1)
    folder = CheckpointFolder(where)
    assert latest(folder, None, print).step == 2
    (once,) = folder.frozen.all()
    flip(once.path / "__0_0.distcp")
    with pytest.raises(StudyError, match="is whole: '.*frozen/step-00000000/__0_0.distcp' is damaged: its checksum"):
        latest(folder, None, lambda note: None)


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert latest(CheckpointFolder(tmp_path / "nowhere"), None, print) is None


def test_a_checkpoint_damaged_on_one_rank_is_used_by_none(two, small, tmp_path):
    """Each rank reads some of the files, so that the damage may be on the other rank."""
    where = tmp_path / "here"
    two.run(lambda workload: part(workload, {"tp": 2}, HYPER, save=where, save_every=3), small("llama"))
    newest = CheckpointFolder(where).all()[0]
    assert newest.files() == (".metadata", "__0_0.distcp", "__1_0.distcp")
    for name in newest.files():
        (newest.path / name).rename(tmp_path / "spare")
        (newest.path / name).write_bytes((tmp_path / "spare").read_bytes())
        flip(newest.path / name)
        found = two.run(lambda workload: part(workload, {"tp": 2}, HYPER, begin=where), small("llama"))
        assert [each.found for each in found] == [3, 3]
        assert found[0].messages == found[1].messages and name in found[0].messages[0]
        (tmp_path / "spare").rename(newest.path / name)


def test_going_on_behind_a_damaged_one_ends_where_the_whole_training_did(small, here, saved):
    """The damaged checkpoint is moved aside: it neither counts among those to keep nor becomes the latest."""
    flip(here.all()[0].path / "__0_0.distcp")
    part(small("llama"), {"micro_batch": 8}, HYPER, begin=here.path, save=here.path, until=5)
    assert [each.step for each in here.all()] == [5, 4, 2]
    assert (here.path / "damaged-step-00000006" / MANIFEST).exists(), "it is kept for whoever wants to look"
    again = part(small("llama"), {"micro_batch": 8}, HYPER, begin=here.path, save=here.path, save_every=1, keep=2)
    assert again.found == 5
    assert [each.step for each in here.all()] == [6, 5]
    whole = part(small("llama"), {"micro_batch": 8}, HYPER)
    assert unequal(whole.weights, again.weights) == []
    notes = []
    assert latest(here, None, notes.append).step == 6 and notes == []


def test_a_checkpoint_of_another_model_is_refused_and_says_what_differs(small, here):
    wider = small("llama", intermediate_size=80)
    with pytest.raises(WorkloadError) as refused:
        part(wider, {"micro_batch": 8}, HYPER, begin=here.path)
    text = str(refused.value)
    assert text.startswith("the checkpoint is of another model than small-llama: 6 tensors have another shape:")
    assert "model.layers.0.mlp.gate_proj.weight with (64, 32) there, (80, 32) in the model" in text
    assert "and 1 more" in text
    deeper = small("llama", num_hidden_layers=3)
    with pytest.raises(WorkloadError, match="9 tensors are missing: model.layers.2.self_attn.q_proj.weight; "):
        part(deeper, {"micro_batch": 8}, HYPER, begin=here.path)
    shallower = small("llama", num_hidden_layers=1)
    with pytest.raises(WorkloadError, match="9 tensors are not in the model: .*model.layers.1."):
        part(shallower, {"micro_batch": 8}, HYPER, begin=here.path)


def test_the_last_few_are_kept_and_going_back_replaces(small, tmp_path):
    where = tmp_path / "here"
    part(small("llama"), {"micro_batch": 8}, HYPER, save=where, save_every=1, keep=2)
    assert sorted(each.name for each in where.iterdir()) == ["step-00000005", "step-00000006"]
    before = Checkpoint(where / "step-00000006").manifest["files"]
    other = Hyperparameters(steps=6, lr=5e-3)
    shutil.rmtree(where / "step-00000005")
    part(small("llama"), {"micro_batch": 8}, other, save=where, save_every=3, keep=2)
    # A new training from the first step, over the earlier checkpoints.
    assert [each.step for each in CheckpointFolder(where).all()] == [6, 3]
    assert Checkpoint(where / "step-00000006").manifest["files"] != before
