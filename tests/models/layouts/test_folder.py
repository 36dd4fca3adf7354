"""A checkpoint for another tool is complete or absent, however its writing ends."""

import os
import signal
from pathlib import Path

import pytest
from checkpoints import architecture, filled, weights_of
from redline.base.errors import UsageError
from redline.models.layouts.hugging_face import write_hugging_face
from redline.models.layouts.safetensors_files import whole_folder
from small_disk import on_small_disk


def written(folder):
    made = architecture("llama")
    weights = weights_of(filled(made))
    with pytest.raises(UsageError) as refused:
        write_hugging_face(weights, made, Path(folder, "out"))
    return str(refused.value), os.listdir(folder)


def test_a_full_disk_is_told_in_words_and_leaves_nothing():
    error, left = on_small_disk(48 << 10, written)
    assert error.startswith("cannot write '/") and error.endswith("; nothing was left there")
    assert "No space left on device" in error
    assert left == []


def test_a_killed_write_leaves_no_folder_of_that_name(tmp_path):
    if (child := os.fork()) == 0:
        with whole_folder(tmp_path / "out") as folder:
            (folder / "model.safetensors").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".out.") and leftover.name.endswith(".writing")
    with whole_folder(tmp_path / "out") as folder:
        assert not (tmp_path / "out").exists()
        (folder / "x").write_text("whole")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["x"]
