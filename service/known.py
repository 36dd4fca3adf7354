"""What a search knows of others: what was measured before, and which earlier searches it is to learn from."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.errors import UsageError
from ..results import Measurement, Status, Trial, request as run_yaml
from ..results.names import RUN
from ..space import Config
from ..tuner.record import asked_of
from ..tuner.request import Request
from ..tuner.task import resolve_task
from ..tuner.transfer import read_runs, take
from .placing import Placed, suits
from .records import Search, SearchState
from .store import Store

MOST_EARLIER = 4
"""Earlier searches that one learns from: those most like it."""
MOST_LOOKED_AT = 100
"""Of the latest ones, how many are looked at for that."""
_DECIDES = ("workload", "seq_len", "global_batch", "seed")
"""What of a request decides what a configuration measures, beside devices and software."""
_OF_DEVICES = ("type", "name", "capability", "used")


class Known:
    """What the store knows that a search can use.

    Args:
        store: of all searches.
        search: which one.
        folder: its run's.
        placed: on what it runs; None where it is simulated.
    """

    def __init__(self, store: Store, search: Search, folder: Path, placed: Placed | None) -> None:
        self._store, self._search, self._folder, self._placed = store, search, folder, placed

    def note(self, trial: Trial) -> None:
        """Keeps what a trial measured, for others."""
        measured = trial.measurement
        if (
            self._placed is None
            or measured is None
            or measured.status not in (Status.OK, Status.OOM)
            or not measured.started
            or not self._comparable
        ):
            return
        told = replace(measured, ranks=(), log="").to_dict()
        self._store.note_measured(self._fingerprint, trial.config.id, trial.config.to_dict(), told, self._search.id)

    def measurement(self, config: Config) -> Measurement | None:
        """What a configuration measured on the same hardware and software with the same seed, where the search may be
        answered by that: in a search of the same user, or one that is shown to all."""
        if not self._search.reuse or self._placed is None or not self._comparable:
            return None
        limit = self._placed.memory_limit_mib or float(self._placed.device.memory_mib)
        for each in reversed(self._store.measured(self._fingerprint, counts_for=self._search.user)):
            if each.config_id != config.id or each.search == self._search.id:
                continue
            found = Measurement.from_dict(each.measurement)
            if _holds(found, limit):
                said = f"measured in {f'search {each.search}' if each.search else 'a search that was deleted'}"
                # It took this search no time, and no devices.
                return replace(
                    found, reason=f"{found.reason}; {said}" if found.reason else said, started=None, seconds_total=0.0
                )
        return None

    @property
    def _comparable(self) -> bool:
        """Whether it is known what software measures: one on all workers that can have the search, and no command,
        whose program may be another one tomorrow."""
        assert self._placed is not None
        there = [each.software for each in self._store.workers() if suits(self._search, each)]
        return "command" not in self._search.request and all(each == self._placed.software for each in there)

    @cached_property
    def _fingerprint(self) -> str:
        document, _ = run_yaml.read(self._folder)
        assert self._placed is not None
        return fingerprint(document["asked"], self._search.request, self._placed.software)

    def earlier(self, asked: Request) -> list[Path]:
        """The folders of the searches that this one is to learn from: of those that ended before it began, and are of the same
        user or shown to all, those that are most like it and have something that counts here."""
        began = self._search.started or self._search.created
        device = self._placed.device if self._placed is not None else None
        task = None
        found: list[tuple[float, float, Path]] = []
        ended = self._store.searches(state=SearchState.DONE, limit=MOST_LOOKED_AT, counts_for=self._search.user)
        for each in ended:
            folder = self._folder.parent / each.id
            if each.ended is None or each.ended > began or not (folder / RUN).is_file():
                continue
            try:
                task = task or resolve_task(asked, device=device, simulated=_simulated(asked))
                [run] = read_runs([folder])
                taken = take(run, task.space, asked_of(asked, task), task.own.unit if task.own else "")
            except UsageError:  # another space, or another kind of thing
                continue
            found.append((taken.weight, each.ended, folder))
        return [folder for _, _, folder in sorted(found, reverse=True)[:MOST_EARLIER]]


def fingerprint(asked: Mapping[str, Any], request: Mapping[str, Any], software: Mapping[str, Any]) -> str:
    """Digest of all that decides what a configuration measures.

    Args:
        asked: as run.yaml keeps it.
        request: as it travelled.
        software: versions of the workers.
    """
    devices = asked["devices"]
    parts = {name: asked.get(name) for name in _DECIDES}
    parts |= {"devices": {name: devices.get(name) for name in _OF_DEVICES}, "software": dict(software)}
    parts["measure_time"] = request.get("measure_time")
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _simulated(asked: Request) -> Any:
    from ..tuner.predicting import described

    return described(asked.hardware) if asked.runs_on == "simulate" else None


def _holds(measured: Measurement, limit_mib: float) -> bool:
    """Whether a measurement says the same where a rank may take so much memory."""
    if measured.status is Status.OOM:
        return (measured.memory_limit_mib or 0.0) >= limit_mib
    return (measured.peak_memory_mib or 0.0) <= limit_mib
