"""Stores for the service's tests: a new one in SQLite, or in each kind of database."""

import shutil

import postgres
import pytest
from redline.service.store import Store
from redline.service.tables import METADATA


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="session")
def cluster():
    if postgres.missing():
        pytest.skip(postgres.missing())
    made = postgres.Cluster()
    yield made
    made.end()


@pytest.fixture(scope="session")
def made_sqlite(tmp_path_factory):
    """A file with the service's tables, to be copied: making them takes longer than most tests."""
    path = tmp_path_factory.mktemp("made") / "redline.db"
    Store.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def made_postgres(cluster):
    """A database with the service's tables, which every test finds empty."""
    url = cluster.new_database()
    Store.open(url).close()
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request):
    """Of a database with the service's tables, of each kind."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request, tmp_path):
    """Of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/empty.db"
    return request.getfixturevalue("cluster").new_database()


@pytest.fixture
def sqlite_url(tmp_path, made_sqlite):
    return f"sqlite:///{shutil.copy(made_sqlite, tmp_path)}"


@pytest.fixture
def postgresql_url(cluster, made_postgres):
    cluster.empty(made_postgres, METADATA.tables)
    return made_postgres


@pytest.fixture
def store(url, clock):
    """A store in each kind of database."""
    with Store.open(url, clock=clock) as made:
        yield made


@pytest.fixture
def sqlite(sqlite_url, clock):
    """A store in SQLite, for what is the same in any."""
    with Store.open(sqlite_url, clock=clock) as made:
        yield made


class Pool:
    """A user with a running search, and a worker with two devices."""

    def __init__(self, store):
        self.store = store
        self.user = store.add_user("ann")
        self.search, _ = store.submit(self.user, {"model": "gpt2-tiny"}, devices=1)
        self.attempt = store.take_search(self.search.id)
        self.worker = self.join()

    def join(self, devices=2, name="NVIDIA H100", type="cuda"):
        return self.store.join(self.user, "w", "host", {"type": type, "name": name}, devices, 81920, {"torch": "2.13"})

    def ask(self, key="0", devices=1):
        return self.store.ask_dry_run(self.search.id, self.attempt, key, "run", {"number": key}, devices)

    def lease(self, dry_run, seconds=10.0, worker=None):
        return self.store.lease(dry_run.id, (worker or self.worker).id, seconds)


@pytest.fixture
def pool(store):
    return Pool(store)
