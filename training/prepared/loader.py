"""Batches for a loop of somebody's own, in an order that follows from the seed alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ...models.batches import each_tensor, to_device
from ...models.workload import Batch
from ..data.samples import TrainingData
from ..training import Training


class Loader:
    """This replica's samples of one step after another, on the device, while those of the next are read.

    `for batch in loader` runs to the end of the epoch, and the next loop goes on with the next one; data without epochs, as a
    workload makes it, goes on for ever. Which samples a step has follows from the seed and from how many steps there were
    before, whatever the configuration and however often the training was taken up again.

    Args:
        training: whose replica this is.
        samples: what it is trained on.
    """

    position: int
    """Samples that all replicas together were given so far; set it to go on from there."""

    def __init__(self, training: Training, samples: TrainingData) -> None:
        self.samples = samples
        self.position = 0
        self._training = training

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
        end, step = self._end(), self._training.samples_per_step
        with ThreadPoolExecutor(1, thread_name_prefix="data") as reader:
            at = self.position
            following = reader.submit(self._read, at)
            while end is None or at < end:
                if at != self.position:  # somebody has set it
                    at = self.position
                    following = reader.submit(self._read, at)
                share = following.result()
                at += step
                self.position = at
                if end is None or at < end:
                    following = reader.submit(self._read, at)
                yield to_device(share, self._training.device)

    def _end(self) -> int | None:
        """Behind the epoch that the position is in."""
        size = self.samples.num_training
        return None if size is None else (self.position // size + 1) * size

    def _read(self, first: int) -> Batch:
        share = self._training.share(self.samples, first)
        return each_tensor(share, lambda each: each.pin_memory()) if self._training.device.type == "cuda" else share
