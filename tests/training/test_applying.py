"""apply_schedule: a configuration is applied to a model in a user's own loop."""

import pytest
import redline as rl
import torch
from ranks import mesh
from redline.base.errors import ScheduleError


def gpt2(layers=4):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": layers, "n_embd": 32, "n_head": 4, "vocab_size": 96, "n_positions": 32}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=1, eos_token_id=2))


def batch():
    tokens = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def test_a_configuration_is_applied_to_the_blocks_and_the_head():
    sch = rl.apply_schedule(gpt2(), {"checkpoint_ratio": 0.5, "kernels": True})
    found = [step.path for step in sch.tree.steps if step.primitive == "checkpoint"]
    assert found == ["transformer.h.1", "transformer.h.3"]
    assert any(step.primitive == "fused_loss" for step in sch.tree.steps)
    with pytest.raises(ScheduleError, match="the configuration has tp=2, so the mesh must have an axis tp"):
        rl.apply_schedule(gpt2(1), {"tp": 2})


def check_own_loop(axes, config):
    sch = rl.apply_schedule(gpt2(2), config, mesh(**axes))
    stages = [each.arguments["zero"] for each in sch.tree.deferred if each.phase == "data"]
    assert stages == ([config["zero"]] if "dp" in axes else [])
    model, optimizer = rl.build(sch, optimizer=sgd)
    plain = gpt2(2)
    reference = sgd(plain.parameters())
    data = batch()
    rank = torch.distributed.get_rank() if "dp" in axes else 0
    mine = {
        name: value.chunk(2)[rank] if "dp" in axes and torch.is_tensor(value) else value for name, value in data.items()
    }
    for _ in range(3):
        for each, steps, given in ((model, optimizer, mine), (plain, reference, data)):
            each(**given).loss.backward()
            steps.step()
            steps.zero_grad()
    found = rl.schedule.full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "config"),
    [({"tp": 2}, {"tp": 2, "checkpoint_ratio": 0.5}), *(({"dp": 2}, {"zero": zero}) for zero in range(4))],
    ids=["tp", *(f"dp with zero={zero}" for zero in range(4))],
)
def test_a_user_s_loop_trains_like_the_plain_model(two, axes, config):
    two.run(check_own_loop, axes, config)
