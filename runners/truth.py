"""Whether a candidate trains the same model: its first losses against the reference's."""

import math
from collections.abc import Sequence

from .runner import Reference

# Relative tolerance of the first step's loss, and of the following steps', by precision. float32 kernels
# differ in the order of sums (1e-6 a layer); bfloat16 keeps 8 bits (0.4 %); later steps add the updates'.
_TOLERANCE = {"fp32": (1e-3, 5e-3), "fp16": (5e-3, 2e-2), "bf16": (1e-2, 3e-2), "bf16_pure": (2e-2, 6e-2)}
_LOOSEST = (3e-2, 8e-2)
# Dropout draws other masks when the batch is split otherwise; the loss of a batch then varies.
_DROPOUT = (2e-2, 4e-2)


def check(
    losses: Sequence[float],
    reference: Reference | None,
    *,
    last_loss: float | None = None,
    precision: str = "fp32",
    stochastic: bool = False,
    samples_per_step: int | None = None,
) -> str:
    """Why the losses of the first steps are wrong, or an empty string.

    Args:
        losses: the candidate's, in order of steps.
        reference: what they must be; None checks finiteness only.
        last_loss: loss of the last step, which must be finite.
        precision: the candidate's `precision` knob.
        stochastic: whether the model draws random numbers in training (dropout).
        samples_per_step: losses of steps over other samples are not compared.
    """
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            return f"loss is {loss} at step {number + 1}"
    if last_loss is not None and not math.isfinite(last_loss):
        return f"loss is {last_loss} at the last step"
    if reference is None or (reference.samples_per_step or samples_per_step) != samples_per_step:
        return ""
    first, later = map(max, *(_TOLERANCE.get(each, _LOOSEST) for each in (precision, reference.precision)))
    if stochastic:
        first, later = first + _DROPOUT[0], later + _DROPOUT[1]
    for number, (loss, expected) in enumerate(zip(losses, reference.losses)):
        allowed = (later if number else first) * max(abs(expected), 1e-3)
        if abs(loss - expected) > allowed:
            return (
                f"loss {loss:.6g} at step {number + 1} is not the reference's {expected:.6g} "
                f"(tolerance {allowed:.2g})"
            )
    return ""
