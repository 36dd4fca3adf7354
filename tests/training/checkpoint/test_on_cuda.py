"""A checkpoint creates no context on another rank's GPU."""

import threading

import torch
from redline.training.checkpoint.folder import CheckpointFolder
from redline.training.checkpoint.saver import SavedPart, Saver, write


def test_the_thread_that_saves_uses_the_device_of_its_rank(monkeypatch, tmp_path):
    set_by = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: set_by.append((threading.current_thread().name, index)))
    saver = Saver(CheckpointFolder(tmp_path))
    name = saver._thread.submit(lambda: threading.current_thread().name).result()
    saver.close()
    assert set_by == [(name, 3)] and name.startswith("checkpoint")


def test_writing_uses_no_cuda_stream(monkeypatch, tmp_path):
    def stream(*_):
        raise AssertionError("of device 0")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, stream)
    write(tmp_path / "new", [SavedPart("weight", (4,), (0,), torch.arange(4.0))], None)
    assert list((tmp_path / "new").glob("*.distcp"))
