"""Trials on one device instead of many: some ranks run one after another, and their communication time is predicted.

Each rank that decides the result runs in a fresh process with a process group without peers (`training/emulation.py`). Memory is
measured. The step time is the measured computation of the ranks plus the communication time (`replay.py`) over the links of the
hardware. Results are not compared with a reference, since a rank without peers computes meaningless values; so no trial is
`wrong`.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...base.errors import WorkloadError
from ...estimator.collectives import Wire
from ...estimator.document import fullest_rank
from ...estimator.estimate import Z80
from ...models import Workload
from ...results import Measurement, RankReport, Status
from ...results.summary import Z95
from ...space import Config
from ...training.world import World
from ..dispatch import DryRuns
from ..host.client import HostAgent
from ..runner import LEAST_COMPILE_TIMEOUT_S, Runner, TrialRequest, TrialTerms
from ..trial.emulated_rank import EmulatedDryRun, EmulatedReport
from ..trial.job import Job, Outcome, RankOutcome, Rendezvous
from ..trial.timing import median_interval
from .replay import ReplayedStep, play

if TYPE_CHECKING:
    from ...estimator import Estimator
    from ...estimator.hardware import Hardware
    from ...training.emulation import Message, StepTrace

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Environment in which PyTorch asks Linux for pages of 2 MiB. A rank that measures memory only and computes no products
otherwise spends its time on page faults."""
NCCL_CHANNEL_MIB = 1.0
"""NCCL's buffers of one channel to one peer, MiB: those of the protocols Simple (512 KiB a direction), LL and LL128 as
NCCL_BUFFSIZE and its documentation state them, halved since most channels use one of them."""
NCCL_CHANNELS = 24
"""Channels of a communicator between devices of a node with NVLink, by NCCL's own tuning of such nodes; half as many rings and
trees run between nodes."""
NCCL_BASE_MIB = 60.0
"""Kernels, queues and work space of a communicator on its device, MiB."""

GLOO_GROUP_MIB = 0.2
"""Memory of a gloo group in a process, MiB, measured on Linux with torch 2.13."""
RECORDED, RECORDED_MIB = 2000, 0.72 / 1024
"""Entries of torch's flight recorder, which records every collective of a real group, and its memory in MiB, as measured."""


@dataclass(frozen=True, kw_only=True)
class EmulationTerms:
    """Settings that all emulated trials share."""

    hardware: "Hardware"
    """Hardware to predict: its links are priced, and its memory is the limit."""
    memory_only: bool = False
    """True to measure memory without step time, for example if this device is not of the predicted hardware."""


class EmulateRunner(Runner):
    """Emulates ranks of each trial on one device of this machine.

    Args:
        workload: the training.
        terms: devices of a trial, limits and deadlines; its device is the one here.
        emulation: hardware to emulate, and what is measured.
        estimator: of trials that measure memory only, predicts the step time and the fullest stage.
        compiles: True if any configuration may compile.
        agent: an agent that is already running; this runner closes it.
    """

    name = "emulate"
    confirms = False

    def __init__(
        self,
        workload: Workload,
        terms: TrialTerms,
        emulation: EmulationTerms,
        *,
        estimator: "Estimator | None" = None,
        compiles: bool = True,
        agent: HostAgent | None = None,
    ) -> None:
        self.workload, self.terms, self.emulation = workload, terms, emulation
        self._runs = DryRuns(workload, compiles=compiles)
        self._estimator = estimator
        self._wire = Wire.on(emulation.hardware, terms.devices)
        """Prices of communications."""
        if agent is None:
            agent = HostAgent(self._runs.imports)
        else:
            agent.also_import(self._runs.imports)
        self._agent = agent

    def wait_ready(self) -> None:
        self._agent.wait_ready()

    def run(self, request: TrialRequest) -> Measurement:
        started, begin = time.time(), time.perf_counter()
        rank_outcomes: list[RankOutcome] = []
        failed: Outcome | None = None
        try:
            world = World.of(request.config, 0, self.terms.devices)
        except WorkloadError as error:
            failed = Outcome(status=Status.CRASH, reason=str(error))
        else:
            # All ranks of a trial together have one trial's time.
            deadline = request.timeout_s or self.terms.timeout_s
            for number, rank in enumerate(self._ranks(world, request.config)):
                remaining_s = None if deadline is None else max(1.0, deadline - (time.perf_counter() - begin))
                outcome = self._agent.run(
                    self._job(request, rank, remaining_s, first=number == 0), key=str(request.log or "")
                )
                rank_outcomes += outcome.ranks
                if outcome.status is not Status.OK:
                    failed = outcome
                    break
        common: dict[str, Any] = {
            "devices": self.terms.devices,
            "started": started,
            "seconds_total": time.perf_counter() - begin,
            "log": request.log_name,
            "memory_limit_mib": self.terms.memory_limit_mib or float(self.terms.device.memory_mib),
            "emulated_ranks": ",".join(str(outcome.rank) for outcome in rank_outcomes),
        }
        if failed is not None:
            needs = [outcome.needed_memory_mib or outcome.peak_memory_mib for outcome in failed.ranks]
            return Measurement(
                status=failed.status,
                reason=f"emulated: {failed.reason}",
                peak_memory_mib=max((need for need in needs if need), default=None),
                ranks=tuple(_rank_report(outcome, None) for outcome in rank_outcomes),
                **common,
            )
        return self._measured(request, world, rank_outcomes, common)

    def _ranks(self, world: World, config: Mapping[str, Any]) -> list[int]:
        fullest = 0
        if self._estimator is not None and self.emulation.memory_only and world.pp > 1:
            fullest = fullest_rank(self._estimator, config).rank
        return emulated_ranks(world, config, memory_only=self.emulation.memory_only, fullest=fullest)

    def _runs_eagerly(self, config: Mapping[str, Any]) -> bool:
        """True if a configuration with fusion runs without it. Code compiled for this CPU would compute the products, which
        takes hours for a large model, and differs from the code of a GPU."""
        on_cpu = self.terms.device.type == "cpu" and self.emulation.hardware.kind != "cpu"
        return on_cpu and self.emulation.memory_only and bool(config.get("fusion"))

    def _job(self, request: TrialRequest, rank: int, timeout_s: float | None, *, first: bool) -> Job:
        import cloudpickle

        terms, config = self.terms, request.config
        if self._runs_eagerly(config):
            config = Config({**config, "fusion": False})
        program = EmulatedDryRun(
            workload=self.workload,
            config=config,
            plan=terms.plan,
            seed=terms.seed,
            memory_only=self.emulation.memory_only,
        )
        return Job(
            program=cloudpickle.dumps(program),
            ranks=1,
            rendezvous=Rendezvous(world_size=terms.devices, first_rank=rank),
            device_type=terms.device.type,
            threads=terms.threads,
            memory_limit_mib=terms.memory_limit_mib,
            timeout_s=timeout_s,
            compile_timeout_s=max(timeout_s or 0.0, LEAST_COMPILE_TIMEOUT_S),
            log=str(request.log) if request.log else None,
            log_continues=not first,
        )

    def _measured(
        self, request: TrialRequest, world: World, outcomes: Sequence[RankOutcome], common: Mapping[str, Any]
    ) -> Measurement:
        reports: dict[int, EmulatedReport] = {outcome.rank: outcome.report for outcome in outcomes}
        lowest = next(iter(reports.values()))
        communication = {rank: self.communication_mib(world, report) for rank, report in reports.items()}
        fields: dict[str, Any] = {
            "peak_memory_mib": max(report.peak_memory_mib + communication[rank] for rank, report in reports.items()),
            "samples_per_step": lowest.samples_per_step,
            "unit": self.workload.unit,
            "seconds_build": sum(report.seconds_build + report.seconds_compile for report in reports.values()),
            "seconds_compile": sum(report.seconds_compile for report in reports.values()),
            "seconds_warmup": sum(report.seconds_warmup for report in reports.values()),
            "seconds_measure": sum(report.seconds_measure for report in reports.values()),
        }
        spent = sum(fields[name] for name in ("seconds_build", "seconds_warmup", "seconds_measure"))
        fields["seconds_overhead"] = max(0.0, common["seconds_total"] - spent)
        notes = [f"emulated ranks {common['emulated_ranks']} of {self.terms.devices}, no comparison with a reference"]
        if self.terms.device.type == "cuda":
            notes.append(f"{max(communication.values()):,.0f} MiB of NCCL added")
        if not_finite := [str(rank) for rank, report in reports.items() if not report.finite]:
            notes.append(f"values of rank {', '.join(not_finite)} are not finite, and kernels may run at another speed")
        if self.emulation.memory_only:
            assert self._estimator is not None, "without times the estimator predicts them"
            estimate = self._estimator(request.config)
            step, spread = estimate.step_ms / 1e3, Z95 / Z80 * (estimate.step_ms_high - estimate.step_ms_low) / 2e3
            modelled = step
            notes.append("memory measured, time predicted")
            if self._runs_eagerly(request.config):
                notes.append("memory is that without fusion")
        else:
            step, spread, modelled = self._step(world, reports)
            notes.append(f"{1e3 * (step - modelled):,.1f} ms measured and {1e3 * modelled:,.1f} ms modelled")
        ranks = tuple(_rank_report(outcome, step, communication[outcome.rank]) for outcome in outcomes)
        rate = lowest.samples_per_step / step
        tokens = lowest.tokens_per_step / step if lowest.tokens_per_step else None
        tflops = lowest.flops_per_step / step / 1e12 / self.terms.devices if lowest.flops_per_step else None
        return Measurement(
            status=Status.OK,
            reason="; ".join(notes),
            throughput=tokens if self.workload.unit == "tokens/s" else rate,
            samples_per_second=rate,
            tokens_per_second=tokens,
            step_ms=step * 1e3,
            step_ms_spread=spread * 1e3,
            seconds_modelled=modelled,
            tflops_per_device=tflops,
            ranks=ranks,
            **fields,
            **dict(common),
        )

    def _step(self, world: World, reports: Mapping[int, EmulatedReport]) -> tuple[float, float, float]:
        """Returns the step time, the half-width of its 95 % interval, and its modelled part, s."""
        best: tuple[float, float, float] | None = None
        for pipeline in pipelines(world, list(reports)):
            traces = [reports[rank].traces for rank in pipeline]
            replays = [self._play(steps, 1.0) for steps in zip(*traces)]
            seconds, scatter = median_interval([replay.seconds for replay in replays])
            median = min(replays, key=lambda replay: abs(replay.seconds - seconds))
            number = replays.index(median)
            # The interval: scatter of the measured steps, and the uncertainty of all prices together.
            factor = math.exp(Z95 * self._wire.log_std)
            bounds = [self._play([trace[number] for trace in traces], scale).seconds for scale in (1 / factor, factor)]
            spread = math.hypot(scatter, (bounds[1] - bounds[0]) / 2)
            if best is None or seconds > best[0]:
                best = seconds, spread, min(median.modelled, seconds)
        assert best is not None, "a trial has a rank"
        return best

    def _play(self, steps: "Sequence[StepTrace]", scale: float) -> ReplayedStep:
        threads, cores = max(1, self.terms.threads or 1), self.emulation.hardware.cores

        def price(message: "Message") -> float:
            # A send needs both of its ends; a group needs all of its ranks.
            ranks = message.ranks if message.peer is None else (message.ranks[0], message.peer)
            if message.peer is not None and message.peer == ranks[0]:
                ranks = (message.ranks[-1], message.peer)
            return scale * self._wire.price(message.kind.value, message.num_bytes, ranks)

        return play(
            steps,
            price,
            cores=None if cores is None else cores / threads,
            world_size=self.terms.devices,
        )

    def communication_mib(self, world: World, report: EmulatedReport) -> float:
        """Memory of real communication in addition to the rank's own, MiB: NCCL's buffers on CUDA; gloo and torch's flight
        recorder in a CPU process. 0 if a CPU measures the memory of other hardware, since the limit then excludes NCCL."""
        if self.terms.device.type == "cuda":
            return self.nccl_mib(world)
        if self.emulation.hardware.kind != "cpu":
            return 0.0
        return GLOO_GROUP_MIB * report.groups + RECORDED_MIB * min(RECORDED, report.messages)

    def nccl_mib(self, world: World) -> float:
        """Memory of NCCL's communicators on a device, MiB: channels to the peers in each group, and the fixed part of each
        communicator. Groups are those of the mesh's axes, of ranks that share sequences or experts, and of all ranks. It is
        assumed, not measured: an emulated rank has no communicators."""
        hardware, total_mib = self.emulation.hardware, 0.0
        tp, replicas = world.tp, world.replicas
        # The ranks of each group, and the distance between neighbours in it.
        groups = {(tp, 1), (world.sp, tp), (world.cp, tp * world.sp), (replicas, tp), (world.pp, tp * replicas)}
        groups |= {(world.size, 1), *([(world.ep, tp), (replicas // world.ep, tp * world.ep)] if world.ep > 1 else [])}
        for size, stride in groups:
            if size > 1:
                crosses_nodes = size * stride > hardware.devices_per_node
                channels = NCCL_CHANNELS / 2 if crosses_nodes else NCCL_CHANNELS
                total_mib += NCCL_BASE_MIB + channels * NCCL_CHANNEL_MIB * min(2, size - 1)
        return total_mib

    def stop(self, log: str) -> None:
        """Stops the trial that writes this log."""
        self._agent.stop(log)

    def close(self) -> None:
        self.closed = True
        self._agent.close()


def emulated_ranks(
    world: World, config: Mapping[str, Any], *, memory_only: bool = False, fullest: int = 0
) -> list[int]:
    """Returns the ranks of a training to emulate.

    Ranks of one stage differ if something is distributed unevenly: owners of parameters (ZeRO 1), rows of experts (`ep`), or the
    last pieces of a division with a remainder. The first rank is emulated, or the first `ep` ranks (at most `MOST_SHARERS`) if
    experts are shared. Step time needs all stages of a pipeline; memory needs the first, the last, and the fullest.

    Args:
        fullest: the stage with the largest predicted memory.
    """
    stages = list(range(world.pp))
    ranks_per_stage = world.replicas * world.tp
    if memory_only:
        stages = sorted({0, fullest, world.pp - 1})
    # Whole experts (`etp`) are on ranks that share a layer, too.
    stride = 1 if config.get("etp") == 1 else world.tp
    places = [sharer * stride for sharer in range(min(world.ep, MOST_SHARERS))]
    return [stage * ranks_per_stage + place for stage in stages for place in places]


MOST_SHARERS = 4
"""Maximum number of emulated ranks among replicas that share experts."""


def pipelines(world: World, ranks: Sequence[int]) -> list[list[int]]:
    """Ranks with the same position in their stages, stage by stage."""
    ranks_per_stage = world.replicas * world.tp
    by_position: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        by_position.setdefault(rank % ranks_per_stage, []).append(rank)
    return list(by_position.values())


def _rank_report(outcome: RankOutcome, step: float | None, communication_mib: float = 0.0) -> RankReport:
    report = outcome.report if isinstance(outcome.report, EmulatedReport) else None
    return RankReport(
        rank=outcome.rank,
        status=outcome.status,
        reason=outcome.reason,
        step_ms=None if step is None else step * 1e3,
        peak_memory_mib=report.peak_memory_mib + communication_mib if report else outcome.peak_memory_mib,
        peak_allocated_mib=report.peak_allocated_mib if report else None,
        build_memory_mib=report.build_memory_mib if report else None,
        allocation_retries=report.allocation_retries if report else 0,
    )
