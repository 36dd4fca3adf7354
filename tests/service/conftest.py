"""Stores for the service's tests: a new one in SQLite, or in each kind of database."""

import shutil

import postgres
import pytest
from clock import Clock
from redline.service.store import Store
from redline.service.tables import METADATA
from served import served

EACH = ("sqlite", pytest.param("postgresql", marks=pytest.mark.slow))
"""Kinds of database for tests over HTTP. The quick tier has only SQLite."""


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
    """A file with the service's tables. Tests copy it, because creating the tables takes longer than most tests."""
    path = tmp_path_factory.mktemp("made") / "redline.db"
    Store.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def made_postgres(cluster):
    """URL of a database with the service's tables. Every test finds it empty."""
    url = cluster.new_database()
    Store.open(url).close()
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request):
    """URL of a database with the service's tables, for each kind of database."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(params=EACH)
def each_url(request):
    """As `url`; the quick tier has only SQLite."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(scope="module", params=EACH)
def service(request, tmp_path_factory):
    """A service that the tests of a module share, over each kind of database."""
    url = None if request.param == "sqlite" else request.getfixturevalue("cluster").new_database()
    with served(tmp_path_factory.mktemp("service"), url=url) as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request, tmp_path):
    """URL of an empty database of each kind."""
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
    """A store in SQLite, for behaviour that does not depend on the kind of database."""
    with Store.open(sqlite_url, clock=clock) as made:
        yield made
