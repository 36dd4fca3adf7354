"""The demonstrations of `examples/` at small sizes, some of them as scripts."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import mesh
from redline.schedule import create_schedule, verify
from torch import nn

ROOT = Path(__file__).parents[2]


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernel_injection_replaces_every_norm(make_transformer, tokens, seed):
    injection = example("kernel_injection")
    sch = create_schedule(make_transformer("bert"))
    with verify(sch, {"input_ids": tokens, "labels": tokens}, seed=seed):
        sch.replace_all(nn.LayerNorm, injection.flat)
    norms = [each for each in sch.module.modules() if isinstance(each, nn.LayerNorm)]
    assert len(norms) == 6 and all(type(each) is injection.FlatLayerNorm for each in norms)


def test_block_fusion_finds_its_pattern_in_every_block(seed):
    fusion = example("block_fusion")
    torch.manual_seed(seed)
    sch = create_schedule(fusion.Net(width=8, depth=3))
    with verify(sch, torch.randn(4, 8)):
        fusion.schedule(sch, compiler="none")
    assert len(sch.find("fused_linear_norm_act")) == 3


def check_sharding(seed):
    sharding = example("parameter_sharding")
    torch.manual_seed(seed)
    sch = create_schedule(sharding.MLP(8, 16), mesh(tp=2))
    with verify(sch, torch.randn(4, 8)):
        sharding.schedule(sch)
    return sch["fc1"].module.weight.shape, sch["fc2"].module.weight.shape


def test_parameter_sharding_has_the_gradients_of_one_rank(two, seed):
    shapes = two.run(check_sharding, seed)
    assert shapes == [((8, 8), (8, 8))] * 2


def test_a_norm_between_cut_layers_is_given_all_features_or_whole_rows_or_says_what_to_do(two):
    for found in two.run(lambda: example("sharding_with_norm").compare(mesh(tp=2))):
        assert max(found["gathered"], found["in_rows"]) < 1e-5
        assert "'norm' (LayerNorm) takes 256 features, but gets the 128 of one of 2 ranks" in found["forgotten"]


def near(found, expected):
    assert found == pytest.approx(expected, rel=1e-5) and len({round(each, 4) for each in found}) == len(found)


def test_a_model_that_looks_at_values_has_the_losses_of_one_process_in_stages(two):
    for reason, alone, staged in two.run(lambda: example("untraceable_pipeline").compare(mesh(pp=2))):
        assert "untraceable_pipeline.py:" in reason and "if y.abs().max() > 2:" in reason
        near(staged, alone)


def test_an_embedding_tied_over_stages_stays_the_same_in_both(two):
    for found in two.run(lambda: example("tied_embeddings").compare(mesh(pp=2))):
        assert found["between the stages"] == 0 and found["moved"] > 1e-3
        # A step of AdamW turns the rounding error of an almost zero gradient into a fraction of the learning rate.
        assert found["from one process"] < 1e-3 and found["of the loss"] < 1e-5


def ran(*arguments):
    """Runs a command on one thread and returns its output."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=570, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def started(ranks, name, *arguments):
    """Runs an example on so many ranks and returns its output."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return ran(*launcher, ROOT / "examples" / f"{name}.py", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("sharding_with_norm", 2, "in_rows    verified; departs by "),
        ("untraceable_pipeline", 2, "no graph: "),
        ("tied_embeddings", 2, "between the stages   0.0e+00"),
        ("gpt_neo", 4, "step 2: loss "),
        pytest.param("deepspeed_engine", 2, "by DeepSpeed", marks=pytest.mark.exhaustive),
    ],
)
def test_an_example_is_a_script(name, ranks, message):
    if name == "deepspeed_engine":
        pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    assert message in started(ranks, name)
