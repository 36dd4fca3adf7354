"""A pool without processes: a store, and a thread that runs its dry runs by a formula."""

import threading
import time
from collections import Counter

from redline.base.device import Device
from redline.base.errors import LeaseOver
from redline.results import Measurement, Status
from redline.results.names import holds_run
from redline.runners import TrialRequest
from redline.service.placing import Placed
from redline.service.pool_runner import PoolRunner
from redline.service.searcher import StoreListener
from redline.service.store import Store
from redline.space import Space
from redline.tuner import tune
from service_pool import begun

DEVICE = Device(type="cpu", name="a CPU", count=1, memory_mib=8000)
GPU = Device(type="cuda", name="H100", count=8, memory_mib=80_000, capability=(9, 0))
PLACED = Placed(device=DEVICE, hardware=None, memory_limit_mib=1000.0, software={"torch": "2"}, workers_devices=1)


def a_store(folder):
    """Opens a store in a folder and returns it with the id of a user."""
    store = Store.open(f"sqlite:///{folder}/redline.db")
    return store, store.add_user("ann", "admin").id


def a_space():
    """A space of two knobs and twelve configurations."""
    space = Space()
    space.choice("micro_batch", [1, 2, 4, 8])
    space.choice("checkpoint_ratio", [0.0, 0.5, 1.0])
    return space


def speed(config):
    """Returns the throughput of a configuration, tokens/s."""
    return 100.0 * config["micro_batch"] ** 0.5 * (1 - 0.3 * config["checkpoint_ratio"])


def measured(payload):
    """Returns the outcome of a dry run: `oom` if it needs more memory than the limit."""
    [asked] = payload["requests"]
    config = TrialRequest.from_dict(asked).config
    peak = 150.0 * config["micro_batch"] * (1 - 0.5 * config["checkpoint_ratio"])
    known = {"peak_memory_mib": peak, "memory_limit_mib": payload["memory_limit_mib"], "started": time.time()}
    if peak > payload["memory_limit_mib"]:
        return Measurement(status=Status.OOM, reason="out of memory", seconds_total=0.001, **known).to_dict()
    rate = speed(config)
    return Measurement(
        status=Status.OK, throughput=rate, unit="tokens/s", seconds_total=0.001, step_ms=1e3 / rate, **known
    ).to_dict()


class Hands(threading.Thread):
    """Runs every dry run that a store's searches ask for, and counts the runs of each.

    A dry run whose outcome is None loses its worker, which joins again.
    """

    def __init__(self, store, user, outcome=measured):
        super().__init__(daemon=True)
        self.store, self.user, self.outcome = store, user, outcome
        self.worker = self._joined()
        self.ran = Counter()
        self.stopping = threading.Event()
        self.trouble = None

    def run(self):
        try:
            self._work()
        except Exception as error:
            self.trouble = error
            raise

    def _work(self):
        while not self.stopping.wait(0.01):
            for each in self.store.waiting():
                try:
                    taken = self.store.lease(each.dry_run, self.worker, 30.0)
                except LeaseOver:
                    continue
                self.ran[self.store.dry_run(each.dry_run).key] += 1
                if (outcome := self.outcome(taken.payload)) is not None:
                    self.store.answer(taken.dry_run, taken.lease, outcome)
                else:
                    self.worker = self._joined()

    def _joined(self):
        return self.store.join(self.user, "hands", "here", {**DEVICE.to_dict()}, 8, 1000, {"torch": "2"}).id

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc):
        self.stopping.set()
        self.join()
        assert self.trouble is None


class Killed(BaseException):
    """Raised in place of a searcher's death."""


def a_runner(store, search, attempt=None, **more):
    """Returns the runner of an attempt at a search; by default of a new one."""
    attempt = attempt or begun(store, search, PLACED.device.name)
    return PoolRunner(store, search=search, attempt=attempt, placed=PLACED, devices=1, in_turns=False, **more)


def a_whole_search(store, search, folder, killed_after=None, known=None):
    """Runs a search to its end, or until its searcher dies after `killed_after` finished trials; `known` is the
    search's `EarlierResults`."""

    class Dying(StoreListener):
        def on_trial_end(self, trial):
            super().on_trial_end(trial)
            if killed_after is not None and self.done >= killed_after:
                raise Killed

    attempt = begun(store, search, PLACED.device.name)
    listener = Dying(store, search, attempt)
    more = {}
    if known is not None:
        listener.finished_one, more = known.note, {"known": known.measurement}
    runner = a_runner(store, search, attempt, finished=lambda: listener.done, **more)
    return tune(
        lambda config: 0.0,  # not called: the pool runs its own formula
        a_space(),
        runner=runner,
        trials=8,
        seed=1,
        out=folder,
        storage=f"sqlite:///{folder.parent}/redline.db",
        resume=holds_run(folder),
        listener=listener,
    )
