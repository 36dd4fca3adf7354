"""Data parallelism at every ZeRO stage, and offloading."""

import copy

import numerics_table as numerics
import pytest
import torch
from ranks import mesh
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule, verify
from redline.schedule.parallel.collectives import PlannedMesh
from torch import nn


def check_blocks(make):
    from torch.distributed.fsdp import FSDPModule

    sch = create_schedule(make("gpt2"), mesh(dp=2))
    sch.shard_data(zero=3)
    model, _ = build(sch)
    assert isinstance(model.transformer.h[0], FSDPModule)
    assert not isinstance(model.transformer.h[0].mlp, FSDPModule)
    for call, reason in [
        (lambda s: s["transformer"].shard_data(), "on the root"),
        (lambda s: s.shard_data(zero=4), "from 0 to 3, but got 4"),
        (lambda s: s.shard_data(zero=True), "but got True"),
        (lambda s: s.shard_data().shard_data(), "replicated already"),
        (lambda s: s.shard_data(zero=1, hsdp=2), "needs stage 2 or 3"),
        (lambda s: s.shard_data(zero=3, hsdp=2), "divide the 2 ranks into groups of two or more, but is 2"),
    ]:
        with pytest.raises(ScheduleError, match=reason):
            call(create_schedule(make("gpt2"), mesh(dp=2)))
    with pytest.raises(ScheduleError, match="axis named dp"):
        create_schedule(make("gpt2")).shard_data()


def test_blocks_are_gathered_one_at_a_time_and_misuse_is_refused(two, make_transformer):
    two.run(check_blocks, make_transformer)


def check_departure(make):
    sch = create_schedule(make("gpt2"), mesh(dp=2))
    tokens = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(1))
    with (
        pytest.raises(ScheduleError, match=r"the gradient of .* departs"),
        verify(sch, {"input_ids": tokens, "labels": tokens}),
    ):
        sch["transformer.h.0"].checkpoint()
    with (
        pytest.raises(ScheduleError, match="must divide the batch, but it has 3"),
        verify(sch, {"input_ids": tokens[:3], "labels": tokens[:3]}),
    ):
        sch["transformer.h.1"].checkpoint()


def test_verify_notices_that_gradients_are_not_averaged(two, make_transformer):
    two.run(check_departure, make_transformer)


# offload


def test_saved_activations_are_copied_to_the_host_and_weights_are_not(monkeypatch):
    copied = []
    away = torch.autograd.graph.save_on_cpu

    class Watched(away):
        def __init__(self, **options):
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (copied.append(tuple(tensor.shape)), pack(tensor))[1]

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Watched)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    sch = create_schedule(model)
    sch.offload("activations")
    build(sch)
    x = torch.randn(3, 4)
    for each in (model, plain):
        each(x).square().sum().backward()
    assert copied and all(shape[0] == 3 for shape in copied), "activations of three samples, no weight"
    for one, other in zip(model.parameters(), plain.parameters()):
        assert torch.equal(one.grad, other.grad)


def test_an_offloaded_optimizer_steps_as_the_plain_one(mlp):
    sch = create_schedule(copy.deepcopy(mlp)).offload("optimizer")
    model, optimizer = build(sch, optimizer=numerics.adamw)
    plain, reference = mlp, numerics.adamw(mlp.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, reference)]
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        for each, opt, scheduler in ((model, optimizer, schedulers[0]), (plain, reference, schedulers[1])):
            opt.zero_grad()
            each(x).pow(2).mean().backward()
            opt.step()
            scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"] == 1e-3 / 8
    held = {id(p) for p in model.parameters()}
    assert not held & {id(p) for p in optimizer.state}
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert optimizer.state_dict()["state"][0]["step"] == 3


def test_offload_refuses_what_it_cannot(mlp):
    sch = create_schedule(mlp)
    with pytest.raises(ScheduleError, match="did you mean 'activations'"):
        sch.offload("activation")
    with pytest.raises(ScheduleError, match="on the root"):
        sch["fc1"].offload("optimizer")
    with pytest.raises(ScheduleError, match="offloaded already"):
        sch["fc1"].offload().offload()
    assert isinstance(sch.module, nn.Module) and len(sch.tree.steps) == 1


def balancing(family, **more):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(family, output_router_logits=True, vocab_size=64, pad_token_id=0, **more)
    with torch.device("meta"):
        return (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config)


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
FAMILIES_OF_EXPERTS = {
    "switch_transformers": {"num_layers": 2, "num_decoder_layers": 2, "d_model": 32, "d_ff": 64, "num_experts": 4},
    "nllb-moe": {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "num_experts": 4},
    "doge": {**SMALL, "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 2, "is_moe": True},
    "mixtral": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
}


@pytest.mark.parametrize("family", FAMILIES_OF_EXPERTS)
def test_a_loss_that_balances_experts_is_of_all_replicas_or_refused(family):
    sch = create_schedule(balancing(family, **FAMILIES_OF_EXPERTS[family]), PlannedMesh(dp=2))
    if family == "mixtral":
        sch.shard_data()
        return
    with pytest.raises(ScheduleError, match="is not computed over replicas; set output_router_logits=False"):
        sch.shard_data()
    create_schedule(sch.module, PlannedMesh(dp=1)).shard_data()
