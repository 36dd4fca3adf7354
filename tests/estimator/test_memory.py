"""Predicted memory: known formulas, published numbers, and monotonicity in knobs."""

import numpy as np
import pytest
from redline.base.errors import UsageError
from redline.estimator import Estimator, Hardware, Link, ModelFacts, TrainingSetup
from redline.estimator.constants import Constants
from redline.estimator.knob_arrays import knob_arrays
from redline.estimator.memory import peak_memory
from redline.estimator.stages import stage_blocks, stages
from redline.estimator.trainers import find_trainer

MIB = 1024**2
LLAMA2_7B = {"layers": 32, "hidden": 4096, "heads": 32, "intermediate": 11008, "vocabulary": 32000}
GPT2 = {
    "layers": 12, "hidden": 768, "heads": 12, "vocabulary": 50257, "gated": False, "tied": True, "biases": True,
    "positions": 1024, "dropout": True,
}  # fmt: skip
MIXED = {"precision": "bf16_pure", "master_weights": "fp32", "gradient_dtype": "bf16"}
STATES = ("parameters", "gradients", "optimizer", "master")


def terms(shape=LLAMA2_7B, setup=None, rank="fullest", **config):
    setup = setup or TrainingSetup(seq_len=4096, devices=64, global_batch=4096, **MIXED)
    made = knob_arrays([config], setup)
    variant, _ = next(made.variants())
    facts = ModelFacts.from_shape(**shape).facts(**dict(zip(("precision", "attention", "fusion", "kernels"), variant)))
    found = peak_memory(facts, made, setup, Constants(), rank)
    return {name: float(value[0]) for name, value in found.items()}


@pytest.mark.parametrize(
    ("zero", "bytes_"),
    # ZeRO, arXiv:1910.02054, figure 1: 2 + 2 + 12 bytes a parameter, and the parts that 64 replicas share.
    [(0, 16.0), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)],
)
@pytest.mark.parametrize("sp", [1, 8])
def test_states_are_zeros_sixteen_bytes_a_parameter_also_where_ranks_share_a_sequence(zero, bytes_, sp):
    found = terms(zero=zero, micro_batch=1, sp=sp)
    assert sum(found[name] for name in STATES) * MIB == pytest.approx(6_738_415_616 * bytes_)


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "expected"),
    # Korthikanti et al., arXiv:2205.05198, table 2, in units of sequence * batch * hidden: 34 + 5 a s / h for the
    # layer, 10 + 24 / t with tensor parallelism, 34 / t with sequence parallelism, without the scores where those
    # are recomputed.
    [(False, False, "10 + 24/t + 5as/ht"), (True, False, "34/t + 5as/ht"), (True, True, "34/t")],
)
def test_activations_are_korthikantis(sequence_parallel, recompute, expected):
    shape = {**GPT2, "layers": 24, "hidden": 2048, "heads": 16}
    seq, micro, tp = 1024, 4, 8
    setup = TrainingSetup(
        seq_len=seq,
        devices=8,
        global_batch=32,
        attention="eager",
        kernels=True,
        recompute_attention=recompute,
        **MIXED,
    )
    one = terms(shape, setup, tp=tp, micro_batch=micro, sequence_parallel=sequence_parallel)["activations"]
    two = terms({**shape, "layers": 25}, setup, tp=tp, micro_batch=micro, sequence_parallel=sequence_parallel)
    unit = seq * micro * 2048
    scores = 5 * 16 * seq / 2048 / tp
    wanted = {"10 + 24/t + 5as/ht": 10 + 24 / tp + scores, "34/t + 5as/ht": 34 / tp + scores, "34/t": 34 / tp}
    assert (two["activations"] - one) * MIB / unit == pytest.approx(wanted[expected], rel=1e-6)


def test_inputs_of_products_take_a_byte_less_in_8_bits():
    half, eight = (terms(setup=find_trainer("megatron").training(seq_len=4096, products=each), micro_batch=1, grad_accum=2)
                   for each in (None, "fp8"))  # fmt: skip
    # Those of the projections of attention together, of the MLP's first two together, and of its last.
    inputs = 32 * 4096 * (4096 + 4096 + 11008)
    assert (half["activations"] - eight["activations"]) * MIB == pytest.approx(inputs)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_activations_are_divided_by_the_ranks_of_a_sequence(attention):
    whole, cut = (terms(zero=3, micro_batch=1, sp=sp, attention=attention, grad_accum=2) for sp in (1, 8))
    for name in ("activations", "logits and loss"):
        assert cut[name] == pytest.approx(whole[name] / 8)


def test_tokens_that_the_ranks_do_not_divide_have_no_estimate():
    setup = TrainingSetup(seq_len=4096, devices=63, grad_accum=1, **MIXED)
    with pytest.raises(UsageError, match=r"sp \* cp must divide the 4096 tokens of a sample"):
        terms(setup=setup, micro_batch=1, sp=3)
    with pytest.raises(UsageError, match=r"2 \* cp must divide the 4096 tokens of a sample"):
        terms(setup=setup, micro_batch=1, cp=3)


def test_a_checkpointed_model_keeps_the_inputs_of_its_blocks():
    found = terms(micro_batch=2, checkpoint_ratio=1.0)
    assert found["checkpoints"] * MIB == 32 * 2 * 4096 * 4096 * 2
    assert found["activations"] < terms(micro_batch=2)["activations"] / 50


def test_gpipe_as_a_knob_holds_all_micro_batches():
    config = {"pp": 4, "dp": 1, "grad_accum": 16, "micro_batch": 1}
    kept = {kind: terms(**config, pipeline_schedule=kind)["activations"] for kind in ("1f1b", "gpipe")}
    assert kept["gpipe"] == pytest.approx(4 * kept["1f1b"], rel=0.1)
    setup = TrainingSetup(seq_len=4096, devices=64, global_batch=4096, pipeline="gpipe", **MIXED)
    assert terms(setup=setup, **config)["activations"] == kept["gpipe"]


AUTOCAST = find_trainer("fsdp").training(
    seq_len=4096, micro_batch=4, zero=3, checkpoint_ratio=1.0, precision="bf16", gather_dtype="fp32", keeps_cache=True,
    reserved_memory=False,
)  # fmt: skip


@pytest.mark.parametrize(("gpus", "published_mib"), [(8, 39596), (16, 34776), (32, 32366), (64, 31161)])
def test_llama2_7b_under_fsdp_is_what_was_published(gpus, published_mib):
    # DLRover's atorch/examples/llama2: A100-80GB, micro-batch 4, sequence 4096, peak allocated. Its script trains under
    # autocast alone, recomputes all blocks by a wrapper from outside and leaves `use_cache` on.
    setup = AUTOCAST.replace(devices=gpus, global_batch=4 * gpus)
    assert Estimator(LLAMA2_7B, "a100-80gb", setup)({}).peak_memory_mib == pytest.approx(published_mib, rel=0.1)


def test_keys_and_values_that_a_model_returns_stay_where_blocks_are_recomputed():
    llama3 = {**LLAMA2_7B, "kv_heads": 8}
    for ratio in (0.0, 0.5, 1.0):
        kept, freed = (
            terms(llama3, AUTOCAST.replace(devices=8, global_batch=32, keeps_cache=each), checkpoint_ratio=ratio, tp=2)
            for each in (True, False)
        )
        bytes_ = (kept["checkpoints"] - freed["checkpoints"]) * MIB
        # Two of 8 heads of 128 elements in 16 bits, half of them on either rank, for 16,384 tokens.
        assert bytes_ == pytest.approx(ratio * 32 * 2 * 8 * 128 * 2 / 2 * 16384)


def test_weights_gathered_in_fp32_are_twice_those_in_bf16_and_products_that_are_kept_cast_them():
    def found(gathered, ratio):
        setup = AUTOCAST.replace(devices=8, global_batch=32, gather_dtype=gathered, pieces=True)
        return terms(setup=setup, checkpoint_ratio=ratio)

    narrow, wide, kept = found(None, 1.0), found("fp32", 1.0), found("fp32", 0.0)
    block, ends = 202_383_360, 2 * 32000 * 4096 + 4096
    assert (wide["buffers"] - narrow["buffers"]) * MIB == pytest.approx(2 * (2 * block + ends))
    assert narrow["weight copies"] == 0
    # Recomputed blocks keep no copies: the copies are those of the head's matrix, and little for norms.
    assert wide["weight copies"] * MIB == pytest.approx(2 * 32000 * 4096, rel=0.01)
    assert (kept["weight copies"] - wide["weight copies"]) * MIB == pytest.approx(32 * 2 * block, rel=0.001)


def test_autocast_keeps_fp32_weights_and_casts_them():
    setup = TrainingSetup(seq_len=1024, devices=1, global_batch=8, precision="bf16")
    found = terms(GPT2, setup, micro_batch=4)
    assert found["parameters"] * MIB == 124_439_808 * 4
    assert found["optimizer"] * MIB == 124_439_808 * 8
    assert found["weight copies"] * MIB == pytest.approx((85e6 + 50257 * 768) * 2, rel=0.01)


def test_gradients_are_there_only_when_they_are():
    setup = TrainingSetup(seq_len=1024, devices=1, global_batch=64, precision="fp32")
    # One micro-batch a step: at the activations' peak the head's gradient is the only one.
    assert terms(GPT2, setup, micro_batch=64)["gradients"] * MIB == 50257 * 768 * 4
    assert terms(GPT2, setup, micro_batch=32)["gradients"] * MIB == 124_439_808 * 4
    # Few activations: the peak is at the end, with all gradients.
    assert terms(GPT2, setup.replace(global_batch=1, seq_len=16), micro_batch=1)["gradients"] * MIB == 124_439_808 * 4


def test_gradient_buckets_are_no_larger_than_the_gradients():
    small = {"layers": 2, "hidden": 64, "heads": 2, "vocabulary": 256}
    found = terms(small, TrainingSetup(seq_len=16, devices=2, global_batch=4, precision="fp32"), micro_batch=1, dp=2)
    assert 0 < found["buffers"] <= found["gradients"]
    large = terms(setup=TrainingSetup(seq_len=16, devices=2, global_batch=4, precision="fp32"), micro_batch=1, dp=2)
    assert large["buffers"] == pytest.approx(50)


def test_a_cpu_rank_has_no_cuda_context():
    tiny = {"layers": 2, "hidden": 64, "heads": 2, "vocabulary": 256}
    cpu = Hardware(
        name="cpu", memory_gib=4, tflops={"fp32": 0.1}, memory_gb_per_s=20, devices_per_node=1, kind="cpu",
        intra_node=Link(name="memory", gb_per_s=3, latency_us=100), inter_node=Link(name="net", gb_per_s=1, latency_us=50),
    )  # fmt: skip
    setup = TrainingSetup(seq_len=64, global_batch=4, precision="fp32")
    plain = Estimator(tiny, cpu, setup)
    # Measured from the fork on, a dry run of a 1 MB model takes some tens of MiB; compiled, some more.
    assert plain({}).peak_memory_mib < 80
    assert plain({"fusion": True}).peak_memory_mib > plain({}).peak_memory_mib + 20
    assert plain.memory_limit_mib == 4096
    assert Estimator(tiny, "h100", setup).memory_limit_mib < 79.1 * 1024


def test_an_offloaded_optimizer_leaves_the_device():
    assert terms(micro_batch=1, offload="optimizer")["optimizer"] == 0
    assert terms(micro_batch=1, offload="optimizer")["master"] == 0


@pytest.mark.parametrize(
    ("blocks", "pp", "balance", "head", "expected"),
    [
        (10, 4, "layers", 0.0, (3, 3, 2, 2)),
        (32, 1, "layers", 1.0, (32,)),
        (8, 2, "cost", 0.0, (5, 3)),
        (32, 4, "cost", 2.0, (9, 9, 8, 6)),
    ],
)
def test_stages_share_out_all_blocks(blocks, pp, balance, head, expected):
    found = stage_blocks(blocks, pp, balance, head)
    assert sum(found) == blocks
    assert found == expected


def test_a_tied_head_is_in_both_end_stages():
    facts = ModelFacts.from_shape(**GPT2)
    from redline.estimator.rank import local_parameters

    one = np.ones(1)
    whole = sum(local_parameters(stage, facts, one)[0] for stage in stages(facts, 12, "layers") if stage.first)
    last = next(stage for stage in stages(facts, 12, "layers") if stage.last)
    assert local_parameters(last, facts, one)[0] > 50257 * 768
    assert whole > 50257 * 768


@pytest.mark.parametrize("term", ["buffers", "build"])
def test_a_tied_head_is_gathered_as_one_of_its_own(term):
    shape = {"layers": 16, "hidden": 4096, "heads": 32, "intermediate": 8192, "vocabulary": 256_000}
    setup = TrainingSetup(devices=16, seq_len=512, grad_accum=8)
    for zero in (2, 3):
        tied, own = (
            terms({**shape, "tied": each}, setup, "last", pp=2, zero=zero, checkpoint_ratio=1.0)[term]
            for each in (True, False)
        )
        assert tied == pytest.approx(own)


def test_the_peak_of_a_single_micro_batch_is_the_larger_of_two():
    """At the loss, with the head's gradient, or at the end of backward: without a gap where one becomes the larger."""
    shape = {"layers": 8, "hidden": 2048, "heads": 16, "intermediate": 8192, "vocabulary": 256_000}
    peaks = [
        sum(terms(shape, TrainingSetup(devices=1, seq_len=seq_len, grad_accum=1)).values())
        for seq_len in range(768, 1536, 64)
    ]
    steps = np.diff(peaks)
    assert (steps > 0).all() and steps.max() < 1.5 * steps[-1]


def test_rows_of_whole_experts_are_divided_among_the_ranks_of_a_layer():
    shape = {
        "layers": 48, "hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 1536, "vocabulary": 128_256, "experts": 128,
        "experts_per_token": 8,
    }  # fmt: skip
    setup = TrainingSetup(devices=64, seq_len=4096, grad_accum=4)
    alone = terms(shape, setup, ep=8)["activations"]
    together = terms(shape, setup, tp=8, ep=8, etp=1, sequence_parallel=True)["activations"]
    cut = terms(shape, setup, tp=8, ep=8, sequence_parallel=True)["activations"]
    assert together == pytest.approx(alone / 8, rel=0.05) and cut > 2 * together


def test_zero_2_has_the_pieces_it_updates_beside_the_weights_it_gathers():
    parameters = 6_738_415_616
    for precision, width in (("fp32", 4), ("bf16", 2)):
        setup = TrainingSetup(seq_len=4096, devices=64, global_batch=64, precision=precision)
        found = terms(setup=setup, zero=2, micro_batch=1)
        assert found["parameters"] * MIB == pytest.approx(parameters * 4 / 64)
        assert found["buffers"] * MIB >= parameters * width
        whole = [sum(terms(setup=setup, zero=zero, micro_batch=1).values()) for zero in range(4)]
        # In float32 ZeRO 2 has these pieces in addition to ZeRO 1, which also has whole weights.
        assert whole[0] > whole[1] and whole[2] > whole[3]
        assert whole[2] - whole[1] == pytest.approx(parameters * 4 / 64 / MIB, rel=0.2) or precision == "bf16"
        assert precision == "fp32" or whole[1] > whole[2]
