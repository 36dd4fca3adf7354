"""The database: its tables match the code; a locked, full, read-only, damaged or newer one is reported as such."""

import contextlib
import subprocess
import sys
import threading
import time

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from redline.base.errors import StorageAhead, StorageUnavailable, StudyError, UsageError
from redline.service.store import Store, connection
from redline.service.store.connection import Database, DatabaseLock
from redline.service.tables import METADATA, VERSIONS
from sqlalchemy import text


def different(connection):
    ours = {
        "version_table": VERSIONS,
        "include_name": lambda name, kind, parents: name in METADATA.tables or kind != "table",
    }
    return compare_metadata(MigrationContext.configure(connection, opts=ours), METADATA)


def test_migrations_make_the_tables_that_the_code_knows(empty_url):
    with Store.open(empty_url) as store:
        assert store.database.read(different) == []


def test_differences_from_the_tables_are_found(sqlite):
    sqlite.database.write(lambda c: c.execute(text("ALTER TABLE redline_users ADD COLUMN extra TEXT")))
    assert [each[0] for each in sqlite.database.read(different)] == ["remove_column"]


def test_many_may_open_a_new_database_at_once(empty_url):
    found, go = [], threading.Barrier(4)

    def open_it():
        go.wait()
        with Store.open(empty_url) as store:
            found.append(store.users())

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [[]] * 4


def test_a_database_of_a_later_version_is_refused_and_left_alone(empty_url):
    with Store.open(empty_url) as store:
        store.database.write(lambda c: c.execute(text(f"UPDATE {VERSIONS} SET version_num = '99'")))
    with pytest.raises(
        StorageAhead, match=r"has version 99, written by a later redline: this one supports versions up to [0-9]"
    ):
        Store.open(empty_url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redline.db", "the storage 'redline.db' is not a URL; give sqlite:///FILE or postgresql://"),
        ("sqlite://", "must not be in memory; give sqlite:///FILE"),
        ("sqlite:///:memory:", "must not be in memory"),
        ("sqlite:///file:x.db?mode=ro&uri=true", "cannot use the URI 'file:x.db'"),
        ("mysql://ann:secret@h/d", "unknown database 'mysql'.*Known: postgresql, sqlite"),
        ("redis://h", "unknown database 'redis'|is not a URL"),
    ],
)
def test_another_kind_of_database_is_refused(url, message):
    with pytest.raises(UsageError, match=message) as refused:
        Store.open(url)
    assert "secret" not in str(refused.value)


def test_files_that_are_no_database_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing of the kind " * 500)
    with pytest.raises(StorageUnavailable, match="cannot be used: file is not a database"):
        Store.open(f"sqlite:///{tmp_path}/notes.txt")
    with pytest.raises(StorageUnavailable, match="cannot be used: unable to open"):
        Store.open(f"sqlite:///{tmp_path}/none/redline.db")


def test_a_postgres_that_is_not_there_says_so_without_its_password():
    pytest.importorskip("psycopg")
    start = time.monotonic()
    with pytest.raises(
        StorageUnavailable, match=r"'postgresql://ann@127.0.0.1:1/d' cannot be used: connection"
    ) as caught:
        Store.open("postgresql://ann:secret@127.0.0.1:1/d", patience_s=0.5)
    assert "secret" not in str(caught.value) and time.monotonic() - start < 60


def test_a_lost_connection_is_replaced(cluster, postgresql_url):
    with Store.open(postgresql_url) as store:
        store.add_user("ann")
        cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname IS NOT NULL"
        with Store.open(postgresql_url) as other:
            other.database.read(lambda c: c.execute(text(cut)).all())
        assert [each.name for each in store.users()] == ["ann"]


def test_a_transaction_that_fails_leaves_nothing(store):
    def half(connection):
        connection.execute(text("DELETE FROM redline_users"))
        raise KeyError("in the middle")

    store.add_user("ann")
    with pytest.raises(KeyError):
        store.database.write(half)
    assert len(store.users()) == 1


def test_committed_data_survives_a_kill(url, tmp_path):
    """Everything that the store acknowledged before the kill is in the database."""
    code = (
        "import sys; from redline.service.store import Store; store = Store.open(sys.argv[1]); ann = store.add_user('ann')\n"
        "while True: print(store.submit(ann, {'filler': 'x' * 2000}, devices=1)[0].id, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline().strip() for _ in range(20)]
        process.kill()
        lines += [line for line in process.stdout.read().split("\n") if len(line) == 12]
    with Store.open(url) as store:
        kept = {each.id for each in store.searches(limit=10_000)}
        assert len(lines) >= 20 and set(lines) <= kept
        assert len(store.events()) == len(kept)  # each with its event, or neither
        with contextlib.closing(Database(url)) as database:
            assert (
                database.sqlite is False
                or database.read(lambda c: c.execute(text("PRAGMA integrity_check")).scalar()) == "ok"
            )


def test_one_server_has_a_database_until_it_ends(url):
    """A second server is refused even if it works on another folder."""
    first = DatabaseLock(url, lost=lambda: None)
    with pytest.raises(StudyError, match=r"is in use by .*process \d+ on "):
        DatabaseLock(url, lost=lambda: None)
    first.close()
    DatabaseLock(url, lost=lambda: None).close()


def test_a_server_whose_session_is_lost_has_the_database_again_or_ends(postgresql_url, monkeypatch):
    monkeypatch.setattr(connection, "LOOK_S", 0.05)
    lost = threading.Event()

    def cut(database):
        """Ends the sessions, as a restart of Postgres does."""
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'redline serve%'"
        assert database.read(lambda connection: connection.execute(text(query)).scalar())

    database = Database(postgresql_url)
    with contextlib.closing(database), contextlib.closing(DatabaseLock(postgresql_url, lost=lost.set)) as first:
        cut(database)
        time.sleep(0.5)
        assert not lost.is_set()
        with pytest.raises(StudyError, match="is in use by"):
            DatabaseLock(postgresql_url, lost=lambda: None)
        first._over.set()
        first._thread.join()
        cut(database)
        with contextlib.closing(DatabaseLock(postgresql_url, lost=lambda: None)):
            first._over.clear()
            first._watch()  # as if it looked only now
            assert lost.is_set()
