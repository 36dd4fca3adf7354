"""A pool for tests of the store, and a clock that tests advance."""


class Clock:
    """A clock that moves only by `pass_by`."""

    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


def begun(store, search, kind="NVIDIA H100"):
    """Takes a search, places it on a kind of device, and returns the attempt."""
    attempt = store.take_search(search)
    store.place_search(search, attempt, kind, {})
    return attempt


class Pool:
    """A user with a running search, and a worker with two devices."""

    def __init__(self, store):
        self.store = store
        self.user = store.add_user("ann")
        self.search, _ = store.submit(self.user, {"model": "gpt2-tiny"}, devices=1)
        self.attempt = begun(store, self.search.id)
        self.worker = self.join()

    def join(self, devices=2, name="NVIDIA H100", type="cuda"):
        return self.store.join(self.user, "w", "host", {"type": type, "name": name}, devices, 81920, {"torch": "2.13"})

    def ask(self, key="0", devices=1):
        return self.store.ask_dry_run(self.search.id, self.attempt, key, "run", {"number": key}, devices)

    def lease(self, dry_run, seconds=10.0, worker=None):
        return self.store.lease(dry_run.id, (worker or self.worker).id, seconds)
