"""The search loop: propose, try, learn, until the budget is spent; then see which leader holds up."""

import statistics
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import RunnerError
from ..results import Measurement, RunFolder, Status, Trial
from ..runners import Reference, Runner, TrialRequest
from ..space import Config
from .budget import Budget, Stopwatch
from .listener import SearchListener
from .samplers import Sampler

ATTEMPTS = 3
"""How often a trial is tried when the machinery, not the candidate, fails."""
LEADERS = 3
"""Candidates measured again at the end, beside the default configuration."""
LEADER_WITHIN = 0.85
"""Share of the best throughput from which a candidate counts as a leader."""
ROUNDS = 2
"""How often each leader is measured again."""


@dataclass
class Search:
    """One search over a run's folder. Call `run`, then `confirm`."""

    run_folder: RunFolder
    """Trials and files."""
    sampler: Sampler
    """Proposes configurations."""
    runner: Runner
    """Tries them."""
    budget: Budget
    """Ends it."""
    first: tuple[Config, ...] = ()
    """Configurations tried before the sampler is asked; the first is the default configuration."""
    fallback: Config | None = None
    """Tried after the default configuration if that fails: the same at the smallest memory."""
    trial_timeout_s: float | None = None
    """Deadline of one trial, s."""
    listener: SearchListener | None = None
    """Hears of progress."""

    def __post_init__(self) -> None:
        self.listener = self.listener or SearchListener()
        self._watch = Stopwatch(self.budget.seconds)
        self.ended = ""
        """Why the search ended, in words."""

    def run(self) -> None:
        """Tries configurations until the budget is spent or the space exhausted.

        Raises:
            KeyboardInterrupt: passed on after the running trials were ended; they stay pending.
            RunnerError: the machinery failed for good.
            StudyError: the ledger cannot be written.
        """
        running: dict[Future[Measurement], Trial] = {}
        again = list(self.run_folder.pending())
        pool = ThreadPoolExecutor(max_workers=self.runner.slots, thread_name_prefix="trial")
        try:
            while True:
                while len(running) < self.runner.slots:
                    trial = again.pop(0) if again else self._next()
                    if trial is None:
                        break
                    running[pool.submit(self._try, trial)] = trial
                    self.listener.started(trial)
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    trial = running.pop(future)
                    self.listener.finished(self.run_folder.finish(trial.number, future.result()))
        except BaseException:
            self.runner.close()  # ends the running trials, so that the threads return
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _next(self) -> Trial | None:
        """The next trial, recorded as pending; None if there is to be none now."""
        trials = self.run_folder.trials()
        if self.budget.trials is not None and len(trials) >= self.budget.trials:
            self.ended = f"all {self.budget.trials} trials are done"
            return None
        if trials and self._watch.left < self._typical_seconds(trials):
            self.ended = f"the time of {self.budget.seconds:g} s is used up"
            return None
        config, sampler = self._choose(trials)
        if config is None:
            return None
        return self.run_folder.start(config, sampler=sampler)

    def _choose(self, trials: list[Trial]) -> tuple[Config | None, str]:
        tried = {trial.config for trial in trials}
        for config in self.first:
            if config not in tried:
                return config, "default" if config == self.first[0] else "user"
        base = next((trial for trial in trials if trial.sampler == "default"), None)
        if base is not None and not base.pending and not base.ok and self.fallback not in (None, *tried):
            return self.fallback, "fallback"
        proposals = self.sampler.propose(trials, 1)
        if not proposals:
            self.ended = "every valid configuration was tried"
            return None, ""
        return proposals[0], self.sampler.name

    def _typical_seconds(self, trials: list[Trial]) -> float:
        known = [trial.measurement.seconds_total for trial in trials if not trial.pending]
        known = [seconds for seconds in known if seconds]
        return statistics.median(known) if known else 0.0

    def _try(self, trial: Trial, *, free: bool = False) -> Measurement:
        """Runs a trial, again if the machinery fails. With `free`, no candidate is cut short or judged."""
        trials = self.run_folder.trials()
        request = TrialRequest(
            config=trial.config,
            number=trial.number,
            log=self._log(trial, free),
            timeout_s=self.trial_timeout_s,
            best_throughput=None if free else _best_throughput(trials),
            reference=reference(trials, trial.number),
        )
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self.runner.run(request)
            except RunnerError:
                if attempt == ATTEMPTS or self.runner.closed:
                    raise
        raise AssertionError("unreachable")

    def _log(self, trial: Trial, free: bool) -> Path:
        path = self.run_folder.log_path(trial.number)
        return path.with_suffix(".again.log") if free else path

    def confirm(self) -> None:
        """Measures the leaders again, interleaved, so that the winner is not merely the luckiest.

        Throughputs of one candidate drift with the machine's state; interleaving spreads that over all. Where
        none holds up, the next best are measured, until some do or the time is used up.
        """
        if self.runner.name == "function":
            return
        fallen: set[int] = set()
        while leaders := self._leaders(fallen):
            if self._confirmed(leaders) or self._watch.left < 0:
                return
            fallen |= {trial.number for trial in leaders}

    def _confirmed(self, leaders: list[Trial]) -> bool:
        """Measures these again; whether any of them held up."""
        total = len(leaders) * ROUNDS
        taken: dict[int, list[float]] = {trial.number: [] for trial in leaders}
        done = 0
        try:
            for _ in range(ROUNDS):
                for trial in leaders:
                    self.listener.remeasuring(leaders, done, total)
                    if self._watch.left < 0 and done >= len(leaders):
                        break
                    again = self._try(replace(trial, measurement=None), free=True)
                    done += 1
                    if again.status is Status.OK:
                        taken[trial.number].append(again.throughput)
                    else:
                        self.listener.said(
                            f"trial {trial.number} did not hold up when measured again: "
                            f"{again.status} ({again.reason})"
                        )
                        taken[trial.number].append(0.0)
        except BaseException:
            self.runner.close()
            raise
        finally:
            for number, throughputs in taken.items():
                if throughputs:
                    self.run_folder.remeasure(number, throughputs)
        self.listener.remeasuring(leaders, total, total)
        return any(statistics.median(throughputs) for throughputs in taken.values() if throughputs)

    def _leaders(self, fallen: set[int]) -> list[Trial]:
        successes = sorted(
            (trial for trial in self.run_folder.trials() if trial.ok and trial.number not in fallen),
            key=lambda trial: -trial.measurement.throughput,
        )
        if not successes:
            return []
        floor = LEADER_WITHIN * successes[0].measurement.throughput
        leaders = [trial for trial in successes[:LEADERS] if trial.measurement.throughput >= floor]
        base = [trial for trial in successes if trial.sampler == "default" and trial not in leaders]
        return leaders + base


def reference(trials: list[Trial], number: int) -> Reference | None:
    """The losses a candidate must reproduce: those of the first trial that ran, other than itself.

    Trial 0 is the default configuration, which applies nothing, so it sets them where it runs.
    """
    for trial in trials:
        if trial.ok and trial.number != number and trial.measurement.losses:
            measured = trial.measurement
            return Reference(
                losses=measured.losses, samples_per_step=measured.samples_per_step, config_id=trial.config.id
            )
    return None


def _best_throughput(trials: list[Trial]) -> float | None:
    return max((trial.measurement.throughput for trial in trials if trial.ok), default=None)


