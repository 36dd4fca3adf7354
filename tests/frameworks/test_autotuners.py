"""Spaces in other tools' files: each is converted, and anything left out is reported."""

import copy
import json
import math

import pytest
import yaml
from hypothesis import given, settings, strategies as st
from redline.base.errors import UsageError
from redline.frameworks.autotuners import find_source
from stated_spaces import left, read, values


def written(tmp_path, name, document):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document) if name.endswith(".json") else yaml.safe_dump(document))
    return str(path)


# -- FlagScale -----------------------------------------------------------------------------------------------

FLAGSCALE = """
defaults:
  - train: 7b
  - _self_
experiment:
  exp_name: aquila2
  task: {type: train, backend: megatron, entrypoint: ./flagscale/train/train_gpt.py}
  runner: {backend: torchrun, nnodes: 1, nproc_per_node: 8}
  auto_tuner:
    space:
      data_parallel_size: "auto"
      use_distributed_optimizer: [true, false]
      tensor_model_parallel_size: [2, 4, 8]
      sequence_parallel: [true]
      pipeline_model_parallel_size: "auto"
      num_layers_per_virtual_pipeline_stage: [0, 1, 2]
      context_parallel_size: [1]
      expert_model_parallel_size: [1]
      micro_batch_size: [1, 2, 4]
      use_recompute: [true, false]
      recompute_method: "auto"
      recompute_granularity: "auto"
      recompute_num_layers: "auto"
    control: {max_time_per_task: 300, train_iters: 5, max_time: 600}
action: auto_tune
"""
MODEL = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024, "global_batch_size": 32}


def flagscale(tmp_path, **changed):
    document = yaml.safe_load(FLAGSCALE)
    document["experiment"]["auto_tuner"]["space"].update(changed)
    written(tmp_path, "train/7b.yaml", {"system": {}, "model": MODEL})
    return written(tmp_path, "config.yaml", document)


def flagscale_strategies(space, cards):
    """Returns the strategies of `Searcher.build_strategies`, reimplemented from its rules."""
    out = set()
    for tp in space["tp"]:
        for pp in space["pp"]:
            dp = cards // (tp * pp)
            if tp * pp * dp != cards or MODEL["num_layers"] % pp or MODEL["global_batch_size"] % max(dp, 1):
                continue
            for zero in space["zero"] if dp > 1 else [None]:
                for sp in space["sp"] if tp > 1 else [None]:
                    for micro in space["micro"]:
                        if (MODEL["global_batch_size"] // dp) % micro:
                            continue
                        for chunk in space["chunk"]:
                            stage = MODEL["num_layers"] // pp
                            if chunk and (pp <= 2 or stage % chunk or micro % chunk):
                                continue
                            for recompute in _recomputations(stage):
                                out.add((tp, pp, dp, zero, sp, micro, chunk, *recompute))
    return out


def _recomputations(stage):
    yield False, None, None, None
    yield True, "selective", None, None
    for layers in range(1, MODEL["num_layers"] + 1):
        if layers == stage:
            yield True, "full", "uniform", layers
        if layers <= stage:
            yield True, "full", "block", layers


def test_flagscales_space_holds_the_strategies_of_its_searcher_and_no_others(tmp_path):
    found = read(flagscale(tmp_path), devices=8)
    names = ("tp", "pp", "dp", "zero", "sequence_parallel", "micro_batch", "num_layers_per_virtual_pipeline_stage")
    names += ("use_recompute", "recompute_granularity", "recompute_method", "recompute_num_layers")
    mine = {tuple(config.get(name) for name in names) for config in found.space}
    given = {"tp": [2, 4, 8], "pp": [1, 2, 4, 8], "zero": [0, 1], "sp": [True], "micro": [1, 2, 4], "chunk": [0, 1, 2]}
    assert mine == flagscale_strategies(given, 8) and len(mine) == len(found.space) > 100
    assert all(each["micro_batch"] * each["grad_accum"] * each["dp"] == 32 for each in found.space)
    assert found.space["zero"].default == 1 and found.space["tp"].monotone_memory == -1
    assert set(left(found)) == {"auto_tuner.control"}
    assert "off there, and so no knobs: context_parallel_size=1, expert_model_parallel_size=1" in found.notes


def test_ranks_that_share_experts_are_replicas_in_flagscale(tmp_path):
    found = read(flagscale(tmp_path, expert_model_parallel_size=[1, 2, 8]), devices=8)
    mine = {(config["tp"], config["pp"], config["dp"], config["ep"]) for config in found.space}
    assert {(2, 1, 4, 1), (2, 1, 4, 2), (2, 2, 2, 2)} <= mine
    assert all(tp * pp * dp == 8 and dp % ep == 0 for tp, pp, dp, ep in mine)
    assert not [each for each in mine if each[3] == 8]  # tp is at least 2


def test_flagscales_auto_is_its_own_range_and_recomputing_everything_is_a_ratio(tmp_path):
    path = flagscale(
        tmp_path,
        tensor_model_parallel_size="auto",
        context_parallel_size="auto",
        micro_batch_size="auto",
        recompute_method=["uniform"],
        recompute_granularity=["full"],
        num_layers_per_virtual_pipeline_stage="auto",
    )
    space = read(path, devices=8).space
    assert space["tp"].values == space["cp"].values == (1, 2, 4, 8)
    assert space["micro_batch"].values == (1, 2, 4, 8, 16, 32)
    assert space["num_layers_per_virtual_pipeline_stage"].values == (0, 1, 2, 4, 8)
    assert space["checkpoint_ratio"].values == (0.0, 1.0) and space["checkpoint_ratio"].default == 1.0
    assert space["dp"].rule.text == "8 // (tp * pp * cp)"


def test_flagscales_file_for_other_devices_is_told_from_these(tmp_path):
    found = read(flagscale(tmp_path, data_parallel_size=[1]), devices=4)
    assert found.space["tp"].values == (2, 4) and {config["dp"] for config in found.space} == {1}
    assert left(found)["tensor_model_parallel_size 8"] == "it does not divide the 4 devices"
    assert any("for 8 devices (nnodes 1, nproc_per_node 8), here are 4" in each for each in found.notes)
    with pytest.raises(UsageError, match="tensor_model_parallel_size 2, 4, 8: none of them divides 1 devices"):
        read(flagscale(tmp_path), devices=1)


def test_settings_missing_in_flagscale_s_file_are_reported(tmp_path):
    document = yaml.safe_load(FLAGSCALE)
    del document["defaults"]
    document["experiment"]["auto_tuner"]["space"] |= {"micro_batch_size": "auto", "block_size": [8, 16], "odd": "auto"}
    document["experiment"]["auto_tuner"]["novel"] = 1
    found = read(document, devices=8)
    assert set(left(found)) == {
        *("auto_tuner.control", "auto_tuner.novel", "micro_batch_size", "recompute_num_layers", "odd"),
    }
    assert found.space["block_size"].values == (8, 16)
    assert any("num_layers, hidden_size" in each and "not in the file" in each for each in found.notes)
    assert read(document, devices=8, global_batch=16).space["micro_batch"].values == (1, 2, 4, 8, 16)


# -- PaddlePaddle --------------------------------------------------------------------------------------------

PADDLE = {
    "dp_degree": "auto",
    "mp_degree": [1, 2],
    "pp_degree": {"min": 1, "max": 2},
    "vpp_degree": [1, 2],
    "micro_batch_size": "auto",
    "sharding_degree": "auto",
    "sharding_stage": [1, 2],
    "use_recompute": "auto",
    "recompute_granularity": ["full", "core_attn"],
    "task_limit": 1,
    "max_time_per_task": 90,
    "custom_search_dim": {"fuse_attn": {"value": ["0", "1"]}},
    "model_cfg": {"hidden_size": 64, "global_batch_size": 8, "num_layers": 8, "num_attention_heads": 4},
    "run_cmd": {
        "dp_degree": ["-o", "Distributed.dp_degree"],
        "mp_degree": ["-o", "Distributed.mp_degree"],
        "local_batch_size": ["--local_batch_size", ""],
        "sequence_parallel": ["--sequence_parallel", ""],
        "use_recompute": ["model.json", "recompute.use"],
        "fuse_attn": ["model.json", "fuse", "level_"],
        "search_stage": {"max_steps": ["--max_steps", "20"]},
        "run_best_stage": {"max_steps": ["--max_steps", "1000"]},
        "refined_recompute": ["--rr", ""],
        "generate_launch_cfg": True,
    },
    "metric_cfg": {"name": "interval_samples_per_second", "OptimizationDirection": "Maximize"},
}


def test_paddles_degrees_share_the_devices_and_the_batch(tmp_path):
    found = read(written(tmp_path, "tuner.json", PADDLE), devices=8)
    space = found.space
    for config in space:
        assert config["tp"] * config["pp"] * config["sharding_degree"] * config["dp_degree"] == 8
        assert config["dp"] == config["dp_degree"] * config["sharding_degree"]
        assert ("zero" in config) == (config["sharding_degree"] > 1)
        assert config["micro_batch"] * config["dp"] * config["grad_accum"] == 8
        assert 8 % (config["pp"] * config["virtual_stages"]) == 0
        assert config["virtual_stages"] == 1 or config["grad_accum"] % config["pp"] == 0
        assert ("recompute_granularity" in config) == config["use_recompute"]
    assert {each["sharding_degree"] for each in space} == {1, 2, 4, 8} and space["zero"].values == (1, 2)
    assert space["virtual_stages"].values == (1, 2) and space["fuse_attn"].values == ("0", "1")
    assert {"task_limit", "max_time_per_task", "run_cmd.refined_recompute"} == set(left(found))
    assert found.options == (
        ("-o Distributed.dp_degree=", "{dp_degree!s}"),
        ("-o Distributed.mp_degree=", "{tp!s}"),
        ("--local_batch_size", "{micro_batch * grad_accum!s}"),
        ("--sequence_parallel", "{min(tp - 1, 1)!s}"),
        ("--max_steps", "20"),
    )
    assert found.render == ("model.json:recompute.use={use_recompute}", "model.json:fuse=level_{fuse_attn!s}")
    assert found.metric == r"interval_samples_per_second:* *(?P<samples_per_second>\d+(?:\.\d*)?)"
    assert found.direction is None


def test_paddles_missing_degrees_are_one_and_recomputing_is_a_ratio():
    found = read({"mp_degree": [1, 2], "dp_degree": "auto", "use_recompute": [True, False]}, devices=2)
    assert {(each["tp"], each["dp_degree"]) for each in found.space} == {(1, 2), (2, 1)}
    assert found.space["checkpoint_ratio"].values == (0.0, 1.0)
    with pytest.raises(UsageError, match="pp_degree must have min and max"):
        read({"pp_degree": {"min": 2}})
    with pytest.raises(UsageError, match="mp_degree must be whole numbers of at least 1 or 'auto', but contains 'two'"):
        read({"mp_degree": ["two"]})


# -- DeepSpeed -----------------------------------------------------------------------------------------------

DEEPSPEED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "fp16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.9, 0.999]}},
    "zero_optimization": {"stage": [2, 3], "overlap_comm": [True, False], "reduce_bucket_size": [5e7, 5e8]},
    "autotuning": {
        "enabled": True,
        "max_train_batch_size": 64,
        "min_train_micro_batch_size_per_gpu": 2,
        "max_train_micro_batch_size_per_gpu": 12,
        "num_tuning_micro_batch_sizes": 3,
        "tuner_type": "model_based",
        "start_profile_step": 3,
        "metric": "latency",
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"},
    },
}


def test_deepspeeds_lists_are_choices_and_its_file_is_rendered(tmp_path):
    path = written(tmp_path, "ds_config.json", DEEPSPEED)
    found = read(path, devices=2)
    assert values(found.space) == {
        "zero": (2, 3),
        "micro_batch": (2, 4, 8, 12),
        "overlap_comm": (True, False),
        "reduce_bucket_size": (5e7, 5e8),
    }
    assert {(each["micro_batch"], each["grad_accum"]) for each in found.space} == {(2, 16), (4, 8), (8, 4), (12, 2)}
    assert found.options == (("--per_device_train_batch_size", "{micro_batch}"),)
    # Options that the Trainer gets on the command line stay `auto` in the file, as it compares the two.
    assert set(found.render) == {
        path,
        f"{path}:zero_optimization.stage={{zero}}",
        f"{path}:gradient_accumulation_steps={{grad_accum}}",
        f"{path}:zero_optimization.overlap_comm={{overlap_comm}}",
        f"{path}:zero_optimization.reduce_bucket_size={{reduce_bucket_size}}",
        f"{path}:autotuning.enabled={{false}}",
    }
    assert set(left(found)) == {
        f"autotuning.{each}" for each in ("tuner_type", "num_tuning_micro_batch_sizes", "start_profile_step", "metric")
    }


def test_deepspeeds_own_choices_come_with_fast_off_and_only_for_their_stages():
    document = {"zero_optimization": {"stage": "all", "reduce_scatter": True}, "autotuning": {"fast": False}}
    space = read(document).space
    assert space["zero"].values == (0, 1, 2, 3)
    for config in space.sample(200):
        assert ("reduce_bucket_size" in config) == (config["zero"] >= 1)
        assert ("overlap_comm" in config) == (config["zero"] >= 2)
        assert ("allgather_partitions" in config) == (config["zero"] == 3)
        assert "reduce_scatter" not in config
    one = read({"zero_optimization": {"stage": 1}, "autotuning": {"fast": False}}).space
    assert {"reduce_bucket_size", "allgather_bucket_size", "micro_batch"} == set(values(one))


def test_deepspeeds_micro_batches():
    listed = {"train_micro_batch_size_per_gpu": [1, 4, 16], "gradient_accumulation_steps": 2, "autotuning": {}}
    assert values(read(listed).space) == {"micro_batch": (1, 4, 16)}
    least = {"train_micro_batch_size_per_gpu": 4, "autotuning": {"enabled": True}}
    assert read(least).space["micro_batch"].values == (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert read(least, devices=2, global_batch=64).space["micro_batch"].values == (4, 8, 16, 32)
    several = {**listed, "gradient_accumulation_steps": [1, 2]}
    assert "gradient_accumulation_steps" in left(read(several))
    with pytest.raises(UsageError, match="micro-batches from 8 to 4: there are none"):
        read({"train_micro_batch_size_per_gpu": 8, "autotuning": {"max_train_micro_batch_size_per_gpu": 4}})
    with pytest.raises(UsageError, match="mp_size must be a whole number of at least 1, but is 'two'"):
        read({"autotuning": {"mp_size": "two"}})
    with pytest.raises(UsageError, match=r"zero_optimization must be a mapping, such as \{'stage': 'all'\}"):
        read({"zero_optimization": "all"})
    with pytest.raises(UsageError, match="stage must be of 0, 1, 2, 3 or 'all', but is 4"):
        read({"zero_optimization": {"stage": [1, 4]}})


# -- all of them ---------------------------------------------------------------------------------------------


def test_a_file_that_no_tool_wrote_is_refused_and_those_known_are_named(tmp_path):
    with pytest.raises(
        UsageError, match="not a known format. FlagScale's auto-tuner has .*Write other spaces for --space"
    ):
        find_source(written(tmp_path, "odd.yaml", {"a": 1}))
    with pytest.raises(UsageError, match="a space of redline: give it with --space"):
        find_source(written(tmp_path, "own.yaml", {"knobs": []}))
    with pytest.raises(UsageError, match="none.yaml cannot be read: No such file"):
        find_source(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "deep.yaml").write_text("[" * 1000)
    (tmp_path / "code.yaml").write_text("autotuning: !!python/object/apply:os.system ['true']")
    for name, says in (("bad.yaml", "not YAML"), ("bad.json", "not JSON"), ("deep.yaml", "nest"), ("code.yaml", "tag")):
        with pytest.raises(UsageError, match=says):
            find_source(tmp_path / name)


ODD = [None, True, 0, -1, 1.5, math.inf, "auto", "x", "", [], [1, "a"], [[1]], [None], {}, {"a": 1}, {"min": 1}]


@st.composite
def damaged(draw):
    """Draws a document of one of the tools with one value, at any depth, replaced by another."""
    whole = draw(st.sampled_from([yaml.safe_load(FLAGSCALE), PADDLE, DEEPSPEED]))
    document = at = copy.deepcopy(whole)
    while True:
        keys = sorted(at) if isinstance(at, dict) else range(len(at))
        key = draw(st.sampled_from(list(keys)))
        if not isinstance(at[key], dict | list) or not at[key] or draw(st.integers(0, 2)) == 0:
            at[key] = draw(st.sampled_from(ODD))
            return document
        at = at[key]


@settings(max_examples=400, deadline=None)
@given(damaged(), st.sampled_from([1, 2, 8]))
def test_a_damaged_document_is_read_or_refused_in_words(document, devices):
    try:
        source = find_source(document)
        found = source.read(devices)
    except UsageError as error:
        assert str(error)
    else:
        assert found.space.default() in found.space


HUGE = [(1 << 20) + 1, 10**12 + 39, 10**300]


@pytest.mark.parametrize("size", HUGE)
def test_sizes_that_would_take_unbounded_work_are_refused(size, tmp_path):
    for changed in ({"global_batch_size": size}, {"num_layers": size}):
        document = yaml.safe_load(FLAGSCALE)
        document["experiment"]["auto_tuner"]["space"]["micro_batch_size"] = "auto"
        document["train"] = {"model": {**MODEL, **changed}}
        with pytest.raises(UsageError, match="at most 1,048,576|more than 4,096 values"):
            read(document, devices=8)
    for name in ("micro_batch_size", "mp_degree", "dp_degree", "vpp_degree"):
        with pytest.raises(UsageError, match=f"{name} from 1 to .* has more than 4,096 values"):
            read({**PADDLE, name: {"min": 1, "max": size}}, devices=8)
    with pytest.raises(UsageError, match="at most 1,048,576 for 'auto'"):
        auto = {**PADDLE, "micro_batch_size": "auto", "model_cfg": {**PADDLE["model_cfg"], "global_batch_size": size}}
        read(auto, devices=8)


def test_a_large_global_batch_needs_no_divisors_if_micro_batches_are_listed():
    total = 3 << 20
    listed = {**PADDLE, "micro_batch_size": [1, 2], "model_cfg": {**PADDLE["model_cfg"], "global_batch_size": total}}
    assert read(listed, devices=8).space["micro_batch"].values == (1, 2)


def test_deepspeeds_comments_and_schedules_are_not_choices():
    document = {
        "_comment": ["one line", "another"],
        "zero_optimization": {"stage": [1, 2]},
        "elasticity": {"enabled": True, "micro_batch_sizes": [2, 4, 6]},
        "data_efficiency": {"data_sampling": {"curriculum_learning": {"difficulty": [1, 2]}}},
        "curriculum_learning": {"enabled": False},
    }
    found = read(document)
    assert values(found.space) == {"zero": (1, 2)}
    assert set(left(found)) == {"elasticity", "data_efficiency"}
