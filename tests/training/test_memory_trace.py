"""A rank's memory is traced without allocating it: totals to the byte, names, roles, and no side effects."""

import pytest
import redline as rl
import torch
from redline.base.errors import WorkloadError
from redline.training.memory_trace import Phase, Role, trace_memory


def workload(model="llama-tiny"):
    return rl.workload(model, global_batch=8)


def alive(trace, event):
    return [each for each in trace.blocks if each.begin <= event and (each.end is None or each.end > event)]


def total(trace, role, event):
    return sum(each.num_bytes for each in alive(trace, event) if each.role is role)


@pytest.fixture(scope="module")
def plain():
    return trace_memory(workload(), {"micro_batch": 2})


def test_parameters_and_states_have_the_bytes_of_real_tensors(plain):
    training = rl.training.Training(workload(), {"micro_batch": 2}, torch.device("cpu"))
    training.step()
    parameters = sum(each.nbytes for each in training.model.parameters())
    states = [each for state in training.optimizer.state.values() for each in state.values()]
    end = plain.num_events - 1
    assert total(plain, Role.PARAMETER, end) == parameters
    assert total(plain, Role.OPTIMIZER, end) == sum(each.untyped_storage().nbytes() for each in states)


def test_gradients_are_as_large_as_parameters_when_the_optimizer_steps(plain):
    step = next(each for each in plain.parts if each.phase is Phase.OPTIMIZER)
    assert total(plain, Role.GRADIENT, step.begin) == total(plain, Role.PARAMETER, step.begin)
    assert total(plain, Role.GRADIENT, plain.num_events - 1) == 0


def test_activations_are_gone_after_backward_and_named_by_their_module(plain):
    backward = next(each for each in plain.parts if each.phase is Phase.BACKWARD)
    kept = [each for each in alive(plain, backward.begin) if each.role is Role.ACTIVATION]
    assert {"model.layers.0.mlp.gate_proj: mm", "model.layers.1.mlp.up_proj: mm"} <= {each.name for each in kept}
    assert total(plain, Role.ACTIVATION, plain.num_events - 1) == 0


def test_every_event_is_the_begin_or_the_end_of_one_block(plain):
    events = [each.begin for each in plain.blocks] + [each.end for each in plain.blocks if each.end is not None]
    assert sorted(events) == list(range(plain.num_events))


def test_checkpointing_keeps_fewer_activations(plain):
    checkpointed = trace_memory(workload(), {"micro_batch": 2, "checkpoint_ratio": 1})

    def kept(trace):
        backward = next(each for each in trace.parts if each.phase is Phase.BACKWARD)
        return total(trace, Role.ACTIVATION, backward.begin)

    assert kept(checkpointed) < 0.8 * kept(plain)


@pytest.mark.parametrize("config", [{"zero": 3}, {"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_ranks_are_traced_without_peers(config):
    trace = trace_memory(workload(), {"micro_batch": 2, **config}, rank=1, world_size=2)
    whole = 2785408  # bytes of llama-tiny's parameters / 4
    share = total(trace, Role.PARAMETER, trace.num_events - 1) / 4 / whole
    assert (share == pytest.approx(1, rel=0.01)) if "cp" in config else (0.4 < share < 0.65)
    assert trace.groups > 0
    assert not torch.distributed.is_initialized()


def test_zero_gathers_weights_and_frees_them():
    trace = trace_memory(workload(), {"micro_batch": 2, "zero": 3}, rank=0, world_size=2)
    gathered = [each for each in trace.blocks if "gathered weights" in each.name]
    assert gathered
    assert all(each.role is Role.COMMUNICATION for each in gathered)
    assert total(trace, Role.COMMUNICATION, trace.num_events - 1) == 0


def test_a_large_model_takes_no_memory():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = trace_memory(rl.workload("gpt2-medium", global_batch=1), {"micro_batch": 1})
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert total(trace, Role.OPTIMIZER, trace.num_events - 1) > 2500 * 2**20
    assert grown_mib < 500


def test_a_rank_outside_of_the_world_is_refused():
    with pytest.raises(WorkloadError, match="rank must be from 0 to 1, but is 2"):
        trace_memory(workload(), {"micro_batch": 2}, rank=2, world_size=2)
    assert not torch.distributed.is_initialized()


def test_code_runs_as_before_after_a_trace(plain):
    assert torch.ones(5000).sum() == 5000
    storage = torch.ones(4).untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0


def test_experts_are_traced_without_reading_their_routes():
    trace = trace_memory(workload("mixtral-tiny"), {"micro_batch": 2, "ep": 2}, rank=1, world_size=2)
    products = [each for each in trace.blocks if each.name.endswith(": _grouped_mm")]
    assert products
    assert all(each.dtype == "float32" for each in products)
