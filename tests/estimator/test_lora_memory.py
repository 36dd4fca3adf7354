"""Measured savings of adapters: frozen weights need neither optimizer state nor gradients."""

import pytest
from redline.base.device import detect
from redline.models.architecture import Architecture
from redline.models.huggingface import hugging_face_workload
from redline.models.lora import Lora, with_lora
from redline.models.skeleton import skeleton
from redline.runners import LocalRunner, TimingPlan, TrialRequest, TrialTerms
from redline.space import Config

pytest.importorskip("peft")


@pytest.mark.exhaustive
def test_measured_memory_lacks_gradients_and_optimizer_state_of_what_is_frozen():
    config = Config(micro_batch=1, grad_accum=1, precision="fp32")
    plan = TimingPlan(warmup_min_steps=2, warmup_max_steps=2, min_steps=1, max_steps=1)
    peak = {}
    # Wide tied embeddings and few tokens: memory is weights, gradients and optimizer state.
    arguments = {"vocab_size": 60_000, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "max_position_embeddings": 16}  # fmt: skip
    architecture = Architecture(model_type="bert", arguments=arguments, task="masked")
    made = hugging_face_workload(architecture, name="wide", spec="wide", seq_len=8, global_batch=1)
    for lora, adapted in ((None, made), ("r=1", with_lora(made, Lora(r=1)))):
        with LocalRunner(adapted, TrialTerms(device=detect(), threads=1, plan=plan)) as runner:
            done = runner.run(TrialRequest(config=config, number=0))
        assert done.status == "ok", done.reason
        peak[lora] = done.peak_memory_mib
    weights = sum(each.numel() for each in skeleton(adapted).parameters()) * 4 / 2**20
    # Full training: weights, gradients and two values each for AdamW. Adapters: weights, and some MiB for the rest.
    assert peak[None] > 3.9 * weights
    assert peak["r=1"] < 1.9 * weights
