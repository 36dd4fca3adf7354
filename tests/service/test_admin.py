"""Owners and admins hold, retry, reprioritise, show and delete searches; roles, quotas, disabling and audit of users."""

import json

import pytest
import redline as rl
from click.testing import CliRunner
from redline.base.errors import NotFound, Refused, StudyError, UsageError
from redline.base.lock import FolderLock
from redline.cli.main import redline as command_line
from redline.results.ledger import Ledger
from redline.results.names import RUN
from redline.results.request import read
from redline.service.retention import Retention, deleted
from served import SPACE, served


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A service with a database in a file, which `redline user` opens as well."""
    with served(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def client(service):
    with service.rl() as made:
        yield made


def ran(service, *arguments, fine=True):
    """Returns the output of a command, or its error if it is expected to fail."""
    environment = {"REDLINE_SERVER": service.address, "REDLINE_TOKEN": service.tokens["submitter"]}
    done = CliRunner().invoke(command_line, [str(each) for each in arguments], env=environment)
    assert (done.exit_code == 0) is fine, done.output
    return done.stdout if fine else str(done.exception)


def test_a_search_is_held_released_and_gets_another_priority(service, client):
    run = client.submit("gpt2-tiny")
    assert "held" in ran(service, "queue", "--hold", run.id)
    assert run.look().held and run.look().reason == "it is held until a user releases it"
    assert ran(service, "queue", "--priority", run.id, "20", "--release", run.id)
    assert (run.look().held, run.look().priority) == (False, 20)
    service.store.change_user("submitter", priority=20)
    with pytest.raises(Refused, match="up to 20, but got 21; an admin can raise the limit"):
        run.change(priority=21)
    assert run.look().priority == 20
    service.rl("admin").search(run.id).change(priority=21)
    assert run.look().priority == 21
    other = service.rl("other").search(run.id)
    run.change(priority="low")
    assert run.look().priority == -10
    assert ran(service, "queue", "--priority", run.id, "high")
    assert run.look().priority == 10
    with pytest.raises(UsageError, match="a priority is low, normal, high, urgent, or a whole number.*'higher'"):
        run.change(priority="higher")
    for change in (other.hold, other.release, other.retry, other.delete, lambda: other.change(priority=1)):
        with pytest.raises(Refused, match="belongs to submitter"):
            change()
    run.cancel()


def test_a_search_that_failed_is_retried_and_one_that_is_done_is_not(service, client):
    run = client.submit("gpt2-tiny")
    service.store.finish(run.id, service.store.take_search(run.id), "failed", "its disk was full")
    run.retry()
    look = run.look()
    assert (look.state, look.ended) == ("queued", None) and "disk" not in look.reason
    service.store.finish(run.id, service.store.take_search(run.id), "done", "trials")
    with pytest.raises(UsageError, match=f"{run.id} is done and cannot be retried: submit it again"):
        run.retry()


def test_a_search_is_deleted_with_its_folder_and_its_ledger(service, client):
    run = client.submit("gpt2-tiny")
    attempt, folder = service.store.take_search(run.id), service.parts.runs.folder(run.id)
    service.store.ask_dry_run(run.id, attempt, "trial-0", "run", {}, 1)
    more = {"isolate": False, "sampler": "grid", "trials": 1, "out": folder, "storage": service.parts.url}
    rl.tune(lambda config: 1.0, rl.Space.from_dict(SPACE), **more)
    name = read(folder)[0]["study"]
    assert len(Ledger.load(service.parts.url, name=name).trials()) == 1
    with pytest.raises(UsageError, match="is running: cancel it before"):
        run.delete()
    run.cancel()
    ran(service, "queue", "--delete", run.id)
    assert not folder.exists()
    with pytest.raises(NotFound):
        client.search(run.id)
    with pytest.raises(UsageError, match=name):
        Ledger.load(service.parts.url, name=name)
    assert service.client().get(f"/runs/api/run?run={run.id}").status_code == 404


def test_searches_that_ended_long_ago_are_deleted(service, client):
    in_use, old, new = (client.submit("gpt2-tiny") for _ in range(3))
    for each in (in_use, old, new):
        each.cancel()
    service.parts.runs.folder(in_use.id).mkdir()
    folder = service.parts.runs.folder(old.id)
    folder.mkdir()
    (folder / RUN).write_text("damaged")
    before = service.store.search(old.id).ended
    service.store.retry(new.id)

    def delete(search):
        deleted(service.store, service.parts.runs, search, service.parts.url)

    retention, lock = Retention(service.store, 30, 0.0, delete), FolderLock(service.parts.runs.folder(in_use.id))
    retention._delete_searches(before + 1e-6)
    assert service.store.search(in_use.id).state == "cancelled", "its searcher is still ending"
    lock.release()
    assert not folder.exists()
    with pytest.raises(NotFound):
        service.store.search(old.id)
    assert service.store.search(new.id).state == "queued"


def test_a_deletion_that_fails_can_be_repeated(service, client):
    """Regression: the search was deleted first, and its folder and ledger stayed for ever."""
    run = client.submit("gpt2-tiny")
    run.cancel()
    folder = service.parts.runs.folder(run.id)
    more = {"isolate": False, "sampler": "grid", "trials": 1, "out": folder, "storage": service.parts.url}
    rl.tune(lambda config: 1.0, rl.Space.from_dict(SPACE), **more)

    with pytest.raises(StudyError):
        deleted(service.store, service.parts.runs, run.id, f"sqlite:///{folder}/nowhere/redline.db")
    assert folder.exists() and run.state == "cancelled"
    run.delete()
    assert not folder.exists()


def test_a_search_is_seen_by_those_that_it_is_shown_to(service, client):
    """Other users get nothing by any route: lists, the queue, results, events, pages."""
    run = client.submit("gpt2-tiny", visibility="team", name="a secret")
    service.store.change_user("submitter", team="vision")
    paths = [f"/v1/searches/{run.id}{each}" for each in ("", "/trials", "/trials.csv", "/best", "/events", "/logs/0")]
    paths += [f"/v1/searches/{run.id}/export/yaml", f"/v1/history?search={run.id}", f"/runs/api/run?run={run.id}"]
    with service.client("other") as other, service.client("reader") as reader, service.client("admin") as admin:

        def listed(who):
            shown = [who.get(path).json()["searches"] for path in ("/v1/searches?limit=1000", "/v1/queue")]
            history = who.get("/v1/history?limit=1000").json()
            return {run.id in [each["id"] for each in some] for some in shown} | {
                run.id in [each["search"] for each in history]
            }

        service.store.change_user("reader", team="vision")
        assert (listed(other), listed(reader), listed(admin)) == ({False}, {True}, {True})
        for path in paths:
            assert other.get(path).status_code == 404, path
        assert reader.get(paths[0]).json()["name"] == "a secret"
        run.change(visibility="own")
        assert (listed(other), listed(reader), listed(admin)) == ({False}, {False}, {True})
        with other.stream("GET", "/v1/events", params={"after": 0}) as stream:
            public = client.submit("gpt2-tiny")
            seen = ""
            for text in stream.iter_text():
                seen += text
                if public.id in seen:
                    break
        assert run.id not in seen
        ran(service, "queue", "--show-to", run.id, "all")
        assert listed(other) == {True}


def test_users_are_changed_and_disabled_and_what_was_done_is_listed(service):
    database = ("--storage", service.parts.url)
    ran(service, "user", *database, "change", "coder", "--role", "reader", "--running", "3", "--device-hours", "10")
    found = service.store.user("coder")
    assert (found.role, found.running, found.device_hours, found.allow_code) == ("reader", 3, 10.0, True)
    ran(service, "user", *database, "change", "coder", "--running", "none", "--no-code", "--weight", "2")
    found = service.store.user("coder")
    assert (found.running, found.device_hours, found.allow_code, found.weight) == (None, 10.0, False, 2.0)
    ran(service, "user", *database, "change", "coder", "--priority", "7")
    assert service.store.user("coder").priority == 7
    coder = next(line for line in ran(service, "user", *database, "list").splitlines() if "coder" in line)
    assert "7" in [cell.strip() for cell in coder.split("|")]
    with service.client("coder") as client:
        assert client.get("/v1/me").json()["role"] == "reader"
        ran(service, "user", *database, "disable", "coder")
        assert client.get("/v1/me").status_code == 401
        assert "disabled 2" in ran(service, "user", *database, "list")
        ran(service, "user", *database, "enable", "coder")
        assert client.get("/v1/me").status_code == 200
    assert "is the only admin" in ran(service, "user", *database, "disable", "admin", fine=False)
    tokens = ran(service, "token", *database, "list").splitlines()
    assert "never" not in next(line for line in tokens if "coder" in line)
    audit = ran(service, "user", *database, "audit", "--last", "50")
    assert "disable" in audit and json.dumps({"running": 3, "device_hours": 10.0})[1:-1].split(",")[0] in audit
