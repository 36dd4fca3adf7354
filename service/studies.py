"""Studies by ask and tell: redline's samplers for trials that clients run, with the ledger in the service's database.

These functions run in a helper process (`child_processes.py`), the only one that writes the studies' ledgers.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..base.device import detect
from ..base.errors import KeyTaken, NotFound, StudyError
from ..results import Measurement, Status, Trial
from ..results.ledger import Ledger
from ..space import Config, Space
from ..tuner.result import make_result
from ..tuner.samplers import Sampler, make_sampler
from ..views.report.document import as_json

PREFIX = "study-"
"""Prefix of a study's name in the database, which also contains the searches' ledgers."""
OPEN = 200
"""Number of studies that are kept open."""
_FORM = "service"


@dataclass(frozen=True, kw_only=True)
class _Study:
    """An open study."""

    form: Mapping[str, Any]
    ledger: Ledger
    sampler: Sampler
    space: Space


_open: OrderedDict[tuple[str, str], _Study] = OrderedDict()


def begin(url: str, study: str, form: Mapping[str, Any]) -> dict[str, Any]:
    """Creates a study of that id and returns it as `look` does.

    Raises:
        SpaceError: the space is invalid.
    """
    space = Space.from_dict(form["space"])
    sampler = _sampler(form["sampler"], space, form["seed"])
    knobs = {knob.name: None if knob.derived else knob.values for knob in space.knobs}
    ledger = Ledger.open(
        url, name=PREFIX + study, metadata={_FORM: dict(form)}, knobs=knobs, make_config=Config, exist_ok=True
    )
    _open[url, study] = _Study(form=form, ledger=ledger, sampler=sampler, space=space)
    while len(_open) > OPEN:
        _open.popitem(last=False)[1].ledger.close()
    return look(url, study)


def look(url: str, study: str) -> dict[str, Any]:
    """Returns a study with its trials and the best of them."""
    found = _found(url, study)
    trials = found.ledger.trials()
    best = make_result(trials, (), folder=None, ended="", interrupted=False).to_dict()["best"]
    listed = [_trial(each) for each in trials]
    return as_json({"id": study, "name": found.form["name"], "trials": listed, "best": best})


def owner(url: str, study: str) -> int:
    """Returns the user id of a study's owner."""
    return int(_found(url, study).form["user"])


def ask(url: str, study: str) -> dict[str, Any]:
    """Returns the next trial, which is pending from then on; number and configuration are None if none is left."""
    found = _found(url, study)
    trials = found.ledger.trials()
    if not trials:
        proposed, by = [found.space.default()], "default"
    else:
        proposed, by = found.sampler.propose(trials), found.sampler.name
    if not proposed:
        return {"trial": None, "config": None}
    trial = found.ledger.start(proposed[0], sampler=by)
    return as_json({"trial": trial.number, "config": trial.config.to_dict()})


def tell(url: str, study: str, number: int, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Records how a trial ended. Repeating the same report changes nothing.

    Raises:
        NotFound: the trial does not exist.
        KeyTaken: it has ended with another result.
    """
    found = _found(url, study)
    try:
        trial = found.ledger.trial(number)
    except StudyError:
        raise NotFound(f"the study {study} has no trial {number}; ask for one first") from None
    ok = outcome.get("throughput") is not None
    measured = Measurement(
        status=Status(outcome.get("status") or ("ok" if ok else "crash")),
        reason=outcome.get("reason") or ("" if ok else "reported without a reason"),
        throughput=outcome.get("throughput"),
        peak_memory_mib=outcome.get("memory"),
    )
    if trial.pending:
        trial = found.ledger.finish(number, measured)
    elif trial.measured.to_dict() != measured.to_dict():
        raise KeyTaken(f"trial {number} already has another result: it is {trial.measured.status}")
    return _trial(trial)


def forget_ledger(url: str, name: str) -> None:
    """Deletes the ledger of that name; does nothing if there is none."""
    import optuna

    from ..results.storage import contained, open_storage, quiet, words

    with quiet(), contained(words(url)):
        storage, _ = open_storage(url, writable=True)
        try:
            optuna.delete_study(study_name=name, storage=storage)
        except KeyError:
            return
        finally:
            storage.remove_session()


def _trial(trial: Trial) -> dict[str, Any]:
    out: dict[str, Any] = {"trial": trial.number, "config": trial.config.to_dict(), "status": "pending"}
    if trial.measurement is not None:
        measured = trial.measured
        out |= {"status": str(measured.status), "throughput": measured.throughput, "memory": measured.peak_memory_mib}
        out["reason"] = measured.reason
    return as_json(out)


def _sampler(name: str, space: Space, seed: int) -> Sampler:
    options = {}
    if name == "bayes":
        from ..tuner.default_prior import assumed_hardware, default_prior

        options["prior"] = default_prior(space, 1, assumed_hardware(detect(), space, 1))
    return make_sampler(name, space, seed=seed, **options)


def _found(url: str, study: str) -> _Study:
    """Returns a study, opened if necessary.

    Raises:
        NotFound: no study has that id.
    """
    if (url, study) in _open:
        _open.move_to_end((url, study))
        return _open[url, study]
    try:
        form = _form_of(url, study)
    except (StudyError, KeyError):
        raise NotFound(f"there is no study '{study}'") from None
    begin(url, study, form)
    return _open[url, study]


def _form_of(url: str, study: str) -> Mapping[str, Any]:
    """Reads one study alone: the database has the ledgers of all searches as well.

    Raises:
        KeyError: there is none of that id.
    """
    from ..results.storage import contained, open_storage, quiet, words

    with quiet(), contained(words(url)):
        storage, _ = open_storage(url, writable=True)
        try:
            found: Mapping[str, Any] = storage.get_study_user_attrs(storage.get_study_id_from_name(PREFIX + study))[
                _FORM
            ]
        finally:
            storage.remove_session()
    return found
