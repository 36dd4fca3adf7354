"""The search loop: proposes and runs trials until the budget is spent, then measures the leaders again."""

import math
import re
import statistics
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ..base.errors import NoRoom, RunnerError
from ..base.option import option
from ..results import Measurement, RunFolder, Status, Trial
from ..results.measurement import DEFAULT, FALLBACK, REFINEMENT, USER
from ..results.summary import best_so_far
from ..runners import Runner, TrialRequest
from ..runners.trial.failure import NO_METRIC
from ..space import Config
from .budget import Budget, Stopwatch, counts
from .confirm import Confirmation
from .feasibility import OutOfMemoryKnowledge
from .history import reference
from .listener import SearchListener
from .samplers import Sampler

if TYPE_CHECKING:
    from .samplers.bayes import Judge

ATTEMPTS = 3
"""Number of attempts at a trial if the machinery, not the candidate, fails."""
ATTEMPTS_IN_PROCESS = 2
"""Number of attempts at a call that kills this process."""
CONFIRM_SHARE = 1 / 3
"""Largest share of a search's time that is reserved for measuring the leaders again."""

ALIKE = {"the command": 2, "the callable": 3}
"""Number of first trials that end a search if they fail in the same way. A callable needs no start of a program, and may
raise on purpose.
"""
_EXCEPTION = re.compile(r"\w*(Error|Exception|Exit)\b")
SMALL_CHANCE = 0.05
"""Probability of a further gain of 1 % below which a search with patience ends."""
TRIALS_TO_JUDGE = 6
"""Number of finished trials from which that probability is used."""
MISSES_TO_JUDGE = 8
"""Number of trials that ran out of memory, without a success, after which the space counts as infeasible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refinement:
    """A configuration outside the space, derived from the winner."""

    config: Config
    predicted_throughput: float | None = None
    """In the unit of the trials."""
    predicted_memory_mib: float | None = None
    """Peak on the fullest rank, MiB."""
    summary: str = ""
    """Description of its changes."""


@dataclass
class Search:
    """One search over a run's folder. Call `run`, then `refine` if requested, then `confirm`."""

    run_folder: RunFolder
    sampler: Sampler
    runner: Runner
    budget: Budget
    first: tuple[Config, ...] = ()
    """Configurations tried before the sampler is used. The first is the default configuration, or its replacement
    (see `first_trial`).
    """
    fallback: Config | None = None
    """Configuration with less memory that is tried after the first if that fails."""
    trial_timeout_s: float | None = None
    listener: SearchListener = field(default_factory=SearchListener)
    judge: "Judge | None" = None
    """Predicts each trial, and forecasts the gain that is left, for `budget.patience`; None for neither."""
    user_code_errors: str = ""
    """Name of the user code to blame if the first `ALIKE` trials crash in the same way, or time out without a metric,
    which ends the search; empty to continue.
    """
    peak_rate: Callable[[Config], float] | None = None
    """Peak FLOP/s of a device at a configuration's precision, for MFU; None if unknown."""
    watch: Stopwatch | None = None
    """Remaining time of `budget.seconds`; by default it starts now.

    After the time is up nothing is started, so the search exceeds it by one trial at most. Before, a trial is started
    only if the time is enough for a typical trial and for measuring the leaders again.
    """

    def __post_init__(self) -> None:
        self._watch = self.watch or Stopwatch(self.budget.seconds)
        self._judge_at = 0
        self._earlier: set[int] = set()
        """Trials that an earlier process finished: the cause of a crash may have been fixed since."""
        self._shortfall = ""
        self.ended = ""
        """Reason for the end of the search."""
        self.again_s = 0.0
        """Time of measuring the leaders again, s."""

    def run(self) -> None:
        """Runs trials until the budget is spent or the space is exhausted.

        Raises:
            KeyboardInterrupt: after the running trials were ended, which then stay pending; or if the listener
                pauses, after they have ended by themselves.
            RunnerError: the machinery failed in all attempts.
            StudyError: the ledger cannot be written.
        """
        running: dict[Future[Measurement], tuple[Trial, TrialRequest]] = {}
        self._earlier = {trial.number for trial in self.run_folder.trials() if not trial.pending}
        again = [self._restart_pending(trial) for trial in self.run_folder.pending()]
        again = [trial for trial in again if trial.pending]
        pool = ThreadPoolExecutor(max_workers=self.runner.slots, thread_name_prefix="trial")
        try:
            while True:
                while len(running) < self.runner.slots and not self.listener.pauses():
                    trial = again.pop(0) if again else self._next()
                    if trial is None:
                        break
                    request = self._request(trial)
                    running[pool.submit(self._attempt, trial, request)] = trial, request
                    self.listener.on_trial_start(trial)
                if not running and self.listener.pauses():
                    raise KeyboardInterrupt
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                # Outcomes are saved, although another trial beside them was lost.
                for future in sorted(done, key=lambda future: future.exception() is not None):
                    measured = future.result()
                    trial, request = running.pop(future)
                    measured = self._compared_late(trial, request, measured)
                    self.listener.on_trial_end(self.run_folder.finish(trial.number, measured))
        except BaseException as cause:
            self._close(cause)  # ends the running trials, so that the threads return
            if not self.runner.isolated:  # this process is still alive
                for trial, _ in running.values():
                    self.run_folder.attempt(trial.number, trial.attempts - 1)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _compared_late(self, trial: Trial, request: TrialRequest, measured: Measurement) -> Measurement:
        """Compares a trial that began before a reference was known, beside the default configuration, with the present one."""
        if not measured.ok or measured.probe is None or request.reference is not None or trial.sampler == DEFAULT:
            return measured
        from ..runners.trial.numerics_check import numerics_mismatch

        expected = reference(self.run_folder.trials(), trial.number)
        loss = measured.probe.quiet.loss  # the runner has checked the others
        wrong = numerics_mismatch(measured.probe, expected, loss=loss, last_loss=loss)
        return replace(measured, status=Status.WRONG, reason=wrong) if wrong else measured

    def _close(self, cause: BaseException) -> None:
        """Closes the runner, which ends the running trials. Acknowledges an interrupt first, because closing takes time."""
        if isinstance(cause, KeyboardInterrupt):
            self.listener.on_wait("interrupted: ending the running trials")
        self.runner.close()

    def _restart_pending(self, trial: Trial) -> Trial:
        """Prepares a pending trial of an earlier process to run again. A trial that has killed two processes becomes
        a `crash`.
        """
        if self.runner.isolated:
            return trial
        if trial.attempts < ATTEMPTS_IN_PROCESS:
            return self.run_folder.attempt(trial.number, trial.attempts + 1)
        reason = f"the process that called it died, {trial.attempts} times"
        finished = self.run_folder.finish(trial.number, Measurement(status=Status.CRASH, reason=reason))
        self.listener.on_trial_end(finished)
        return finished

    def refine(self, refiner: Callable[[list[Trial]], Refinement | None]) -> None:
        """Runs the refined winner as a trial like all others: it wins only if it is measured faster.

        Args:
            refiner: makes a configuration from the trials so far; None if there is none to try.
        """
        trials = self.run_folder.trials()
        if not any(trial.ok for trial in trials) or self._too_late(trials):
            return
        refinement = refiner(trials)
        if refinement is None or any(trial.config == refinement.config for trial in trials):
            return
        self.listener.on_message(refinement.summary)
        started = self.run_folder.start(
            refinement.config,
            sampler=REFINEMENT,
            predicted_throughput=refinement.predicted_throughput,
            predicted_memory_mib=refinement.predicted_memory_mib,
        )
        self.listener.on_trial_start(started)
        try:
            measured = self._try(started)
        except BaseException as cause:
            self._close(cause)
            raise
        self.listener.on_trial_end(self.run_folder.finish(started.number, measured))

    def _next(self) -> Trial | None:
        """Returns the next trial, recorded as pending; None if there is none now."""
        while True:
            # A refined configuration is outside the space.
            trials = [trial for trial in self.run_folder.trials() if trial.sampler != REFINEMENT]
            if (stop_reason := self._budget_reason(trials)) is not None:
                self.ended = stop_reason
                return None
            config, sampler = self._choose(trials)
            if config is None:
                return None
            # Configurations that the user named are run in any case.
            blocked = None
            if sampler == self.sampler.name:
                blocked = self._knowledge.blocked_by(config, trials)
            throughput, memory = (None, None) if self.judge is None else self.judge.prediction(config)
            started = self.run_folder.start(
                config, sampler=sampler, predicted_throughput=throughput, predicted_memory_mib=memory
            )
            if blocked is None:
                return started
            reason = self._knowledge.say(blocked, config)
            skipped = Measurement(status=Status.SKIPPED, reason=reason)
            self.listener.on_trial_end(self.run_folder.finish(started.number, skipped))

    @cached_property
    def _knowledge(self) -> OutOfMemoryKnowledge:
        return OutOfMemoryKnowledge(self.sampler.space)

    def _budget_reason(self, trials: list[Trial]) -> str | None:
        """Reason to run no further trials; None if there is none."""
        if self.budget.trials is not None and sum(map(counts, trials)) >= self.budget.trials:
            return f"all {self.budget.trials} trials are done"
        if trials and self._too_late(trials):
            return f"the rest of the {self.budget.seconds:g} s is not enough for another trial"
        return self._all_alike(trials) or self._no_use(trials)

    def _all_alike(self, trials: list[Trial]) -> str | None:
        """Reason to expect that further trials fail like the first ones; None if there is none."""
        if not self.user_code_errors:
            return None
        finished = [
            trial for trial in trials if not trial.pending and not trial.skipped and trial.number not in self._earlier
        ]
        called = self.user_code_errors == "the callable"
        # Numbers in a program's last lines, such as addresses, differ; those in an exception's message are values of knobs.
        reasons = {
            trial.measured.reason if called else re.sub(r"\d+", "N", trial.measured.reason) for trial in finished
        }
        if len(finished) < ALIKE[self.user_code_errors] or len(reasons) > 1:
            return None
        status = finished[0].measured.status
        if any(trial.measured.status is not status for trial in finished):
            return None
        subject = f"the first {'three' if called else 'two'} trials"
        if status is Status.TIMEOUT and NO_METRIC in finished[0].measured.reason:
            blame = f"{self.user_code_errors} is to blame, or {option('trial_timeout')} is too short"
            return f"{subject} timed out {NO_METRIC}, so {blame}"
        # A callable may also return a measurement that is a crash, such as a recorded one.
        if status is not Status.CRASH or (called and not _EXCEPTION.match(finished[0].measured.reason)):
            return None
        return f"{subject} crashed in the same way, so {self.user_code_errors} is to blame"

    def _no_use(self, trials: list[Trial]) -> str | None:
        """Reason why further trials are not worth their time; None if there is none."""
        if not self.budget.patience or self.judge is None or len(trials) < self._judge_at:
            return None
        trials = [trial for trial in trials if not trial.skipped]
        finished = [trial for trial in trials if not trial.pending]
        if len(finished) < self._judge_at:
            return None
        # Judging takes as long as proposing, so it is done less often as trials become many.
        self._judge_at = max(len(finished) + 1, math.ceil(1.05 * len(finished)))
        successes = sum(trial.ok for trial in finished)
        misses = [trial for trial in finished if trial.measured.did_not_fit]
        # A failure of another kind may be fixed, and does not show what is feasible.
        if not successes and (not misses or len(misses) < len(finished)):
            return None
        outlook = self.judge.outlook(trials, self.budget.patience)
        if successes:
            if len(finished) < TRIALS_TO_JUDGE or outlook.gain >= SMALL_CHANCE:
                return None
            so_far = [throughput or 0.0 for throughput in best_so_far(finished)]
            recent = so_far[max(0, len(so_far) - 1 - self.budget.patience)]
            if so_far[-1] > 1.01 * recent:
                return None
            return (
                f"the chance that {self.budget.patience} further trials bring another 1 % is "
                f"{100 * outlook.gain:.2g} % (see patience)"
            )
        limits = [t.measured.memory_limit_mib for t in misses if t.measured.memory_limit_mib]
        if outlook.need_mib and limits and outlook.need_mib > limits[-1]:
            lack = outlook.need_mib - limits[-1]
            self._shortfall = f"; the smallest predicted shortfall is {lack:,.0f} MiB"
        few = len(misses) < MISSES_TO_JUDGE and outlook.works >= SMALL_CHANCE
        if few or len(misses) < min(MISSES_TO_JUDGE, 3):
            return None
        return (
            f"nothing feasible: {_trials(len(misses))} ran out of memory, and the best chance of another to fit is "
            f"{100 * outlook.works:.2g} %{self._shortfall}"
        )

    def _exhausted(self, trials: list[Trial]) -> str:
        """Reason for the end of a search with nothing left to try."""
        tried = [trial for trial in trials if not trial.pending and not trial.skipped]
        if tried and all(trial.measured.did_not_fit for trial in tried):
            return (
                f"nothing feasible: {_trials(len(tried))} ran out of memory, and every other configuration needs at "
                f"least as much{self._shortfall}"
            )
        return "every valid configuration was tried"

    def _choose(self, trials: list[Trial]) -> tuple[Config | None, str]:
        def tried(config: Config) -> bool:
            return any(trial.config == config for trial in trials)

        base = next((trial for trial in trials if trial.sampler == DEFAULT), None)
        for config in self.first:
            if config == self.first[0] and base is not None:
                continue  # a resumed run may have had another first trial, because estimates change
            if not tried(config):
                return config, DEFAULT if config == self.first[0] else USER
        failed = base is not None and not base.pending and not base.ok
        if failed and self.fallback is not None and not tried(self.fallback):
            return self.fallback, FALLBACK
        proposals = self.sampler.propose(trials, 1)
        if not proposals:
            self.ended = self._exhausted(trials)
            return None, ""
        return proposals[0], self.sampler.name

    def _too_late(self, trials: list[Trial]) -> bool:
        """True if the remaining time is not enough for another trial and for measuring the leaders again."""
        if self.budget.seconds is None:
            return False
        typical = self._typical_seconds(trials)
        again = 0.0 if not self.runner.confirms else self._confirmation().seconds
        return self._watch.left < typical + min(again, CONFIRM_SHARE * self.budget.seconds)

    def _typical_seconds(self, trials: list[Trial]) -> float:
        spent = [trial.measured.seconds_total or 0.0 for trial in trials if not trial.pending]
        durations = [seconds for seconds in spent if seconds]
        return statistics.median(durations) if durations else 0.0

    def _try(self, trial: Trial, *, free: bool = False) -> Measurement:
        """Runs a trial. With `free`, the candidate is neither cut short nor judged."""
        return self._attempt(trial, self._request(trial, free))

    def _request(self, trial: Trial, free: bool = False) -> TrialRequest:
        trials = self.run_folder.trials()
        log = self.run_folder.log_path(trial.number)
        return TrialRequest(
            config=trial.config,
            number=trial.number,
            log=log.with_suffix(".again.log") if free else log,
            timeout_s=self.trial_timeout_s,
            best_throughput=None if free else max((ran.throughput for ran in trials if ran.ok), default=None),
            reference=reference(trials, trial.number),
            sustained=free,
        )

    def _attempt(self, trial: Trial, request: TrialRequest) -> Measurement:
        """Runs a trial, again if the machinery fails."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._with_mfu(trial.config, self.runner.run(request))
            except NoRoom:  # it has waited for as long as it may
                raise
            except RunnerError:
                if attempt == ATTEMPTS or self.runner.closed:
                    raise
        raise AssertionError("unreachable")

    def _with_mfu(self, config: Config, measured: Measurement) -> Measurement:
        if measured.mfu is not None or measured.tflops_per_device is None or self.peak_rate is None:
            return measured
        mfu = measured.tflops_per_device * 1e12 / self.peak_rate(config)
        # An exceeded peak is wrong: it was measured while this machine was busy with something else.
        return replace(measured, mfu=mfu) if mfu <= 1 else measured

    def confirm(self) -> None:
        """Measures the leaders again, in turns, so that the winner is not merely the luckiest (see `Confirmation`)."""
        if not self.runner.confirms:
            return
        begin = self._watch.elapsed
        try:
            self._confirmation().run()
        except BaseException as cause:
            self._close(cause)
            raise
        finally:
            self.again_s = self._watch.elapsed - begin

    def _confirmation(self) -> Confirmation:
        return Confirmation(
            self.run_folder,
            self._measure_again,
            self.listener,
            self._watch,
            settle_s=self.runner.settle_s,
        )

    def _measure_again(self, trial: Trial) -> Measurement:
        return self._try(replace(trial, measurement=None), free=True)


def _trials(count: int) -> str:
    return f"{count} trial{'s'[: count > 1]}"
