"""A search's access to earlier results: stored measurements to reuse, and earlier searches to learn from."""

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
from ..tuner.history import read_runs
from ..tuner.predicting import described
from ..tuner.record import asked_of
from ..tuner.request import Request
from ..tuner.task import resolve_task
from ..tuner.warm_start import take
from .placing import Placed, suits
from .records import Search, SearchState
from .store import Store

MOST_EARLIER = 4
"""Maximum number of earlier searches that a search learns from; the most similar ones are used."""
MOST_LOOKED_AT = 100
"""Number of latest searches that are considered for that."""
_DECIDES = ("workload", "seq_len", "global_batch", "seed")
"""Fields of a request that affect measurements, besides devices and software."""
_OF_DEVICES = ("type", "name", "capability", "used")


class EarlierResults:
    """Earlier results in the store that a search can use.

    Args:
        store: contains all searches.
        search: the search that uses them.
        folder: folder of its run.
        placed: the devices it runs on; None if it is simulated.
    """

    def __init__(self, store: Store, search: Search, folder: Path, placed: Placed | None) -> None:
        self._store, self._search, self._folder, self._placed = store, search, folder, placed

    def note(self, trial: Trial) -> None:
        """Stores a trial's measurement for other searches."""
        measured = trial.measurement
        if (
            self._placed is None
            or measured is None
            or measured.status not in (Status.OK, Status.OOM)
            or not measured.started
            or not self._comparable
        ):
            return
        stored = replace(measured, ranks=(), log="").to_dict()
        self._store.note_measured(self._fingerprint, trial.config.id, trial.config.to_dict(), stored, self._search.id)

    def measurement(self, config: Config) -> Measurement | None:
        """Returns an earlier measurement of a configuration on the same hardware and software with the same seed;
        None if there is none.

        Only for searches with `reuse`. Uses searches of the same user and those with visibility `all`.
        """
        if not self._search.reuse or self._placed is None or not self._comparable:
            return None
        limit = self._placed.memory_limit_mib or float(self._placed.device.memory_mib)
        for each in reversed(self._store.measured(self._fingerprint, config.id, counts_for=self._search.user)):
            if each.search == self._search.id:
                continue
            found = Measurement.from_dict(each.measurement)
            if _holds(found, limit):
                source = f"measured in {f'search {each.search}' if each.search else 'a search that was deleted'}"
                # This search spent neither time nor devices on it.
                return replace(
                    found,
                    reason=f"{found.reason}; {source}" if found.reason else source,
                    started=None,
                    seconds_total=0.0,
                )
        return None

    @property
    def _comparable(self) -> bool:
        """True if measurements depend only on what `fingerprint` covers.

        All suitable workers must have the same software, and the target must not be a command, whose program may
        change.
        """
        assert self._placed is not None
        software = [each.software for each in self._store.workers() if suits(self._search, each)]
        return "command" not in self._search.request and all(each == self._placed.software for each in software)

    @cached_property
    def _fingerprint(self) -> str:
        document, _ = run_yaml.read(self._folder)
        assert self._placed is not None
        return fingerprint(document["asked"], self._search.request, self._placed.software)

    def similar(self, asked: Request) -> list[Path]:
        """Returns the folders of the earlier searches that this one learns from, the most similar first.

        Considers searches that ended before this one began, are of the same user or visible to all, and have trials
        that apply to this space.
        """
        start = self._search.started or self._search.created
        device = self._placed.device if self._placed is not None else None
        task = None
        found: list[tuple[float, float, Path]] = []
        done = self._store.searches(state=SearchState.DONE, limit=MOST_LOOKED_AT, counts_for=self._search.user)
        for each in done:
            folder = self._folder.parent / each.id
            if each.ended is None or each.ended > start or not (folder / RUN).is_file():
                continue
            try:
                simulated = described(asked.hardware) if asked.runs_on == "simulate" else None
                task = task or resolve_task(asked, device=device, simulated=simulated)
                [run] = read_runs([folder])
                taken = take(run, task.space, asked_of(asked, task), task.own.unit if task.own else "")
            except UsageError:  # another space, or another kind of target
                continue
            found.append((taken.weight, each.ended, folder))
        return [folder for _, _, folder in sorted(found, reverse=True)[:MOST_EARLIER]]


def fingerprint(asked: Mapping[str, Any], request: Mapping[str, Any], software: Mapping[str, Any]) -> str:
    """Returns a digest of everything that affects the measurement of a configuration: `asked` is the request in run.yaml,
    `request` the submitted one.
    """
    devices = asked["devices"]
    parts = {name: asked.get(name) for name in _DECIDES}
    parts |= {"devices": {name: devices.get(name) for name in _OF_DEVICES}, "software": dict(software)}
    parts["measure_time"] = request.get("measure_time")
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _holds(measured: Measurement, limit_mib: float) -> bool:
    """True if a measurement is also valid under another memory limit of a rank."""
    if measured.status is Status.OOM:
        return (measured.memory_limit_mib or 0.0) >= limit_mib
    return (measured.peak_memory_mib or 0.0) <= limit_mib
