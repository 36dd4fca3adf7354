"""A checkpoint for another tool is complete or absent, however its writing ends."""

import os
import signal
from pathlib import Path

import pytest
from checkpoints import architecture, filled, weights_of
from redline.base.errors import UsageError
from redline.models.layouts.folder import whole_folder
from redline.models.layouts.save import write_hugging_face
from small_disk import on_small_disk


def written(folder):
    made = architecture("llama")
    weights = weights_of(filled(made))
    with pytest.raises(UsageError) as refused:
        write_hugging_face(weights, made, Path(folder, "out"))
    return str(refused.value), os.listdir(folder)


def test_a_full_disk_is_told_in_words_and_leaves_nothing():
    error, left = on_small_disk(48 << 10, written)
    assert error.startswith("cannot write '/") and error.endswith(
        "/out': No space left on device; nothing was left there"
    )
    assert left == []


def test_the_next_write_removes_only_leftovers_of_killed_ones(tmp_path):
    (tmp_path / ".out.mine.writing").mkdir()
    if (child := os.fork()) == 0:
        with whole_folder(tmp_path / "out") as made:
            (made / "model.safetensors").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 2
    with whole_folder(tmp_path / "out") as made:
        assert sorted(each.name for each in tmp_path.iterdir()) == sorted([".out.mine.writing", made.name])
        with whole_folder(tmp_path / "out") as beside:  # a folder that is being written is left alone
            assert made.is_dir()
        assert not beside.exists()
        (tmp_path / "out").rmdir()
        (made / "x").write_text("whole")
    assert sorted(each.name for each in tmp_path.iterdir()) == [".out.mine.writing", "out"]
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["x"]


def test_only_disk_errors_are_reported_as_such(tmp_path):
    with pytest.raises(RuntimeError, match="a shape is wrong"), whole_folder(tmp_path / "out"):
        raise RuntimeError("a shape is wrong")
    assert list(tmp_path.iterdir()) == []
