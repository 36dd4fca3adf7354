"""What a loop of somebody's own may know of its configuration, and do beside its steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import StudyError
from ..checkpoint.folder import Checkpoint, CheckpointFolder
from ..checkpoint.restoring import latest, restore
from ..checkpoint.saver import Saver
from ..checkpoint.state import State
from ..world import World
from .loader import Loader
from .steps import Steps

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Info:
    """The configuration of a training, why it is that, and what acts on all ranks together.

    Args:
        steps: of the training.
        loader: of its batches.
        why: why it is that configuration, in a sentence for people.
        notes: what of a strategy could not be followed, a sentence each.
        predicted: throughput, as it was measured in a dry run or estimated; None where neither was.
        group: of all ranks, of the gloo backend; None for one rank.
    """

    def __init__(
        self,
        steps: Steps,
        loader: Loader,
        *,
        why: str,
        notes: tuple[str, ...] = (),
        predicted: float | None = None,
        group: "ProcessGroup | None" = None,
    ) -> None:
        self.why, self.notes, self.predicted = why, notes, predicted
        self.training = steps.training
        """Model, optimizer and sizes in this configuration."""
        self._steps, self._loader, self._group = steps, loader, group
        self._found: Checkpoint | None = None
        """The latest checkpoint of this course of steps: loaded, or saved."""

    @property
    def config(self) -> dict[str, Any]:
        """The configuration."""
        return dict(self.training.config)

    @property
    def world(self) -> World:
        """What this rank is: its `rank` among `size`, and the degrees `tp`, `pp` and `dp`."""
        return self.training.world

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which prints."""
        return self.world.rank == 0

    @property
    def device(self) -> "torch.device":
        """Where this rank trains."""
        return self.training.device

    @property
    def precision(self) -> str:
        """The number formats, by the knob's name."""
        return str(self.training.config.get("precision", "fp32"))

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.training.samples_per_step

    @property
    def unit(self) -> str:
        """What throughput counts."""
        return self.training.workload.unit

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return self._steps.step

    @property
    def grad_norm(self) -> float | None:
        """Norm of all gradients of the last step that was clipped, before that. Reading it waits for the device."""
        return None if self._steps.norm is None else float(self._steps.norm)

    def backward(self, loss: "torch.Tensor") -> None:
        """`loss.backward()`, for loops that are written so."""
        loss.backward()

    def clip(self, max_norm: float) -> "torch.Tensor":
        """Clips the norm of all gradients together, whatever is cut over ranks how; all ranks call it, between `backward` and
        `step`. PyTorch's `clip_grad_norm_` would see this rank's part only.

        Returns:
            The norm before, a scalar on the device.
        """
        return self._steps.clip(max_norm)

    def save(self, path: str | Path, *, keep: int = 3, facts: Mapping[str, Any] | None = None) -> Path:
        """Saves a checkpoint of model, optimizer and position in a folder of checkpoints, for any configuration and any
        number of ranks; all ranks call it.

        Args:
            path: the folder, on a file system that all ranks share: a new one, an empty one, or one of checkpoints.
            keep: checkpoints that it keeps.
            facts: what the checkpoint is to say beside, as plain data.

        Returns:
            Where it is.

        Raises:
            StudyError: it cannot be written, or the folder holds checkpoints of later steps, or something else and no
                checkpoint; what is there is untouched.
        """
        folder = CheckpointFolder(Path(path).absolute(), keep)
        self._prepare(folder)
        saver = Saver(folder, self.world.rank, self._group)
        about = {
            **(facts or {}),
            "samples": self._loader.position,
            "loss_scale": self.training.precision.loss_scale,
            "configuration": self.config,
            "devices": self.world.size,
        }
        try:
            saver.save(State(self.training), self.step, about)
            saved = saver.wait()
        finally:
            saver.close()
        if saved is not None and saved.failure:
            raise StudyError(f"no checkpoint of step {self.step} could be saved in '{path}': {saved.failure}")
        self._found = folder.whole(self.step)
        return self._found.path

    def _prepare(self, folder: CheckpointFolder) -> None:
        """Has rank 0 make a folder, before any rank writes into it."""
        failure = [self._made(folder) if self.main else ""]
        if self._group is not None:
            import torch.distributed as dist

            dist.broadcast_object_list(failure, src=0, group=self._group)
        if failure[0]:
            raise StudyError(failure[0])

    def _made(self, folder: CheckpointFolder) -> str:
        """Makes a folder; why it cannot take a checkpoint of this step, empty where it can."""
        here = self._found if self._found is not None and self._found.path.parent == folder.path else None
        try:
            folder.prepare(here)
        except StudyError as error:
            return str(error)
        except OSError as error:
            return f"the folder '{folder.path}' for checkpoints cannot be made: {error.strerror or error}"
        later = [str(each.step) for each in folder.all() if each.step > self.step]
        if not later:
            return ""
        return (
            f"'{folder.path}' holds checkpoints of later steps ({', '.join(later)}) than this one, {self.step}, which did not "
            "go on from them; call info.load before the loop, or give another folder"
        )

    def load(self, path: str | Path) -> bool:
        """Goes on from the latest checkpoint in a folder, whatever configuration it was saved in; all ranks call it, before
        the loop.

        Returns:
            Whether there was one.

        Raises:
            StudyError: all there are damaged.
            WorkloadError: it is of another model.
        """
        import warnings

        def say(note: str) -> None:
            if self.main:
                warnings.warn(note, RuntimeWarning, stacklevel=3)

        found = latest(CheckpointFolder(Path(path).absolute()), self._group, say)
        if found is None:
            return False
        self._found = found
        restore(State(self.training), found)
        self.training.precision.restore(float(found.manifest.get("loss_scale", 1.0)))
        self._steps.step, self._loader.position = found.step, int(found.manifest["samples"])
        return True

    def state_dict(self) -> "dict[str, torch.Tensor]":
        """A copy of the whole model's state by the names of the original, on the CPU; all ranks call it.

        Returns:
            On rank 0; empty on the others.
        """
        from ...schedule import full_state_dict

        world = self.world
        mine = {name: each.detach().to("cpu", copy=True) for name, each in full_state_dict(self.training.model).items()}
        if world.pp == 1:
            return mine if self.main else {}
        import torch.distributed as dist

        # Every stage has the weights of its layers.
        first = world.dp_rank == 0 and world.tp_rank == 0
        stages: list[Any] | None = [None] * world.size if self.main else None
        dist.gather_object(mine if first else {}, stages, group=self._group)
        return {name: each for stage in stages or () for name, each in stage.items()}

    def __repr__(self) -> str:
        knobs = " ".join(f"{name}={value}" for name, value in self.config.items())
        return f"Info({knobs}; {self.why})"
