"""A trial on several ranks computes the same loss, gradients and weights as one process."""

from dataclasses import replace

import numeric
import pytest
import torch
from redline.base.errors import WorkloadError
from redline.training import Training
from tiers import diagonal, tiered

CPU = torch.device("cpu")


def check(pool, workload, config, seed):
    """Compares each rank with one process, and checks that all ranks report the same loss."""
    found = pool.run(numeric.departure, workload, config, seed)
    for each in found:
        assert each.largest_of("loss").by == found[0].largest_of("loss").by
        numeric.hold(each)


def held(workload, config):
    """Returns, on each rank, the numbers of values of optimizer state and of weights, and the samples of a step."""
    import torch.distributed as dist

    training = Training(workload, config, CPU, rank=dist.get_rank(), world_size=dist.get_world_size())
    training.step()
    # ZeRO stage 1 wraps the optimizer, which steps this rank's share of the weights.
    optimizer = getattr(training.optimizer, "optim", training.optimizer)
    state = sum(
        getattr(value, "to_local", lambda value=value: value)().numel()
        for each in optimizer.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    weights = sum(getattr(each, "to_local", lambda each=each: each)().numel() for each in training.model.parameters())
    return state, weights, training.samples_per_step


@pytest.mark.parametrize("family", tiered(["gpt2"], ["llama"]))
def test_each_zero_stage_shards_its_state(two, small, family):
    configs = [{"zero": zero, "micro_batch": 2, "grad_accum": 2} for zero in range(4)]
    found = [two.run(held, small(family), each) for each in configs]
    assert {samples for each in found for _, _, samples in each} == {8}
    whole = found[0][0][1]
    state = [sum(state for state, _, _ in each) for each in found]
    assert state == [4 * whole, 2 * whole, 2 * whole, 2 * whole]  # AdamW keeps two values a weight
    weights = [sum(weights for _, weights, _ in each) for each in found]
    assert weights == [2 * whole, 2 * whole, whole, whole]


@pytest.mark.parametrize(("zero", "micro_batch"), diagonal([2, 3], [1, 2]))
def test_groups_of_replicas_train_as_one(four, small, seed, zero, micro_batch):
    check(four, small("llama"), {"zero": zero, "hsdp": 2, "micro_batch": micro_batch}, seed)


def created(workload, config):
    """Returns the number of process groups that a training creates."""
    import torch.distributed as dist

    before = dist.distributed_c10d._world.group_count
    Training(workload, config, CPU, rank=dist.get_rank(), world_size=dist.get_world_size())
    return dist.distributed_c10d._world.group_count - before


def test_groups_of_replicas_are_created_once_for_all_blocks(four, small):
    """Stages of a pipeline have different numbers of blocks, and all ranks must create the same groups."""
    config = {"zero": 3, "hsdp": 2, "micro_batch": 1}
    assert four.run(created, small("llama"), config) == [4, 4, 4, 4]  # two pairs along each of two axes


def test_each_group_of_replicas_holds_all_pieces(four, small):
    config = {"zero": 3, "micro_batch": 1}
    whole, _, _ = four.run(held, small("llama"), {**config, "zero": 0})[0]
    for groups in (1, 2):
        for state, weights, _ in four.run(held, small("llama"), {**config, "hsdp": groups}):
            assert state == pytest.approx(whole * groups / 4, rel=0.02)
            assert weights == pytest.approx(whole * groups / 8, rel=0.02)


@pytest.mark.parametrize("zero", tiered([1, 3], [0, 2]))
def test_offloading_goes_with_every_stage_of_zero(two, small, seed, zero):
    config = {"zero": zero, "micro_batch": 4, "grad_accum": 1, "offload": "optimizer"}
    check(two, small("llama"), config, seed)


def test_groups_of_replicas_gather_within_and_sum_with_the_others_once_a_step(four, small):
    def exchanged(workload, config):
        """Returns the sizes passed to this rank's collectives, by kind and ranks."""
        import torch.distributed as dist

        training = Training(workload, config, CPU, rank=dist.get_rank(), world_size=4)
        training.step()
        found = {}
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor",
                         "reduce_scatter_tensor"):  # fmt: skip
                if not hasattr(dist, name):
                    continue

                call = getattr(dist, name)

                def noted(*args, name=name, call=call, **kwargs):
                    ranks = tuple(dist.get_process_group_ranks(kwargs["group"]))
                    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
                    size = max(each.numel() for each in tensors)
                    kind = name.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor")
                    found[kind, ranks] = found.get((kind, ranks), 0) + (size if size > 1 else 0)
                    return call(*args, **kwargs)

                patch.setattr(dist, name, noted)
            training.step()
        return {key: size for key, size in found.items() if size}

    workload, config = small("llama"), {"zero": 3, "hsdp": 2}
    once, twice = (four.run(exchanged, workload, {**config, "micro_batch": size}) for size in (2, 1))
    for rank in range(4):
        within, across = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        assert set(once[rank]) == {("all_gather", within), ("reduce_scatter", within), ("all_reduce", across)}
        assert twice[rank]["reduce_scatter", within] == 2 * once[rank]["reduce_scatter", within]
        # Groups sum pieces of half the reduced size, once a step for any number of micro-batches.
        assert twice[rank]["all_reduce", across] == once[rank]["all_reduce", across]
        assert 2 * once[rank]["all_reduce", across] == once[rank]["reduce_scatter", within]


def test_two_axes_at_once_train_as_one(four, small, seed):
    check(four, small("llama"), {"micro_batch": 2, "tp": 2, "zero": 3}, seed)


@pytest.mark.parametrize(
    ("precision", "config"),
    diagonal(["bf16", "bf16_pure"], [{"tp": 2}, {"pp": 2}, {"zero": 0}, {"zero": 1}, {"zero": 3}]),
    ids=str,
)
def test_lower_precisions_go_with_every_way_of_spreading(two, small, seed, config, precision):
    check(two, small("llama"), {"micro_batch": 2, "precision": precision, **config}, seed)


@pytest.mark.parametrize(("kind", "precision"), diagonal(["interleaved", "zbv"], ["bf16", "bf16_pure"]))
def test_lower_precisions_go_with_several_stages_a_rank(two, small, seed, kind, precision):
    knobs = {"pp": 2, "virtual_stages": 2, "pipeline_schedule": kind, "grad_accum": 4, "micro_batch": 2}
    check(two, small("gpt2"), {**knobs, "precision": precision}, seed)


def test_several_stages_a_rank_are_interleaved_by_default(two, small, seed):
    check(two, small("gpt2"), {"pp": 2, "virtual_stages": 2, "grad_accum": 4, "micro_batch": 2}, seed)


def test_a_loss_of_somebody_s_own_goes_through_a_pipeline(two, seed):
    def run(own_schedule):
        import redline as rl
        from torch import nn

        def batch(size, seed):
            generator = torch.Generator().manual_seed(seed)
            return torch.randn(size, 8, generator=generator), torch.randint(0, 5, (size,), generator=generator)

        def schedule(sch, config):
            if config.get("pp", 1) > 1:
                sch["1"].cut_pipeline_stage()

        made = rl.Workload(
            model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)),
            batch=batch,
            loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
            global_batch=8,
            schedule=schedule if own_schedule else None,
        )
        return numeric.departure(made, {"pp": 2, "micro_batch": 2}, seed)

    for each in two.run(run, True):
        numeric.hold(each)
    with pytest.raises(AssertionError, match="pp: neither transformers nor redline has a pipeline plan"):
        two.run(run, False)


def test_a_loss_computed_in_bfloat16_reaches_every_stage(two):
    def run():
        import redline as rl
        import torch.distributed as dist
        from torch import nn

        def batch(size, seed):
            generator = torch.Generator().manual_seed(seed)
            return tuple(torch.randint(0, 5, (size,), generator=generator) for _ in range(2))

        made = rl.Workload(
            model=lambda: nn.Sequential(nn.Embedding(5, 16), nn.Linear(16, 5)),
            batch=batch,
            loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
            global_batch=8,
            schedule=lambda sch, config: sch["0"].cut_pipeline_stage(),
        )
        config = {"pp": 2, "micro_batch": 2, "precision": "bf16_pure"}
        return float(Training(made, config, CPU, rank=dist.get_rank(), world_size=2).step())

    first, second = two.run(run)
    # T5 computes its loss in bfloat16 too; most models compute it in float32.
    assert first == second and 1 < first < 4


def test_unsupported_combinations_are_refused(two, small):
    def refused(workload, config, message):
        import torch.distributed as dist

        with pytest.raises(WorkloadError, match=message):
            Training(workload, config, torch.device("cpu"), rank=dist.get_rank(), world_size=2)

    workload = small("llama")
    two.run(refused, workload, {"dp": 4}, r"dp=4: .* must equal the number of devices \(2\)")
    two.run(refused, workload, {"hsdp": 2, "zero": 1}, "hsdp=2, zero=1: hsdp needs zero 2 or 3")
    two.run(refused, workload, {"hsdp": 2, "zero": 3}, "hsdp must divide the .* replicas into groups of two or more")
    two.run(refused, workload, {"hsdp": True, "zero": 3}, "hsdp must be a whole number of at least 1, but is True")
    uneven = replace(workload, seq_len=15)
    two.run(refused, uneven, {"sp": 2}, r"sp=2: sp \* cp must divide the 15 tokens of a sample")
    two.run(refused, uneven, {"cp": 2}, r"cp=2: 2 \* cp must divide the 15 tokens of a sample")
    own = replace(workload, loss=lambda output, batch: output.loss)
    two.run(refused, own, {"sp": 2}, "sp=2: the workload's own loss takes whole samples")
    two.run(refused, workload, {"micro_batch": 3}, "micro_batch must divide a replica's samples, 4, but is 3")
