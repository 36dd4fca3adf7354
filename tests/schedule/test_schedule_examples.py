"""The three classic demonstrations, at small sizes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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
    from torch.distributed.device_mesh import init_device_mesh

    sharding = example("parameter_sharding")
    torch.manual_seed(seed)
    sch = create_schedule(sharding.MLP(8, 16), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    with verify(sch, torch.randn(4, 8)):
        sharding.schedule(sch)
    return sch["fc1"].module.weight.shape, sch["fc2"].module.weight.shape


def test_parameter_sharding_has_the_gradients_of_one_rank(two, seed):
    shapes = two.run(check_sharding, seed)
    assert shapes == [((8, 8), (8, 8))] * 2


def ran(*arguments):
    """What a command printed, on one thread."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=570, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_a_whole_transformer_on_two_processes():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    out = ran(*launcher, ROOT / "examples" / "transformer_parallel.py", "--model", "llama", "--sequence-parallel")
    losses = [line.split("loss ")[1].split()[0] for line in out.splitlines() if "loss " in line]
    assert len(losses) == 2 and float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-5)


@pytest.mark.exhaustive
def test_what_a_schedule_costs_is_measured():
    out = json.loads(ran(ROOT / "bench" / "schedule.py", "--rounds", 3, "--json"))
    # 24 blocks, six cuts and four exchanges in each.
    assert out["apply"]["steps"] > 240 and out["apply"]["seconds"] > 0
    assert min(out["lines"].values()) > 0 and out["lines"]["every parallel knob of BERT"] < 60
    assert out["step"]["ratio"] > 0
