"""A run's folder that keeps its trials in memory."""

from dataclasses import replace
from types import SimpleNamespace

from redline.results import Trial
from redline.results.summary import judged


class MemoryFolder:
    def __init__(self, trials=()):
        self._trials, self._first = list(trials), {}

    def trials(self):
        return list(self._trials)

    def pending(self):
        return []

    def start(self, config, **details):
        self._trials.append(Trial(number=len(self._trials), config=config, **details))
        return self._trials[-1]

    def finish(self, number, measurement):
        self._trials[number] = replace(self._trials[number], measurement=measurement)
        return self._trials[number]

    def remeasure(self, number, throughputs, failure=None):
        first = self._first.setdefault(number, self._trials[number].measured)
        self._trials[number] = judged(self._trials[number], throughputs, failure, initial=first)

    def log_path(self, number):
        return SimpleNamespace(with_suffix=lambda suffix: None)
