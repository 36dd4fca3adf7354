"""Folders of torch.distributed.checkpoint: read in part, written in pieces, refused if damaged."""

import os
import pickle

import pytest
import torch
from checkpoints import architecture, lazy
from redline.base.errors import WorkloadError
from redline.models.layouts import dcp
from redline.models.layouts.dcp import dcp_tensors, save_planner
from redline.models.layouts.hugging_face import find_weights
from torch.distributed import checkpoint

BIG = torch.arange(40 * 6 * 4, dtype=torch.float32).reshape(40, 6, 4)
SMALL = torch.tensor(3.5)


def write_dcp(tensors, folder):
    """Writes tensors in the pieces and with the planner of a training's checkpoints."""
    parts = {(name, (0,) * tensor.dim()): tensor for name, tensor in tensors.items()}
    planner = save_planner({name: tensor.shape for name, tensor in tensors.items()})
    writer = checkpoint.FileSystemWriter(folder, single_file_per_rank=False)
    checkpoint.save(parts, storage_writer=writer, planner=planner, no_dist=True)


def test_pieces_make_up_a_tensor_once_and_stay_within_the_limit(monkeypatch):
    for limit, most in ((1 << 20, BIG.numel()), (256, 64), (40, 10), (8, 4)):
        monkeypatch.setattr(dcp, "PIECE_BYTES", limit)
        count = torch.zeros_like(BIG)
        for box in dcp.boxes(lazy(BIG)):
            assert BIG[box].numel() <= max(most, 4)
            count[box] += 1
        assert bool((count == 1).all())
    assert list(dcp.boxes(lazy(SMALL))) == [()]


def test_torch_loads_what_is_written_and_we_what_torch_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp, "PIECE_BYTES", 500)
    (tmp_path / "ours").mkdir()
    half = torch.randn(7).bfloat16()
    write_dcp({"big": BIG, "small": SMALL, "half": half}, tmp_path / "ours")
    into = {"big": torch.empty_like(BIG), "small": torch.empty(()), "half": torch.empty_like(half)}
    checkpoint.load(into, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert torch.equal(into["big"], BIG) and torch.equal(into["small"], SMALL) and torch.equal(into["half"], half)
    checkpoint.save({"big": BIG, "small": SMALL, "note": "x"}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    found = dcp_tensors(tmp_path / "theirs")
    assert set(found) == {"big", "small"}
    assert torch.equal(found["big"].read(), BIG) and torch.equal(found["small"].read(), SMALL)


def test_a_box_reads_only_the_pieces_that_it_overlaps(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp, "PIECE_BYTES", 500)
    write_dcp({"big": BIG}, tmp_path)
    found = dcp_tensors(tmp_path)["big"]
    read = []
    load = torch.load

    def counted(*args, **options):
        read.append(load(*args, **options))
        return read[-1]

    monkeypatch.setattr(torch, "load", counted)
    box = (slice(4, 7), slice(1, 5), slice(2, 4))
    assert torch.equal(found.read(box), BIG[box])
    assert [each.shape[0] for each in read] == [5, 5]
    assert found.read((slice(3, 3),)).shape == (0, 6, 4)


def test_a_checkpoint_of_another_tool_is_refused_with_its_converter(tmp_path):
    checkpoint.save({"tok_embeddings.weight": BIG}, checkpoint_id=tmp_path / "titan", no_dist=True)
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("5")
    for folder in ("titan", "megatron"):
        with pytest.raises(WorkloadError, match="has to be written in Hugging Face's format: by `redline convert`, or"):
            find_weights(tmp_path / folder, architecture("llama"))


class Evil:
    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_metadata_that_would_run_code_is_refused_and_does_not(tmp_path):
    evil = Evil()
    evil.path = tmp_path / "was run"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(evil))
    with pytest.raises(WorkloadError, match=r"it names posix\.mkdir, which no metadata of tensors needs"):
        dcp_tensors(tmp_path)
    assert not evil.path.exists()


def test_a_damaged_folder_says_what_is_wrong(tmp_path):
    with pytest.raises(WorkloadError, match=r"is not a distributed checkpoint: it has no \.metadata"):
        dcp_tensors(tmp_path)
    write_dcp({"big": BIG}, tmp_path)
    data = next(tmp_path.glob("*.distcp"))
    found = dcp_tensors(tmp_path)["big"]
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(WorkloadError, match=r"big cannot be read: .*; copy the checkpoint again"):
        found.read()
    data.unlink()
    with pytest.raises(WorkloadError, match=r"big cannot be read: .*No such file"):
        found.read()
    (tmp_path / ".metadata").write_bytes((tmp_path / ".metadata").read_bytes()[:50])
    with pytest.raises(WorkloadError, match=r"\.metadata' cannot be read: .*; copy the checkpoint again"):
        dcp_tensors(tmp_path)
