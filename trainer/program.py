"""The program of a training's ranks: builds the model in its configuration, resumes from the latest checkpoint and trains."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..base.errors import WorkloadError
from ..models import Workload
from ..models.architecture import Architecture
from ..models.layouts.dcp import dcp_tensors
from ..models.layouts.hugging_face import find_weights
from ..models.layouts.weights import Weights
from ..results import Measurement, Status
from ..results.names import CHECKPOINTS, DATA, LOG, STOP
from ..runners.host.client import COMMON_IMPORTS
from ..runners.runner import Work
from ..runners.trial.dry_run import join
from ..runners.trial.job import Job, Outcome, Rendezvous
from ..runners.trial.rank import RankContext
from ..space import Config
from ..training import Training
from .checkpoint.saver import Checkpoint, CheckpointFolder, Saver, gathered, latest, patient_group
from .checkpoint.state import State
from .data import DataPlan, training_data
from .loop import Hyperparameters, Loop, LoopPlan, LoopResult

if TYPE_CHECKING:
    from ..runners.runner import CommonFields, TrialRequest, TrialTerms


_SYNCED = ("checkpoint", "end")
"""Kinds of log lines after which the file is synced, so that it survives a power failure as checkpoints do."""


@dataclass(frozen=True, kw_only=True)
class TrainRank:
    """The program of the ranks of a training. Called with the rank's context.

    It always resumes from the latest checkpoint in its folder, saved in any configuration.
    """

    workload: Workload
    config: Config
    hyperparameters: Hyperparameters
    """Including the number of steps."""
    plan: LoopPlan
    """Intervals of logs, evaluations and checkpoints."""
    folder: Path
    """Contains checkpoints and the log; shared by all ranks."""
    data: DataPlan = field(default_factory=DataPlan)
    weights: str | None = None
    """A checkpoint of another tool with the initial weights; None to initialise them from the seed."""
    seed: int = 0
    """Seed of weights and dropout."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of a checkpoint's manifest."""
    peak_flops: float | None = None
    """Peak rate of a device; None if unknown."""

    def __call__(self, context: RankContext) -> LoopResult:
        import torch

        device = torch.device(context.device_type, context.local_rank if context.device_type == "cuda" else None)
        group = None
        if context.world_size > 1:
            context.phase("rendezvous")
            join(context)
            group = patient_group()
        with ExitStack() as stack:
            log = stack.enter_context(_Log(self.folder)) if context.rank == 0 else _discard
            context.phase("data")
            samples = training_data(self.data, self.workload, self.folder / DATA)
            context.phase("build")
            training = Training(
                self.workload.with_optimizer(self.hyperparameters.optimizer),
                self.config,
                device,
                seed=self.seed,
                rank=context.rank,
                world_size=context.world_size,
                own_data=False,
            )
            context.phase("checkpoint")
            folder = CheckpointFolder(self.folder / CHECKPOINTS, self.plan.keep)
            saver = Saver(folder, context.rank, group)
            stack.callback(saver.close)
            checkpoint = latest(folder, group)
            if context.rank == 0:
                folder.prepare()
            from_weights = self._load(training, checkpoint, log)
            step, position = (0, 0) if checkpoint is None else (checkpoint.step, int(checkpoint.manifest["samples"]))
            # Waits here: collectives of steps have a shorter timeout for a rank that reads more than others.
            gathered(None, group)
            loop = Loop(
                training,
                samples,
                self.hyperparameters,
                self.plan,
                saver=saver,
                step=step,
                position=position,
                facts={
                    **self.facts,
                    "configuration": dict(self.config),
                    "devices": context.world_size,
                    "from_weights": bool(from_weights),
                },
                log=log,
                stop=stack.enter_context(_stop_requested(self.folder if context.rank == 0 else None)),
                memory_mib=context.memory.peak_mib,
                peak_flops=self.peak_flops,
                from_weights=from_weights,
            )
            context.phase("training")
            return loop.run()

    def _load(
        self,
        training: Training,
        checkpoint: Checkpoint | None,
        log: Callable[[Mapping[str, Any]], None],
    ) -> frozenset[str]:
        """Loads the weights to begin with and the checkpoint. Returns the names of frozen parameters among the former, which
        checkpoints leave out.
        """
        from_weights = frozenset[str]()
        if self.weights is not None and (checkpoint is None or training.outline.frozen):
            weights = weights_to_begin_with(self.workload, self.weights)
            from_weights = frozenset(training.outline.frozen) & weights.tensors.keys()
            for note in weights.notes if checkpoint is None else ():
                log({"kind": "note", "text": note})
            State(training).load_weights(weights)
        if checkpoint is not None:
            State(training, from_weights).load(dcp_tensors(checkpoint.path), checkpoint.path.name, log)
            training.precision.restore(checkpoint.manifest)
            log({"kind": "resumed", "step": checkpoint.step, "checkpoint": checkpoint.path.name})
        return from_weights


def weights_to_begin_with(workload: Workload, path: str) -> Weights:
    """Returns the weights of another tool's checkpoint, without reading them.

    Raises:
        WorkloadError: the checkpoint belongs to another model or cannot be read.
    """
    if not isinstance(workload.model, Architecture):
        raise WorkloadError(
            f"{workload.name} is not a Hugging Face model: its own code must load '{path}', since redline only reads "
            "checkpoints of other tools for Hugging Face models"
        )
    return find_weights(path, workload.model)


class Trainings(Work):
    """A training in one configuration after another."""

    in_turns = False
    confirms = False

    def __init__(self, program: TrainRank) -> None:
        self.program = program
        self.ended: LoopResult | None = None
        """The first rank's report of how its loop ended; None if it did not report."""
        self.imports = (*COMMON_IMPORTS, "redline.trainer.program", *program.workload.imports)

    def job(self, request: "TrialRequest", terms: "TrialTerms") -> Job:
        import cloudpickle

        return Job(
            program=cloudpickle.dumps(replace(self.program, config=request.config)),
            ranks=terms.devices,
            rendezvous=Rendezvous(world_size=terms.devices),
            device_type=terms.device.type,
            threads=terms.threads,
            memory_limit_mib=terms.memory_limit_mib,
            log=str(request.log) if request.log else None,
        )

    def measurement(
        self, request: "TrialRequest", terms: "TrialTerms", outcome: Outcome, common: "CommonFields"
    ) -> Measurement:
        """Returns the status of the training and its throughput."""
        unit = self.program.workload.unit
        results = [rank.report for rank in outcome.ranks if isinstance(rank.report, LoopResult)]
        self.ended = next(iter(results), None)
        peaks = [rank.peak_memory_mib for rank in outcome.ranks if rank.peak_memory_mib]
        measured = Measurement(
            status=outcome.status,
            reason=outcome.reason,
            memory_limit_mib=terms.memory_limit_mib or float(terms.device.memory_mib),
            peak_memory_mib=max(peaks, default=None),
            **common,
        )
        timed_results = [result for result in results if result.step_ms]
        if outcome.status is not Status.OK or not timed_results:
            return measured
        slowest = max(timed_results, key=lambda result: result.step_ms or 0.0)
        steps_per_second = 1e3 / (slowest.step_ms or 1.0)
        samples = slowest.samples_per_step * steps_per_second
        tokens = slowest.tokens_per_step * steps_per_second if slowest.tokens_per_step else None
        return replace(
            measured,
            throughput=tokens if unit == "tokens/s" else samples,
            unit=unit,
            samples_per_second=samples,
            tokens_per_second=tokens,
            step_ms=slowest.step_ms,
            tflops_per_device=slowest.tflops_per_device,
            samples_per_step=slowest.samples_per_step,
        )


def _discard(line: Mapping[str, Any]) -> None:
    """The log of ranks other than 0."""


class _Log:
    """Appends JSON lines to a training's log. A full disk must not end a training: a line that cannot be written is
    printed instead.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOG
        self._cut = path.exists() and path.read_bytes()[-1:] not in (b"\n", b"")
        """True if the last line has no end: the next one is on a line of its own."""
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __call__(self, line: Mapping[str, Any]) -> None:
        data = b"\n" * self._cut + json.dumps({"time": time.time(), **line}, allow_nan=False).encode() + b"\n"
        try:
            if written := self._file.write(data):
                self._cut = written < len(data)
            if line.get("kind") in _SYNCED:
                os.fsync(self._file)
            problem = "cut short" if written < len(data) else None
        except OSError as error:
            problem = str(error.strerror)
        if problem is not None:
            print(f"redline: the log cannot be written ({problem}): {json.dumps(line)}", flush=True)


@contextmanager
def _stop_requested(folder: Path | None) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True when the training must end: after SIGTERM, SIGINT, or if a file is in its
    folder, which one rank checks.
    """
    requested = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        requested = True

    previous_handlers = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: requested or (folder is not None and os.path.exists(folder / STOP))
    finally:
        for number, handler in previous_handlers.items():
            with suppress(TypeError):  # None for a handler that Python did not set, which cannot be restored
                signal.signal(number, handler)
