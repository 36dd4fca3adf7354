"""A process that takes part in a pool through the store alone: `python pool_process.py ROLE URL ARGUMENTS...`.

A worker leases any waiting dry run, and at random renews, answers, answers late, gives back, or stops responding; it
prints each accepted answer as `DRY_RUN LEASE`. A reaper ends expired leases. Both run until nothing is left to do.
"""

import random
import sys
import time

from redline.base.errors import LeaseOver, Refused
from redline.service.store import Store

LEASE_S = 0.15
IDLE_S = 20.0


def work(store, worker, seed):
    """Leases dry runs and answers them, at times too late or not at all."""
    rng, idle = random.Random(seed), time.monotonic()
    while time.monotonic() - idle < IDLE_S:
        waiting = store.waiting()
        if not waiting:
            if store.latest() and not store.running():
                return
            time.sleep(0.01)
            continue
        idle = time.monotonic()
        try:
            lease = store.lease(rng.choice(waiting).dry_run, worker, LEASE_S)
            what = rng.random()
            if what < 0.1:
                continue  # no answer for this lease
            if what < 0.2:
                store.give_back(lease.dry_run, lease.lease)
                continue
            if what < 0.4:
                time.sleep(2 * LEASE_S)  # late: another worker may have it by now
            elif what < 0.5:
                store.renew(lease.dry_run, lease.lease, LEASE_S)
            store.answer(lease.dry_run, lease.lease, {"by": worker, "lease": lease.lease})
            print(lease.dry_run, lease.lease, flush=True)
        except (LeaseOver, Refused):
            continue


def reap(store):
    """Ends expired leases; several reapers may run at once."""
    idle = time.monotonic()
    while time.monotonic() - idle < IDLE_S:
        if store.expire() or store.waiting():
            idle = time.monotonic()
        elif not store.running():
            return
        time.sleep(0.02)


if __name__ == "__main__":
    role, url, *arguments = sys.argv[1:]
    with Store.open(url, create=False, patience_s=60) as opened:
        print("ready", flush=True)
        sys.stdin.readline()
        if role == "work":
            work(opened, arguments[0], int(arguments[1]))
        else:
            reap(opened)
