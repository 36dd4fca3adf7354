"""`rl.Client` and the commands: Python and the terminal show the state that the server has."""

import json
import os
import subprocess
import sys
import threading
import time

import httpx
import pytest
import redline as rl
from click.testing import CliRunner
from redline.base.errors import KeyTaken, NotFound, Refused, ServiceError, UsageError
from redline.cli import submit
from redline.cli.main import redline as command_line
from redline.models.presets import ServerModel
from redline.service.client import ServerUnreachable
from redline.service.records import SearchState
from redline.service.request import arguments, travelling
from served import SPACE, served


@pytest.fixture
def client(service):
    with service.rl() as made:
        yield made


def search_of(service, search, trials=3, state="done"):
    """Runs a search with made-up measurements and ends it in `state`."""
    service.store.give_devices(search, "H100", 1)
    folder = service.parts.runs.folder(search)
    result = found(folder, trials)
    (folder / "logs" / "0.log").write_text("what it printed\x1b[31m\n")
    service.store.take_devices(search, SearchState(state), "trials", result.to_dict()["best"])
    return result


def found(folder, trials=3):
    """Returns the result of a search with `trials` trials."""
    space = rl.Space.from_dict(SPACE)
    more = {"isolate": False, "sampler": "grid", "trials": trials, "out": folder}
    result = rl.tune(lambda config: 100.0 + config["micro_batch"], space, **more)
    (folder / "logs").mkdir(exist_ok=True)
    return result


def test_a_search_is_submitted_waited_for_and_read(service, client, tmp_path):
    run = client.submit("gpt2-tiny", trials=3, name="mine", priority=5, fix={"precision": "fp32"})
    assert run.state == "queued"
    look = run.look()
    assert (look.name, look.priority, look.devices, look.user) == ("mine", 5, 1, "submitter")
    assert look.request == {"target": "gpt2-tiny", "trials": 3, "fix": {"precision": "fp32"}, "devices": 1}
    assert run.best is None and len(run.trials) == 0
    threading.Timer(0.3, search_of, [service, run.id]).start()
    kinds = [(each.kind, each.data.get("state")) for each in run.events()]
    assert kinds == [("search", "queued"), ("search", "running"), ("search", "done")]
    assert run.wait(timeout=60) is run
    result = found(tmp_path / "same")
    assert run.best.config == result.best.config
    assert run.best.throughput == pytest.approx(result.best.throughput)
    assert list(run.trials.columns) == list(result.trials.columns)
    assert list(run.trials["throughput"]) == pytest.approx(list(result.trials["throughput"]))
    assert run.log(0) == b"what it printed\x1b[31m\n"
    assert f"micro_batch: {run.best.config['micro_batch']}" in run.export("yaml")
    assert next(each.id for each in client.searches(state="done", mine=True)) == run.id


def test_errors_are_redline_s_own(service, client):
    with pytest.raises(UsageError, match="did you mean 'gpt2-tiny'"):
        client.submit("gpt2-tny")
    with pytest.raises(NotFound, match="no search"):
        client.search("0123456789ab")
    with pytest.raises(Refused, match="reader"):
        service.rl("reader").submit("gpt2-tiny")
    first = client.submit("gpt2-tiny", key="k1")
    assert client.submit("gpt2-tiny", key="k1").id == first.id
    with pytest.raises(KeyTaken, match=first.id):
        client.submit("gpt2-tiny", trials=7, key="k1")
    with pytest.raises(UsageError, match="key"):
        client.submit("gpt2-tiny", key="a b")
    with pytest.raises(UsageError, match="cannot be sent"):
        client.submit("gpt2-tiny", out="runs/x")
    with pytest.raises(UsageError, match="unknown argument 'trails'; did you mean 'trials'"):
        client.submit("gpt2-tiny", trails=7)
    with pytest.raises(NotFound, match="no output of a trial 7"):
        first.cancel()
        first.log(7)
    with pytest.raises(UsageError, match="objects cannot be sent"):
        client.submit(lambda config: 1.0)
    with pytest.raises(UsageError, match="like http://"):
        rl.Client("127.0.0.1:8700", token="x")
    with pytest.raises(UsageError, match="REDLINE_TOKEN"):
        rl.Client("http://127.0.0.1:8700", token="")


@pytest.mark.parametrize("body", ["<html>hello</html>", "[]", '{"error": 1}'])
def test_a_server_that_is_not_redline_s_is_named_so(monkeypatch, body):
    answer = httpx.Response(200, text=body)
    with rl.Client("http://127.0.0.1:1", token="redline_x") as client:
        monkeypatch.setattr(client._http, "request", lambda *arguments, **options: answer)
        for call in (client.me, client.queue, client.searches, lambda: client.search("0123456789ab")):
            with pytest.raises(ServiceError, match="not the answer of a redline server"):
                call()


def test_an_unreachable_server_is_retried_and_a_stream_continues(tmp_path):
    """Following a search and waiting for it retry after other calls of the same client have given up."""
    seen, found, ended, said = [], [], [], []
    with served(tmp_path) as first:
        port, tokens = int(first.address.rpartition(":")[2]), first.tokens
        short_patience = rl.Client(first.address, token=tokens["submitter"], patience_s=0.3)
        patient = rl.Client(first.address, token=tokens["submitter"], patience_s=60, say=said.append)
        run = short_patience.submit("gpt2-tiny")
        received = threading.Event()

        def follow():
            for event in run.events():
                seen.append(event)
                received.set()

        following = threading.Thread(target=follow)
        following.start()
        waiting = threading.Thread(target=lambda: ended.append(run.wait(timeout=120).state))
        waiting.start()
        assert received.wait(60)
    asking = threading.Thread(target=lambda: found.append(patient.search(run.id).state))
    asking.start()
    with pytest.raises(ServerUnreachable):
        short_patience.me()
    with pytest.raises(TimeoutError, match="has not ended within 0.1 s") as late:
        run.wait(timeout=0.1)
    assert isinstance(late.value.__cause__, ServerUnreachable)
    assert following.is_alive() and asking.is_alive() and waiting.is_alive()
    with served(tmp_path, port=port, tokens=tokens) as again:
        asking.join(timeout=60)
        again.store.add_event(run.id, "said", {"message": "after"})
        again.store.cancel(run.id)
        following.join(timeout=60)
        waiting.join(timeout=60)
    assert found == ["queued"] and ended == ["cancelled"]
    waits, back = said
    assert waits.startswith(f"the server {first.address} does not answer: ") and waits.endswith("; waiting for it")
    assert back == f"the server {first.address} answers again"
    assert [each.data.get("message") or each.data["state"] for each in seen] == ["queued", "after", "cancelled"]
    assert len({each.id for each in seen}) == 3


def test_local_files_are_sent_by_their_contents(tmp_path):
    (tmp_path / "train.py").write_text("workload = 1\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    (tmp_path / "space.yaml").write_text("knobs:\n- {name: micro_batch, type: choice, values: [1, 2]}\n")
    code = travelling({"target": f"{tmp_path}/train.py:workload", "trials": 2, "out": None, "allow": ()})
    assert code == {
        "workload": {"text": "workload = 1\n", "name": "workload"},
        "trials": 2,
    }
    model = travelling({"target": str(tmp_path / "config.json"), "space": str(tmp_path / "space.yaml")})
    assert model["model"] == {"model_type": "gpt2", "n_layer": 2}
    there = tmp_path / "there"
    found = arguments(code, there)
    assert (
        found["target"] == f"{there}/workload.py:workload" and (there / "workload.py").read_text() == "workload = 1\n"
    )
    found = arguments(model, there)
    assert json.loads((there / "model" / "config.json").read_text()) == model["model"]
    assert found["target"] == ServerModel.of(model["model"], there / "model" / "config.json")
    assert len(found["space"]) == 2
    with pytest.raises(UsageError, match="opens no files"):
        arguments({"target": str(tmp_path)}, there)


# -- commands ------------------------------------------------------------------------------------------------


def ran(service, *arguments, role="submitter", code=0):
    """Returns the output of a command."""
    environment = {"REDLINE_SERVER": service.address, "REDLINE_TOKEN": service.tokens.get(role, "")}
    done = CliRunner().invoke(command_line, list(arguments), env=environment, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    assert (done.return_value or 0) == code, done.output
    return done.output


def test_commands_submit_show_and_cancel(service, tmp_path):
    printed = ran(service, "submit", "gpt2-tiny", "--trials", "3", "--priority", "7", "--name", "theirs")
    search, note = printed.splitlines()
    assert note == "note: the Ray cluster is being joined"
    assert service.store.search(search).request["trials"] == 3
    queue = ran(service, "queue", role="reader")
    assert search in queue and "theirs" in queue and "does not reach its Ray cluster" in queue
    assert json.loads(ran(service, "queue", "--json"))["searches"][0]["id"] == search
    printed = ran(service, "results", search, code=3)
    assert printed.startswith(search) and "no result yet: " in printed
    assert "no result yet: " in ran(service, "results", search, "--to", "yaml", code=3)
    assert ran(service, "results", search, "--trial", "0", code=3) == "the trial 0 has no output yet\n"
    assert json.loads(ran(service, "results", search, "--json", code=3))["id"] == search
    table = tmp_path / "trials.csv"
    assert ran(service, "results", search, "--csv", str(table), code=3) == f"wrote {table}\n" and table.exists()
    search_of(service, search)
    assert "done: trials" in ran(service, "results", search, "-f")
    printed = ran(service, "results", search, "--trial", "0")
    assert "what it printed" in printed and "\x1b" not in printed
    assert "winner   trial" in ran(service, "results", search)
    winner, other = (ran(service, "results", search, *more, "--to", "yaml") for more in ((), ("--trial", "0")))
    assert winner == service.rl().search(search).export("yaml") and winner != other
    assert other == service.rl().search(search).export("yaml", trial=0)
    found = json.loads(ran(service, "results", search, "--json"))
    assert found["id"] == search and found["best"]["config"]
    other = ran(service, "submit", "gpt2-tiny").split()[0]
    assert ran(service, "queue", "--cancel", other).split() == [other, "cancelled"]
    with pytest.raises(Refused):
        ran(service, "submit", "gpt2-tiny", role="reader")


def test_the_queue_fits_a_terminal_of_100_columns_and_shows_whole_reasons(service):
    with service.rl() as client:
        run = client.submit("gpt2-tiny", priority=-100, name="n" * 100)
        service.store.give_devices(run.id, "H100", 1)
        reason = "its process ended 8 times in a row; " + "for a long reason " * 9
        service.store.take_devices(run.id, SearchState.FAILED, reason)
    lines = ran(service, "queue", "--all").splitlines()
    row = next(number for number, line in enumerate(lines) if line.startswith(run.id))
    assert "n" * 21 + "..." in lines[row] and lines[row + 1] == f"    {reason}".rstrip()
    assert max(len(line) for line in lines if not line.startswith(" ")) <= 100


def test_following_says_that_it_waits_for_the_server_and_when_it_is_back(tmp_path):
    with served(tmp_path) as first:
        tokens, port = first.tokens, int(first.address.rpartition(":")[2])
        search = first.client().post("/v1/searches", json={"request": {"target": "gpt2-tiny"}}).json()["id"]
        command = [sys.executable, "-m", "redline.cli", "results", search, "-f", "--server", first.address]
        environment = {**os.environ, "REDLINE_TOKEN": tokens["submitter"], "PYTHONUNBUFFERED": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        following = subprocess.Popen(command, env=environment, **pipes)
        assert "queued" in following.stdout.readline()
    assert following.stderr.readline().endswith("; waiting for it\n")
    with served(tmp_path, port=port, tokens=tokens) as again:
        assert following.stderr.readline() == f"note: the server {again.address} answers again\n"
        again.store.cancel(search)
        out, err = following.communicate(timeout=60)
    assert following.returncode == 3 and err == "" and "cancelled" in out


def test_a_submission_waits_for_what_is_found(service):
    def answer():
        until = time.monotonic() + 20
        while time.monotonic() < until:
            waiting = [each for each in service.store.searches(state="queued") if each.request.get("trials") == 2]
            if waiting:
                search_of(service, waiting[0].id, trials=2)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=answer)
    thread.start()
    output = ran(service, "submit", "gpt2-tiny", "--trials", "2", "--wait")
    thread.join()
    assert "winner   trial" in output
    with pytest.raises(UsageError, match="^`out` only applies .* cannot be sent"):
        travelling({"target": "gpt2-tiny", "out": "x"})


def test_tokens_are_made_listed_and_revoked_in_the_database(tmp_path):
    def command(*arguments):
        done = CliRunner().invoke(command_line, ["token", "--data", str(tmp_path), *arguments], standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        notes.append(done.stderr)
        return done.stdout

    notes = []
    with pytest.raises(UsageError, match=r"there is no server's database .*redline\.db: give --data"):
        command("list")
    made = command("new", "ann", "--role", "admin", "--for", "laptop").strip()
    brief = command("new", "bob", "--expires", "30d", "--searches", "2").strip()
    assert "redline.db is new" in notes[0] and "needs --storage here" in notes[0] and not notes[1]
    listed = command("list")
    assert "ann | admin" in listed and "laptop" in listed and "valid until" in listed and made not in listed
    with served(tmp_path, tokens={"ann": made, "bob": brief}) as service:
        assert service.client("ann").get("/v1/me").json()["role"] == "admin"
        assert service.client("bob").get("/v1/me").json()["searches"] == 2
        command("revoke", made)
        assert service.client("ann").get("/v1/me").status_code == 401
    with pytest.raises(UsageError, match="exists already"):
        command("new", "bob", "--role", "admin")
    with pytest.raises(UsageError, match="duration"):
        command("new", "eve", "--expires", "soon")
    with pytest.raises(UsageError, match="no server's folder .*elsewhere: give --data"):
        command("--data", str(tmp_path / "elsewhere"), "list")


def test_options_with_the_value_zero_are_sent(monkeypatch):
    sent = {}

    class Client:
        def submit(self, target, space, **options):
            sent.update(options)

    monkeypatch.setattr(submit, "client_of", lambda *where: Client())
    submit.submitted({"target": "gpt2-tiny", "patience": 0, "seed": 0, "resume": False, "fix": {}}, "", None)
    assert sent == {"patience": 0, "seed": 0}
