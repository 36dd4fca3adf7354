"""Probe results of made-up candidates, for tests of their evaluation."""

import math

from redline.results.probe import Computed, Probe
from redline.training.probe import ProbePart

FP32, BF16 = 2.0**-24, 2.0**-8


def part(squares=(1.0, 3.5), logits=(), *, changed=0.0, size=0.0, by_batch=False, **values):
    """A rank's part of a probe."""
    norms = [math.sqrt(each) for each in squares]
    computed = Computed(loss=9.0, gradient=math.hypot(*norms), blocks=tuple(norms[:-1]), vectors=(0.0, 0.5), samples=2)
    given = {"depth": 3, "roundoff": FP32, "loss_roundoff": FP32, **values}
    return ProbePart(share=Probe(quiet=computed, logits=logits, **given), changed=changed, size=size, by_batch=by_batch)


def probe(roundoff=FP32, **values):
    """A complete probe."""
    quiet = Computed(loss=9.0, gradient=2.0, blocks=(1.0, 1.2), vectors=(0.1, 0.1, 0.2), samples=2)
    step = Computed(loss=9.1, gradient=1.0, blocks=(0.5, 0.6), vectors=(0.05, 0.05, 0.1), samples=32)
    given = {"quiet": quiet, "step": step, "logits": (0.5, -0.5, 0.5, -0.5), "depth": 25}
    return Probe(**{**given, "roundoff": roundoff, "loss_roundoff": roundoff, **values})
