"""Large checkpoints are written, read and checked in pieces. Each rank handles about the same number of bytes."""

import torch
import torch.distributed as dist
from redline.models.layouts import dcp
from redline.training.checkpoint import folder as folders
from redline.training.checkpoint.folder import CheckpointFolder, described
from redline.training.checkpoint.restoring import check
from redline.training.checkpoint.saver import PATIENCE, patient_group
from redline.training.hyperparameters import Hyperparameters
from trainings import part, unequal

HYPER = Hyperparameters(steps=4, lr=1e-3)
SMALL = 1000
"""Bytes of a piece in these tests: some rows of a small model's matrices."""


def test_a_rank_that_needs_a_row_of_a_matrix_reads_no_more_than_a_piece(small, tmp_path, monkeypatch):
    monkeypatch.setattr(dcp, "PIECE_BYTES", SMALL)
    workload, where = small("llama"), tmp_path / "here"
    part(workload, {"micro_batch": 8}, HYPER, until=2, save=where)
    saved = CheckpointFolder(where).all()[0]
    metadata = dcp.read_metadata(saved.path)
    sizes = {(index.fqn, tuple(index.offset)): each.length for index, each in metadata.storage_data.items()}
    name = "model/model.layers.0.mlp.gate_proj.weight"
    assert len([each for each in sizes if each[0] == name]) > 5
    assert max(sizes.values()) < 3 * SMALL, "torch writes a header beside a piece"
    whole = part(workload, {"micro_batch": 8}, HYPER)
    again = part(workload, {"micro_batch": 8}, HYPER, begin=where)
    assert again.found == 2 and unequal(whole.weights, again.weights) == []


def test_several_ranks_check_one_rank_s_file_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "PIECE_BYTES", SMALL)
    folder = CheckpointFolder(tmp_path)
    beside = folder.temporary(1)
    beside.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    for name, size in ((".metadata", 300), ("__0_0.distcp", 10 * SMALL + 5)):
        (beside / name).write_bytes(bytes(torch.randint(256, (size,), generator=draw).tolist()))
    made = folder.finish(1, described(beside, [".metadata", "__0_0.distcp"]), {"samples": 8})
    shares = made.shares(4)
    units = [unit for share in shares for unit in share]
    assert len(units) == 12
    assert set(units) == {(".metadata", None), *(("__0_0.distcp", number) for number in range(11))}
    assert sorted(map(len, shares)) == [3, 3, 3, 3]
    assert check(made, None) == ""
    path = made.path / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[7 * SMALL + 3] ^= 1
    path.write_bytes(data)
    found = [rank for rank in range(4) if refuses(made, rank, 4)]
    assert found == [rank for rank in range(4) if ("__0_0.distcp", 7) in shares[rank]] and len(found) == 1
    assert "is damaged: its checksum is not the one it was saved with" in check(made, None)


def refuses(made, rank, ranks):
    try:
        made.check(rank, ranks)
    except folders.StudyError:
        return True
    return False


def test_ranks_wait_longer_than_half_an_hour_for_one_that_is_at_a_checkpoint(two):
    def waits():
        group = patient_group()
        return group._get_backend(torch.device("cpu")).options._timeout, dist.get_world_size(group)

    assert two.run(waits) == [(PATIENCE, 2)] * 2
