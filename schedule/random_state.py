"""Random streams: the global generators while draws are noted instead of made, and the seeds of a mesh's ranks."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .parallel.collectives import axis_of


def full(device: torch.device) -> torch.device:
    """A device with its index, as tensors have it."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class RandomState:
    """The state of the global generators of the CPU and a device, as seen by code whose draws are noted.

    After every noted draw it is moved by a step, so that it is another one at each point: code that sets it, or goes
    back to one of earlier, shows.

    Args:
        device: the device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # before it there are no generators
            self.generators.append(torch.cuda.default_generators[device.index])
        self.states: list[torch.Tensor] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts it in the place of the surroundings' state, which is back at the end."""
        outside = [each.get_state() for each in self.generators]
        if not self.states:
            self.nudge()
        try:
            self._set(self.states)
            yield
        finally:
            self._set(outside)

    def nudge(self) -> None:
        """Moves it by a step."""
        for each in self.generators:
            torch.empty(1, device=each.device).uniform_(generator=each)
        self.states = [each.get_state() for each in self.generators]

    def changed(self) -> int | None:
        """The seed that was set since the last step; None where nothing was, -1 where anything else was."""
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
    """Seeds torch, NumPy and Python: ranks of the `tp` axis alike, those of `dp` and `pp` each otherwise.

    So replicas drop other elements, and what tensor-parallel ranks all compute stays equal; what each of them computes
    on its piece differs by the primitive `fork_rng`. Call it behind making the model, whose weights all ranks share.

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
