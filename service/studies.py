"""Studies by ask and tell: a sampler of redline's over trials that run elsewhere, its ledger in the service's database.

These functions run in a helper (`helper.py`), which alone writes the studies' ledgers.
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
"""What a study's name begins with in the database, where the searches' ledgers are, too."""
OPEN = 200
"""Studies that are kept open."""
_FORM = "service"


@dataclass(frozen=True, kw_only=True)
class _Study:
    """A study that is open."""

    form: Mapping[str, Any]
    ledger: Ledger
    sampler: Sampler
    space: Space


_open: OrderedDict[tuple[str, str], _Study] = OrderedDict()


def begin(url: str, study: str, form: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a study of that id; what `look` says of it.

    Raises:
        SpaceError: the space is none.
    """
    space = Space.from_dict(form["space"])
    sampler = _sampler(form["sampler"], space, form["seed"])
    knobs = {knob.name: None if knob.derived else knob.values for knob in space.knobs}
    ledger = Ledger.open(
        url, name=PREFIX + study, metadata={_FORM: dict(form)}, knobs=knobs, make_config=Config, exist_ok=True
    )
    _keep(url, study, _Study(form=form, ledger=ledger, sampler=sampler, space=space))
    return look(url, study)


def look(url: str, study: str) -> dict[str, Any]:
    """A study with its trials, and the best of them."""
    found = _found(url, study)
    trials = found.ledger.trials()
    best = make_result(trials, (), folder=None, ended="", interrupted=False).to_dict()["best"]
    listed = [_trial(each) for each in trials]
    return as_json({"id": study, "name": found.form["name"], "trials": listed, "best": best})


def owner(url: str, study: str) -> int:
    """Whose study it is, by the number of the user."""
    return int(_found(url, study).form["user"])


def ask(url: str, study: str) -> dict[str, Any]:
    """The next trial, which is pending from then on; neither number nor configuration where none is left."""
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
    """Records how a trial ended; told again, it stays what it was.

    Raises:
        NotFound: there is no such trial.
        KeyTaken: it ended otherwise.
    """
    found = _found(url, study)
    try:
        trial = found.ledger.trial(number)
    except StudyError:
        raise NotFound(f"the study {study} has no trial {number}; ask for one first") from None
    ok = outcome.get("throughput") is not None
    measured = Measurement(
        status=Status(outcome.get("status") or ("ok" if ok else "crash")),
        reason=outcome.get("reason") or ("" if ok else "told without a reason"),
        throughput=outcome.get("throughput"),
        peak_memory_mib=outcome.get("memory"),
    )
    if trial.pending:
        trial = found.ledger.finish(number, measured)
    elif trial.measured.to_dict() != measured.to_dict():
        raise KeyTaken(f"trial {number} has ended otherwise: it is {trial.measured.status}")
    return _trial(trial)


def forget_ledger(url: str, name: str) -> None:
    """Deletes the ledger of that name, a search's; nothing where there is none."""
    import optuna

    from ..results.storage import contained, open_storage, quiet, words

    with quiet(), contained(words(url)):
        storage, _ = open_storage(url, mend=True)
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
    """An open study, opened anew where it has to be.

    Raises:
        NotFound: there is none of that id.
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
    import optuna

    from ..results.storage import contained, open_storage, quiet, words

    with quiet(), contained(words(url)):
        storage, _ = open_storage(url, mend=True)
        try:
            names = {
                each.study_name: each for each in optuna.get_all_study_summaries(storage, include_best_trial=False)
            }
        finally:
            storage.remove_session()
    found: Mapping[str, Any] = names[PREFIX + study].user_attrs[_FORM]
    return found


def _keep(url: str, study: str, made: _Study) -> None:
    _open[url, study] = made
    while len(_open) > OPEN:
        _open.popitem(last=False)[1].ledger.close()
