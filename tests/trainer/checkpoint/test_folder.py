"""A folder of checkpoints keeps the last few, each complete, at whatever moment a process is killed."""

import itertools
import os
import shutil

import pytest
from redline.base.errors import StudyError
from redline.base.writing import write_atomic
from redline.trainer.checkpoint.saver import CheckpointFolder
from redline.trainer.program import _Log


class Killed(BaseException):
    """Raised in place of the process's death."""


def write(folder, step):
    """Writes files as ranks do, and makes them the checkpoint of a step."""
    beside = folder.temporary(step)
    beside.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (beside / name).write_text(f"{name} of {step}")
    return folder.finish(step, {"samples": 8 * step})


def damage_of(folder):
    """Names of checkpoints that are not as they were saved."""
    return [
        checkpoint.path.name
        for checkpoint in folder.all()
        if {path.name for path in checkpoint.path.iterdir()}
        != {"manifest.json", ".metadata", "__0_0.distcp", "__1_0.distcp"}
        or checkpoint.manifest["samples"] != 8 * checkpoint.step
    ]


def killed_at(patch, number):
    """Raises `Killed` at the call with this number among those that change the disk. Half of a removal is done by then."""
    calls = itertools.count(1)

    def ending(inner, half):
        def call(*args, **more):
            if next(calls) == number:
                half(*args)
                raise Killed
            return inner(*args, **more)

        return call

    def half_removed(path):
        next(each for each in sorted(path.iterdir())).unlink()

    for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree")):
        half = half_removed if name == "rmtree" else lambda *args: None
        patch.setattr(module, name, ending(getattr(module, name), half))


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_between_any_two_changes_leaves_whole_ones_alone(tmp_path, monkeypatch, keep):
    before = CheckpointFolder(tmp_path / "before", keep)
    for step in range(1, keep + 1):
        write(before, step)
    for number in itertools.count(1):
        folder = CheckpointFolder(tmp_path / str(number), keep)
        shutil.copytree(before.path, folder.path)
        with monkeypatch.context() as patch:
            killed_at(patch, number)
            try:
                write(folder, keep + 1)
                ended = True
            except Killed:
                ended = False
        steps = [each.step for each in folder.all()]
        assert steps and damage_of(folder) == [], f"killed at change {number}"
        assert steps in ([*range(keep, 0, -1)], [*range(keep + 1, 0, -1)], [*range(keep + 1, 1, -1)]), number
        if ended:
            break
    assert number > 6, "a save has more moments than that"
    assert steps == [*range(keep + 1, 1, -1)]
    folder.prepare()
    assert len(list(folder.path.iterdir())) == keep, "what kills leave is cleared away"


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_latest_checkpoints_are_kept(tmp_path, keep):
    folder = CheckpointFolder(tmp_path, keep)
    for step in (2, 9, 10, 11, 100):
        write(folder, step)
    assert [each.step for each in folder.all()] == [100, 11, 10][:keep]


def test_a_save_after_going_back_stays_beside_later_steps(tmp_path):
    """Later steps are from before the training went back: `keep` neither counts nor removes them, and the new save
    stays."""
    folder = CheckpointFolder(tmp_path, keep=1)
    write(folder, 8), write(folder, 3), write(folder, 4)
    assert [each.step for each in folder.all()] == [8, 4] and damage_of(folder) == []


# -- files of others -----------------------------------------------------------------------------------------

FOREIGN = (
    ".git/HEAD", ".hydra/config.yaml", ".step-notes/x", "step-00000001/model.bin", "step-2/x", "step-00000002/manifest.json",
)  # fmt: skip


def lay(folder, names=FOREIGN):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")


def there(folder):
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(tmp_path):
    lay(tmp_path)
    folder = CheckpointFolder(tmp_path)
    assert folder.all() == []
    with pytest.raises(
        StudyError, match=r"contains \.git, \.hydra, \.step-notes and 3 more and no checkpoint.*new or empty"
    ):
        folder.prepare()
    assert there(tmp_path) == set(FOREIGN)


@pytest.mark.parametrize("left", [(), (".step-00000004.saving/x",)], ids=str)
def test_a_folder_that_is_empty_or_holds_what_a_first_save_left_is_taken(tmp_path, left):
    lay(tmp_path, left)
    CheckpointFolder(tmp_path).prepare()
    assert there(tmp_path) == set()


MANIFESTS = {"empty": "", "list": "[1, 2]", "deep": "[" * 100_000, "old": '{"format": 1, "samples": 8}'}


@pytest.mark.parametrize("text", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_cannot_be_read_is_an_error_with_the_folder_s_name(tmp_path, text):
    folder = CheckpointFolder(tmp_path)
    (write(folder, 3).path / "manifest.json").write_text(text)
    with pytest.raises(StudyError, match="step-00000003' is not a (whole )?checkpoint"):
        folder.all()[0].manifest  # noqa: B018  # a property that reads


def test_names_survive_a_power_cut_as_what_they_name_does(tmp_path, monkeypatch):
    """A file is synced before it is renamed, and the folder after."""
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{int(fd)}")) or fsync(fd))
    write_atomic(tmp_path / "train.yaml", b"x")
    assert synced == [f"{tmp_path}/.train.yaml.tmp", str(tmp_path)]


def test_the_log_is_synced_when_it_records_a_checkpoint(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(file.name))
    with _Log(tmp_path) as log:
        log({"kind": "step", "step": 1})
        assert synced == []
        log({"kind": "checkpoint", "step": 1})
        assert synced == [str(tmp_path / "log.jsonl")]
