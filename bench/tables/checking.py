"""`redline check` on the recipes of tables: each run is written as its framework's file, and its model is traced."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from redline.base.errors import RedlineError
from redline.estimator import Shape, TrainingSetup
from redline.estimator.check import Check, check
from redline.estimator.trainers import find_trainer
from redline.frameworks.trainer_config import TrainerConfig
from redline.space import Config

from .form import Left, Run
from .judging import judge
from .reading import Source

FILE_OF_OTHERS = "accelerate"
"""Framework in whose file a run of a trainer without one is written."""
ASKED = ("devices", "seq_len", "global_batch", "memory_limit_mib")
"""Fields of the setup that a file sets itself, unlike those of its framework."""


def architecture(shape: Shape) -> dict[str, Any]:
    """Returns a model's config.json: Llama's if it has a gate, GPT-2's if it has learned positions.

    Raises:
        Left: it is neither.
    """
    sizes = {"vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied, "use_cache": False}
    if shape.gated and not shape.positions:
        return {
            "model_type": "llama", "num_hidden_layers": shape.layers, "hidden_size": shape.hidden,
            "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads or shape.heads,
            "intermediate_size": shape.intermediate or 4 * shape.hidden, "max_position_embeddings": 1 << 20,
            **({"head_dim": shape.head_dim} if shape.head_dim else {}), **sizes,
        }  # fmt: skip
    if shape.gated or not shape.positions or not shape.causal or shape.kv_heads not in (None, shape.heads):
        raise Left(f"{shape.name} is neither Llama-like nor GPT-2-like")
    dropped = {} if shape.dropout else dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return {
        "model_type": "gpt2", "activation_function": "gelu", "n_layer": shape.layers, "n_embd": shape.hidden,
        "n_head": shape.heads, "n_inner": shape.intermediate, "n_positions": shape.positions, **dropped, **sizes,
    }  # fmt: skip


def stated(run: Run, config: Mapping[str, Any]) -> TrainerConfig:
    """Returns the file of the run's framework for a configuration."""
    trainer, known = find_trainer(run.framework), {each.name for each in fields(TrainingSetup)}
    setup = {name: value for name, value in run.setup.items() if name in known and name not in ASKED}
    length, config = run.setup.get("seq_len"), {"micro_batch": 1, "dp": 1, "grad_accum": 1, **config}
    return TrainerConfig(
        framework=trainer.reads or FILE_OF_OTHERS,
        config=Config({name: value for name, value in config.items() if value is not None}),
        stated=frozenset(config),
        architecture=architecture(run.model),
        seq_len=length,
        global_batch=int(config["micro_batch"]) * int(config["dp"]) * int(config["grad_accum"]),
        devices=run.devices_of(config),
        explicit_conventions={**trainer.setup, **setup},
    )


@dataclass(frozen=True)
class Verdict:
    """A run and the result of `redline check` for it."""

    run: Run
    found: Check
    seconds: float


def verdicts(source: Source, most: int) -> Iterator[Verdict | str]:
    """Returns the results for at most `most` evenly chosen runs of a source, or the reason why one cannot be checked."""
    judged = judge(source)
    rows = list(zip(judged.runs, judged.configs, strict=True))
    for at in np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int)) if rows else ():
        run, config = rows[at]
        start = time.perf_counter()
        try:
            trainer = stated(run, config)
            # Facts of a trainer without files of its own are its own nevertheless.
            facts = run.framework if trainer.framework == FILE_OF_OTHERS else None
            result = check(trainer, run.hardware, framework=facts)
            yield Verdict(run, result, time.perf_counter() - start)
        except (Left, RedlineError) as reason:
            yield f"{run.where}: {reason}"


def summary(found: list[Verdict]) -> dict[str, float]:
    """Returns the columns of the report."""
    ran, failed = [each for each in found if not each.run.failed], [each for each in found if each.run.failed]
    out = {"ran": float(len(ran)), "failed": float(len(failed))}
    if ran:
        out["unfit"] = float(np.mean([not each.found.fits for each in ran]))
        out["seconds"] = float(np.median([each.seconds for each in found]))
    if failed:
        out["called fit"] = float(np.mean([each.found.fits for each in failed]))
    for name, ratios in (
        ("time", [each.found.estimate.step_ms / each.run.step_ms for each in ran if each.run.step_ms]),
        ("memory", [each.found.estimate.peak_memory_mib / each.run.memory_mib for each in ran if each.run.memory_mib]),
    ):
        if ratios:
            out[f"{name}_median"] = float(np.median(np.abs(np.array(ratios) - 1)))
            out[f"{name}_bias"] = float(np.median(ratios) - 1)
    return out
