"""The checkpoint folder: its layout, which checkpoints are kept, and a description of each.

A checkpoint is written to a temporary folder and renamed when it is complete, so that earlier ones stay intact if a
process dies.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...base.errors import StudyError
from ...base.writing import sync_folder, write_atomic

MANIFEST = "manifest.json"
FORMAT = 2
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(saving|removing)")
"""Names of the leftovers of a killed save or removal."""
_METADATA = ".metadata"
"""Metadata file of torch.distributed.checkpoint, which every checkpoint has."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a training."""

    path: Path

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return int(_NAME.fullmatch(self.path.name)[1])  # type: ignore[index]  # found by that name

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """Description that was saved with it: samples used, configuration, devices. `redline train` adds `from_weights`: true
        if frozen parameters are left out.

        Raises:
            StudyError: it cannot be read, or was written by another version.
        """
        try:
            document = json.loads((self.path / MANIFEST).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise StudyError(
                f"'{self.path}' is not a whole checkpoint: its {MANIFEST} cannot be read ({error}); remove the folder to "
                "continue from an earlier checkpoint"
            ) from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise StudyError(
                f"'{self.path}' is not a checkpoint of this version of redline, which reads format {FORMAT}: "
                f"its {MANIFEST} has another format"
            )
        return document


class CheckpointFolder:
    """The checkpoints in a folder, which need not exist yet.

    Args:
        keep: number of checkpoints to keep.
    """

    def __init__(self, path: Path, keep: int = 3) -> None:
        self.path, self.keep = path, keep

    def all(self) -> list[Checkpoint]:
        """The checkpoints, the latest first. A folder with the name but not the contents of a checkpoint is ignored."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            checkpoints = [Checkpoint(path) for path in self.path.iterdir() if _NAME.fullmatch(path.name)]
            return sorted(filter(_is_checkpoint, checkpoints), key=lambda checkpoint: -checkpoint.step)
        return []

    @property
    def step(self) -> int:
        """Number of steps of the latest checkpoint; 0 if there is none."""
        return next((checkpoint.step for checkpoint in self.all()), 0)

    def obstacle(self) -> str | None:
        """Reason why no checkpoints may be saved here: other files. None if the folder is absent, empty, or contains
        checkpoints.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = sorted(path.name for path in self.path.iterdir() if not _LEFTOVER.fullmatch(path.name))
            if names and not self.all():
                further = f" and {len(names) - 3} more" if len(names) > 3 else ""
                return (
                    f"'{self.path}' contains {', '.join(names[:3])}{further} and no checkpoint: checkpoints need a separate "
                    "folder; give one that is new or empty"
                )
        return None

    def checkpoint(self, step: int) -> Checkpoint:
        """The checkpoint of a step, which need not exist yet."""
        return Checkpoint(self.path / f"step-{step:08d}")

    def temporary(self, step: int) -> Path:
        """Temporary folder that the checkpoint of a step is written to."""
        return self.path / f".step-{step:08d}.saving"

    def finish(self, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Turns the temporary folder into a checkpoint, and removes surplus checkpoints.

        Args:
            facts: description for the manifest, JSON-ready.

        Raises:
            OSError: it cannot be written.
        """
        temporary, checkpoint = self.temporary(step), self.checkpoint(step)
        write_atomic(temporary / MANIFEST, json.dumps({"format": FORMAT, "step": step, **facts}, indent=1).encode())
        sync_folder(temporary)
        if checkpoint.path.exists():  # of a training that went back to an earlier step
            self._remove(checkpoint)
        os.rename(temporary, checkpoint.path)
        sync_folder(self.path)
        earlier = [checkpoint for checkpoint in self.all() if checkpoint.step < step]
        for surplus in earlier[self.keep - 1 :]:
            self._remove(surplus)
        return checkpoint

    def discard(self, step: int) -> None:
        """Removes the temporary folder of a failed save."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def prepare(self) -> None:
        """Creates the folder, and removes only leftovers of killed saves.

        Raises:
            OSError: it cannot be created.
            StudyError: it contains something else.
        """
        if obstacle := self.obstacle():
            raise StudyError(obstacle)
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self.path.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, checkpoint: Checkpoint) -> None:
        # Renamed first, so that a killed process does not leave half a checkpoint under its name.
        removing = checkpoint.path.with_name(f".{checkpoint.path.name}.removing")
        with contextlib.suppress(OSError):
            os.rename(checkpoint.path, removing)
        shutil.rmtree(removing, ignore_errors=True)


def _is_checkpoint(checkpoint: Checkpoint) -> bool:
    """True if a folder was saved as a checkpoint."""
    path = checkpoint.path
    named_so = path.name == f"step-{checkpoint.step:08d}" and not path.is_symlink()
    return named_so and (path / MANIFEST).is_file() and (path / _METADATA).is_file()
