"""Tables of Oneflow-Inc's DLPerf and LiBai: GPT and BERT on hosts of 8 V100-16GB, by OneFlow, Megatron-LM, DeepSpeed
and apex.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from redline.estimator import Hardware, Shape, find_hardware
from redline.estimator.hardware import Link

from .form import Left, Rows, Run, batches, columns, degrees, memory_mib, number, read_csv, read_markdown, whole
from .models import model_of

INFERRED = (
    "GPT grid: sequence 2048, vocabulary 50,257 padded to 51,200, every block recomputed, fp16 with fp32 master weights; "
    "memory is nvidia-smi's, less the context",
    "LiBai: GPT-2 and BERT of 24 or 48 layers are 1024 wide (its settings; sequence 1024 and 512), fp16; two runs a row, "
    "LiBai's and Megatron-LM's; devices of 32 GB, since the batches that ran do not fit into 16",
    "`XnYg_dp_Zbs` is X hosts of Y devices with Z samples each, GPT-2 small of sequence 1024, fp16",
    "BERT base by NVIDIA's PyTorch: sequence 128, under a heading with 16 in fp16 by apex, else fp32; batch a device",
    "hosts are joined by 100 Gbit/s; left out: convolutional networks, tables of several frameworks",
)
_PLACED = re.compile(r"(\d+)n_(\d+)g_dp_(\d+)bs")
CONTEXT_MIB = 800.0
_HALF = {"precision": "bf16_pure", "gradient_dtype": "fp16", "master_weights": "fp32", "products": "fp16"}


def matches(path: Path, header: set[str]) -> bool:
    if header >= {"libai_samples_s", "megatron_samples_s"}:
        return True
    return path.suffix != ".csv" and bool(header & {"case", "xn_xg_xdp_xmp_xbs", "samples/s(PyTorch)"})


def read(path: Path, source: str) -> Rows:
    if path.suffix == ".csv":
        given = (
            (f"{path.name}:{at}", _libai, (row, who)) for at, row in read_csv(path) for who in ("libai", "megatron")
        )
    else:
        given = iter(_of_page(path))
    for where, make, arguments in given:
        yield where, partial(make, *arguments, source, where)


def _of_page(path: Path) -> Iterator[tuple]:
    tables = read_markdown(path)
    cases = {row["case"]: row for table in tables for _, row in table.rows if row.get("case") and "hidden_size" in row}
    for table in tables:
        for at, row in table.rows:
            where = f"{path.name}:{at}"
            if row.get("case") and columns(table.header).keys() & {"step_ms", "samples"}:
                yield where, _grid, (row, cases.get(row["case"]))
            elif _PLACED.search(" ".join(row.values())):
                yield where, _placed, (row,)
            elif "samples/s(PyTorch)" in row:
                yield where, _bert, (row, "16" in table.words)


def _machine(memory: str = "16gb") -> Hardware:
    return find_hardware(f"v100-{memory}").replace(
        inter_node=Link(name="100 Gbit/s for 8", gb_per_s=12.5 / 8, latency_us=25.0)
    )


def _grid(row: dict[str, str], asked: dict[str, str] | None, source: str, where: str) -> Run:
    found = columns(list(row))
    if asked is None:
        raise Left(f"the case '{row['case']}' is not described")
    known = {what: asked[column] for what, column in columns(list(asked)).items()}
    tp, pp, dp = (whole(known.get(each), 1) for each in ("tp", "pp", "dp"))
    hidden, heads, layers = (whole(asked[each]) for each in ("hidden_size", "num_attention_heads", "num_layers"))
    config = {**degrees(tp * pp * dp, tp=tp, pp=pp),
              **batches(dp, whole(known.get("micro_batch")), whole(known.get("global_batch")), None),
              "zero": 0, "checkpoint_ratio": 1.0}  # fmt: skip
    samples = number(row[found["samples"]])
    memory = memory_mib(row[found["memory"]], "mib") if "memory" in found else None
    return _made(
        source, where, _gpt(layers, hidden, heads, 2048), config, 2048, samples,
        memory=memory - CONTEXT_MIB if memory else None, framework=_trainer(where),
    )  # fmt: skip


def _trainer(where: str) -> str:
    """OneFlow's models are those of its library LiBai, the others are Megatron-LM's."""
    return "libai" if where.startswith("OneFlow-Language") else "megatron"


def _gpt(layers: int, hidden: int, heads: int, length: int, **more: object) -> Shape:
    return Shape(name="gpt", layers=layers, hidden=hidden, heads=heads, vocabulary=51200, gated=False, tied=True,
                 biases=True, positions=length, dropout=True, **more)  # fmt: skip


def _made(
    source: str, where: str, model: Shape, config: dict, seq_len: int, samples: float | None, *,
    memory: float | None = None, framework: str = "megatron", setup: dict | None = None, device: str = "16gb",
) -> Run:  # fmt: skip
    if not samples:
        raise Left("it has no throughput")
    per_step = config["micro_batch"] * config["grad_accum"] * config["dp"]
    return Run(
        source=source,
        where=where,
        model=model,
        hardware=_machine(device),
        framework=framework,
        setup={"seq_len": seq_len, "attention": "eager", **(setup or _HALF)},
        config=config,
        step_ms=per_step / samples * 1e3,
        memory_mib=memory,
    )


def _libai(row: dict[str, str], library: str, source: str, where: str) -> Run:
    layers, dp, tp, pp = (whole(row[each]) for each in ("layers", "dp", "tp", "pp"))
    bert = row["family"].upper() == "BERT"
    length = 512 if bert else 1024
    if row["act_ckpt"] not in ("True", "False") or None in (layers, dp, tp, pp):
        raise Left("it cannot be read")
    config = {**degrees(dp * tp * pp, tp=tp, pp=pp), "zero": 0,
              # The micro-batch of a row includes the accumulation of all replicas if it exceeds the batch.
              **batches(dp, whole(row["micro_batch"]), whole(row["global_batch"]), None),
              "checkpoint_ratio": float(row["act_ckpt"] == "True")}  # fmt: skip
    model = _gpt(layers, 1024, 16, length, causal=not bert)
    return _made(
        source, f"{where} {library}", model, config, length, number(row[f"{library}_samples_s"]), framework=library,
        device="32gb",
    )  # fmt: skip


def _placed(row: dict[str, str], source: str, where: str) -> Run:
    hosts, each, micro = (int(value) for value in _PLACED.search(" ".join(row.values())).groups())
    if "on_optimization" in row.get("test_desc", ""):
        raise Left("OneFlow's own placement of the optimizer")
    found = columns(list(row))
    memory = next((memory_mib(value, "mib") for name, value in row.items() if "mem" in name.lower()), None)
    zero = re.search(r"zero-stage-(\d)", row.get("test_desc", ""))
    devices = hosts * each
    config = {"tp": 1, "pp": 1, "dp": devices, "micro_batch": micro, "grad_accum": 1, "zero": int(zero[1]) if zero else 0,
              "checkpoint_ratio": 0.0}  # fmt: skip
    return _made(source, where, _gpt(12, 768, 12, 1024), config, 1024, number(row[found["samples"]]),
                 memory=memory - CONTEXT_MIB if memory else None, framework="deepspeed" if zero else _trainer(where))  # fmt: skip


def _bert(row: dict[str, str], half: bool, source: str, where: str) -> Run:
    hosts, each, micro = (whole(row[name]) for name in ("node_num", "gpu_num_per_node", "batch_size_per_device"))
    if None in (hosts, each, micro):
        raise Left("hosts, devices or batch is not stated")
    config = {"tp": 1, "pp": 1, "dp": hosts * each, "micro_batch": micro, "grad_accum": 1, "zero": 0}
    setup = {"precision": "fp16" if half else "fp32", "parameter_dtype": None, "master_weights": None,
             "gradient_dtype": None}  # fmt: skip
    return _made(source, where, model_of("bert-base"), config, 128, number(row["samples/s(PyTorch)"]),
                 framework="redline", setup=setup)  # fmt: skip
