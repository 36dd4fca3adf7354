"""Converts trial requests to jobs for ranks, and the outcomes of jobs to measurements."""

import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..base.device import Device
from ..estimator.measuring import table_entry
from ..models import Workload
from ..results import Measurement, RankReport, Status
from .host.client import COMMON_IMPORTS, PLAIN_IMPORTS
from .runner import LEAST_COMPILE_TIMEOUT_S, CommonFields, Runner, TrialRequest, TrialTerms, Work
from .trial.dry_run import DryRun, DryRunReport
from .trial.failure import is_damaged_library
from .trial.job import Job, Outcome, RankOutcome, Rendezvous

SETTLE_S = 20.0
"""Time for a GPU's clocks to settle before a possible winner is measured, s."""


class DryRunner(Runner):
    """Runs trials in fresh processes. Subclasses define where."""

    def __init__(self, work: Workload | Work, terms: TrialTerms) -> None:
        self.work = work if isinstance(work, Work) else DryRuns(work)
        self.terms = terms
        self.confirms = self.work.confirms
        on_gpus = terms.device.type == "cuda"
        self.settle_s = SETTLE_S if on_gpus and isinstance(self.work, DryRuns) else 0.0

    @abstractmethod
    def dispatch(self, job: Job) -> Outcome:
        """Runs the job on free devices and returns its outcome; called from up to `slots` threads."""

    def run(self, request: TrialRequest) -> Measurement:
        started, begin = time.time(), time.perf_counter()
        outcome = self._run(request)
        if outcome.status is Status.CRASH and is_damaged_library(outcome.reason):
            # Another trial was killed while it linked; the ranks of the second run remove the damaged library.
            outcome = self._run(request)
        common: CommonFields = {
            "devices": self.terms.devices,
            "started": started,
            "seconds_total": time.perf_counter() - begin,
            "log": request.log_name,
        }
        return self.work.measurement(request, self.terms, outcome, common)

    def _run(self, request: TrialRequest) -> Outcome:
        at_once, device = self.slots, self.terms.device
        if device.type == "cuda":
            at_once = max(1, min(at_once, device.count // self.terms.devices))
        return self.dispatch(replace(self.work.job(request, self.terms), at_once=at_once))


class DryRuns(Work):
    """Dry runs of a workload, with one rank per device.

    Args:
        workload: the workload.
        compiles: whether any candidate may compile.
    """

    def __init__(self, workload: Workload, *, compiles: bool = True) -> None:
        self.workload = workload
        self.imports = (*(COMMON_IMPORTS if compiles else PLAIN_IMPORTS), *workload.imports)

    def job(self, request: TrialRequest, terms: TrialTerms) -> Job:
        import cloudpickle

        timeout_s = request.timeout_s or terms.timeout_s
        program = DryRun(
            workload=self.workload,
            config=request.config,
            plan=replace(terms.plan, settle_seconds=SETTLE_S)
            if request.sustained and terms.device.type == "cuda"
            else terms.plan,
            best_throughput=request.best_throughput,
            seed=terms.seed,
        )
        return Job(
            program=cloudpickle.dumps(program),
            ranks=terms.devices,
            rendezvous=Rendezvous(world_size=terms.devices),
            device_type=terms.device.type,
            threads=terms.threads,
            memory_limit_mib=terms.memory_limit_mib,
            timeout_s=timeout_s,
            compile_timeout_s=max(timeout_s or 0.0, LEAST_COMPILE_TIMEOUT_S),
            log=str(request.log) if request.log else None,
        )

    def measurement(
        self, request: TrialRequest, terms: TrialTerms, outcome: Outcome, common: CommonFields
    ) -> Measurement:
        reports = _reports(outcome)
        fields: _DryRunFields = {
            **common,
            "memory_limit_mib": terms.memory_limit_mib or float(terms.device.memory_mib),
            "ranks": tuple(_rank_report(rank) for rank in outcome.ranks),
        }
        if outcome.status is not Status.OK or not reports:
            needs = [rank.needed_memory_mib for rank in outcome.ranks if rank.needed_memory_mib]
            peaks = [rank.peak_memory_mib for rank in outcome.ranks if rank.peak_memory_mib]
            return Measurement(
                status=outcome.status,
                reason=outcome.reason,
                peak_memory_mib=max(needs or peaks, default=None),
                **fields,
            )
        return self._timed(request, terms, reports, fields)

    def _timed(
        self, request: TrialRequest, terms: TrialTerms, reports: list[DryRunReport], fields: "_DryRunFields"
    ) -> Measurement:
        from .trial import numerics_check

        config = request.config
        # Ranks wait for each other: the slowest one determines the step.
        slowest = max(reports, key=lambda report: report.step_ms)
        samples_per_second = slowest.samples_per_step / slowest.step_ms * 1e3
        tokens_per_second = None
        if slowest.tokens_per_step:
            tokens_per_second = slowest.tokens_per_step / slowest.step_ms * 1e3
        tflops = None
        if slowest.flops_per_step:
            tflops = slowest.flops_per_step / slowest.step_ms * 1e3 / 1e12 / terms.devices
        peak = peak_flops(terms.device, config)
        retries = sum(report.allocation_retries for report in reports)
        probe = numerics_check.together([report.probe for report in reports], [report.first for report in reports])
        mismatch = numerics_check.numerics_mismatch(
            probe, request.reference, loss=slowest.loss, last_loss=slowest.last_loss
        )
        notes = [mismatch or slowest.note]
        if request.reference is not None and not mismatch:
            notes.append(numerics_check.why_incomparable(probe, request.reference))
        if slowest.seconds_settle and not mismatch:
            notes.append(f"measured after {slowest.seconds_settle:.0f} s for clocks to settle")
        load = numerics_check.expert_load([report.probe for report in reports])
        if load is not None and int(config.get("ep") or 1) > 1 and not mismatch:
            notes.append(f"the fullest expert has {load:.2f} times the mean of rows")
        dropped = numerics_check.dropped_share([report.dropped for report in reports])
        if dropped is not None and not mismatch:
            notes.append(f"experts dropped {100 * dropped:.1f} % of the rows")
        if retries and not mismatch:
            notes.append(f"near OOM: {retries} allocation retries")
        seconds_build = slowest.seconds_build + slowest.seconds_compile
        seconds_reported = sum((seconds_build, slowest.seconds_warmup, slowest.seconds_measure))
        return Measurement(
            status=Status.WRONG if mismatch else Status.OK,
            reason="; ".join(note for note in notes if note),
            throughput=tokens_per_second if self.workload.unit == "tokens/s" else samples_per_second,
            unit=self.workload.unit,
            samples_per_second=samples_per_second,
            tokens_per_second=tokens_per_second,
            step_ms=slowest.step_ms,
            step_ms_spread=slowest.spread_ms,
            peak_memory_mib=max(report.peak_memory_mib for report in reports),
            tflops_per_device=tflops,
            mfu=None if tflops is None or peak is None else tflops * 1e12 / peak,
            loss=slowest.loss,
            probe=probe,
            expert_load=load,
            expert_dropped=dropped,
            samples_per_step=slowest.samples_per_step,
            seconds_overhead=max(0.0, fields["seconds_total"] - seconds_reported),
            seconds_build=seconds_build,
            seconds_compile=slowest.seconds_compile,
            seconds_warmup=slowest.seconds_warmup,
            seconds_measure=slowest.seconds_measure,
            **fields,
        )


class _DryRunFields(CommonFields):
    """Fields of all measurements of a workload's dry runs."""

    memory_limit_mib: float
    ranks: tuple[RankReport, ...]


def _reports(outcome: Outcome) -> list[DryRunReport]:
    """Returns the reports of the ranks that ended successfully."""
    return [rank.report for rank in outcome.ranks if isinstance(rank.report, DryRunReport)]


def peak_flops(device: Device, config: Mapping[str, Any]) -> float | None:
    """Returns the peak FLOP/s of a device in a configuration's number format; None if unknown, as for a CPU."""
    hardware = table_entry(device)
    return None if hardware is None else hardware.rate(str(config.get("precision", "fp32")))


def _rank_report(outcome: RankOutcome) -> RankReport:
    report = outcome.report if isinstance(outcome.report, DryRunReport) else None
    return RankReport(
        rank=outcome.rank,
        status=outcome.status,
        reason=outcome.reason,
        step_ms=report.step_ms if report else None,
        peak_memory_mib=report.peak_memory_mib if report else outcome.peak_memory_mib,
        peak_allocated_mib=report.peak_allocated_mib if report else None,
        build_memory_mib=report.build_memory_mib if report else None,
        outside_mib=report.outside_mib if report else None,
        allocation_retries=report.allocation_retries if report else 0,
    )
