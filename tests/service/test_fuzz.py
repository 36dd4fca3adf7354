"""Malformed requests get a 4xx with words: what the OpenAPI document allows and what it does not, never a 5xx."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from served import served

STREAMS = ("/v1/events", "/v1/searches/{search}/events")
SLOW = ("/v1/estimate", "/v1/studies", "/v1/studies/{study}", "/v1/studies/{study}/ask", "/v1/studies/{study}/tell")
"""What a helper computes, in seconds."""
QUIET = {"suppress_health_check": list(HealthCheck), "deadline": None, "database": None, "derandomize": True}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


@pytest.fixture(scope="module")
def quick(service):
    return schema_of(service, (*STREAMS, *SLOW))


@pytest.fixture(scope="module")
def whole(service):
    return schema_of(service, STREAMS)


def schema_of(service, without):
    found = schemathesis.openapi.from_url(f"{service.address}/v1/openapi.json")
    for path in without:
        found = found.exclude(path=path)
    return found


def tried(service, case):
    """One request: with a token, sometimes a reader's, and no long wait."""
    role = "coder" if hash(str(case.body)) % 7 else "reader"
    if isinstance(case.query, dict) and "wait" in (case.query or {}):
        case.query.pop("wait")
    if case.path.endswith("/lease"):
        case.query = {**(case.query or {}), "wait": 0}
    answer = case.call(headers={"authorization": f"Bearer {service.tokens[role]}"}, timeout=150)
    said = f"{case.method} {case.formatted_path} {case.query} {case.body!r:.300}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code < 500, said
    assert "Traceback" not in answer.text, said
    if answer.status_code >= 400 and answer.request.method != "HEAD":
        detail = answer.json()["error"]
        assert detail["code"] and len(detail["message"]) > 5, said


def some(examples):
    return settings(max_examples=examples, phases=list(settings.default.phases), **QUIET)


quick_schema = schemathesis.pytest.from_fixture("quick")
whole_schema = schemathesis.pytest.from_fixture("whole")


@quick_schema.parametrize()
@some(20)
def test_some_requests_of_every_kind_are_answered_in_words(service, case):
    tried(service, case)


@pytest.mark.slow
@whole_schema.parametrize()
@some(400)
def test_ten_thousand_requests_are_answered_in_words(service, case):
    tried(service, case)
