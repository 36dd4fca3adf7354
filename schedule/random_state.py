"""Random streams: the global generators while draws are recorded, and the seeds of a mesh's ranks."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .parallel.collectives import axis_of


def full(device: torch.device) -> torch.device:
    """A device with its index, like the device of a tensor."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class RandomState:
    """State of the global generators of the CPU and a device, as seen by code whose draws are recorded.

    It is advanced after every recorded draw, so that it differs at each point: code that sets it, or restores an
    earlier one, is detected.

    Args:
        device: the device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # generators exist only after it
            self.generators.append(torch.cuda.default_generators[device.index])
        self.states: list[torch.Tensor] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Installs it in place of the current state, which is restored at the end."""
        outside = [each.get_state() for each in self.generators]
        if not self.states:
            self.advance()
        try:
            self._set(self.states)
            yield
        finally:
            self._set(outside)

    def advance(self) -> None:
        for each in self.generators:
            torch.empty(1, device=each.device).uniform_(generator=each)
        self.states = [each.get_state() for each in self.generators]

    def changed(self) -> int | None:
        """Seed that was set since it was last advanced; None if nothing was set, -1 if anything else was."""
        states = [each.get_state() for each in self.generators]
        if all(map(torch.equal, states, self.states)):
            return None
        for generator, state in zip(self.generators, states, strict=True):
            fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
            if not torch.equal(fresh.get_state(), state):
                return -1
        seeds = {each.initial_seed() for each in self.generators}
        return seeds.pop() if len(seeds) == 1 else -1

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)


def seed_ranks(seed: int, mesh: Any = None) -> int:
    """Seeds torch, NumPy and Python: the same for ranks of the `tp` axis, different for those of `dp` and `pp`.

    Replicas thus drop different elements, and replicated computations of tensor-parallel ranks stay equal;
    computations on pieces differ by the primitive `fork_rng`. Call it after making the model, whose weights all ranks
    share.

    Returns:
        The seed of this rank.
    """
    import numpy

    number, stride = seed, 1
    for name in ("dp", "pp"):
        found = axis_of(mesh, name)
        if found is not None:
            number += stride * found.rank
            stride *= found.size
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)
    return number
