"""Texts about a command's training, from the facts that the observer recorded."""

from collections.abc import Mapping
from typing import Any

PARTS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "data": "waiting for batches",
    "evaluation": "evaluation",
    "saving": "saving",
    "other": "other",
}
"""Parts of the wall time, by the observer's names."""
DATA_BOUND, OPTIMIZER_BOUND, OTHER_BOUND = 0.1, 0.3, 0.3
"""Shares of the wall time from which a part other than the passes is reported as the bottleneck."""
LEAST_SHARE = 0.005
"""Share below which a part is not shown."""


def parts_text(observed: Mapping[str, Any]) -> str:
    """Returns the shares of the wall time, largest first: `backward 48 %, forward 40 %, optimizer 12 %`."""
    shares = sorted(observed["shares"].items(), key=lambda item: -item[1])
    return ", ".join(f"{PARTS[name]} {share:.0%}".replace("%", " %") for name, share in shares if share >= LEAST_SHARE)


def batch_text(observed: Mapping[str, Any]) -> str:
    """Returns the samples of a step, with passes, micro-batch and ranks: `64: 4 passes of 8 on 2 ranks`."""
    samples, micro = observed["samples_per_step"], observed["micro_batch"]
    if samples is None:
        return "not known"
    if not micro:
        return f"{samples:,.6g}"
    passes, ranks = observed["backwards"], observed["ranks"]
    return f"{samples:,.6g}: {passes:,.6g} pass{'es'[: 2 * (passes != 1)]} of {micro:,.6g}" + (
        f" on {ranks} ranks" if ranks > 1 else ""
    )


def formats_text(observed: Mapping[str, Any]) -> str:
    """Returns the formats of the trained parameters and of the matrix products."""
    trained = ", ".join(f"{count:,} in {name}" for name, count in observed["trained"].items())
    products = observed["products"]
    return "; ".join(filter(None, [trained, f"matrix products in {products}" if products else ""]))


def binding(observed: Mapping[str, Any]) -> str:
    """Returns the bottleneck of the training as a text."""
    shares = observed["shares"]
    if shares.get("data", 0.0) >= DATA_BOUND:
        return "the data loader: the training waits for batches (more workers, or less work a sample)"
    if observed["stalled"] >= DATA_BOUND:
        return "stalls: some steps take far longer than the median"
    if shares.get("optimizer", 0.0) >= OPTIMIZER_BOUND:
        return "the optimizer's step: more samples a step, or a fused optimizer"
    if shares.get("other", 0.0) >= OTHER_BOUND:
        return "work outside of passes and optimizer: logging, copies, synchronisation, Python"
    return "the forward and backward passes"
