"""Which lost leases count against a dry run, and when it is taken to be what ends its workers.

| how a lease ended | it counts | because |
|---|---|---|
| its worker gave it back, or left the pool | no | nothing was lost |
| its worker asked for the dry run again | in place of the next one | the worker was slow, not lost |
| while no server ran that could renew it | no | the server was lost |
| in the same moment as others of its worker | no | which one was to blame is not known |
| otherwise | yes | its worker was lost while it ran this |

`MOST_ATTEMPTS` leases that count make its outcome a crash. From lease `FORGIVEN` + 1 on all but those that were given back
count: each of these reasons may be this dry run's doing, and it must end somewhere.
"""

MOST_ATTEMPTS = 3
"""Leases that count, after which a dry run is a crash."""
FORGIVEN = 10
"""The last lease that is forgiven."""


def attempts_when_leased(attempts: int, latest: int, *, same_worker: bool) -> int:
    """Leases that count, with a new one.

    Args:
        attempts: that counted before.
        latest: number of the latest lease.
        same_worker: whether the worker that gets it is the one that let that lease end.
    """
    return max(1, attempts) if same_worker and latest <= FORGIVEN else attempts + 1


def attempts_when_lost(attempts: int, latest: int, *, with_server: bool, with_others: bool) -> int:
    """Leases that count, after the latest one was lost.

    Args:
        attempts: that counted while it ran.
        latest: its number.
        with_server: whether no server ran that could renew it.
        with_others: whether others of its worker were lost in the same moment.
    """
    return attempts - 1 if (with_server or with_others) and latest <= FORGIVEN else attempts


def attempts_when_given_back(attempts: int) -> int:
    """Leases that count, after the latest one was given back."""
    return attempts - 1
