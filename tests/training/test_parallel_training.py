"""A trial on several ranks computes the same loss, gradients and weights as one process."""

import numeric
import pytest
import torch
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
