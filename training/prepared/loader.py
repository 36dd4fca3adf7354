"""Batches for a loop of somebody's own, in an order that follows from the seed alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ...models.batches import each_tensor, to_device
from ...models.workload import Batch
from ..data.samples import TrainingData
from .steps import Steps


class Loader:
    """This replica's samples of one step after another, on the device, while those of the next are read.

    `for batch in loader` runs to the end of the epoch, and the next loop goes on with the next one; data without epochs, as a
    workload makes it, goes on for ever. Which samples a step has follows from the seed and from how many steps there were
    before, whatever the configuration and however often the training was taken up again. A loop that ends earlier, with a
    batch that it was handed and took no step of, leaves that batch to the next loop.

    Args:
        steps: of the training whose replica this is.
        samples: what it is trained on.
    """

    def __init__(self, steps: Steps, samples: TrainingData) -> None:
        self.samples = samples
        self._steps, self._training = steps, steps.training
        self._begun, self._since = 0, steps.step
        """A position, and the steps that were done there."""
        self._set = 0
        """How often the position was set."""
        self._past = 0
        """Where the last loop that came to an epoch's end was."""

    @property
    def position(self) -> int:
        """Samples that the steps so far took, of all replicas together, whatever else was handed out, as by `zip` or ahead of
        the steps; set it to go on from there."""
        return self._begun + (self._steps.step - self._since) * self._training.samples_per_step

    @position.setter
    def position(self, value: int) -> None:
        self._begun, self._since, self._past = value, self._steps.step, value
        self._set += 1

    def __len__(self) -> int:
        """Steps that are left of this epoch.

        Raises:
            TypeError: the data has no epochs.
        """
        end = self._end()
        if end is None:
            raise TypeError("the data of this loader has no epochs, and so no length")
        return -(-(end - self.position) // self._training.samples_per_step)

    def __iter__(self) -> Iterator[Batch]:
        if self.position < self._past:  # batches of the epoch that no step was taken of are over as well
            self.position = self._past
        end, step, known = self._end(), self._training.samples_per_step, self._set
        with ThreadPoolExecutor(1, thread_name_prefix="data") as reader:
            at = self.position
            following = reader.submit(self._read, at)
            while end is None or at < end:
                if known != self._set:  # somebody has set it
                    at, known = self.position, self._set
                    following = reader.submit(self._read, at)
                share = following.result()
                at += step
                if end is None or at < end:
                    following = reader.submit(self._read, at)
                yield to_device(share, self._training.device)
        self._past = at

    def _end(self) -> int | None:
        """Behind the epoch that the position is in."""
        size = self.samples.num_training
        return None if size is None else (self.position // size + 1) * size

    def _read(self, first: int) -> Batch:
        share = self._training.share(self.samples, first)
        return each_tensor(share, lambda each: each.pin_memory()) if self._training.device.type == "cuda" else share
