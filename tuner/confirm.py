"""Measures the leaders again in rounds.

The logarithms of throughput of contender i in round r are compared by the model:

    y[i, r] = level[i] + round[r] + noise

The round term absorbs what changed the speed of all contenders in a round. Levels are therefore comparable although not
every contender takes part in every round (a randomised block design; Montgomery, Design and Analysis of Experiments,
chapter 4). They are those of measurements that other work did not slow down (`DISTURBED`). The variance of the noise is that
of the residuals, moderated by the errors of the measurements themselves (Smyth 2004, Linear models and empirical Bayes methods,
section 3).
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..base.option import option
from ..results import Measurement, RunFolder, Status, Trial, summary
from ..results.columns import speed
from ..results.measurement import DEFAULT
from ..results.summary import EQUAL, Z95
from .budget import Stopwatch
from .listener import SearchListener

LEADERS, LEADER_WITHIN = 3, 0.85
"""Number of contenders at first, apart from the default configuration, and their least share of the best throughput."""
CHALLENGE_WITHIN = 0.97
"""Share of the best throughput that a trial without re-measurement must have reached at first to be measured beside
the best.
"""
FEWEST_ROUNDS, MOST_ROUNDS = 2, 6
"""Bounds of the number of rounds of each contender."""
MOST_ROUNDS_OF_PAIR = 18
"""Total number of rounds after which the winner and the default configuration are not measured further to show a gain."""
DISTURBED = 0.1
"""Share by which a measurement must be slower than the fastest of its contender to count as disturbed: more than noise, and
less than a busy core costs on most hosts. Other work can only slow a measurement down, so that it does not count.
"""
ERROR = 0.05
"""Probability of dropping the best contender, over all rounds and contenders (Bonferroni)."""
ROUNDS_TO_TIE = 3
"""Rounds after which contenders closer than `EQUAL` count as equal."""
SHARE_OF_SEARCH = 0.3
"""Limit on the time of rounds beyond the fewest, as a share of the trials' time."""
SHARE_IF_UNSTEADY = 1.3
"""The same where other work has slowed down most of the measurements of a contender."""
FAR_OFF = 1.25
"""Ratio of the first measurement to the re-measurement (or its inverse) above which the user is informed."""
ROUND_PENALTY = 0.01
"""Variance of the noise over that of the effects of rounds: a prior that matters only where rounds share no contender."""
_TYPICAL_NOISE, _PRIOR_DEGREES = 0.01, 4.0


@dataclass
class Confirmation:
    """Measures leaders again and saves the results in the run's folder. Call `run` once."""

    run_folder: RunFolder
    measure: Callable[[Trial], Measurement]
    """Measures a trial's configuration again, completely."""
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
            while active and len(self.rounds) < MOST_ROUNDS:
                counted = self._counted()
                steady = all(counted[trial.number] >= FEWEST_ROUNDS for trial in active)
                limit_s = spent * (SHARE_OF_SEARCH if steady else SHARE_IF_UNSTEADY)
                all_twice = all(self._times[trial.number] >= FEWEST_ROUNDS for trial in active)
                if self.watch.left <= 0 or (all_twice and self.watch.elapsed - begin >= limit_s):
                    break
                if not self._round(active):
                    break
                active = self._still_open([trial for trial in active if trial.number not in self.failed])
            while (pair := self._pair_in_question()) and len(self.rounds) < MOST_ROUNDS_OF_PAIR:
                left_s = SHARE_OF_SEARCH * spent - (self.watch.elapsed - begin)
                if self.watch.left <= 0 or left_s <= 0:
                    break
                if not self._round(pair):
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
        left.sort(key=lambda trial: -trial.throughput)
        if not left:
            return []
        leaders = _leaders(left, LEADERS, LEADER_WITHIN)
        # Lossy leaders are compared with the best trial without lossy values.
        exact = next((trial for trial in left if not trial.lossy), None)
        references = [trial for trial in left if trial.sampler == DEFAULT or trial is exact]
        return leaders + [trial for trial in references if trial not in leaders]

    def _fewest_s(self, contenders: Iterable[Trial]) -> float:
        """Time of the fewest rounds of these contenders, s."""
        return FEWEST_ROUNDS * sum((trial.measured.seconds_total or 0.0) + self.settle_s for trial in contenders)

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
                f"trial {trial.number} timed out when measured again ({again.reason}): {kept}; {option('trial_timeout')} sets "
                "the time limit"
            )
            return
        self.listener.on_message(f"trial {trial.number} failed when measured again: {again.status} ({again.reason})")

    def _round(self, active: Sequence[Trial]) -> bool:
        """Measures each active trial once. Returns False if the time is not enough for all."""
        current: dict[int, Measurement] = {}
        self.rounds.append(current)
        total = self._times.total() + sum(max(1, FEWEST_ROUNDS - self._times[trial.number]) for trial in active)
        # Each round starts with another contender, so that none is always measured after the same one.
        start = (len(self.rounds) - 1) % len(active)
        for trial in [*active[start:], *active[:start]]:
            done = self._times.total()
            left = max(1, total - done)
            self.listener.on_remeasure([trial], done, total, left * self._turn_s(active))
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
            self._times[trial.number] += 1
            self._record(trial, again, current)
        done = self._times.total()
        self.listener.on_remeasure(list(active), done, done)
        return True

    def _turn_s(self, active: Sequence[Trial]) -> float:
        """Expected time of one re-measurement, s: the mean of those so far, which other work on the machine slows as much as
        the next ones, or of the first measurements.
        """
        again = [measurement.seconds_total or 0.0 for current in self.rounds for measurement in current.values()]
        return statistics.fmean(again or [(trial.measured.seconds_total or 0.0) + self.settle_s for trial in active])

    def _still_open(self, active: list[Trial]) -> list[Trial]:
        """Returns the contenders of the next round; none if the winner is found."""
        if not active:
            return self._contenders(())
        level = compare_rounds(self._undisturbed()).level
        top = max(level, key=lambda number: level[number])
        by_number = {trial.number: trial for trial in self.run_folder.trials()}
        first = {n: math.log(by_number[n].first or by_number[n].throughput) for n in level}
        # That of the whole machine, as after a change of its clocks.
        change = statistics.median(level[n] - first[n] for n in level)
        logs = {n: [math.log(round_[n].reached) for round_ in self.rounds if n in round_] for n in level}
        # What the first measurement of a trial that was never measured again may have lost, as one of these once did.
        lost = max(max(*logs[n], first[n] + change) - min(*logs[n], first[n] + change) for n in level)
        untried = self._contenders(level)
        least = level[top] + math.log(CHALLENGE_WITHIN) - change - lost
        challengers = [trial for trial in untried if math.log(trial.throughput) > least]
        if by_number[top].lossy:
            # The best exact trial takes part as a reference. If it failed, the next one takes its place.
            exact = [by_number[n].throughput for n in level if not by_number[n].lossy]
            faster = [trial for trial in untried if not trial.lossy and trial.throughput > max(exact, default=0.0)]
            challengers += [trial for trial in faster[:1] if trial not in challengers]
        if any(self._times[trial.number] < FEWEST_ROUNDS for trial in active):
            unsteady = lost > -math.log(1 - DISTURBED)
            return [*active, *challengers] if unsteady else active
        # With the disturbed measurements, which show how unsteady the machine is.
        comparison = compare_rounds(self._valid_rounds())
        rivals = [
            trial
            for trial in active
            if trial.number != top
            and not comparison.ahead(top, trial.number, len(level) - 1)
            and (trial.sampler != DEFAULT or comparison.gap(top, trial.number) < EQUAL)
        ]
        close = all(comparison.gap(top, trial.number) < EQUAL for trial in rivals)
        if close and all(self._times[trial.number] >= ROUNDS_TO_TIE for trial in rivals):
            rivals = []
        is_confirmed = self._counted()[top] >= FEWEST_ROUNDS
        return [by_number[top], *rivals, *challengers] if rivals or challengers or not is_confirmed else []

    def _counted(self) -> Counter[int]:
        """Number of undisturbed measurements of each contender."""
        return Counter(number for round_ in self._undisturbed() for number in round_)

    def _undisturbed(self) -> list[dict[int, Measurement]]:
        """Returns the rounds without measurements that were far slower than another one of the same contender."""
        fastest: dict[int, float] = {}
        for round_ in self._valid_rounds():
            for number, measured in round_.items():
                fastest[number] = max(fastest.get(number, 0.0), measured.reached)
        rounds = [
            {n: measured for n, measured in round_.items() if measured.reached >= (1 - DISTURBED) * fastest[n]}
            for round_ in self._valid_rounds()
        ]
        return [round_ for round_ in rounds if round_]

    def _valid_rounds(self) -> list[dict[int, Measurement]]:
        """Returns the rounds without contenders that failed in any round."""
        rounds = [
            {number: measured for number, measured in round_.items() if number not in self.failed}
            for round_ in self.rounds
        ]
        return [round_ for round_ in rounds if round_]

    def _keep(self) -> None:
        """Saves the re-measurements, each corrected for the speed of its round."""
        failed = dict(self.failed)
        for number, failure in self.failed.items():
            timed_out = failure.status is Status.TIMEOUT
            if timed_out and number in self._saved:
                del failed[number]
            elif timed_out or self._none_holds():
                failed[number] = replace(failure, unconfirmed=_described(failure))
        kept: dict[int, list[float]] = {number: [] for number in failed}
        rounds = self._undisturbed()
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
                "re-measurements count, because the leaders were measured one after the other, several times"
            )


@dataclass(frozen=True)
class RoundsModel:
    """Contenders' levels, estimated from rounds."""

    level: dict[int, float]
    """Log throughput of each contender in an average round."""
    round_effect: list[float]
    """Effect of the machine on all measurements of each round, log."""
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

        covariance = self._covariance
        factor = covariance[first, first] + covariance[other, other] - 2 * covariance[first, other]
        looks = (MOST_ROUNDS - FEWEST_ROUNDS + 1) * max(1, comparisons)
        return self.gap(first, other) > math.sqrt(self.variance * factor) * t.ppf(1 - ERROR / looks, self.degrees)


def compare_rounds(rounds: Sequence[dict[int, Measurement]]) -> RoundsModel:
    """Estimates levels by least squares (see the module's docstring).

    Args:
        rounds: measurements of the contenders of each round, by number; no round is empty.
    """
    numbers = list(dict.fromkeys(number for round_ in rounds for number in round_))
    cells = [(index, number, measured) for index, round_ in enumerate(rounds) for number, measured in round_.items()]
    contenders = len(numbers)
    design = np.zeros((len(cells), contenders + len(rounds)))
    for row, (index, number, _) in enumerate(cells):
        design[row, numbers.index(number)] = design[row, contenders + index] = 1.0
    logs = np.array([math.log(measured.reached) for _, _, measured in cells])
    # Rounds without a contender in common are compared as if they were equal.
    inverse = np.linalg.inv(design.T @ design + np.diag([0.0] * contenders + [ROUND_PENALTY] * len(rounds)))
    coefficients = inverse @ design.T @ logs
    degrees = len(cells) - np.linalg.matrix_rank(design)
    spreads = [measured.spread / Z95 for _, _, measured in cells if measured.spread]
    typical = statistics.median(spreads) if spreads else _TYPICAL_NOISE
    residual = float(((logs - design @ coefficients) ** 2).sum())
    effects = coefficients[contenders:]
    return RoundsModel(
        level={number: float(coefficients[index]) for index, number in enumerate(numbers)},
        round_effect=effects.tolist(),
        variance=(residual + _PRIOR_DEGREES * typical**2) / (degrees + _PRIOR_DEGREES),
        degrees=degrees + _PRIOR_DEGREES,
        _covariance={(a, b): float(inverse[i, j]) for i, a in enumerate(numbers) for j, b in enumerate(numbers)},
    )


def corrected(rounds: Sequence[dict[int, Measurement]]) -> dict[int, list[float]]:
    """Returns the throughputs of each contender, by number, without the effects of their rounds.

    These are fitted to the same measurements and take up a part of their noise: of two contenders half of the
    variance. The values are spread about their mean as much as they would be if the effects were known.
    """
    if not rounds:
        return {}
    model = compare_rounds(rounds)
    logs: dict[int, list[float]] = {}
    for round_, effect in zip(rounds, model.round_effect, strict=True):
        for number, measured in round_.items():
            logs.setdefault(number, []).append(math.log(measured.reached) - effect)
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
    floor = within * sorted_trials[0].throughput
    return [trial for at, trial in enumerate(sorted_trials[:many]) if at < 2 or trial.throughput >= floor]


def _described(failure: Measurement) -> str:
    """Describes a failed re-measurement of a trial whose first measurement counts."""
    reason = f": {failure.reason}" if failure.reason else ""
    return (
        f"it ended as {failure.status} when it was measured again{reason}{f' ({failure.log})' if failure.log else ''}"
    )
