"""Parts of the user's training loop that `redline.accelerate` returns: model, optimizer, loader, info."""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...base.device import one_thread
from ...base.errors import StudyError, UsageError
from ...knobs.text import config_text
from ...models.batches import batch_slice, entries, to_device
from ...models.layouts.dcp import dcp_tensors
from ...models.workload import Batch
from ...training import gradients
from ...training.gradients import factors
from ...training.training import Training
from ...training.training_data import TrainingData
from ...training.world import World
from ..checkpoint.saver import CheckpointFolder, Saver, latest
from ..checkpoint.state import State


class PreparedModel(nn.Module):
    """`loss = model(**batch)`, or `model(*batch)` for a tuple, in any configuration; then `loss.backward()`.

    A call takes this replica's samples of a step, runs their forward and backward passes (micro-batch by micro-batch,
    or through the pipeline) and returns the mean loss over the global batch, the same on all ranks. `loss.backward()`
    multiplies the gradients by the derivative of the final value: `(loss / 2).backward()` halves them. Under
    `torch.no_grad()` only the forward passes run, with any number of samples.

    The trained model is `model.module`: this rank's part, as scheduled.
    """

    def __init__(self, steps: "Steps") -> None:
        super().__init__()
        self.module = steps.training.model
        self.__dict__["steps"] = steps
        self.__dict__["anchor"] = torch.zeros((), device=steps.training.device, requires_grad=True)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        steps: Steps = self.__dict__["steps"]
        batch = kwargs or args
        if not torch.is_grad_enabled():
            return steps.evaluated(batch)
        loss: torch.Tensor = _Computed.apply(self.__dict__["anchor"], steps.loss(batch), steps.backward)
        return loss

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """State of `module`: this rank's part, by the names of the original model. `info.state_dict()` assembles the
        whole.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


class _Computed(torch.autograd.Function):
    """A loss whose gradients are already computed: backward multiplies them by the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, multiply: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.multiply = multiply
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.multiply(gradient)
        return None, None, None


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` does what the configuration needs: unscales float16, clips if requested, steps.

    Parameter groups and state are those of `optimizer`, the one requested by the loop, over this rank's parameters:
    learning-rate schedulers of PyTorch work on it. After `step` the gradients are gone; `zero_grad` without a step
    drops them.
    """

    def __init__(self, steps: "Steps") -> None:
        self._steps = steps
        self.optimizer = steps.training.optimizer
        """The wrapped optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:
        """Runs one step.

        Raises:
            UsageError: a closure is given, or there are no gradients.
        """
        if closure is not None:
            raise UsageError("optimizer.step() takes no closure: a step's passes run once, in the call of the model")
        self._steps.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients."""
        self._steps.drop()

    def state_dict(self) -> dict[str, Any]:
        """State of this rank's part; `info.save` saves the whole, for any other configuration."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of this rank's part."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Always raises: parameters are sharded and communicated as they were prepared."""
        raise UsageError("parameters cannot be added to a prepared optimizer; freeze or group them in optimizer=")

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


class Loader:
    """Yields this replica's samples of one step after another, on the device, and reads the next ones meanwhile.

    `for batch in loader` runs to the end of the epoch, and the next loop continues with the next epoch; data without
    epochs, such as a workload's own, never ends. The samples of a step depend on the seed and the number of steps
    before it, regardless of the configuration and the number of restarts. If a loop ends early, with a batch that was
    yielded but not used in a step, the next loop yields that batch again.
    """

    def __init__(self, steps: "Steps", samples: TrainingData) -> None:
        self.samples = samples
        self._steps, self._training = steps, steps.training
        self._begun, self._since = 0, steps.step
        """A position, and the number of steps done at it."""
        self._set = 0
        """Number of times that the position was set."""
        self._past = 0
        """Position at which the last complete loop ended its epoch."""

    @property
    def position(self) -> int:
        """Number of samples used by the steps so far, of all replicas together, whatever else was yielded, as by
        `zip` or by reading ahead; set it to continue from there.
        """
        return self._begun + (self._steps.step - self._since) * self._training.samples_per_step

    @position.setter
    def position(self, value: int) -> None:
        self._begun, self._since, self._past = value, self._steps.step, value
        self._set += 1

    def __len__(self) -> int:
        """Number of steps left in this epoch.

        Raises:
            TypeError: the data has no epochs.
        """
        end = self._end()
        if end is None:
            raise TypeError("the data of this loader has no epochs, and so no length")
        return -(-(end - self.position) // self._training.samples_per_step)

    def __iter__(self) -> Iterator[Batch]:
        if self.position < self._past:  # skips batches of the epoch that no step used
            self.position = self._past
        end, step, times_set = self._end(), self._training.samples_per_step, self._set
        with one_thread("data") as reader:
            fetch, samples = self._training.fetch, self.samples
            position = self.position
            following = fetch(reader, samples, position)
            while end is None or position < end:
                if times_set != self._set:  # set by the user
                    position, times_set = self.position, self._set
                    following = fetch(reader, samples, position)
                share = following.result()
                position += step
                if end is None or position < end:
                    following = fetch(reader, samples, position)
                yield to_device(share, self._training.device)
        self._past = position

    def _end(self) -> int | None:
        """Position of the end of the current epoch."""
        size = self.samples.num_training
        return None if size is None else (self.position // size + 1) * size


class Steps:
    """Optimizer steps of a training, in parts that a loop calls one by one.

    A step is the same in every configuration: the loss of this replica's share of the global batch, its gradients, the
    optimizer's update. The number of micro-batches, and the order of pipeline stages, are internal.

    Args:
        training: a training without its own data.
        clip: largest norm of all gradients together; None for no limit.
    """

    def __init__(self, training: Training, samples: TrainingData, clip: float | None = None) -> None:
        if clip is not None and not clip > 0:
            raise UsageError(f"clip must be a norm above 0, or None for no limit, but got {clip!r}")
        self.training, self.samples = training, samples
        self.step = 0
        """Number of steps done."""
        self.norm: torch.Tensor | None = None
        """Norm of all gradients before the last clipping; float64, a scalar on the device."""
        self._clip = clip
        self._computed = self._unscaled = self._clipped = False

    def loss(self, batch: Batch) -> torch.Tensor:
        """Returns the mean loss over the global batch, the same on all ranks; its gradients are in place afterwards.

        Args:
            batch: this replica's samples of a step.

        Raises:
            UsageError: the number of samples is wrong, or the previous step has not ended.
        """
        training = self.training
        if self._computed:
            raise UsageError(
                "the model was called again before optimizer.step(): a call takes all samples of a step, gradient accumulation "
                "included; loss.backward() and optimizer.step() must follow every call with gradients"
            )
        expected, count = training.micro_batch * training.grad_accum, _size(batch)
        if count != expected:
            raise UsageError(
                f"the model takes this replica's {expected} samples of a step, as the loader gives them, but got {count}; under "
                "torch.no_grad() it takes any number"
            )
        training.reseed(self.step)
        total = gradients.passes(training, self.samples, batch)
        self._computed = True
        return total.detach()

    def evaluated(self, batch: Batch) -> torch.Tensor:
        """Returns the mean loss over the batches of all replicas, without gradients. All ranks call it, with the same
        number of samples.

        Raises:
            UsageError: it would delete the gradients of the current step.
        """
        training = self.training
        if training.world.pp > 1:
            if self._computed:
                raise UsageError(
                    "in a pipeline an evaluation takes away the gradients: call optimizer.step() before it evaluates"
                )
            batches = [to_device(batch, training.device)]
            return training.passes(batches, factors=factors(training, self.samples, batches))
        size, count = training.micro_batch, _size(batch)
        slices = [batch_slice(batch, begin, min(begin + size, count)) for begin in range(0, count, size)]
        batches = [to_device(piece, training.device) for piece in slices]
        weights = factors(training, self.samples, batches)
        if weights is None and count % size:
            shares = [_size(piece) * len(slices) / count for piece in slices]
            weights = torch.tensor(shares, device=training.device)
        return training.passes(batches, factors=weights)

    def backward(self, factor: torch.Tensor) -> None:
        """Multiplies the gradients by a scalar on the device."""
        if not self._computed:
            raise UsageError("there is no loss for backward: call the model first, with gradients switched on")
        if factor.device.type != "cpu" or float(factor) != 1.0:  # on a GPU a look at it would wait
            gradients.multiply(self.training, factor.float())

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clips all gradients by their common norm, over all ranks.

        Returns:
            The norm before, float64, a scalar on the device.
        """
        if not self._computed:
            raise UsageError("there are no gradients to clip: call the model and loss.backward() first")
        training = self.training
        self._unscale()
        total = gradients.square(training)
        if training.world.size > 1:
            dist.all_reduce(total)
        self.norm = total.sqrt()
        # As torch.nn.utils.clip_grad_norm_, whose norm would be that of this rank's part.
        gradients.multiply(training, (max_norm / (self.norm + 1e-6)).clamp(max=1.0).float())
        self._clipped = True
        return self.norm

    def update(self) -> None:
        """Runs the optimizer's update; the gradients are gone after it.

        Raises:
            UsageError: there are none.
        """
        if not self._computed:
            raise UsageError(
                "optimizer.step() has no gradients: call the model with a batch of the loader, and loss.backward(), before"
            )
        if self._clip is not None and not self._clipped:
            self.clip(self._clip)
        self._unscale()
        self.training.precision.step(self.training.optimizer)
        self.step += 1
        self.drop()

    def drop(self) -> None:
        self.training.optimizer.zero_grad(set_to_none=True)
        self._computed = self._unscaled = self._clipped = False

    def _unscale(self) -> None:
        if not self._unscaled:
            self.training.precision.unscale(self.training.optimizer)
            self._unscaled = True


def _size(batch: Batch) -> int:
    tensors = entries(batch)
    if not tensors:
        kind = "names" if isinstance(batch, Mapping) else "positions"
        raise UsageError(f"the model was called without a batch: give the loader's, whose {kind} it takes")
    return int(next(iter(tensors.values())).shape[0])


class Info:
    """The configuration of a training, the reason for it, and operations on all ranks together.

    Args:
        why: reason for the configuration, in a sentence.
        notes: parts of the strategy that could not be followed, one sentence each.
        predicted: throughput, measured in a dry run or estimated; None if neither was done.
        group: gloo group of all ranks; None for one rank.
        from_weights: frozen parameters that checkpoints leave out; see `State`.
    """

    def __init__(
        self,
        steps: Steps,
        loader: Loader,
        *,
        why: str,
        notes: tuple[str, ...] = (),
        predicted: float | None = None,
        group: dist.ProcessGroup | None = None,
        from_weights: Collection[str] = (),
    ) -> None:
        self.why, self.notes, self.predicted = why, notes, predicted
        self.training = steps.training
        """Model, optimizer and sizes in this configuration."""
        self._steps, self._loader, self._group = steps, loader, group
        self._from_weights = from_weights

    @property
    def config(self) -> dict[str, Any]:
        """The configuration."""
        return dict(self.training.config)

    @property
    def world(self) -> World:
        """Position of this rank: its `rank` among `size`, and the degrees `tp`, `pp` and `dp`."""
        return self.training.world

    @property
    def main(self) -> bool:
        """True on rank 0, which prints."""
        return self.world.rank == 0

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.training.device

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.training.samples_per_step

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self._steps.step

    @property
    def grad_norm(self) -> float | None:
        """Norm of all gradients before the last clipping. Reading it waits for the device."""
        return None if self._steps.norm is None else float(self._steps.norm)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clips the norm of all gradients together, including those that are sharded over ranks. All ranks call it, between
        `backward` and `step`. PyTorch's `clip_grad_norm_` would use only this rank's part.

        Returns:
            The norm before, a scalar on the device.
        """
        return self._steps.clip(max_norm)

    def save(self, path: str | Path, *, keep: int = 3, facts: Mapping[str, Any] | None = None) -> Path:
        """Saves a checkpoint of model, optimizer and position in a folder of checkpoints, for any configuration and
        any number of ranks. All ranks call it.

        Args:
            path: the folder, on a file system that all ranks share: new, empty, or with checkpoints.
            keep: number of checkpoints to keep.
            facts: further description for the checkpoint, JSON-ready.

        Returns:
            Folder of the checkpoint.

        Raises:
            StudyError: it cannot be written, or the folder contains checkpoints of later steps, or other files and no
                checkpoint; nothing is changed.
        """
        folder = CheckpointFolder(Path(path).absolute(), keep)
        self._prepare(folder)
        saver = Saver(folder, self.world.rank, self._group)
        about = {
            **(facts or {}),
            "samples": self._loader.position,
            **self.training.precision.facts,
            "configuration": self.config,
            "devices": self.world.size,
        }
        try:
            saver.save(self._state(), self.step, about)
            saved = saver.wait()
        finally:
            saver.close()
        if saved is not None and saved.failure:
            raise StudyError(f"no checkpoint of step {self.step} could be saved in '{path}': {saved.failure}")
        return folder.checkpoint(self.step).path

    def _state(self) -> State:
        return State(self.training, from_weights=self._from_weights)

    def _prepare(self, folder: CheckpointFolder) -> None:
        """Creates the folder on rank 0, before any rank writes into it."""
        failure: list[str | None] = [None]
        if self.main:
            try:
                folder.prepare()
            except StudyError as error:
                failure = [str(error)]
            except OSError as error:
                failure = [f"the folder '{folder.path}' for checkpoints cannot be made: {error.strerror or error}"]
            if later := [str(checkpoint.step) for checkpoint in folder.all() if checkpoint.step > self.step]:
                failure = [
                    f"'{folder.path}' contains checkpoints of later steps ({', '.join(later)}) than this one, {self.step}, which "
                    "did not continue from them; call info.load before the loop, or give another folder"
                ]
        if self._group is not None:
            dist.broadcast_object_list(failure, src=0, group=self._group)
        if failure[0] is not None:
            raise StudyError(failure[0])

    def load(self, path: str | Path) -> bool:
        """Loads the latest checkpoint in a folder, regardless of the configuration it was saved in. All ranks call it, before
        the loop.

        Returns:
            True if there was one.

        Raises:
            StudyError: its description cannot be read.
            WorkloadError: it is of another model, or damaged.
        """
        checkpoint = latest(CheckpointFolder(Path(path).absolute()), self._group)
        if checkpoint is None:
            return False
        self._state().load(dcp_tensors(checkpoint.path), checkpoint.path.name)
        self.training.precision.restore(checkpoint.manifest)
        self._steps.step, self._loader.position = checkpoint.step, int(checkpoint.manifest["samples"])
        return True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies the whole model's state by the names of the original, on the CPU. All ranks call it.

        Returns:
            The state on rank 0; empty on the others.
        """
        from ...schedule.parallel.sharding import whole_tensors

        world, state = self.world, dict[str, torch.Tensor]()
        keeps = world.replica == 0 and world.tp_rank == 0
        # One tensor at a time, since together they may not fit on a device.
        for name, tensor in whole_tensors(self.training.model):
            if keeps and self.main:
                state[name] = tensor.detach().to("cpu", copy=True)
            elif keeps:  # every stage has the weights of its layers
                dist.send_object_list([(name, tensor.detach().cpu())], dst=0, group=self._group)
        if keeps and not self.main:
            dist.send_object_list([None], dst=0, group=self._group)
        for stage in range(1, world.pp) if self.main else ():
            received: list[Any] = [None]
            while True:
                dist.recv_object_list(received, src=stage * world.replicas * world.tp, group=self._group)
                if received[0] is None:
                    break
                name, state[name] = received[0]
        return state

    def __repr__(self) -> str:
        return f"Info({config_text(self.config)}; {self.why})"
