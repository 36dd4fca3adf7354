"""Experts that ranks share: their weights, the exchange of rows, and the wait for the fullest rank."""

from dataclasses import replace

import numpy as np
import pytest
from redline.base.errors import UsageError
from redline.estimator import Estimator, Shape, TrainingSetup
from redline.estimator.constants import Constants
from redline.estimator.facts.model_facts import Matmul, ModelFacts
from redline.estimator.hardware import find_hardware
from redline.estimator.work import matmul_seconds

H100 = find_hardware("h100-80gb")
EXPERTS, CHOSEN, HIDDEN, INNER, LAYERS = 64, 4, 2048, 1024, 16


def mixture():
    """Facts of a mixture of experts: a Llama's attention, with experts' products instead of the dense ones."""
    dense = ModelFacts.from_shape(
        layers=LAYERS, hidden=HIDDEN, heads=16, intermediate=INNER, vocabulary=32000, precision="bf16"
    )
    rows = CHOSEN / EXPERTS
    stack = EXPERTS * 3 * HIDDEN * INNER

    def changed(part):
        if part.role != "block":
            return part
        products = (
            *part.matmuls[:2],
            Matmul(k=HIDDEN, n=2 * INNER, split="column", count=EXPERTS, experts=EXPERTS, rows=rows),
            Matmul(k=INNER, n=HIDDEN, split="row", count=EXPERTS, experts=EXPERTS, rows=rows),
        )
        rest = part.parameters - 3 * HIDDEN * INNER
        return replace(
            part, matmuls=products, parameters=rest + stack, sharded=part.sharded - 3 * HIDDEN * INNER + stack,
            experts=stack, routed=float(CHOSEN * HIDDEN),
        )  # fmt: skip

    return replace(dense, parts=tuple(map(changed, dense.parts)), shape=None)


FACTS = mixture()
STACKS = LAYERS * EXPERTS * 3 * HIDDEN * INNER


def estimated(devices=64, constants=None, **config):
    setup = TrainingSetup(devices=devices, seq_len=4096, global_batch=512)
    return Estimator(FACTS, H100, setup, constants=constants)({"micro_batch": 1, **config})


def memory(name, **config):
    return estimated(**config).breakdown[f"memory.{name}"] * 2**20


def time(name, **config):
    return estimated(**config).breakdown[f"time.{name}"]


def test_a_rank_has_its_share_of_experts_and_all_else():
    rest = FACTS.parameters - STACKS
    for ep in (1, 2, 8, 64):
        assert memory("parameters", ep=ep) == pytest.approx(4 * (rest + STACKS / ep))
        # Sharded states of all replicas are the same however they share the experts.
        assert memory("optimizer", ep=ep, zero=1) == pytest.approx(8 * FACTS.parameters / 64)
        assert memory("parameters", ep=ep, zero=3) == pytest.approx(4 * FACTS.parameters / 64)
    assert memory("parameters", ep=8, tp=2) == pytest.approx(memory("parameters", ep=8) / 2, rel=0.01)


def test_with_zero_3_only_the_experts_of_the_rank_are_gathered():
    assert memory("buffers", ep=8, zero=3) < memory("buffers", zero=3) / 3
    assert time("parameter gathers", ep=8, zero=3) < time("parameter gathers", zero=3)


def test_the_fullest_rank_waits_for_and_keeps_what_the_routing_gives_it():
    even = Constants(expert_spread=0.0)
    assert time("expert imbalance", ep=8, constants=even) == 0
    assert time("expert imbalance", ep=8) > 0
    assert memory("activations", ep=8) > memory("activations", ep=8, constants=even) > memory("activations")


def test_a_reported_rank_need_not_be_the_one_with_the_most_rows():
    setup = TrainingSetup(devices=64, seq_len=4096, global_batch=512)
    config = {"micro_batch": 1, "ep": 8}
    fullest, last, even = (
        Estimator(FACTS, H100, setup.replace(reported_rank=rank), constants=Constants(expert_spread=spread))
        for rank, spread in (("fullest", 0.25), ("last", 0.25), ("fullest", 0.0))
    )
    assert fullest(config).peak_memory_mib > last(config).peak_memory_mib == even(config).peak_memory_mib
    assert last.table([config]).fullest_memory_mib == fullest.table([config]).fullest_memory_mib


def test_rows_travel_four_times_a_block_and_twice_more_where_it_is_recomputed():
    """Each of a node's 8 ranks sends 7 of 8 parts, 4 x 2048 numbers of 2 bytes per token."""
    link = H100.intra_node.gb_per_s * 1e9 * Constants().link_efficiency
    moved = 4096 * CHOSEN * HIDDEN * 2 * 7 / 8 / link
    fixed = 2 * Constants().collective_us * 1e-6 + H100.intra_node.latency_us / 4 * 1e-6
    passes = 512 / 64 * LAYERS * 4
    assert time("expert exchange", ep=8) == pytest.approx(passes * (moved + fixed) * 1e3, rel=1e-6)
    assert time("expert exchange", ep=8, checkpoint_ratio=1.0) == pytest.approx(1.5 * time("expert exchange", ep=8))
    assert time("expert exchange") == 0


def test_rows_between_nodes_go_by_each_ranks_own_share_of_the_network():
    near, far = time("expert exchange", ep=8), time("expert exchange", ep=64)
    network = H100.inter_node.gb_per_s * 1e9 * Constants().network_efficiency
    moved = 512 / 64 * LAYERS * 4 * 4096 * CHOSEN * HIDDEN * 2 * 56 / 64 / network * 1e3
    assert moved < far < 1.2 * moved and far > 4 * near


def test_rows_that_are_sent_once_to_each_node_take_less_of_the_network():
    """Four choices among eight nodes reach 8 (1 - (7 / 8)^4) of them: 3.31 instead of 4 rows."""
    setup = TrainingSetup(devices=64, seq_len=4096, global_batch=512)
    config = {"micro_batch": 1, "ep": 64}
    each, once = (
        Estimator(FACTS, H100, setup.replace(rows_once_a_node=known))(config).breakdown["time.expert exchange"]
        for known in (False, True)
    )
    fixed = 512 / 64 * LAYERS * 4 * (2 * Constants().collective_us + H100.inter_node.latency_us) * 1e-3
    assert (once - fixed) / (each - fixed) == pytest.approx(8 * (1 - (7 / 8) ** 4) / 4)


def test_separate_products_of_experts_take_the_host_longer_the_more_a_rank_has():
    """A tiny micro-batch, whose kernels take less time than their launches: three passes launch 2 products of E / P experts."""
    constants = Constants()

    def launches(separate, ep):
        setup = TrainingSetup(devices=8, seq_len=16, global_batch=8, separate_experts=separate)
        return Estimator(FACTS, H100, setup)({"micro_batch": 1, "ep": ep}).breakdown["time.launches"]

    for ep in (2, 8):
        experts = next(each.experts for part in FACTS.parts for each in part.matmuls if each.experts > 1)
        more = LAYERS * 3 * 2 * experts / ep * constants.launch_us * 1e-3
        # A device that waits longer runs at higher clocks, and is the slower one in fewer passes.
        assert launches(True, ep) - launches(False, ep) == pytest.approx(more, rel=0.1)


def test_products_of_experts_with_more_rows_each_are_faster():
    """The arithmetic is the same: rows per expert grow as the number of experts falls."""
    item = next(each for part in FACTS.parts for each in part.matmuls if each.experts > 1)

    def seconds(ep, tokens=8192):
        forward, _ = matmul_seconds(item, np.array([tokens]), np.ones(1), 2, H100, "bf16", Constants(), np.array([ep]))
        return float(forward[0])

    assert seconds(64) < seconds(8) < seconds(1)
    rate = 2 * 8192 * CHOSEN * HIDDEN * 2 * INNER / seconds(64)
    assert 0.5 < rate / (H100.rate("bf16") * H100.achievable * Constants().matmul_efficiency) < 1


@pytest.mark.parametrize(
    ("parameters", "sizes"),
    [
        # Mixtral-8x7B and Qwen3-30B-A3B; shape numbers do not include the latter's norms of queries and keys.
        (46_702_792_704, {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336,
                          "vocabulary": 32000, "experts": 8, "experts_per_token": 2}),
        (30_532_122_624 - 48 * 256, {"layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128,
                                     "vocabulary": 151936, "experts": 128, "experts_per_token": 8,
                                     "expert_intermediate": 768}),
    ],
)  # fmt: skip
def test_shape_numbers_of_published_mixtures_give_their_parameters(parameters, sizes):
    facts = Shape(**sizes).facts(precision="bf16", attention="sdpa", fusion=False)
    assert facts.parameters == parameters and facts.experts == (sizes["experts"],)
    stacks = sizes["layers"] * sizes["experts"] * 3 * sizes["hidden"] * sizes.get("expert_intermediate", 14336)
    assert sum(part.count * part.experts for part in facts.parts) == stacks


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"experts": 1}, "experts must be 2 or more"),
        ({"experts": 4, "experts_per_token": 5}, "a token has at most all"),
        ({"dense_layers": 1}, "dense_layers must leave a block with experts"),
        ({"experts": 4, "dense_layers": 2}, "dense_layers must leave a block with experts"),
        ({"experts": -1}, "experts must be a whole number of at least 0"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(wrong, words):
    with pytest.raises(UsageError, match=words):
        Shape(layers=2, hidden=8, heads=2, vocabulary=8, **wrong)


def test_with_a_capacity_rows_follow_it_and_no_rank_waits_for_another():
    """Exchanges send f times the rows in one collective instead of two, as their sizes are known."""
    link = H100.intra_node.gb_per_s * 1e9 * Constants().link_efficiency
    moved = 4096 * CHOSEN * HIDDEN * 2 * 7 / 8 / link
    fixed = Constants().collective_us * 1e-6 + H100.intra_node.latency_us / 4 * 1e-6
    for factor in (0.5, 1.0, 2.0):
        found = time("expert exchange", ep=8, capacity_factor=factor)
        assert found == pytest.approx(512 / 64 * LAYERS * 4 * (factor * moved + fixed) * 1e3, rel=1e-6)
        assert time("expert imbalance", ep=8, capacity_factor=factor) == 0
    for ep in (1, 8):
        half, one, two = (time("matmul", ep=ep, capacity_factor=factor) for factor in (0.5, 1.0, 2.0))
        assert half < one < two
        # The number of rows is the same; clocks are slightly higher while ranks wait.
        assert one == pytest.approx(time("matmul", ep=ep), rel=0.02)


def test_with_a_capacity_a_rank_keeps_its_rows_and_the_returned_ones():
    tokens, width = 4096, 2
    products = HIDDEN + 2 * INNER + INNER + HIDDEN
    for ep in (1, 8):
        kept = {factor: memory("activations", ep=ep, capacity_factor=factor) for factor in (0, 0.5, 1.0, 2.0)}
        # Inputs and outputs of experts' products, and returned rows that are weighted.
        assert kept[2.0] - kept[1.0] == pytest.approx(LAYERS * tokens * CHOSEN * width * (products + HIDDEN))
        assert kept[1.0] - kept[0.5] == pytest.approx(LAYERS * tokens * CHOSEN * width * (products + HIDDEN) / 2)
        # They replace the fullest rank's rows; a rank with all experts weights its results at once.
        assert kept[1.0] > kept[0] if ep == 1 else kept[1.0] < kept[0]


def test_whole_experts_are_on_ranks_of_a_layer_and_their_tokens_are_divided():
    rest = FACTS.parameters - STACKS
    cut = {"tp": 4, "ep": 4}
    sharded = memory("parameters", **cut)
    # The same number of ranks share all experts, whether by experts or by columns.
    assert memory("parameters", **{**cut, "ep": 16}, etp=1) == pytest.approx(sharded)
    assert memory("parameters", tp=4, ep=1, etp=1) == pytest.approx(memory("parameters", tp=4) + 4 * STACKS * 3 / 4)
    assert memory("optimizer", **cut, etp=1, zero=1) == pytest.approx(memory("optimizer", **cut, zero=1))
    assert rest > 0 and time("expert exchange", **cut, etp=1) < time("expert exchange", **cut) / 3
    # Experts have whole columns, for the same total of rows.
    assert time("matmul", tp=4, ep=16, etp=1) < time("matmul", **cut)
    assert time("tensor parallel", **cut, etp=1) < time("tensor parallel", **cut)
    with_sequence = time("tensor parallel", **cut, etp=1, sequence_parallel=True)
    assert with_sequence < time("tensor parallel", **cut, sequence_parallel=True)


def test_a_table_of_unlike_configurations_has_the_estimates_of_each():
    configs = [
        {"tp": tp, "ep": ep, "etp": etp, "capacity_factor": factor, "pp": pp}
        for tp, ep, etp, factor, pp in (
            (1, 8, 0, 0, 1), (1, 8, 0, 1.25, 1), (1, 8, 0, 2.0, 1), (4, 4, 0, 0, 1), (4, 8, 1, 0, 1), (4, 8, 1, 1.25, 2),
            (4, 8, 0, 1.25, 2), (4, 1, 1, 0, 2), (4, 1, 0, 0, 2),
        )
    ]  # fmt: skip
    setup = TrainingSetup(devices=64, seq_len=4096, global_batch=512, micro_batch=1)
    estimator = Estimator(FACTS, H100, setup)
    table = estimator.table(configs)
    assert len(set(table.step_ms.tolist())) == len(configs)
    for at, config in enumerate(configs):
        alone = estimator(config)
        assert table.step_ms[at] == pytest.approx(alone.step_ms, rel=1e-12)
        assert table.peak_memory_mib[at] == pytest.approx(alone.peak_memory_mib, rel=1e-12)


def test_biases_of_experts_are_added_to_their_rows_in_passes_of_their_own():
    """28 bytes an element of each of a token's rows, forward, at 60 % of the bandwidth, and twice that in backward; 12 an element
    between the products for the clamps of gate and input."""
    for gated, clamps in ((False, 0), (True, 12 * 4)):
        shape = Shape(
            layers=LAYERS, hidden=HIDDEN, heads=16, vocabulary=32000, experts=EXPERTS, experts_per_token=CHOSEN,
            gated=gated, intermediate=4 * HIDDEN,
        )  # fmt: skip
        setup = TrainingSetup(devices=8, seq_len=4096, global_batch=8, fusion=True)
        with_biases, without = (
            Estimator(replace(shape, biases=biases), H100, setup)({"ep": 8}).breakdown["time.memory-bound"]
            for biases in (True, False)
        )
        moved = 3 * (28 + clamps) * LAYERS * 4096 * CHOSEN * HIDDEN
        assert with_biases - without == pytest.approx(1e3 * moved / (0.6 * H100.memory_gb_per_s * 1e9), rel=1e-6)
