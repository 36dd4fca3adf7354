"""Optuna: distributions by name, or a function that suggests them to a trial.

The function is called with trials of a study of its own, so it should suggest and return: an objective would train each
time. `should_prune` is true for them, and `optuna.TrialPruned` ends one.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import UsageError
from .draft import Draft
from .format import Format
from .ranges import MOST_LISTED, integers, reals, tried

MOST_RUNS, CHECKS = 200, 50
"""How often a function is called to find what it suggests, and then at random to see whether that was all."""
LONGEST = 10.0
"""After so much time it is not called again, s."""


@dataclass(frozen=True)
class _Run:
    """What a function suggested once."""

    params: Mapping[str, Any]
    distributions: Mapping[str, Any]


def _recognises(document: Any) -> bool:
    if isinstance(document, Mapping):
        return bool(document) and all(type(each).__module__ == "optuna.distributions" for each in document.values())
    return callable(document)


def _read(document: Any, draft: Draft) -> None:
    if isinstance(document, Mapping):
        for name, distribution in document.items():
            _declare(draft, str(name), distribution)
        return
    seen = _Seen(document)
    seen.explore()
    if seen.ended:
        draft.say(
            f"{seen.name} was called {len(seen.runs)} times, {seen.ended}: what it suggests seldom may be missing"
        )
    for name in seen.names:
        different = {repr(run.distributions[name]) for run in seen.runs if name in run.distributions}
        if len(different) > 1:
            draft.leave(
                name, f"what is suggested for it depends on other parameters: {' or '.join(sorted(different)[:2])}"
            )
            continue
        condition = seen.condition(name, draft)
        if condition is None:
            draft.leave(name, "it exists under a condition that is not one parameter's; --set gives its values")
        else:
            _declare(draft, name, seen.distributions[name], condition)


@dataclass
class _Seen:
    """What a function suggests, as found by calling it."""

    function: Callable[[Any], Any]
    runs: list[_Run] = field(default_factory=list)
    distributions: dict[str, Any] = field(default_factory=dict)
    """As first suggested, in that order."""
    ended: str = ""
    """Why it was not called more often."""

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.distributions)

    def explore(self) -> None:
        """Calls it until every value of what has few was suggested once, and then at random.

        Raises:
            UsageError: it takes no trial, fails, or suggests nothing.
        """
        import optuna

        try:
            inspect.signature(self.function).bind(None)
        except TypeError:
            raise UsageError(
                f"{self.name} must take an Optuna trial and nothing else, to suggest what may vary"
            ) from None

        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            self._explore(optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=_pruner()))
        finally:
            optuna.logging.set_verbosity(verbosity)

    def _explore(self, study: Any) -> None:
        began = time.monotonic()
        waiting: list[dict[str, Any]] = [{}]
        known: set[tuple[str, Any]] = set()
        checks = CHECKS
        while waiting or checks:
            if len(self.runs) >= MOST_RUNS + CHECKS or time.monotonic() - began > LONGEST:
                self.ended = f"in {time.monotonic() - began:.0f} s"
                return
            if not waiting:
                checks -= 1
            run = self._call(study, waiting.pop(0) if waiting else {})
            known.update(run.params.items())
            few = {name: run.params[name] for name, each in run.distributions.items() if _listed(each)}
            for name, distribution in run.distributions.items():
                fresh = [each for each in _listed(distribution) if (name, each) not in known]
                known.update((name, each) for each in fresh)
                waiting += [{**few, name: each} for each in fresh]

    def _call(self, study: Any, params: Mapping[str, Any]) -> _Run:
        import optuna

        study.enqueue_trial(dict(params))
        trial = study.ask()
        try:
            self.function(trial)
        except optuna.TrialPruned:
            pass
        except (Exception, SystemExit) as error:
            raise UsageError(f"{self.name}(trial) failed: {type(error).__name__}: {error}") from error
        if not trial.params:
            raise UsageError(f"{self.name}(trial) suggests nothing")
        run = _Run(dict(trial.params), dict(trial.distributions))
        self.runs.append(run)
        for name, distribution in run.distributions.items():
            self.distributions.setdefault(name, distribution)
        return run

    def condition(self, name: str, draft: Draft) -> str | None:
        """When a parameter exists: nothing for always, None where no value of one other parameter says so."""
        present = [run for run in self.runs if name in run.params]
        if len(present) == len(self.runs):
            return ""
        absent = [run for run in self.runs if name not in run.params]
        for other in self.names[: self.names.index(name)]:
            if not _listed(self.distributions[other]) or other not in draft.space.by_name:
                continue
            if any(other not in run.params for run in present):
                continue
            values = list(dict.fromkeys(run.params[other] for run in present))
            if not any(other in run.params and run.params[other] in values for run in absent):
                return _among(other, values)
        return None


def _pruner() -> Any:
    """Ends an objective at the first value that it reports."""
    import optuna

    class Ends(optuna.pruners.BasePruner):
        """Prunes whatever is asked about."""

        def prune(self, study: Any, trial: Any) -> bool:
            return True

    return Ends()


def _listed(distribution: Any) -> list[Any]:
    """The values of a distribution that has few."""
    kind = type(distribution).__name__
    if kind == "CategoricalDistribution":
        return (
            [each for each in distribution.choices if each.__hash__] if len(distribution.choices) <= MOST_LISTED else []
        )
    if kind == "IntDistribution":
        values = integers(distribution.low, distribution.high, step=distribution.step)
        return values if len(values) == (distribution.high - distribution.low) // distribution.step + 1 else []
    return []


def _among(name: str, values: list[Any]) -> str:
    if all(isinstance(each, bool) for each in values):
        return name if values == [True] else f"~{name}"
    return f"{name} in [{', '.join(map(repr, values))}]"


def _values(distribution: Any) -> Iterator[Any]:
    kind = type(distribution).__name__
    low, high = getattr(distribution, "low", 0), getattr(distribution, "high", 0)
    if kind == "CategoricalDistribution":
        yield from distribution.choices
    elif kind == "IntDistribution":
        yield from integers(low, high, step=distribution.step, log=distribution.log)
    elif distribution.step is not None:
        step = distribution.step
        yield from (float(f"{low + at * step:.12g}") for at in integers(0, round((high - low) / step)))
    else:
        yield from reals(low, high, log=distribution.log)


def _declare(draft: Draft, name: str, distribution: Any, when: str = "") -> None:
    values = list(_values(distribution))
    if not draft.knob(name, values, when=when or None) or type(distribution).__name__ == "CategoricalDistribution":
        return
    if said := tried(values, repr(distribution), distribution.step):
        draft.say(f"{name}: {said}")


FORMAT = Format(
    name="an Optuna space",
    holds="optuna.distributions by name, or a function of a trial",
    recognises=_recognises,
    read=_read,
)
