"""Facts by tracing: parameters and FLOPs equal those of the shape numbers, kept bytes those of a real step."""

import itertools
import json
import threading

import pytest
import redline as rl
import torch
from redline.estimator import ModelFacts
from redline.estimator.facts import disk_cache
from redline.estimator.facts.traced import TracedFacts, trace_facts
from redline.models import flops_of
from torch import nn

SHAPES = {
    "gpt2": {
        "layers": 12, "hidden": 768, "heads": 12, "vocabulary": 50257, "gated": False, "tied": True, "positions": 1024,
        "biases": True, "dropout": True,
    },
    "llama2-7b": {"layers": 32, "hidden": 4096, "heads": 32, "intermediate": 11008, "vocabulary": 32000},
    "llama3-8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336, "vocabulary": 128256},
    # Latent attention, a dense block, and experts of which one is every token's.
    "deepseek-v3-tiny": {
        "layers": 4, "hidden": 64, "heads": 8, "vocabulary": 8192, "intermediate": 256, "dense_layers": 1,
        "experts": 8, "experts_per_token": 2, "expert_intermediate": 64, "shared_intermediate": 64,
        "head_dim": 8, "rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_tracing_gives_the_parameters_and_flops_of_the_shape_numbers(name, tmp_path):
    workload = rl.workload(name)
    traced = trace_facts(workload, precision="bf16", folder=tmp_path)
    shape = ModelFacts.from_shape(**SHAPES[name])
    assert traced.parameters == shape.parameters
    assert traced.model_flops(workload.seq_len) == pytest.approx(shape.model_flops(workload.seq_len), rel=1e-9)
    assert traced.model_flops(workload.seq_len) * workload.seq_len == pytest.approx(flops_of(workload).per_sample)
    assert (traced.vocabulary, traced.tied, traced.blocks) == (shape.vocabulary, shape.tied, shape.blocks)
    block = next(part for part in traced.parts if part.role == "block")
    expected = next(part for part in shape.parts if part.role == "block")
    assert block.sharded == expected.sharded
    assert block.attention == expected.attention
    assert block.boundary == expected.boundary
    widths = {split: sum(each.n * each.k * each.count for each in block.matmuls if each.split == split)
              for split in ("column", "row", "none")}  # fmt: skip
    assert widths == {
        split: sum(each.n * each.k * each.count for each in expected.matmuls if each.split == split)
        for split in ("column", "row", "none")
    }


def _saved_bytes(model: nn.Module, step) -> int:
    """Returns the bytes that a real step keeps; storages count once, parameters and buffers do not."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(size for size, _ in kept.values())


def test_kept_bytes_are_those_of_a_real_step_on_this_cpu(tmp_path):
    workload = rl.workload("llama-tiny", seq_len=32)
    facts = trace_facts(workload, device_type="cpu", folder=tmp_path)
    model = workload.build_model(workload.probe).train()
    batch = workload.batch(4, 0)
    real = _saved_bytes(model, lambda: model(**batch).loss)
    tokens = 4 * 32
    per_token = 0.0
    for part in facts.parts:
        heads = part.attention.heads if part.attention else 0
        saved = part.saved
        per_token += part.count * (saved.sequence + saved.sharded + saved.scores * heads * 32)
    assert per_token * tokens == pytest.approx(real, rel=0.02)


def test_autocast_keeps_copies_of_weights_and_pure_bf16_does_not(tmp_path):
    workload = rl.workload("llama-tiny")
    mixed = trace_facts(workload, precision="bf16", folder=tmp_path)
    pure = trace_facts(workload, precision="bf16_pure", folder=tmp_path)
    block = {each.precision: next(p for p in each.parts if p.role == "block") for each in (mixed, pure)}
    products = sum(each.k * each.n * each.count for each in block["bf16"].matmuls)
    assert block["bf16"].saved_fixed == 2 * products
    assert block["bf16_pure"].saved_fixed == 0
    assert block["bf16"].boundary == 2 * block["bf16_pure"].boundary == 4 * 64


def test_eager_attention_keeps_scores_and_sdpa_where_torch_has_no_kernel(tmp_path):
    source = TracedFacts(workload=rl.workload("llama-tiny"), folder=tmp_path)  # with fewer heads of keys

    def scores(precision, attention):
        parts = source.facts(precision=precision, attention=attention, fusion=False).parts
        return next(part.saved.scores for part in parts if part.role == "block")

    assert scores("bf16", "sdpa") == 0
    assert scores("fp32", "sdpa") == 4
    assert scores("fp32", "eager") == 4  # the softmax's output, fp32; llama has no dropout


def test_fusion_keeps_less_and_moves_less(tmp_path):
    workload = rl.workload("llama-tiny")
    plain = trace_facts(workload, precision="bf16", folder=tmp_path)
    fused = trace_facts(workload, precision="bf16", fusion=True, folder=tmp_path)
    assert fused.notes == plain.notes
    one, other = (next(part for part in each.parts if part.role == "block") for each in (plain, fused))
    assert 0.4 < (other.saved.sequence + other.saved.sharded) / (one.saved.sequence + one.saved.sharded) < 0.9
    assert (other.traffic.sequence + other.traffic.sharded) < 0.5 * (one.traffic.sequence + one.traffic.sharded)
    assert other.kernels < one.kernels
    assert (other.matmuls, other.parameters) == (one.matmuls, one.parameters)


class Own(nn.Module):
    """Not a transformer: two kinds of layers, and no repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.unused = nn.Parameter(torch.zeros(7))

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def own_batch(size: int, seed: int):
    return torch.zeros(size, 16), torch.zeros(size, 4)


def own_loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])


def test_a_module_of_ones_own_is_traced(tmp_path):
    workload = rl.Workload(model=Own, batch=own_batch, loss=own_loss)
    facts = trace_facts(workload, folder=tmp_path)
    assert facts.parameters == 16 * 32 + 32 + 32 * 4 + 4 + 7
    assert facts.model_flops(1) == 6 * (16 * 32 + 32 * 4)
    assert {part.name: part.parameters for part in facts.parts}["unused"] == 7
    # relu keeps its result, which is also the next product's input; the loss keeps its two operands.
    assert sum(part.saved.sequence for part in facts.parts) == pytest.approx(4 * (16 + 32 + 4 + 4), abs=8)


class Reads(Own):
    """Reads values, which fake tensors do not have."""

    def forward(self, x):
        return self.last(torch.relu(self.first(x))) if self.first(x).sum().item() > 0 else self.last(x)


def test_a_model_that_cannot_be_traced_says_where_and_what_is_known(tmp_path):
    workload = rl.Workload(model=Reads, batch=own_batch, loss=own_loss)
    with pytest.raises(rl.WorkloadError, match=r"operator aten\._local_scalar_dense\.default in .*683 parameters"):
        trace_facts(workload, folder=tmp_path)


def test_facts_come_back_from_the_disk_as_they_were(tmp_path, monkeypatch):
    workload = rl.workload("gpt2-tiny")
    first = trace_facts(workload, precision="bf16", folder=tmp_path)
    monkeypatch.setattr("redline.estimator.facts.traced._trace", None)
    assert trace_facts(workload, precision="bf16", folder=tmp_path) == first
    with pytest.raises(TypeError):  # another variant is not in the file
        trace_facts(workload, precision="fp32", folder=tmp_path)


def test_a_broken_cache_file_is_traced_again(tmp_path):
    workload = rl.workload("gpt2-tiny")
    first = trace_facts(workload, folder=tmp_path)
    (file,) = (tmp_path / "facts").iterdir()
    for broken in ("", "{", "{}", json.dumps({"parts": 3, "notes": []})):
        file.write_text(broken)
        assert trace_facts(workload, folder=tmp_path) == first
        assert json.loads(file.read_text())["name"] == "gpt2-tiny"


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "facts").write_text("in the way")
    assert trace_facts(rl.workload("gpt2-tiny"), folder=tmp_path).parameters == 1_414_144


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path):
    facts = ModelFacts.from_shape(layers=2, hidden=64, heads=4, vocabulary=100)
    threads = [threading.Thread(target=disk_cache.store, args=("key", facts, tmp_path)) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    found = disk_cache.load("key", tmp_path)
    assert found is not None and found.parts == facts.parts
    assert [each.name for each in (tmp_path / "facts").iterdir()] == ["key.json"]


def test_a_step_is_traced_once_for_tf32_and_fp32_and_with_and_without_fusion(tmp_path, monkeypatch):
    from redline.estimator.facts import traced

    steps, trace_step = [], traced.trace_step
    monkeypatch.setattr(
        traced, "trace_step", lambda *args, **terms: [steps.append(terms["precision"]), trace_step(*args, **terms)][1]
    )
    source = TracedFacts(rl.workload("gpt2-tiny"), folder=tmp_path)
    for precision, fusion in itertools.product(("tf32", "fp32", "bf16"), (False, True)):
        assert source.facts(precision=precision, attention="sdpa", fusion=fusion).precision == precision
    assert steps == ["fp32", "bf16"]


def test_a_model_that_cannot_be_traced_is_refused_each_time_it_is_asked_for(tmp_path):
    source = TracedFacts(rl.Workload(model=Reads, batch=own_batch, loss=own_loss), folder=tmp_path)
    for _ in range(2):
        with pytest.raises(rl.WorkloadError, match="683 parameters"):
            source.facts(precision="fp32", attention="sdpa", fusion=False)


def test_facts_do_not_depend_on_the_global_batch(tmp_path, monkeypatch):
    """The cache stores them for any global batch."""
    trained = rl.workload("gpt2-tiny", seq_len=16, global_batch=8)
    facts = trace_facts(trained, precision="fp32", folder=tmp_path)
    other = TracedFacts(trained.with_global_batch(32), folder=tmp_path)
    monkeypatch.setattr("redline.estimator.facts.traced._trace", None)  # nothing is left to trace
    assert other.workload.id != trained.id
    assert other.facts(precision="fp32", attention="sdpa", fusion=False) == facts
