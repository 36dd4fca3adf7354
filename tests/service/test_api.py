"""The service over HTTP: permissions, refusals and their messages, and idempotency keys of submissions."""

import socket
import time
from urllib.parse import urlsplit

import pytest
from processes import until
from redline.base.errors import ServiceError
from served import SEARCH, served


@pytest.fixture
def submitter(service):
    with service.client() as client:
        yield client


def error(answer, status, code):
    """Returns the detail of an error response. All errors have the same form."""
    assert answer.status_code == status, answer.text
    detail = answer.json()["error"]
    assert set(detail) == {"code", "message", "field", "given", "rule"}
    assert detail["code"] == code
    assert "Traceback" not in answer.text
    return detail


# -- permissions ---------------------------------------------------------------------------------------------


def test_requests_without_a_token_are_refused(service):
    with service.client(None) as client:
        for path in ("/v1/me", "/v1/queue", "/v1/searches", "/v1/events", "/v1/history"):
            detail = error(client.get(path), 401, "no_token")
            assert "Authorization: Bearer" in detail["message"]
        assert client.get("/runs/api/runs", follow_redirects=False).status_code == 303
        assert client.get("/healthz").json()["status"] == "ok"


@pytest.mark.parametrize("token", ["forged", "redline_00000000_x", "redline_" + "a" * 500, "ü", "a b"])
def test_a_forged_token_is_refused(service, token):
    with service.client(None, headers={"authorization": f"Bearer {token}".encode()}) as client:
        error(client.get("/v1/me"), 401, "bad_token")


def test_a_revoked_and_an_expired_token_are_refused_from_that_moment_on(service):
    user = service.store.user("reader")
    for expires in (None, time.time() + 3.0):
        token = service.store.new_token(user, expires=expires)
        with service.client(None, headers={"authorization": f"Bearer {token}"}) as client:
            assert client.get("/v1/me").json()["name"] == "reader"
            if expires is None:
                service.store.revoke(token)
            else:
                time.sleep(max(0.0, expires - time.time()) + 0.1)
            error(client.get("/v1/me"), 401, "bad_token")


def test_a_reader_looks_and_changes_nothing(service):
    search = service.client().post("/v1/searches", json=SEARCH).json()["id"]
    with service.client("reader") as client:
        assert client.get(f"/v1/searches/{search}").json()["user"] == "submitter"
        detail = error(client.post("/v1/searches", json=SEARCH), 403, "role")
        assert "submitter" in detail["message"] and detail["given"] == "reader"
        error(client.post(f"/v1/searches/{search}/cancel"), 403, "role")
    assert service.store.search(search).state == "queued"


def test_a_search_is_cancelled_by_its_owner_and_an_admin_only_and_that_is_logged(service, caplog):
    caplog.set_level("INFO", "redline.audit")
    first, second = (service.client().post("/v1/searches", json=SEARCH).json()["id"] for _ in range(2))
    error(service.client("other").post(f"/v1/searches/{first}/cancel"), 403, "not_yours")
    assert service.client().post(f"/v1/searches/{first}/cancel").json()["state"] == "cancelled"
    assert service.client("admin").post(f"/v1/searches/{second}/cancel").json()["state"] == "cancelled"
    assert {f"submitter cancels {first}", f"admin cancels {second}"} <= set(caplog.messages)
    assert any(f"submitter submits {first}, 'gpt2-tiny'" in message for message in caplog.messages)


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        ({"target": "gpt2-tny"}, "request.target", "did you mean 'gpt2-tiny'"),
        ({"target": "../../etc/passwd"}, "request.target", "unknown model"),
        ({"target": "/etc/passwd"}, "request.target", "unknown model"),
        ({"target": "tests/service/conftest.py"}, "request.target", "unknown model"),
        ({"command": {"command": ["echo", "{x}"], "model": "/tmp/evil.py:workload"}}, "request.command.model", "unknown model"),
        ({"command": {"command": "echo {x}", "model": "evil.py:workload"}}, "request.command.model", "unknown model"),
        ({"model": {"model_type": "llama", "vision_config": {"backbone": "hf-hub:a/b"}}}, "request.model", "backbone"),
        ({"target": "gpt2-tiny", "devices": 0}, "request.devices", "request.devices must be at least 1, but got 0"),
        ({"target": "gpt2-tiny", "devices": "many"}, "request.devices", "must be a whole number, but got 'many'"),
        ({"target": "gpt2-tiny", "time": "soon"}, "request.time", "such as 90s"),
        ({"target": "gpt2-tiny", "memory_limit": "much"}, "request.memory_limit", "much"),
        ({"target": "gpt2-tiny", "sampler": "bays"}, "request.sampler", "did you mean 'bayes'"),
        ({"target": "gpt2-tiny", "hardware": "setup.cfg"}, "request.hardware", "unknown hardware"),
        ({"target": "gpt2-tiny", "hardware": "h1000"}, "request.hardware", "unknown hardware"),
        ({"target": "gpt2-tiny", "space": {"knobs": [{"name": 1}]}}, "request.space", "name"),
        ({"target": "gpt2-tiny", "allow": ["all"]}, "request.allow.0", "must be 'lossy', but got 'all'"),
        ({"command": {"command": 3}}, "request.command.command", "must be a text or a list, but got 3"),
        ({"target": 3}, "request.target", "request.target must be a text, but got 3"),
        ({"target": "x" * 300}, "", "request.target must have at most 200 characters"),
        ({"workload": {"text": "a = 1"}}, "request.workload.name", "request.workload.name is missing"),
        ({"target": "gpt2-tiny", "out": "/tmp/x"}, "request.out", "is not a field of this request"),
        ({"target": "gpt2-tiny", "storage": "sqlite:///x"}, "request.storage", "is not a field of this request"),
        ({"target": "gpt2-tiny", "runner": "local"}, "request.runner", "is not a field of this request"),
        ({}, "request", "give one of target, model, workload, command, but got none"),
        ({"target": "gpt2-tiny", "model": {"model_type": "gpt2"}}, "request", "but got target, model"),
        ({"target": "gpt2-tiny", "fix": {"a": "b\0c"}}, "", "NUL"),
        ({"target": "gpt2-tiny", "fix": {"a": 1 << 60}}, "", "beyond"),
    ],
)  # fmt: skip
def test_a_field_that_breaks_a_rule_is_named_with_what_was_given(submitter, monkeypatch, request_, field, message):
    detail = error(submitter.post("/v1/searches", json={"request": request_}), 422, "invalid")
    assert message in detail["message"] and "nput should" not in detail["message"]
    assert (detail["field"] or "").startswith(field)
    name = field.partition(".")[2]
    for part in name.split(".") if name else ():
        request_ = request_[int(part)] if isinstance(request_, list) else request_.get(part, request_)
    if name:
        assert detail["given"] == request_


@pytest.mark.parametrize("token", ["", "authorization: Bearer redline_00000000_forged\r\n"])
def test_a_body_is_not_read_before_its_sender_is_known(service, token):
    """The announced body is never sent."""
    where = urlsplit(service.address)
    head = f"POST /v1/searches HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n{token}\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        connection.sendall(head.encode())
        assert connection.recv(12) == b"HTTP/1.1 401"


def test_bodies_that_are_not_json_are_malformed(submitter):
    wide = b'{"request": {"target": "gpt2-tiny", "fix": {"a": [' + b"[]," * 200_000 + b"0]}}}"
    json_type = {"content-type": "application/json"}
    for body in (b"{", b"", b"[" * 100_000, b"\xff\xfe", b'{"request": NaN}'):
        answer = submitter.post("/v1/searches", content=body, headers=json_type)
        assert answer.status_code in (400, 422), answer.text
        assert answer.json()["error"]["message"]
    detail = error(submitter.post("/v1/searches", content=wide, headers=json_type), 422, "invalid")
    assert detail["message"].startswith("the body has too many values")


def test_other_types_of_json_are_refused(submitter):
    """Regression: FastAPI parses them in the event loop, without a limit of values."""
    for kind in (
        "application/merge-patch+json",
        "Application/X+JSON; charset=utf-8",
        "application/x-www-form-urlencoded",
        "",
    ):
        headers = {"content-type": kind}
        detail = error(submitter.post("/v1/searches", content=b"[" * 9, headers=headers), 415, "media_type")
        assert detail["rule"] == "application/json"


def test_a_large_body_is_refused_regardless_of_its_stated_length(submitter):
    large = b'{"request": {"target": "' + b"x" * (1 << 20) + b'"}}'
    headers = {"content-type": "application/json"}
    error(submitter.post("/v1/searches", content=large, headers=headers), 413, "too_large")
    error(
        submitter.post(
            "/v1/searches", content=(large[at : at + 999] for at in range(0, len(large), 999)), headers=headers
        ),
        413,
        "too_large",
    )


def test_unknown_paths_searches_and_methods_are_refused(submitter):
    error(submitter.get("/v1/nothing"), 404, "not_found")
    assert "no search" in error(submitter.get("/v1/searches/0123456789ab"), 404, "not_found")["message"]
    error(submitter.get("/v1/searches/..%2F..%2Fetc"), 404, "not_found")
    error(submitter.delete("/v1/searches"), 405, "method_not_allowed")
    message = error(submitter.get("/v1/searches/zzz"), 422, "invalid")["message"]
    assert message == "search must be the id of a search, 12 hexadecimal digits, but got 'zzz'"


def test_damaged_files_of_a_search_are_an_error_of_the_server(service, submitter, caplog):
    """A client that got status 404 would take the search for deleted."""
    search = submitter.post("/v1/searches", json=SEARCH).json()["id"]
    folder = service.parts.runs.folder(search)
    folder.mkdir(parents=True)
    (folder / "trials.csv").write_text("trial,status,throughput\n0,ok,5\n")
    error(submitter.get(f"/v1/searches/{search}/best"), 500, "unreadable")  # the ledger is missing
    (folder / "run.yaml").write_text("study: [")
    for path in ("best", "export/accelerate"):
        detail = error(submitter.get(f"/v1/searches/{search}/{path}"), 500, "unreadable")
        assert "is damaged" in detail["message"] and detail["message"] in caplog.text
    with service.rl() as client, pytest.raises(ServiceError, match="is damaged") as caught:
        client.search(search).summary()
    assert type(caught.value) is ServiceError
    (folder / "trials.csv").unlink()
    (folder / "trials.csv").mkdir()
    error(submitter.get(f"/v1/searches/{search}/trials.csv"), 500, "unreadable")


def test_code_runs_only_for_whom_the_server_allows(service, tmp_path):
    code = {"request": {"workload": {"text": "import redline\nworkload = None\n", "name": "workload"}}}
    command = {
        "request": {"command": {"command": "python train.py {micro_batch}"}, "override": {"micro_batch": [1, 2]}}
    }
    for each in (code, command):
        assert "code" in error(service.client().post("/v1/searches", json=each), 403, "refused")["message"]
        assert service.client("coder").post("/v1/searches", json=each).status_code == 201
    with served(tmp_path, allow_code=False) as closed, closed.client("coder") as client:
        error(client.post("/v1/searches", json=code), 403, "refused")
        # They were submitted before the server was restarted with --no-code.
        search = closed.store.submit(closed.store.user("coder"), command["request"], devices=1)[0].id
        before = closed.store.cancel(search)
        error(client.post(f"/v1/searches/{search}/retry"), 403, "refused")
        assert closed.store.search(search) == before


# -- keys, lists, queue --------------------------------------------------------------------------------------


def test_lists_continue_where_they_stopped(submitter):
    made = [submitter.post("/v1/searches", json=SEARCH).json()["id"] for _ in range(5)]
    seen, after = [], None
    while True:
        page = submitter.get(
            "/v1/searches", params={"limit": 2, "mine": True, **({"after": after} if after else {})}
        ).json()
        seen += [each["id"] for each in page["searches"]]
        if (after := page["next"]) is None:
            break
    assert seen[:5] == made[::-1] and len(set(seen)) == len(seen)


def test_a_user_has_so_many_searches_queued(tmp_path):
    with served(tmp_path, queued=2) as small, small.client() as client:
        headers = {"idempotency-key": "once"}
        made = [client.post("/v1/searches", json=SEARCH, headers=headers).json()["id"]]
        made += [client.post("/v1/searches", json=SEARCH).json()["id"]]
        assert "2 searches are queued" in error(client.post("/v1/searches", json=SEARCH), 403, "refused")["message"]
        assert client.post("/v1/searches", json=SEARCH, headers=headers).json()["id"] == made[0]
        assert small.client("other").post("/v1/searches", json=SEARCH).status_code == 201
        client.post(f"/v1/searches/{made[1]}/cancel")
        assert client.post("/v1/searches", json=SEARCH).status_code == 201


def test_the_queue_says_why_a_search_waits(service, submitter):
    search = submitter.post("/v1/searches", json={**SEARCH, "device": "h100", "priority": 100}).json()["id"]

    def why():
        first = submitter.get("/v1/queue").json()["searches"][0]
        return first["id"] == search and "is being joined" in first["reason"]

    assert until(why)


def test_metrics_count_requests_by_route_without_user_names(service, submitter):
    submitter.get("/v1/searches/0123456789ab")
    text = service.client(None).get("/metrics").text
    assert 'redline_http_requests_total{method="GET",route="/v1/searches/{search}",status="404"}' in text
    assert "submitter" not in text and "0123456789ab" not in text
    for number in range(3):
        service.client(None).request(f"STRANGE{number}", "/healthz")
    text = service.client(None).get("/metrics").text
    assert 'method="other"' in text and "STRANGE" not in text


def test_a_server_whose_searches_are_not_managed_is_not_ready(tmp_path):
    with served(tmp_path, manages=False) as running, running.client() as client:
        assert "no searches are started" in error(client.get("/readyz"), 503, "not_ready")["message"]
        running.parts.searchers.start()
        assert client.get("/readyz").json()["status"] == "ready"
        running.parts.searchers.close()
        assert error(client.get("/readyz"), 503, "not_ready")
