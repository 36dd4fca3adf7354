"""Published tables are read as runs: bad rows, unknown columns and unknown sources are reported and left out."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MOSAIC_COLUMNS = (
    "Model,SeqLen (T),# GPUs,GPU,MFU,MicroBatchSize,GradAccum,GlobalBatchSize,Throughput (T/s),Precision,MP Mode,"
    "Sharding Strategy,Activation Checkpointing,Activation CPUOffload,Colour"
)
MOSAIC = f"""{MOSAIC_COLUMNS}
1b,2048,8,a100_40gb,45,8,2,128,120000,amp_bf16,PURE,FULL_SHARD,True,False,red
1b,2048,8,a100_40gb,145,8,2,128,520000,amp_bf16,PURE,FULL_SHARD,True,False,red
1b,2048,8,a100_40gb,45,0.5,2,8,120000,amp_bf16,PURE,FULL_SHARD,True,False,red
99b,2048,8,a100_40gb,45,8,2,128,120000,amp_bf16,PURE,FULL_SHARD,True,False,red
1b,2048,8,z9000,45,8,2,128,120000,amp_bf16,PURE,FULL_SHARD,True,False,red
1b,2048,8,a100_40gb,45,8,2,100,120000,amp_bf16,PURE,FULL_SHARD,True,False,red
1b,2048,8,a100_40gb,45,8,2,128,120000,amp_bf16,PURE,FULL_SHARD,True,False,blue
1b,2048
"""
GOLDEN_COLUMNS = (
    "suite,case,device,iteration_time_s_median,mem_max_allocated_gib,num-layers,hidden-size,ffn-hidden-size,"
    "num-attention-heads,num-query-groups,seq-length,vocab-size,micro-batch-size,global-batch-size,"
    "tensor-model-parallel-size,pipeline-model-parallel-size,num-layers-per-virtual-pipeline-stage,context-parallel-size,"
    "num-experts,sequence-parallel,use-distributed-optimizer,data-parallel-sharding-strategy,use-megatron-fsdp,"
    "use-torch-fsdp2,recompute-granularity,transformer-impl,untie-embeddings-and-output-weights,swiglu,cpu-offloading,"
    "optimizer-cpu-offload"
)
GOLDEN = f"""{GOLDEN_COLUMNS}
gpt,gpt_one,h100,0.5,4.0,8,640,,8,,1024,,2,32,2,2,1,,,true,true,,,,full,transformer_engine,true,,,
moe,moe_one,h100,0.5,4.0,8,640,,8,,1024,,2,32,2,2,,,8,true,true,,,,,transformer_engine,,,,
gpt,gpt_two,h100,,,8,640,,8,,1024,,2,32,2,2,,,,,,,,,,transformer_engine,,,,
"""


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        import tables
        import tables.judging

        yield tables
        for name in [each for each in sys.modules if each.partition(".")[0] == "tables"]:
            del sys.modules[name]


def source(tables, folder, **files):
    folder.mkdir()
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text)
    return tables.read_source(folder, folder.name)


def test_rows_of_fsdp_are_read_and_errors_of_other_rows_are_reported(tables, tmp_path):
    found = source(tables, tmp_path / "anything", some_csv=MOSAIC)
    (run,) = found.runs
    assert run.config == {
        "tp": 1,
        "pp": 1,
        "dp": 8,
        "zero": 3,
        "micro_batch": 8,
        "grad_accum": 2,
        "checkpoint_ratio": 1.0,
    }
    assert run.step_ms == pytest.approx(8 * 2 * 8 * 2048 / 120000 * 1e3)
    assert run.model.facts(precision="fp32", attention="sdpa", fusion=False).parameters == pytest.approx(
        1.316e9, rel=0.001
    )
    reasons = dict(each.split(": ", 1) for each in found.left)
    assert "MFU" in reasons["some.csv:3"]
    assert "not a whole number" in reasons["some.csv:4"]
    assert "99b" in reasons["some.csv:5"]
    assert "z9000" in reasons["some.csv:6"]
    assert "does not divide the global batch 100" in reasons["some.csv:7"]
    assert "it repeats another row" in reasons["some.csv:8"]
    assert "some.csv:9" in reasons


def test_megatrons_goldens_have_their_degrees_and_the_last_ranks_memory(tables, tmp_path):
    found = source(tables, tmp_path / "golden", all_csv=GOLDEN)
    run, mixture = found.runs
    want = {"tp": 2, "pp": 2, "cp": 1, "dp": 2, "micro_batch": 2, "grad_accum": 8, "zero": 1, "virtual_stages": 4}
    assert want.items() <= run.config.items()
    assert run.setup["reported_rank"] == "last" and run.memory_mib == 4096 and run.step_ms == 500
    assert run.model.vocabulary == 50432 and not run.model.tied  # 50,257 rounded up to a multiple of 256
    assert mixture.model.experts == 8 and mixture.config.get("ep", 1) == 1
    assert len(found.left) == 1


@pytest.mark.parametrize(
    ("degrees", "knobs"),
    [((1, 4, 4), {}), ((1, 4, 1), {"etp": 1}), ((2, 4, 4), {"ep": 2}), ((16, 4, 1), {"ep": 16, "etp": 1})],
)
def test_experts_are_spread_as_recipes_say(tables, degrees, knobs):
    assert tables.form.spread_of(*degrees, {"dp": 8}) == knobs


def test_calibration_by_other_rows_of_the_device_takes_a_common_factor_away(tables, tmp_path):
    rows = [f"1b,2048,8,a100_40gb,45,8,{accum},{64 * accum},120000,amp_bf16,PURE,FULL_SHARD,True,False,red"
            for accum in range(1, 13)]  # fmt: skip
    found = source(tables, tmp_path / "many", some_csv="\n".join([MOSAIC_COLUMNS, *rows]))
    judged = tables.judging.judge(found)
    before, after = judged.errors(), judged.calibrated(5, seeds=2)
    assert before["rows"] == 12 and before["unfit"] == 0 and "auc" not in before
    assert after["rows"] == 7 and after["time_median"] < max(0.5 * before["time_median"], 0.01)


def test_recipes_are_checked_as_files_and_unfit_verdicts_counted(tables, tmp_path):
    from tables import checking

    rows = [f"125m,2048,8,a100_40gb,45,{micro},1,{8 * micro},120000,amp_bf16,PURE,FULL_SHARD,False,False,red"
            for micro in (4, 256)]  # fmt: skip
    found = source(tables, tmp_path / "two", some_csv="\n".join([MOSAIC_COLUMNS, *rows]))
    fitting, large = checking.verdicts(found, most=10)
    assert fitting.found.fits and not large.found.fits
    assert fitting.found.trainer.global_batch == 32 and fitting.found.framework == fitting.run.framework
    assert fitting.found.parameters == pytest.approx(125e6, rel=0.02)
    summary = checking.summary([fitting, large])
    assert (summary["ran"], summary["failed"], summary["unfit"]) == (2, 0, 0.5) and "called fit" not in summary
    assert summary["time_bias"] == pytest.approx(
        (fitting.found.estimate.step_ms / fitting.run.step_ms + large.found.estimate.step_ms / large.run.step_ms) / 2
        - 1
    )
    with pytest.raises(tables.Left, match="neither Llama-like nor GPT-2-like"):
        checking.architecture(tables.models.model_of("bert-base"))


def _as_if(tables, scales, name, device):
    """A source whose step times are predictions with these factors of the constants."""
    from dataclasses import replace

    from tables import refitting

    rows = [f"{size},2048,8,{device},45,{micro},{accum},{8 * micro * accum},120000,amp_bf16,PURE,FULL_SHARD,True,False,red"
            for size in ("1b", "3b", "7b") for micro, accum in ((2, 1), (4, 2), (8, 1))]  # fmt: skip
    cells = [dict(zip(MOSAIC_COLUMNS.split(","), row.split(","), strict=True)) for row in rows]
    made = tables.Source(name)
    form = tables.reading.mosaic_fsdp
    made.runs = [form._run(cell, name, f"{name}:{at}") for at, cell in enumerate(cells)]
    judged = tables.judging.judge(made, refitting.constants_of(scales))
    steps = dict(zip((run.where for run in judged.runs), judged.predicted["step"], strict=True))
    made.runs = [replace(run, step_ms=float(steps[run.where])) for run in made.runs]
    return made


def test_a_source_that_is_left_out_is_predicted_by_what_the_others_say(tables):
    from tables import refitting

    power = refitting.LIMITED[refitting.HOPPER]
    alike = [_as_if(tables, {power: 0.9}, name, "h100_80gb") for name in ("one", "two")]
    other = _as_if(tables, {}, "other", "a100_80gb")
    found, whole = refitting.leave_out([*alike, other])
    assert whole[power] == pytest.approx(0.9, abs=0.02)
    (one, _, last), devices = found[:3], found[3:]
    assert [each.name for each in devices] == ["h100-80gb", "a100-80gb"]
    # Without its rows an H100 keeps the package's power, and its interval is that of an unmeasured device.
    assert devices[0].out > 0.05 and devices[0].bias < 0 and devices[0].cover == 1
    assert one.plain > 0.05 and one.out < 0.02 and one.together < 0.02
    assert one.scales[power] == pytest.approx(0.9, abs=0.02)
    # The other sources do not determine an A100's power, and hardly the constants that it shares with them.
    assert last.scales[refitting.LIMITED[refitting.OLDER]] == pytest.approx(1.0, abs=1e-6)
    assert last.plain < 1e-9 and last.out < 0.02


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,671", 1671.0),
        ("[888](http://x/1)", 888.0),
        ("n/a", None),
        ("", None),
        ("~13.5 GiB", 13.5),
        ("195.8 (↓1.4%)", 195.8),
    ],
)
def test_numbers_of_cells(tables, text, value):
    assert tables.form.number(text) == value


def test_the_interval_of_a_device_without_measured_runs_holds_its_bias_and_that_of_a_measured_one_does_not(tables):
    """The fault: a device that is left out with the width of one that was measured."""
    from dataclasses import replace

    from redline.estimator import find_hardware

    made = _as_if(tables, {}, "made", "h100_80gb")
    device = find_hardware("mi300x")

    def cover(measured_runs, slower):
        runs = [replace(run, hardware=device.replace(measured_runs=measured_runs)) for run in made.runs]
        judged = tables.judging.judge(tables.Source("made", runs))
        steps = dict(zip((run.where for run in judged.runs), judged.predicted["step"], strict=True))
        late = [replace(run, step_ms=slower * float(steps[run.where])) for run in runs]
        return tables.judging.judge(tables.Source("made", late)).errors()["time_cover"]

    assert cover(0, slower=1.35) == 1 and cover(500, slower=1.35) == 0
    assert cover(0, slower=2.0) == 0


STATED = """source,model,hw,gpus,precision,seq,tp,pp,cp,ep,etp,vp,mb,gbs,meas_s,container
a recipe,llama3-70b,gb200,64,bf16,8192,1,4,1,1,1,5,1,128,5.0,
a recipe,llama3-70b,gb200,64,,8192,1,4,1,1,1,5,1,128,5.0,
a recipe,llama3-70b,gb200,64,mxfp8,8192,1,4,1,1,1,5,1,128,3.0,26.02 NeMo Container
"""


def test_rows_that_state_a_recipe_are_read_with_the_facts_of_their_version(tables, tmp_path):
    found = source(tables, tmp_path / "stated", some_csv=STATED)
    assert found.left == ["some.csv:3: the precision is not stated"]
    first, later = found.runs
    assert (first.framework, later.framework) == ("megatron-bridge@25.02", "megatron-bridge@26.02")
    assert (
        first.config["virtual_stages"] == 5 and first.config["grad_accum"] == 8 and later.setup["products"] == "mxfp8"
    )
