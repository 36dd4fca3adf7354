"""Owners and admins retry, reprioritise and delete searches; roles, limits and disabling of users."""

import pytest
import redline as rl
from click.testing import CliRunner
from redline.base.errors import NotFound, Refused, UsageError
from redline.cli.main import redline as command_line
from redline.service.records import SearchState
from redline.service.searchers import Searchers
from redline.service.serve_options import ServeOptions
from redline.service.store.part import DAY_S
from served import SPACE, served


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A service with a database in a file, which `redline token` opens as well."""
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
    return done.stdout if fine else f"{done.stderr}{done.exception}"


def test_a_search_gets_another_priority(service, client):
    run = client.submit("gpt2-tiny")
    assert ran(service, "queue", "--priority", run.id, "20") == f"{run.id} priority 20\n"
    assert run.look().priority == 20
    service.store.change_user("submitter", priority=20)
    with pytest.raises(Refused, match="up to 20, but got 21; an admin can raise the limit"):
        run.change(priority=21)
    assert run.look().priority == 20
    service.rl("admin").search(run.id).change(priority=21)
    assert run.look().priority == 21
    other = service.rl("other").search(run.id)
    run.change(priority=-10)
    assert run.look().priority == -10
    with pytest.raises(Refused, match="up to 0, but got 1; an admin"):
        service.rl("other").submit("gpt2-tiny", priority=1)
    with pytest.raises(UsageError, match="priority must be at least -100, but got -101"):
        run.change(priority=-101)
    assert "101 is not in the range" in ran(service, "queue", "--priority", run.id, "101", fine=False)
    for change in (other.retry, other.delete, other.cancel, lambda: other.change(priority=1)):
        with pytest.raises(Refused, match="belongs to submitter"):
            change()


def test_a_search_that_failed_is_retried_and_one_that_is_done_is_not(service, client):
    run = client.submit("gpt2-tiny")
    service.ends(run.id, "failed", "its disk was full")
    run.retry()
    look = run.look()
    assert (look.state, look.ended) == ("queued", None) and "disk" not in look.reason
    service.ends(run.id)
    with pytest.raises(UsageError, match=f"{run.id} is done and cannot be retried: submit it again"):
        run.retry()


def test_a_search_is_deleted_with_its_folder_once_its_process_has_ended(service, client):
    run = client.submit("gpt2-tiny")
    folder = service.parts.runs.folder(run.id)
    rl.tune(lambda config: 1.0, rl.Space.from_dict(SPACE), isolate=False, sampler="grid", trials=1, out=folder)
    with pytest.raises(UsageError, match="is queued: cancel it before"):
        run.delete()
    service.store.give_devices(run.id, "H100", 1)
    run.cancel()
    service.store.take_devices(run.id, SearchState.CANCELLED)
    ran(service, "queue", "--delete", run.id)
    assert not folder.exists()
    with pytest.raises(NotFound):
        client.search(run.id)
    assert service.client().get(f"/runs/api/run?run={run.id}").status_code == 404


def test_searches_that_ended_long_ago_are_deleted(tmp_path, clock, monkeypatch):
    with served(tmp_path, manages=False) as service, service.rl() as client:
        monkeypatch.setattr(service.store, "clock", clock)
        in_use, old, new = (client.submit("gpt2-tiny") for _ in range(3))
        service.store.give_devices(in_use.id, "H100", 1)
        for run in (in_use, old, new):
            run.cancel()
        folder = service.parts.runs.folder(old.id)
        folder.mkdir()
        (folder / "run.yaml").write_text("damaged")
        before = service.store.search(old.id).ended
        service.store.retry(new.id)
        clock.now = before + 2 * DAY_S + 1e-6
        Searchers(service.store, service.cluster, ServeOptions(data=tmp_path, keep_searches=2))._delete_old()
        assert service.store.search(in_use.id).state == "cancelled", "its process is still ending"
        assert not folder.exists()
        with pytest.raises(NotFound):
            service.store.search(old.id)
        assert service.store.search(new.id).state == "queued"
        with pytest.raises(UsageError, match="has not ended yet; retry it in a moment"):
            in_use.retry()


def test_users_are_changed_and_disabled(service):
    database = ("--storage", str(service.store.database._reader.url))

    def token(*arguments, fine=True):
        return ran(service, "token", *database, *arguments, fine=fine)

    token("change", "coder", "--role", "reader", "--searches", 3, "--device-hours", 10)
    account = service.store.user("coder")
    assert (account.role, account.searches, account.devices, account.device_hours) == ("reader", 3, None, 10.0)
    token("change", "coder", "--searches", "none", "--devices", 4, "--weight", 2, "--priority", 7)
    account = service.store.user("coder")
    assert (account.searches, account.devices, account.device_hours, account.weight) == (None, 4, 10.0, 2.0)
    row = next(line for line in token("users").splitlines() if "coder" in line)
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        *("coder", "reader", "2", "any", "4", "0.0 of 10", "7", "active")
    ]
    assert "neither a number above 0 nor 'none'" in token("change", "coder", "--devices", 0, fine=False)
    with service.client("coder") as client:
        assert client.get("/v1/me").json()["role"] == "reader"
        token("disable", "coder")
        assert client.get("/v1/me").status_code == 401
        assert "disabled 2" in token("users")
        token("enable", "coder")
        assert client.get("/v1/me").status_code == 200
    assert "is the only admin" in token("disable", "admin", fine=False)
    assert "never" not in next(line for line in token("list").splitlines() if "coder" in line)
    before = service.store.user("coder")
    assert "nothing to change: give at least one of --role, --searches" in token("change", "coder", fine=False)
    assert service.store.user("coder") == before
