"""Measures the leaders again in interleaved turns, and soaks the winner.

The logarithms of throughput of contender i in round r are compared by the model:

    y[i, r] = level[i] + round[r] + slope * load[i, r] + noise

The round term absorbs what changed the speed of all contenders in a round. The slope absorbs the cores used by other
processes (`Measurement.foreign_cores`) within a round. Levels are therefore comparable although the load varies and
not every contender takes part in every round (a randomised block design with a covariate; Montgomery, Design and
Analysis of Experiments, chapters 4 and 15). One slope for all is an approximation, because a load slows some
candidates more than others: if each contender has enough rounds without load, only these count. The variance of the
noise is that of the residuals, moderated by the errors of the measurements themselves (Smyth 2004, Linear models and
empirical Bayes methods, section 3).
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..results import Measurement, RunFolder, Status, Trial, summary
from ..results.again import Z95
from ..results.columns import speed
from ..results.measurement import DEFAULT
from ..results.summary import EQUAL
from ..runners.trial.load import CHANGED_CORES
from ..runners.trial.soak import SoakPlan
from .budget import Stopwatch
from .history import at_first_speed, unsteady
from .listener import SearchListener


@dataclass(frozen=True, kw_only=True)
class Soaking:
    """Soaks the winner. If it fails, soaks the next best trial, until one succeeds."""

    run_folder: RunFolder
    plan: SoakPlan
    measure: Callable[[Trial, SoakPlan], Measurement]
    """Dry-runs and soaks a trial's configuration."""
    say: Callable[[str], None]
    """Receives a message about the outcome of each soak."""
    watch: Stopwatch

    def expected_s(self, typical_s: float) -> float:
        """Expected time of a soak of the winner, s."""
        winner = summary.best(self.run_folder.trials())
        step_ms = None if winner is None else winner.measured.step_ms
        return 0.0 if step_ms is None else typical_s + (self.plan.steps + 2) * step_ms / 1e3

    def run(self) -> None:
        """Runs the soaks. A trial that fails its soak gets the status of the soak and is no longer a leader."""
        while (winner := summary.best(self.run_folder.trials())) is not None:
            if self.watch.left <= 0:
                self.say(f"the time was up before the leader, trial {winner.number}, was soaked")
                return
            found = self.measure(winner, self.plan)
            if found.ok:
                self.say(f"trial {winner.number} succeeded: {found.reason}{_memory(found, winner)}")
                return
            failed = replace(found, reason=f"in its soak: {found.reason or found.status}")
            self.run_folder.remeasure(winner.number, winner.remeasured, failed)
            self.say(f"trial {winner.number} led, but failed: {found.status} {failed.reason}")


def _memory(found: Measurement, winner: Trial) -> str:
    now, before = found.peak_memory_mib, winner.measured.peak_memory_mib
    return f"; {now:,.0f} MiB at its peak, {before:,.0f} MiB before" if now and before else ""


LEADERS, LEADER_WITHIN = 3, 0.85
"""Number of contenders at first, apart from the default configuration, and their least share of the best throughput."""
UNSTEADY_LEADERS, UNSTEADY_WITHIN = 8, 0.67
"""The same if the machine's load has changed, which makes first measurements less reliable."""
LOAD_COSTS_MORE = 0.4
"""Loss of log throughput per core kept busy by others that one candidate may suffer beyond the default
configuration's loss. First measurements are corrected by it: on two cores a load that took 37 % off the one took
66 % off another.
"""
CHALLENGE_WITHIN = 0.97
"""Share of the best throughput that a trial without re-measurement must have reached at first, after corrections, to
be measured beside the best.
"""
FEWEST_ROUNDS, MOST_ROUNDS = 2, 6
"""Bounds of the number of rounds of each contender. A stretch of short turns of contenders that are in memory
together takes as long as the fewest rounds, and counts as them.
"""
MOST_ROUNDS_OF_PAIR = 18
"""Total number of rounds after which the winner and the default configuration are not measured further to show a gain."""
ERROR = 0.05
"""Probability of dropping the best contender, over all rounds and contenders (Bonferroni)."""
ROUNDS_TO_TIE = 3
"""Rounds after which contenders closer than `EQUAL` count as equal."""
SHARE_OF_SEARCH = 0.3
"""Limit on the time of rounds beyond the fewest and of waiting for the load of others to end, as a share of the
trials' time.
"""
CALM_ROUNDS = 5
"""Rounds without others' load that each contender needs so that the other rounds can be left out."""
FAR_OFF = 1.25
"""Ratio of the first measurement to the re-measurement (or its inverse) above which the user is informed."""
ROBUST_ROUNDS = 8
"""Rounds from which outliers get a lower weight: with this many rounds they can be told from noise."""
HUBER, HUBER_STEPS = 1.345, 20
"""Threshold of Huber's weights, in standard deviations, and the number of iterations."""
_TYPICAL_NOISE, _PRIOR_DEGREES = 0.01, 4.0


@dataclass
class Confirmation:
    """Measures leaders again and saves the results in the run's folder. Call `run` once."""

    run_folder: RunFolder
    measure: Callable[[Trial], Measurement]
    """Measures a trial's configuration again, completely."""
    take_turns: Callable[[Sequence[Trial], float], list[list[Measurement]] | None] | None
    """Measures trials' configurations in turns, all of them in memory; takes the patience in s (see
    `Runner.take_turns`). None if the runner measures only one after the other.
    """
    listener: SearchListener
    watch: Stopwatch
    settle_s: float = 0.0
    """Time that a re-measurement takes beyond that of the first measurement, s."""
    rounds: list[dict[int, Measurement]] = field(default_factory=list)
    """Measurements of the contenders that ran, by trial number, one entry per round."""
    failed: dict[int, Measurement] = field(default_factory=dict)
    """Failed re-measurements, by trial number."""
    _saved: set[int] = field(default_factory=set)
    """Numbers of the trials with saved re-measurements."""
    _times: Counter[int] = field(default_factory=Counter)
    """Number of rounds of each contender."""
    _rounds_done: int = 0
    _done: int = 0

    @property
    def seconds(self) -> float:
        """Expected time of the fewest rounds with the current contenders, s."""
        contenders = self._contenders(())
        return self._fewest_s(contenders) if len(contenders) > 1 else 0.0

    def run(self) -> None:
        """Measures until the best is separated from the rest, or differs from the rest by less than `EQUAL`, or the
        rounds or the time are used up. Contenders that fail are replaced by the next best. Then the winner and the
        default configuration are measured further while the interval of the gain includes 1 and time is left.
        """
        begin = self.watch.elapsed
        spent = sum(trial.measured.seconds_total or 0.0 for trial in self.run_folder.trials() if not trial.pending)
        active = self._contenders(())
        if len(active) == 1:  # nothing to compare it with
            return
        try:
            while active and self._rounds_done < MOST_ROUNDS:
                enough = all(self._times[trial.number] >= FEWEST_ROUNDS for trial in active)
                left_s = SHARE_OF_SEARCH * spent - (self.watch.elapsed - begin)
                if self.watch.left <= 0 or (enough and left_s <= 0):
                    break
                if not self._stretch(active, left_s / 2):
                    if not self.rounds:
                        active = self._contenders(())
                    if not self._round(active):
                        break
                active = self._still_open([trial for trial in active if trial.number not in self.failed])
            while (pair := self._pair_in_question()) and self._rounds_done < MOST_ROUNDS_OF_PAIR:
                left_s = SHARE_OF_SEARCH * spent - (self.watch.elapsed - begin)
                if self.watch.left <= 0 or left_s <= 0:
                    break
                if not self._stretch(pair, left_s / 2) and not self._round(pair):
                    break
        finally:
            self._keep()
        if self.failed and self._none_holds():
            self.listener.on_message(
                "no leader is confirmed, because every trial that succeeded failed when it was measured again: the first "
                "measurements count"
            )
        self._say_far_off()

    def _pair_in_question(self) -> list[Trial]:
        """Returns the winner and the default configuration if the interval of the gain includes 1 and further rounds
        can change that.
        """
        if not any(self.rounds):
            return []
        self._keep()
        trials = self.run_folder.trials()
        gain, winner, base = summary.gain(trials), summary.best(trials), summary.default(trials)
        if gain is None or gain.half_width is None or gain.shown or winner is None or base is None:
            return []
        if winner.number in self.failed or base.number in self.failed:  # timed out: the rounds would not count
            return []
        # Closer contenders count as equal, however long they are measured.
        return [winner, base] if gain.ratio > 1 + EQUAL else []

    def _contenders(self, known: Iterable[int]) -> list[Trial]:
        """Returns the possible leaders among trials that are not in `known`, and those to compare the winner with:
        the default configuration, and the best without lossy values.
        """
        beyond = {*known, *self.failed}
        left = [trial for trial in self.run_folder.trials() if trial.ok and trial.number not in beyond]
        left.sort(key=lambda trial: -_at_first(trial))
        if not left:
            return []
        leaders = _leaders(left, LEADERS, LEADER_WITHIN)
        if self.take_turns is not None and unsteady(left):
            candidates = sorted(left, key=lambda trial: -_unloaded_throughput(trial, left))[:UNSTEADY_LEADERS]
            floor = UNSTEADY_WITHIN * _at_first(left[0])
            more = [
                trial for at, trial in enumerate(candidates) if at < 2 or _unloaded_throughput(trial, left) >= floor
            ]
            leaders = more if self._fewest_s(more) < self.watch.left else leaders
        # Lossy leaders are compared with the best trial without lossy values.
        exact = next((trial for trial in left if not trial.lossy), None)
        references = [trial for trial in left if trial.sampler == DEFAULT or trial is exact]
        return leaders + [trial for trial in references if trial not in leaders]

    def _fewest_s(self, contenders: Iterable[Trial]) -> float:
        """Time of the fewest rounds of these contenders, s. Turns take less."""
        return FEWEST_ROUNDS * sum((trial.measured.seconds_total or 0.0) + self.settle_s for trial in contenders)

    def _stretch(self, active: Sequence[Trial], patience_s: float) -> bool:
        """Measures all active trials in turns, up to `patience_s` longer if others' load has to pass. Returns False
        if turns are not possible, or there is no time for the fewest rounds.
        """
        if self.take_turns is None or len(active) < 2 or self.watch.left < self._fewest_s(active):
            return False
        total = self._done + FEWEST_ROUNDS * len(active)
        self.listener.on_alternate(list(active), _turns_s(active))
        found = self.take_turns(active, max(0.0, min(patience_s, self.watch.left - self._fewest_s(active))))
        if found is None:
            self.take_turns = None
            return False
        self._done, self._rounds_done = total, self._rounds_done + FEWEST_ROUNDS
        rounds: list[dict[int, Measurement]] = [{} for _ in range(max(map(len, found)))]
        for trial, turns in zip(active, found, strict=True):
            self._times[trial.number] += FEWEST_ROUNDS
            for round_, each in zip(rounds, turns, strict=False):
                self._record(trial, each, round_)
        self.rounds += rounds
        self.listener.on_remeasure(list(active), self._done, total)
        return True

    def _record(self, trial: Trial, again: Measurement, round_: dict[int, Measurement]) -> None:
        if again.status is Status.OK:
            round_[trial.number] = again
            return
        self.failed[trial.number] = again
        if again.status is Status.TIMEOUT:
            kept = "its first measurement is kept, and is ranked after confirmed ones"
            if trial.number in self._saved:
                kept = "its earlier re-measurements are kept"
            self.listener.on_message(
                f"trial {trial.number} timed out when measured again ({again.reason}): {kept}; --trial-timeout sets the "
                "time limit"
            )
            return
        self.listener.on_message(f"trial {trial.number} failed when measured again: {again.status} ({again.reason})")

    def _round(self, active: Sequence[Trial]) -> bool:
        """Measures each active trial once. Returns False if the time is not enough for all."""
        current: dict[int, Measurement] = {}
        self.rounds.append(current)
        self._rounds_done += 1
        total = self._done + sum(max(1, FEWEST_ROUNDS - self._times[trial.number]) for trial in active)
        # Each round starts with another contender, so that none is always measured after the same one.
        start = (len(self.rounds) - 1) % len(active)
        for trial in [*active[start:], *active[:start]]:
            left = max(1, total - self._done)
            each_s = statistics.fmean((other.measured.seconds_total or 0.0) + self.settle_s for other in active)
            self.listener.on_remeasure(list(active), self._done, total, left * each_s)
            if self.watch.left <= 0 or self.watch.left < (trial.measured.seconds_total or 0.0):
                if not any(self.rounds[:-1]):
                    # A contender that was not measured beside the others cannot be compared with them.
                    current.clear()
                    self.listener.on_message(
                        "the time was up before all leaders were measured again: their first measurements count"
                    )
                return False
            try:
                again = self.measure(trial)
            except BaseException:
                if not any(self.rounds[:-1]):
                    current.clear()  # as above
                raise
            self._done += 1
            self._times[trial.number] += 1
            self._record(trial, again, current)
        self.listener.on_remeasure(list(active), self._done, max(total, self._done))
        return True

    def _still_open(self, active: list[Trial]) -> list[Trial]:
        """Returns the contenders of the next round; none if the winner is found."""
        if not active:
            return self._contenders(())
        if any(self._times[trial.number] < FEWEST_ROUNDS for trial in active):
            return active
        comparison = self.comparison()
        top = max(comparison.level, key=lambda number: comparison.level[number])
        by_number = {trial.number: trial for trial in self.run_folder.trials()}
        # Estimates how fast trials that were never measured again would have been beside the best.
        # The default configuration shows the change best: it was not selected for a high first measurement.
        shifts = {n: comparison.level[n] - math.log(_at_first(by_number[n])) for n in comparison.level}
        base = next((n for n in shifts if by_number[n].sampler == DEFAULT), None)
        shift = statistics.median(shifts.values()) if base is None else shifts[base]
        untried = self._contenders(comparison.level)
        challengers = [
            trial
            for trial in untried
            if math.log(_at_first(trial)) + shift > comparison.level[top] + math.log(CHALLENGE_WITHIN)
        ]
        if by_number[top].lossy:
            # The best exact trial takes part as a reference. If it failed, the next one takes its place.
            exact = [_at_first(by_number[n]) for n in comparison.level if not by_number[n].lossy]
            faster = [trial for trial in untried if not trial.lossy and _at_first(trial) > max(exact, default=0.0)]
            challengers += [trial for trial in faster[:1] if trial not in challengers]
        rivals = [
            trial
            for trial in active
            if trial.number != top
            and not comparison.ahead(top, trial.number, len(comparison.level) - 1)
            and (trial.sampler != DEFAULT or comparison.gap(top, trial.number) < EQUAL)
        ]
        close = all(comparison.gap(top, trial.number) < EQUAL for trial in rivals)
        if close and all(self._times[trial.number] >= ROUNDS_TO_TIE for trial in rivals):
            rivals = []
        return [by_number[top], *rivals, *challengers] if rivals or challengers else []

    def comparison(self) -> "RoundsModel":
        """Compares the contenders by all rounds so far."""
        return compare_rounds(self._valid_rounds())

    def _valid_rounds(self) -> list[dict[int, Measurement]]:
        """Returns the rounds that count, without contenders that failed in any round."""
        rounds = [{n: each for n, each in round_.items() if n not in self.failed} for round_ in self.rounds]
        return calm_rounds([round_ for round_ in rounds if round_])

    def _keep(self) -> None:
        """Saves the re-measurements, each corrected for the disturbance of its round."""
        failed = dict(self.failed)
        for number, failure in self.failed.items():
            timed_out = failure.status is Status.TIMEOUT
            if timed_out and number in self._saved:
                del failed[number]
            elif timed_out or self._none_holds():
                failed[number] = replace(failure, unconfirmed=_described(failure))
        kept: dict[int, list[float]] = {number: [] for number in failed}
        rounds = self._valid_rounds()
        for number, throughputs in corrected(rounds).items():
            kept.setdefault(number, []).extend(throughputs)
        for number, throughputs in kept.items():
            self.run_folder.remeasure(number, throughputs, failed.get(number))
        self._saved |= kept.keys()
        # Re-measurements of an earlier process were taken beside other rounds: they cannot be compared with these.
        for trial in self.run_folder.trials() if rounds else ():
            if trial.remeasured and trial.number not in self._saved:
                self.run_folder.remeasure(trial.number, [])

    def _none_holds(self) -> bool:
        """True if every trial that succeeded failed when it was measured again. The cause is then rather the command or
        the machine than the candidates.
        """
        return all(not trial.ok or trial.number in self.failed for trial in self.run_folder.trials())

    def _say_far_off(self) -> None:
        changes = []
        for trial in self.run_folder.trials():
            if not trial.ok or trial.first is None:
                continue
            now, unit = trial.throughput, trial.measured.unit
            if max(now / trial.first, trial.first / now) > FAR_OFF:
                changes.append(f"trial {trial.number} ran at {speed(trial.first, unit)}, then at {speed(now, unit)}")
        if changes:
            self.listener.on_message(
                f"re-measurements differ much from the first: {'; '.join(changes)}. The machine's load is not steady; the "
                "re-measurements count, because they were taken in turns"
            )


@dataclass(frozen=True)
class RoundsModel:
    """Contenders' levels, estimated from rounds."""

    level: dict[int, float]
    """Log throughput of each contender in an average round."""
    disturbance: list[dict[int, float]]
    """Effect of the machine on each measurement of each round, log; zero on average."""
    variance: float
    """Variance of the noise."""
    degrees: float
    """Degrees of freedom of the variance."""
    _covariance: dict[tuple[int, int], float]

    def gap(self, first: int, other: int) -> float:
        """Difference of the levels of two contenders, log."""
        return self.level[first] - self.level[other]

    def ahead(self, first: int, other: int, comparisons: int) -> bool:
        """True if the first is faster than the other, at `ERROR` over all rounds and this many comparisons."""
        from scipy.stats import t

        at = self._covariance
        error = math.sqrt(self.variance * (at[first, first] + at[other, other] - 2 * at[first, other]))
        looks = (MOST_ROUNDS - FEWEST_ROUNDS + 1) * max(1, comparisons)
        return self.gap(first, other) > error * t.ppf(1 - ERROR / looks, self.degrees)


def calm_rounds(rounds: Sequence[dict[int, Measurement]]) -> list[dict[int, Measurement]]:
    """Returns the rounds in which others kept hardly more cores busy than in the calmest round; all rounds if that
    would leave a contender with too few.
    """
    loads = [max(each.foreign_cores or 0.0 for each in round_.values()) for round_ in rounds]
    calm = [round_ for round_, load in zip(rounds, loads, strict=True) if load <= min(loads) + CHANGED_CORES]
    counts = Counter(number for round_ in calm for number in round_)
    everyone = {number for round_ in rounds for number in round_}
    return calm if all(counts[number] >= CALM_ROUNDS for number in everyone) else list(rounds)


def compare_rounds(rounds: Sequence[dict[int, Measurement]]) -> RoundsModel:
    """Estimates levels by least squares (see the module's docstring).

    Args:
        rounds: measurements of the contenders of each round, by number; no round is empty.
    """
    numbers = list(dict.fromkeys(number for round_ in rounds for number in round_))
    cells = [(at, number, each) for at, round_ in enumerate(rounds) for number, each in round_.items()]
    loads = np.array([each.foreign_cores or 0.0 for _, _, each in cells])
    first = len(numbers)
    design = np.zeros((len(cells), first + len(rounds) + 1))
    for row, (at, number, _) in enumerate(cells):
        design[row, numbers.index(number)] = design[row, first + at] = 1.0
    # If the load hardly changed, its slope would only follow the noise.
    if np.ptp(loads) > CHANGED_CORES:
        design[:, -1] = loads
    # Disturbances are zero on average, so that levels are those of average rounds.
    design[:, first:] -= design[:, first:].mean(axis=0)
    y = np.array([math.log(each.reached) for _, _, each in cells])
    found, inverse, weights = _fit(design, y, len(rounds) >= ROBUST_ROUNDS)
    degrees = len(cells) - np.linalg.matrix_rank(design)
    spreads = [each.spread / Z95 for _, _, each in cells if each.spread]
    typical = statistics.median(spreads) if spreads else _TYPICAL_NOISE
    residual = float((weights * (y - design @ found) ** 2).sum())
    disturbance: list[dict[int, float]] = [{} for _ in rounds]
    for row, (at, number, _) in enumerate(cells):
        disturbance[at][number] = float(design[row, first:] @ found[first:])
    return RoundsModel(
        level={number: float(found[at]) for at, number in enumerate(numbers)},
        disturbance=disturbance,
        variance=(residual + _PRIOR_DEGREES * typical**2) / (degrees + _PRIOR_DEGREES),
        degrees=degrees + _PRIOR_DEGREES,
        _covariance={(a, b): float(inverse[i, j]) for i, a in enumerate(numbers) for j, b in enumerate(numbers)},
    )


def corrected(rounds: Sequence[dict[int, Measurement]]) -> dict[int, list[float]]:
    """Returns the throughputs of each contender, by number, without the disturbances of their rounds.

    Disturbances are fitted to the same measurements and take up a part of their noise: of two contenders half of the
    variance. The values are spread about their mean as much as they would be if disturbances were known.
    """
    if not rounds:
        return {}
    model = compare_rounds(rounds)
    logs: dict[int, list[float]] = {}
    for round_, disturbance in zip(rounds, model.disturbance, strict=True):
        for number, each in round_.items():
            logs.setdefault(number, []).append(math.log(each.reached) - disturbance[number])
    free = model.degrees - _PRIOR_DEGREES
    wider = math.sqrt((sum(map(len, rounds)) - len(logs)) / free) if free > 0 else 1.0
    means = {number: statistics.fmean(values) for number, values in logs.items()}
    return {
        number: [math.exp(means[number] + wider * (value - means[number])) for value in values]
        for number, values in logs.items()
    }


def _leaders(sorted_trials: Sequence[Trial], many: int, within: float) -> list[Trial]:
    """Returns at most `many` first trials that reach the share `within` of the best. The second is always included,
    because the first may have been lucky.
    """
    floor = within * _at_first(sorted_trials[0])
    return [trial for at, trial in enumerate(sorted_trials[:many]) if at < 2 or _at_first(trial) >= floor]


def _described(failure: Measurement) -> str:
    """Describes a failed re-measurement of a trial whose first measurement counts."""
    reason = f": {failure.reason}" if failure.reason else ""
    return (
        f"it ended as {failure.status} when it was measured again{reason}{f' ({failure.log})' if failure.log else ''}"
    )


def _turns_s(contenders: Iterable[Trial]) -> float:
    """Expected time to build all contenders and to measure them in turns, s. Compiled code is in a cache by then."""
    parts = [each.measured for each in contenders]
    return sum(
        (each.seconds_total or 0.0) - (each.seconds_compile or 0.0) + (each.seconds_measure or 0.0) for each in parts
    )


def _fit(design: np.ndarray, y: np.ndarray, robust: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least squares: coefficients, their covariance over the noise's variance, and the weights of `y`.

    Args:
        design: (n, m).
        y: (n,).
        robust: give outliers a lower weight (Huber 1964, Robust estimation of a location parameter).
    """
    weights = np.ones(len(y))
    for _ in range(HUBER_STEPS if robust else 1):
        inverse = np.linalg.pinv(design.T @ (design * weights[:, None]))
        found = inverse @ design.T @ (weights * y)
        if robust:
            off = np.abs(y - design @ found)
            scale = max(float(np.median(off)) / 0.6745, 1e-6)
            weights = np.minimum(1.0, HUBER * scale / np.maximum(off, 1e-12))
    return found, inverse, weights


def _unloaded_throughput(trial: Trial, trials: Sequence[Trial]) -> float:
    """Throughput that the trial may reach under the least load of `trials`, in the conditions at the start of the
    search. A re-measured trial has been compared under the same load as others.
    """
    if trial.remeasured:
        return _at_first(trial)
    loads = [each.measured.foreign_cores or 0.0 for each in trials]
    beyond = (trial.measured.foreign_cores or 0.0) - min(loads)
    return _at_first(trial) * math.exp(LOAD_COSTS_MORE * max(0.0, beyond))


def _at_first(trial: Trial) -> float:
    return at_first_speed(trial).throughput
