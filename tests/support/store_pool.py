"""A pool on a store that this process opens, and a worker on it: `python store_pool.py URL DATA USER`."""

import signal
import sys
import time
from pathlib import Path

from redline.base.errors import LeaseOver
from redline.service.dispatcher import LEASE_S
from redline.service.logs import write_log
from redline.service.scheduling import decide
from redline.service.store import Store
from redline.service.worker import Worker

LOOK_S = 0.2
"""How often a worker looks for a dry run, s."""


class StorePool:
    """A pool on a store opened by this process. Without a dispatcher, each worker decides for itself and takes its
    own dry runs.

    Args:
        store: of the pool.
        user: id of the user who joins workers.
        data: the server's data folder, for logs.
        lease_s: duration of a lease, s.
    """

    def __init__(self, store, *, user, data, lease_s):
        self._store, self._user, self._data, self._lease_s = store, user, data, lease_s

    def join(self, *what):
        return self._store.join(self._user, *what).id

    def lease(self, worker, wait_s):
        until = time.monotonic() + wait_s
        self._store.seen(worker)
        while True:
            self._store.expire()
            for dry_run, chosen in self._decided(worker):
                if chosen != worker:
                    continue
                try:
                    return self._store.lease(dry_run, worker, self._lease_s)
                except LeaseOver:  # another worker was faster
                    continue
            if time.monotonic() >= until:
                return None
            time.sleep(LOOK_S)

    def _decided(self, worker):
        store = self._store
        return decide(store.waiting(), store.running(), [store.worker(worker)], store.shares(), time.time())

    def renew(self, dry_run, lease):
        self._store.renew(dry_run, lease, self._lease_s)

    def answer(self, dry_run, lease, outcome):
        self._store.answer(dry_run, lease, outcome)

    def give_back(self, dry_run, lease):
        self._store.give_back(dry_run, lease)

    def log(self, assignment, name, offset, text):
        self._store.renew(assignment.dry_run, assignment.lease, self._lease_s)
        write_log(self._data, assignment.search, name, offset, text)

    def leave(self, worker):
        self._store.leave(worker)


if __name__ == "__main__":
    url, data, user = sys.argv[1:]
    pool = StorePool(Store.open(url, create=False), user=int(user), data=Path(data), lease_s=LEASE_S)
    worker = Worker(pool, name="here", host="here", devices=1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    worker.run()
