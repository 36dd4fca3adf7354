"""A checkpoint creates no context on another rank's GPU, and leaves no pinned memory behind."""

import threading

import torch
from redline.schedule.parallel.sharding import whole_region
from redline.trainer.checkpoint.saver import PATIENCE, CheckpointFolder, Saver, patient_group


class Whole:
    """The state of a training that has one tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def tensors(self):
        return {"model/weight": (self.tensor, whole_region(self.tensor.shape))}


def test_the_thread_that_saves_uses_the_device_of_its_rank(monkeypatch, tmp_path):
    set_by = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: set_by.append((threading.current_thread().name, index)))
    saver = Saver(CheckpointFolder(tmp_path))
    name = saver._thread.submit(lambda: threading.current_thread().name).result()
    saver.close()
    assert set_by == [(name, 3)] and name.startswith("checkpoint")


def test_tensors_on_a_gpu_are_copied_to_pinned_memory_that_is_kept_until_the_end(monkeypatch, tmp_path):
    from torch.distributed.checkpoint import staging

    options, stagers = [], []

    class Stager(staging.DefaultStager):
        def __init__(self, config):
            options.append(config)
            super().__init__(staging.StagingOptions(False, False, False, False))
            stagers.append(self)

        def close(self):
            stagers.remove(self)
            super().close()

    monkeypatch.setattr(staging, "DefaultStager", Stager)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    saver = Saver(CheckpointFolder(tmp_path))
    for step in (1, 2):
        saver.save(Whole(torch.arange(4.0)), step, {})
    assert not saver.wait().failure and len(stagers) == 1, "one serves both saves"
    (config,) = options
    assert config.use_pinned_memory and config.use_non_blocking_copy
    saver.close()
    assert stagers == []


def test_ranks_wait_longer_than_half_an_hour_for_one_that_is_at_a_checkpoint(two):
    def waits():
        group = patient_group()
        return group._get_backend(torch.device("cpu")).options._timeout

    assert two.run(waits) == [PATIENCE] * 2
