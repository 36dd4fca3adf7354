"""`redline.train`: starts the ranks of a training, and restarts them after failures, if necessary in another
configuration.
"""

import contextlib
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.device import detect, usable_cores
from ..base.errors import NothingFound, RedlineError, RunnerError, StudyError, TrainingFailed, UsageError
from ..base.lock import FolderLock
from ..base.reading import JsonLines
from ..base.writing import free_mib, make_folder
from ..estimator.hardware import Hardware
from ..estimator.measuring import hardware_of
from ..knobs.strategy import Strategy
from ..knobs.text import config_text
from ..models import Workload
from ..models.architecture import Architecture
from ..models.flops import flops_of
from ..models.lora import AdaptedArchitecture
from ..models.resolve import located
from ..results import Measurement, Status
from ..results.names import (
    CHECKPOINTS,
    DATA,
    LOG,
    LOGS,
    STOP,
    fresh_folder,
    holds_training,
    log_size,
    read_document,
    write_document,
)
from ..runners import TrialTerms
from ..runners.dispatch import peak_flops
from ..runners.place.ray_runner import RayRunner, kind_of_cluster
from ..runners.registry import runner_on
from ..runners.runner import Runner, TrialRequest
from ..space import Config
from ..tuner.trackers import logging_to
from .checkpoint.saver import CheckpointFolder
from .data import DataPlan, training_data
from .data.corpus import find_sources
from .listener import Trained, TrainingStart, TrainingStrategy, TrainListener, TrainTracking, devices_text
from .loop import Hyperparameters, LoopPlan, LoopResult
from .planning import plan, safer
from .program import Trainings, TrainRank, weights_to_begin_with
from .request import TrainingSource, TrainRequest, read_source, taken_up, winner, with_tokenizer, without_batch

LOSSES = 3
"""Largest number of restarts in a row, after ranks were lost, that reach no further checkpoint. A failed host loses ranks
once or twice, a defect of the program at every start.
"""
REPLACE_S, RETRY_S = 120.0, 5.0
"""Time limit and retry interval for the replacement of lost devices, s."""
NOTHING_SAVED = "there is no checkpoint, and --resume starts from step 0"
FULL_MIB = 1.0
"""Free space of a training's disk below which it counts as full, MiB."""
LOOK_S = 0.2
"""Interval between reads of the log, s."""


def train(request: TrainRequest, listener: TrainListener | None = None) -> Trained:
    """Trains from the first step or from the latest checkpoint until the last step, or until it is stopped.

    Raises:
        UsageError: the request is invalid; nothing was started.
        NothingFound: no configuration fits on the devices.
        TrainingFailed: the ranks failed for another reason than memory.
        RunnerError: the machinery that runs the ranks failed repeatedly.
    """
    with contextlib.ExitStack() as stack:
        return Driver(request, listener or TrainListener(), stack).run()


class Driver:
    """State of one call of `train`: the request, the folder, and the configurations so far.

    Args:
        request: the request.
        listener: receives the events of the training.
        stack: keeps the folder's lock.

    Raises:
        UsageError: the request is invalid, or contradicts the training in the folder.
    """

    def __init__(self, request: TrainRequest, listener: TrainListener, stack: contextlib.ExitStack) -> None:
        self.document: dict[str, Any] = {}
        note: str | None = None
        if request.resume:
            path = Path(request.out or request.source)
            self.document = read_document(path)
            request, note = taken_up(request, self.document["asked"], CheckpointFolder(path / CHECKPOINTS).step)
            source = TrainingSource.from_dict(self.document["source"])
        else:
            source = read_source(request.source)
            path = Path(request.out) if request.out is not None else fresh_folder("train", source.name)
            if holds_training(path):
                raise StudyError(
                    f"'{path}' contains a training already; continue it with --resume, or give another --out"
                )
        source = replace(source, spec=located(source.spec, request.workload, str(request.source)))
        if request.paths:
            find_sources(request.paths)  # refused before a model is built
        self.request, self.path = request, path
        self.workload = source.workload(request)
        self.source = replace(source, spec=str(self.workload.spec))  # an absolute path
        if self.workload.optimizer is not None and request.lr is not None:
            raise UsageError(f"{self.workload.name} has its own optimizer, whose learning rate --lr does not set")
        self._notes = [] if note is None else [note]
        self.checkpoints = CheckpointFolder(path / CHECKPOINTS, request.keep)
        if obstacle := self.checkpoints.obstacle():
            raise StudyError(obstacle)
        self.listener: TrainListener = stack.enter_context(logging_to(request.log_to, path, listener, TrainTracking))
        self._new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
        make_folder(path)
        stack.callback(FolderLock(path).release)
        (path / STOP).unlink(missing_ok=True)
        self._kind = (
            kind_of_cluster(request.ray_address, source.device_name) if request.runner == RayRunner.name else None
        )
        self.device = detect() if self._kind is None else self._kind.device
        self.strategies = [TrainingStrategy.from_dict(document) for document in self.document.get("strategies", ())]
        self.data: Mapping[str, Any] = {}
        """Description of the training data."""
        self._weights_dtype: str | None = self.document.get("weights_dtype")
        """Dtype of the weights that the training began with; None if it began with none."""
        self._failed: list[Config] = []
        self._end: LoopResult | None = None
        """The ranks' report of their end; the disk with their log may be full."""

    @property
    def step(self) -> int:
        """Number of steps in the latest checkpoint."""
        return self.checkpoints.step

    @property
    def strategy(self) -> TrainingStrategy:
        """Current configuration."""
        return self.strategies[-1]

    def prepare(self) -> None:
        """Reads the data, and decides on a configuration. If that is refused, the new folders are removed.

        Raises:
            UsageError: the data cannot be read, or has changed; or the initial weights are of another model.
            NothingFound: no configuration fits on the devices.
        """
        try:
            self._prepare()
        except RedlineError:
            if self._new_folders and not holds_training(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
                with contextlib.suppress(OSError):  # not empty: another process has created something there
                    for folder in self._new_folders[1:]:
                        folder.rmdir()
            raise

    def _prepare(self) -> None:
        for note in self._notes:
            self.listener.on_message(note)
        if self.request.weights is not None and not self.step:
            start = weights_to_begin_with(self.workload, str(self.request.weights))  # refused before ranks are started
            self._weights_dtype = None if start.dtype is None else str(start.dtype).removeprefix("torch.")
        strategy = self._begin()  # before the data, which may take hours, so that a refusal loses nothing
        self.listener.on_wait("reading the data")
        if not self.document:
            self.request = with_tokenizer(self.request, self.listener.on_message)
        plan = self.request.section(DataPlan)
        samples = training_data(plan, self.workload, self.path / DATA, self.listener.on_read)
        self.data = samples.describe()
        previous_digest = self.document.get("data", {}).get("digest", self.data["digest"])
        if previous_digest != self.data["digest"]:
            raise UsageError(
                f"the data differs from that of the training in '{self.path}'; start another training, or restore the data"
            )
        if self.data.get("made_up"):
            self.listener.on_message(
                f"no data is given, so {self.source.name or self.workload.name} trains on made-up tokens: that shows its speed, "
                "but it learns nothing; --data names training files"
            )
        if self.document and not self.step:
            self.listener.on_message("there is no checkpoint to continue from: the training starts from step 0")
        step = self._samples_of(strategy)
        if self.request.eval_every and samples.num_evaluation < step:
            instead = "leave --eval-every out" if self.step else "give a larger --held-out, or leave --eval-every out"
            raise UsageError(
                f"an evaluation takes at least the {step} samples of a step, but {samples.num_evaluation} are held out; {instead}"
            )
        self._use(strategy)

    def _samples_of(self, strategy: TrainingStrategy) -> int:
        """Returns the samples of an optimizer step in a configuration."""
        total = self.workload.global_batch
        strategy_knobs = Strategy.of(strategy.config, devices=strategy.devices, global_batch=total)
        return strategy_knobs.micro_batch * strategy_knobs.grad_accum * strategy_knobs.dp

    def safer(self, reason: str) -> None:
        """Takes the next safer configuration after an out-of-memory failure.

        Raises:
            NothingFound: there is none.
        """
        self.listener.on_message(reason)
        self._failed.append(self.strategy.config)
        devices = self.strategy.devices
        planned = safer(
            self.workload,
            self.strategy.config,
            devices=devices,
            memory_limit_mib=self.request.limit_mib,
            failed=self._failed,
            fixed=self.request.fix or {},
            hardware=self._hardware,
        )
        if planned is None:
            raise NothingFound(
                f"the training ran out of memory, and no configuration for {devices_text(devices)} needs clearly less; "
                "more devices, a smaller --global-batch or a shorter --seq-len would help"
            )
        self._use(TrainingStrategy(config=planned.config, devices=devices, why=planned.why, step=self.step))
        self.listener.on_message(f"continuing from step {self.step} in a safer configuration")

    def run(self) -> Trained:
        """Starts ranks here, or on the runner's devices, until they have ended successfully."""
        if self.step >= self.request.steps:
            self.listener.on_message(f"all {self.step} steps are done already; a higher --steps continues")
            return self._result(None)
        self.prepare()
        while True:
            measured = self._run_until_ended()
            if measured.ok:
                return self._ended(measured)
            if measured.status is not Status.OOM:
                then = f"--resume continues from the checkpoint of step {self.step}" if self.step else NOTHING_SAVED
                raise TrainingFailed(
                    f"the training ended at step {self.step} or later ({measured.status}): {measured.reason}; what its "
                    f"ranks printed is in {self.path / measured.log}; {then}"
                )
            self.safer(f"out of memory: {measured.reason}")

    def program(self) -> TrainRank:
        """Returns the work of the ranks."""
        request = self.request
        flops_of(self.workload)  # once here, rather than on every rank
        return TrainRank(
            workload=self.workload,
            config=self.strategy.config,
            hyperparameters=request.section(Hyperparameters),
            plan=request.section(LoopPlan),
            folder=self.path.absolute(),
            data=request.section(DataPlan),
            weights=None if request.weights is None else str(request.weights),
            seed=request.seed,
            facts={"model": self.source.spec, "workload": self.workload.id},
            peak_flops=peak_flops(self.device, self.strategy.config),
        )

    def training_start(self) -> TrainingStart:
        """Describes the training for its listener."""
        strategy = self.strategy
        count = f"{strategy.devices} x " if strategy.devices > 1 else ""
        return TrainingStart(
            name=self.source.name or self.workload.name,
            folder=self.path,
            strategy=strategy,
            where=f"{count}{self.device.name}",
            data=self.data,
            steps=self.request.steps,
            step=self.step,
            unit=self.workload.unit,
            hyperparameters=vars(self.request.section(Hyperparameters)),
        )

    def _begin(self) -> TrainingStrategy:
        """Returns the first configuration: the known one, or a plan."""
        request, previous = self.request, self.strategies[-1] if self.strategies else None
        strategy = (
            winner(request, self.source, self.workload, self.device) if previous is None else self._as_before(previous)
        )
        if strategy is not None:
            return strategy
        if previous is None:
            self.listener.on_wait("planning")
            devices, like = request.devices or self.source.devices or self.device.count, self.source.config
            if like is not None and request.global_batch is not None:
                like = without_batch(like)
            return self._planned(devices, like)
        self.listener.on_wait("replanning")
        devices = request.devices or previous.devices
        planned = self._planned(devices, previous.config)
        of = f" with {request.limit_mib:,.0f} MiB each" if request.limit_mib is not None else ""
        previous_devices = f", after {previous.devices}" if devices != previous.devices else ""
        self.listener.on_message(f"replanned for {devices_text(devices)}{of}{previous_devices}: {planned.why}")
        return planned

    def _planned(self, devices: int, like: Config | None) -> TrainingStrategy:
        """Returns the plan for a number of devices.

        Raises:
            NothingFound: no configuration fits on them.
        """
        planned = plan(
            self.workload,
            devices=devices,
            memory_limit_mib=self.request.limit_mib,
            like=like,
            hardware=self._hardware,
            fixed=self.request.fix or {},
        )
        return TrainingStrategy(config=planned.config, devices=devices, why=planned.why, step=self.step)

    @property
    def _hardware(self) -> Hardware | None:
        """Description of a cluster's devices; None for those at hand."""
        return None if self.device == detect() else hardware_of(self.device)

    def _as_before(self, previous: TrainingStrategy) -> TrainingStrategy | None:
        """Returns the previous configuration; None if other devices, memory or knobs are requested."""
        request_document = self.document["asked"]
        same = all(getattr(self.request, name) == request_document.get(name) for name in ("memory_limit", "fix"))
        return previous if same and self.request.devices in (None, previous.devices) else None

    def _use(self, strategy: TrainingStrategy) -> None:
        """Saves a configuration before it is used, for a resumed training.

        Raises:
            UsageError: it has other samples of a step than the training began with.
        """
        if self.strategies and (step := self._samples_of(strategy)) != (began := self._samples_of(self.strategies[0])):
            raise UsageError(
                f"the training has {began} samples a step, but on {devices_text(strategy.devices)} the space of "
                f"{self.workload.name} gives {step} ({config_text(strategy.config)}): --fix keeps a knob, --devices the devices"
            )
        if not self.strategies or strategy != self.strategy:
            self.strategies.append(strategy)
        self.document = {
            "asked": self.request.given(),
            "source": self.source.to_dict(),
            "workload": self.workload.id,
            "data": self.data,
            "steps": self.request.steps,
            "name": self.source.name or self.workload.name,
            "unit": self.workload.unit,
            "weights_dtype": self._weights_dtype,
            "strategies": [strategy.to_dict() for strategy in self.strategies],
        }
        write_document(self.path, self.document)

    def _start(self) -> Measurement:
        """Starts the ranks once and returns their measurement."""
        request, strategy = self.request, self.strategy
        terms = TrialTerms(
            device=self.device,
            devices=strategy.devices,
            memory_limit_mib=request.limit_mib,
            timeout_s=None,
            threads=max(1, usable_cores() // strategy.devices) if self.device.type == "cpu" else None,
            seed=request.seed,
        )
        self.listener.on_wait("starting ranks")
        work = Trainings(self.program())
        ray = {"kind": self._kind, "say": self.listener.on_wait}
        with runner_on(request.runner, work, terms, address=request.ray_address, ray=ray) as runner:
            runner.wait_ready()
            self.listener.on_start(self.training_start())
            measured = self._watched(runner)
        self._end = work.ended
        return measured

    def _run_until_ended(self) -> Measurement:
        """Starts the ranks, again if they are lost, and on fewer devices if lost devices are not replaced.

        Returns the measurement of the ranks that ended by themselves.

        Raises:
            RunnerError: they were lost `LOSSES` times without reaching another checkpoint.
        """
        losses, lost_at = 0, 0.0
        while True:
            previous_step = self.step
            try:
                return self._start()
            except RunnerError as error:
                losses, lost_at = (1 if self.step > previous_step else losses + 1), time.monotonic()
                if losses > LOSSES:
                    raise
                self.listener.on_message(f"ranks were lost ({error}); continuing from step {self.step}")
            except UsageError as error:  # there are fewer devices than before
                if not losses or self.strategy.devices < 2:
                    raise
                if time.monotonic() - lost_at < REPLACE_S:
                    self.listener.on_wait("waiting for devices to replace the lost ones")
                    time.sleep(RETRY_S)
                    continue
                fewer = self.strategy.devices // 2
                self.listener.on_message(f"{error}; planning for {devices_text(fewer)}")
                self._failed.clear()  # `safer` compares with failures on the same devices
                self._use(self._planned(fewer, self.strategy.config))

    def _watched(self, runner: Runner) -> Measurement:
        """Starts the ranks once, and forwards their log. Ctrl-C lets them save and end; a second one ends them."""
        numbers = [int(log.stem) for log in (self.path / LOGS).glob("*.log") if log.stem.isdigit()]
        log = self.path / LOGS / f"{1 + max(numbers, default=-1)}.log"
        log.parent.mkdir(exist_ok=True)
        reader = JsonLines(self.path, LOG, log_size(self.path))
        trial_request = TrialRequest(config=self.strategy.config, number=int(log.stem), log=log.absolute())
        with ThreadPoolExecutor(1, thread_name_prefix="ranks") as pool:
            future = pool.submit(runner.run, trial_request)
            try:
                try:
                    self._follow(future, reader)
                except KeyboardInterrupt:
                    self._ask_to_stop()
                    self._follow(future, reader)
                return future.result()
            except BaseException:  # interrupted again, or for example its output is closed
                runner.close()
                raise

    def _ask_to_stop(self) -> None:
        """Requests the ranks to save a checkpoint and end."""
        try:
            (self.path / STOP).touch()
        except OSError as error:
            reason = error.strerror or error
            self.listener.on_message(
                f"the ranks cannot be requested to end: '{self.path / STOP}': {reason}; Ctrl-C again ends at once"
            )
        else:
            self.listener.on_message("saving a checkpoint and ending; Ctrl-C again ends at once, without a checkpoint")

    def _follow(self, future: "Future[Measurement]", reader: JsonLines) -> None:
        over, full = False, False
        while not over:
            over = future.done()
            for line in reader.lines():
                self.listener.on_line(line)
            was_full, full = full, free_mib(self.path) < FULL_MIB
            if full and not was_full:
                self.listener.on_message(
                    f"THE DISK OF '{self.path}' IS FULL: no checkpoint can be saved and no line logged until there is room"
                )
            if not over:
                time.sleep(LOOK_S)

    def _ended(self, measured: Measurement) -> Trained:
        """Returns the result.

        Raises:
            TrainingFailed: the last step could not be saved.
        """
        end = self._end
        assert end is not None, "ranks that succeed report their end"
        if end.failure:
            checkpoint_text = NOTHING_SAVED
            if self.step:
                checkpoint_text = f"the latest checkpoint is of step {self.step}, and --resume continues from there"
            raise TrainingFailed(
                f"the training reached step {end.step}, which could not be saved: {end.failure}; {checkpoint_text}"
            )
        return self._result(measured)

    def _result(self, measured: Measurement | None) -> Trained:
        source, request = self.source, self.request
        same = self.strategy.config == source.config and all(
            getattr(request, name) in (None, getattr(source, name)) for name in ("lora", "seq_len", "global_batch")
        )
        return Trained(
            folder=self.path,
            step=self.step if self._end is None else self._end.step,
            stopped=self._end is not None and self._end.stopped,
            measurement=measured,
            strategies=tuple(self.strategies),
            predicted=source.predicted if same else None,
            exports_to=_layout(self.workload),
        )


def _layout(workload: Workload) -> str | None:
    if not isinstance(workload.model, Architecture):
        return None
    return "peft" if isinstance(workload.model, AdaptedArchitecture) else "hf"
