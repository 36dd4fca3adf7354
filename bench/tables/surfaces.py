"""Tables with a YAML beside each (`bench/surfaces`, and those of other trainers in that form) as estimators and as runs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from redline.estimator import (
    Estimator,
    Hardware,
    Link,
    Shape,
    TrainingSetup,
    find_hardware,
)
from redline.estimator.trainers import TRAINERS, find_trainer

from .form import Rows, Run

INFERRED = ("what a table's YAML does not say is inferred from the framework that it names: `training_of` says how",)
KNOBS = (
    "tp", "pp", "dp", "zero", "micro_batch", "grad_accum",
    "checkpoint_ratio", "sequence_parallel", "precision", "attention", "fusion", "fused_optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A table and the estimator for it."""

    name: str
    table: pd.DataFrame
    estimator: Estimator
    inferred: tuple[str, ...]

    @property
    def ok(self) -> np.ndarray:
        return (self.table["status"] == "ok").to_numpy()

    @property
    def configs(self) -> pd.DataFrame:
        return self.table[[name for name in KNOBS if name in self.table]]

    @property
    def step_ms(self) -> np.ndarray:
        return self.table["step_ms"].to_numpy(float)


def shape_of(model: Mapping[str, Any]) -> Shape:
    """Returns the model of a YAML."""
    llama = model.get("family") not in ("gpt2", "gpt", "bert", "opt")
    return Shape(
        name=str(model.get("family", "model")),
        layers=model["num_layers"],
        hidden=model["hidden_size"],
        heads=model["num_attention_heads"],
        kv_heads=model.get("num_key_value_heads"),
        intermediate=model.get("intermediate_size"),
        vocabulary=model["vocab_size"],
        tied=bool(model.get("tie_word_embeddings", not llama)),
        gated=llama,
        biases=not llama,
        positions=0 if llama else model["seq_len"],
        dropout=not llama,
    )


def hardware_of(data: Mapping[str, Any]) -> tuple[Hardware, list[str]]:
    """Returns the cluster of a YAML, with its network if the YAML has its bandwidth."""
    device = find_hardware(data["device"])
    notes = []
    per_node = int(data.get("gpus_per_node", device.devices_per_node))
    text = str(data.get("inter_node", ""))
    rate = None
    if found := re.search(r"(\d+)\s*x\s*(HDR|NDR|EDR)", text, re.IGNORECASE):
        gbit = {"EDR": 100, "HDR": 200, "NDR": 400}[found[2].upper()]
        rate = int(found[1]) * gbit / 8 / per_node
    elif found := re.search(r"([\d.]+)\s*(G[Bb])(?:/s|ps)?\s*per\s*node", text):
        rate = float(found[1]) / (1 if found[2] == "GB" else 8) / per_node
    if rate is not None:
        # EFA's latency is about twice InfiniBand's.
        latency = 45.0 if "efa" in text.lower() else device.inter_node.latency_us
        device = device.replace(inter_node=Link(name=text, gb_per_s=rate, latency_us=latency))
        notes.append(f"network: {rate:g} GB/s a device, {latency:g} us")
    return device.replace(devices_per_node=per_node), notes


def framework_of(about: Mapping[str, Any]) -> str:
    """Returns the trainer of a YAML by its name or its source; redline if neither names one."""
    words = f"{about.get('name', '')} {about.get('source', '')} {about.get('framework', '')}".lower()
    named = [name for name in TRAINERS if name not in ("redline", "trainer") and name in words]
    return named[0] if named else "trainer" if "transformers" in words else "redline"


def training_of(data: Mapping[str, Any], seq_len: int, gpus: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of the setup in a YAML, and a description of the inferred ones."""
    notes = []
    recompute = str(data.get("checkpointing", "none")).lower()
    selective = "selective" in recompute
    ratio = 0.0 if selective or recompute in ("none", "no", "false", "off") else 1.0
    if "not stated" in recompute:
        notes.append("checkpointing not stated: every block, Megatron-LM's habit before selective recomputation")
    tp_mode, order = (str(data.get(name, "")).lower() for name in ("tp_mode", "pipeline"))
    pipeline = (
        "interleaved"
        if "interleav" in order
        else "gpipe"
        if any(each in order for each in ("gpipe", "afab"))
        else "1f1b"
    )
    setup_fields: dict[str, Any] = {
        "devices": gpus if isinstance(gpus, int) else 1,
        "seq_len": seq_len,
        "global_batch": data.get("global_batch_sequences"),
        "sequence_parallel": "reduce_scatter" in tp_mode
        or "sequence" in tp_mode
        or bool(data.get("sequence_parallel")),
        "recompute_attention": selective,
        "checkpoint_ratio": ratio,
        "pipeline": pipeline,
        "virtual_stages": int(data.get("virtual_stages", 2 if pipeline == "interleaved" else 1)),
    }
    if "16" not in str(data.get("precision", "bf16")):
        setup_fields |= {"precision": "fp32", "parameter_dtype": None, "gradient_dtype": None, "master_weights": None}
    for name, field in (("master_weights", "master_weights"), ("gradient_accumulation", "gradient_dtype")):
        if name in data:
            setup_fields[field] = str(data[name])
    if "attention" in data:
        setup_fields["attention"] = "sdpa" if "flash" in str(data["attention"]).lower() else "eager"
    return setup_fields, notes


def own(about: Mapping[str, Any]) -> tuple[Hardware, TrainingSetup]:
    """Returns the machine and the setup of a table recorded by `bench/record.py`; knobs are in the columns of the table."""
    machine, training = about["hardware"], about["training"]
    precision = training["precision"]
    return Hardware.from_mapping(machine["numbers"], name=machine["name"], where=about["name"]), TrainingSetup(
        devices=machine["gpus"],
        seq_len=about["model"]["seq_len"],
        global_batch=training["global_batch_sequences"],
        memory_limit_mib=machine.get("memory_limit_mib"),
        precision="fp32" if precision == "knob" else precision,
    )


def load(path: Path) -> Measured:
    """Returns a table with its estimator."""
    about = yaml.safe_load(path.with_suffix(".yaml").read_text())
    framework = framework_of(about)
    table = pd.read_csv(path)
    if "numbers" in about["hardware"]:
        (device, setup), notes = own(about), []
        table = table.assign(**{knob: 1 for knob in ("tp", "pp", "dp") if knob not in table})
    else:
        device, notes = hardware_of(about["hardware"])
        trainer = find_trainer(framework)
        setup_fields, more = training_of(about["training"], about["model"]["seq_len"], about["hardware"].get("gpus"))
        if framework == "megatron":
            # The tables are from 2021 or before: scores are stored, and backward writes separate gradients.
            # With fp16 it accumulates gradients in fp16 unless configured otherwise; with bf16 in fp32.
            half = "fp16" in str(about["training"].get("precision", ""))
            setup_fields = {
                "attention": "eager",
                "gradient_copy": True,
                **({"gradient_dtype": "fp16"} if half else {}),
                **setup_fields,
            }
        setup, notes = trainer.training(**setup_fields), [*notes, *more, *trainer.facts]
    samples = table["micro_batch"] * table["grad_accum"] * table["dp"]
    if "step_ms" not in table:
        table["step_ms"] = samples * setup.seq_len / table["tokens_per_second"] * 1e3
    table["throughput"] = samples * setup.seq_len / table["step_ms"] * 1e3
    estimator = Estimator(shape_of(about["model"]), device, setup, framework=framework)
    return Measured(path.stem, table, estimator, tuple(notes))


def matches(path: Path, header: set[str]) -> bool:
    return path.suffix == ".csv" and path.with_suffix(".yaml").is_file() and "micro_batch" in header


def read(path: Path, source: str) -> Rows:
    surface = load(path)
    made = surface.estimator
    memory = surface.table.get("peak_memory_gib")
    for at, row in enumerate(surface.configs.to_dict("records")):
        ok, step = surface.ok[at], surface.step_ms[at]
        peak = None if memory is None else float(memory.iloc[at])
        yield (
            f"{path.name}:{at + 2}",
            partial(
                Run,
                source=source,
                where=f"{path.name}:{at + 2}",
                model=made.source,
                hardware=made.hardware,
                framework=framework_of(yaml.safe_load(path.with_suffix(".yaml").read_text())),
                setup={each.name: getattr(made.training, each.name) for each in fields(TrainingSetup)},
                config=row,
                step_ms=float(step) if ok and np.isfinite(step) else None,
                memory_mib=peak * 1024 if ok and peak and np.isfinite(peak) else None,
                failed=not ok,
            ),
        )
