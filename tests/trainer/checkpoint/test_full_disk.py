"""A full disk makes a save fail, with a message, and does nothing else."""

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from redline.models.layouts.dcp import dcp_tensors
from redline.trainer.checkpoint.saver import CheckpointFolder
from redline.trainer.loop import Hyperparameters
from small_disk import fill, free, on_small_disk
from torch.distributed.checkpoint import FileSystemWriter
from trainings import part, place

HYPER = Hyperparameters(steps=12, lr=1e-3)
FULL, ROOM = 5, 9
"""The disk is full before step FULL and has space again before step ROOM, so that the saves of steps 6 and 8 fail."""


def hooked(full, room):
    """Returns a stop function that calls `full` and `room` at their steps, between saves."""

    def stop(loop):
        if loop.step in (FULL, ROOM):
            while loop.saver.busy:
                time.sleep(0.001)
            (full if loop.step == FULL else room)(loop)
        return False

    return stop


def readable(checkpoint):
    """True if all tensors of a checkpoint can be read."""
    return all(tensor.read().shape == tensor.shape for tensor in dcp_tensors(checkpoint.path).values())


def trained(folder, workload, config):
    """Trains on a disk that fills up; returns the part, the folder's contents meanwhile, and the last checkpoint."""
    kept = {}

    def room(loop):
        where = CheckpointFolder(Path(folder, "checkpoints"))
        kept["names"] = sorted(each.name for each in where.path.iterdir())
        kept["whole"] = [checkpoint.step for checkpoint in where.all() if readable(checkpoint)]
        if place()[0] == 0:
            free(folder)

    def full(loop):
        if place()[0] == 0:
            fill(folder)

    found = part(workload, config, HYPER, save=Path(folder, "checkpoints"), stop=hooked(full, room), save_every=2)
    last = CheckpointFolder(Path(folder, "checkpoints")).all()[0]
    return found, kept, (last.step, readable(last))


@pytest.mark.parametrize(("config", "ranks"), [({"micro_batch": 4}, 1), ({"dp": 2, "zero": 1}, 2), ({"tp": 2}, 2)])
def test_a_full_disk_ends_the_save_and_not_the_training(small, config, ranks):
    workload = small("llama", global_batch=8)
    found = on_small_disk(8 << 20, trained, workload, config, ranks=ranks)
    (one, kept, last), *_ = found if ranks > 1 else [found]
    failures = {line["step"]: line["failure"] for line in one.of("checkpoint")}
    assert {step for step, failure in failures.items() if failure} == {6, 8}
    assert "No space left on device" in failures[6] and "\n" not in failures[6]
    assert ("rank " in failures[6]) is (ranks > 1)
    assert one.step == 12 and not one.failure and last == (12, True)
    # The failed saves left nothing, and the previous checkpoint is complete.
    assert kept == {"names": ["step-00000002", "step-00000004"], "whole": [4, 2]}
    if ranks == 1:
        assert one.losses == part(workload, config, HYPER).losses


def test_ranks_do_not_wait_for_one_that_failed(two, small, tmp_path):
    """The checkpoints' folder is below a file: each save fails at once on both ranks."""
    (tmp_path / "file").write_text("")

    def run(workload):
        from redline.trainer.checkpoint.saver import Saver
        from redline.trainer.checkpoint.state import State
        from trainings import built

        group = dist.new_group(backend="gloo")
        saver = Saver(CheckpointFolder(tmp_path / "file" / "below"), place()[0], group)
        saver.save(State(built(workload, {"tp": 2}, HYPER)), 3, {})
        saved = saver.wait()
        saver.close()
        return saved

    found = two.run(run, small("llama"), timeout=60)
    assert all("Not a directory" in each.failure for each in found)
    assert found[0].failure == found[1].failure


def test_training_continues_while_a_slow_disk_writes_a_checkpoint(small, tmp_path, monkeypatch):
    taken, in_time = threading.Event(), []
    write_data = FileSystemWriter.write_data

    def slowly(*given):
        in_time.append(taken.wait(60))
        return write_data(*given)

    def stop(loop):
        if loop.step == 7:
            taken.set()
        return False

    monkeypatch.setattr(FileSystemWriter, "write_data", slowly)
    found = part(small("llama"), {"micro_batch": 4}, HYPER, save=tmp_path / "here", stop=stop, save_every=4)
    assert in_time[0], "steps 5 to 7 waited for the checkpoint of step 4"
    assert [line["step"] for line in found.of("checkpoint") if not line["failure"]] == [4, 8, 12]
