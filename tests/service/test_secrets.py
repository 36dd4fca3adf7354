"""Secrets of a user are shown to no other: environments, tokens, sessions; input of strangers has no effect."""

import contextlib
import io
import json
import logging

import pytest
from redline.base.device import Device
from redline.base.errors import NotFound
from redline.service.api.app import PlainLines
from redline.service.request import arguments
from redline.tuner.request.options import Request
from redline.tuner.request.record import asked_of, command_of
from redline.tuner.request.target import resolve_task
from served import SEARCH, served

COMMAND = {"command": "python train.py {x}", "env": ["HF_TOKEN=hf_secret", "OMP_NUM_THREADS={x}", "EMPTY="]}
SUBMITTED = {"request": {"command": COMMAND, "override": {"x": [1, 2]}}}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(tmp_path_factory.mktemp("secrets")) as running:
        yield running


def test_values_of_an_environment_are_not_shown(service):
    with service.client("coder") as owner:
        made = owner.post("/v1/searches", json=SUBMITTED).json()
        assert made["request"]["command"]["env"] == ["HF_TOKEN=***", "OMP_NUM_THREADS=***", "EMPTY=***"]
        assert service.store.search(made["id"]).request["command"]["env"] == COMMAND["env"]
        path = f"/v1/searches/{made['id']}"
        for each in (owner, service.client("admin"), service.client("reader")):
            for where in (path, "/v1/searches", "/v1/queue", "/v1/history", f"{path}/best"):
                answer = each.get(where)
                assert "hf_secret" not in answer.text and answer.status_code in (200, 404), (where, answer.text)
                assert answer.status_code == 200 or where.endswith("/best"), "there is no winner yet"
        assert "hf_secret" not in owner.post(f"{path}/cancel").text


def test_values_of_an_environment_are_in_no_file_of_a_run(tmp_path):
    """run.yaml keeps `asked`, best.yaml the command that measures the winner again; a note names the winner's command."""
    given = arguments({"devices": 1, **SUBMITTED["request"]}, tmp_path)
    request = Request(given.pop("target"), **given)
    task = resolve_task(request, device=Device(type="cpu", name="cpu", count=1, memory_mib=1000))
    kept = json.dumps([asked_of(request, task), command_of(request, task, None, ())])
    shown = task.command.rendered({"x": 2}, 0, tmp_path) + task.command.training_command({"x": 2}, 0, tmp_path, hosts=1)
    assert "hf_secret" not in kept + shown
    assert "HF_TOKEN=***" in kept and "HF_TOKEN='***'" in shown
    assert {name: each.text({"x": 2}) for name, each in task.command._environment}["HF_TOKEN"] == "hf_secret"


def test_lists_carry_no_requests(service):
    with service.client() as client:
        large = {"model_type": "gpt2", "n_layer": 1, "more": ["x" * 1000] * 500}
        made = client.post("/v1/searches", json={"request": {"model": large, "trials": 7}}).json()["id"]
        assert client.get(f"/v1/searches/{made}").json()["request"]["model"] == large
        for where in ("/v1/queue", "/v1/searches"):
            found = client.get(where)
            assert len(found.content) < 100_000
            one = next(each for each in found.json()["searches"] if each["id"] == made)
            assert one["request"] is None


# -- sessions ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def logged_in(service, role="submitter"):
    with service.client(None) as client:
        answer = client.post("/login", data={"token": service.tokens[role]})
        assert answer.status_code == 303 and "max-age=" in answer.headers["set-cookie"].lower()
        yield client


def test_a_cookie_is_a_session_and_not_the_token(service):
    with logged_in(service) as page:
        (value,) = page.cookies.values()
        assert value not in service.tokens.values() and page.get("/v1/me").json()["name"] == "submitter"
        with service.client(None, headers={"authorization": f"Bearer {value}"}) as other:
            assert other.get("/v1/me").status_code == 401
        with service.client(None, cookies={next(iter(page.cookies)): service.tokens["submitter"]}) as other:
            assert other.get("/v1/me").status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "same-origin"}, 201),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "null"}, 403),
        ({"origin": "https://elsewhere.example.org"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_a_change_that_a_page_of_another_site_sends_is_refused(service, headers, status):
    with logged_in(service) as page:
        assert page.post("/v1/searches", json=SEARCH, headers=headers).status_code == status
        assert page.get("/v1/me", headers=headers).status_code == 200
    with service.client() as api:  # it sends its token itself
        assert api.post("/v1/searches", json=SEARCH, headers=headers).status_code == 201


def test_a_session_ends_with_a_logout_whoever_has_its_cookie(service):
    with logged_in(service) as page:
        cookies = dict(page.cookies)
        page.post("/logout")
        with service.client(None, cookies=cookies) as other:
            assert other.get("/v1/me").status_code == 401
            assert other.get("/runs/api/runs").status_code == 401
    with service.client() as api:
        assert api.get("/v1/me").status_code == 200  # the token is still valid


def test_a_session_ends_with_its_time_and_with_its_token(service, sqlite, clock):
    ann = sqlite.add_user("ann")
    token = sqlite.new_token(ann)
    session = sqlite.new_session(token, 100.0)
    assert sqlite.user_of(session, session=True) == ann
    assert sqlite.user_of(token, session=True) is None and sqlite.user_of(session) is None
    clock.now += 99.0
    assert sqlite.user_of(session, session=True) == ann
    clock.now += 2.0
    assert sqlite.user_of(session, session=True) is None
    session = sqlite.new_session(token, 100.0)
    assert len(sqlite.tokens()) == 1, "sessions are not listed, and cannot be revoked by themselves"
    with pytest.raises(NotFound):
        sqlite.revoke(session)
    sqlite.revoke(token)
    assert sqlite.user_of(session, session=True) is None
    with pytest.raises(NotFound):
        sqlite.new_session(token, 100.0)
    brief = sqlite.new_token(ann, expires=clock.now + 10)
    session = sqlite.new_session(brief, 100.0)
    clock.now += 10.0
    assert sqlite.user_of(session, session=True) is None


# -- input of strangers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [
    b'{"request": {"target": "\\ud800"}}', b'{"request": {"target": "gpt2-tiny", "fix": {"\\udfff": 1}}}',
    b'{"request": {"\\ud800": 1}}', b'{"request": {"target": "gpt2-tiny"}, "name": "\\ud83d"}', b'"\\ud800"',
])  # fmt: skip
def test_half_a_surrogate_pair_is_refused_in_words(service, body):
    with service.client(headers={"content-type": "application/json"}) as client:
        answer = client.post("/v1/searches", content=body)
        assert answer.status_code == 422 and answer.json()["error"]["message"]


def test_a_login_with_too_many_fields_or_bytes_is_refused(service):
    with service.client(None) as client:
        answer = client.post("/login", data={f"f{number}": "x" for number in range(11)})
        assert (answer.status_code, answer.json()["error"]["rule"]) == (400, "at most 10 fields")
        answer = client.post("/login", data={"token": "x" * 5000})
        assert (answer.status_code, answer.json()["error"]["rule"]) == (413, "at most 4096 bytes")


def test_redirects_do_not_use_the_host_header(service):
    with service.client(headers={"host": "evil.example"}) as client:
        for path in ("/v1/searches/", "/v1/me/", "/runs", "/login/", "/runs/api/runs/", "/v1/queue/"):
            answer = client.get(path)
            assert "evil" not in answer.headers.get("location", ""), path
            assert answer.status_code in (307, 404)


def test_input_cannot_break_a_line_of_the_log():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainLines())
    record = logging.LogRecord("redline", logging.WARNING, "", 1, "no %s", ("a\nb\x1b[31m\x9b\u2028\u202e",), None)
    handler.emit(record)
    text = stream.getvalue()
    assert text.endswith("\n") and text[:-1].isprintable() and "\\n" in text
