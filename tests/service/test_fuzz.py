"""Malformed requests, within the OpenAPI document and outside of it, get a 4xx with a message, never a 5xx."""

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from served import served

STREAMS = ("/v1/events", "/v1/searches/{search}/events")
"""Streams of events. A request of one does not end by itself."""
QUIET = {"suppress_health_check": list(HealthCheck), "deadline": None, "database": None, "derandomize": True}
OPERATIONS = 16
"""Least number of operations of the API without streams."""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


def operations(service):
    """Returns every operation of the API except the streams."""
    schema = schemathesis.openapi.from_url(f"{service.address}/v1/openapi.json")
    for path in STREAMS:
        schema = schema.exclude(path=path)
    return [found.ok() for found in schema.get_all_operations()]


def tried(service, case, role):
    """Sends one request and returns its status."""
    answer = case.call(headers={"authorization": f"Bearer {service.tokens[role]}"}, timeout=150)
    message = (
        f"{case.method} {case.formatted_path} {case.query} {case.body!r:.300}: {answer.status_code} {answer.text[:300]}"
    )
    assert answer.status_code < 500, message
    assert "Traceback" not in answer.text, message
    if answer.status_code >= 400:
        detail = answer.json()["error"]
        assert detail["code"] and len(detail["message"]) > 5, message
    return answer.status_code


def fuzz_one(service, cases, examples, role, seen):
    @settings(max_examples=examples, **QUIET)
    @given(case=cases)
    def one(case):
        status = tried(service, case, role)
        seen[status] = seen.get(status, 0) + 1

    one()


def fuzzed(service, found, examples):
    """Sends `examples` requests of each operation and mode; returns how often each status was answered."""
    seen = {}
    for operation in found:
        for mode, role in ((GenerationMode.POSITIVE, "coder"), (GenerationMode.NEGATIVE, "admin")):
            try:
                fuzz_one(service, operation.as_strategy(generation_mode=mode), examples, role, seen)
            except (
                schemathesis.errors.SchemathesisError,
                hypothesis.errors.Unsatisfiable,
            ):  # no such request can be generated
                assert mode is GenerationMode.NEGATIVE
    return seen


def tracebacks(caplog):
    """Returns the messages that the server logged with a traceback."""
    return [each.getMessage() for each in caplog.records if each.exc_info or "Traceback" in each.getMessage()]


def test_hundreds_of_requests_are_answered_in_words(service, caplog):
    found = operations(service)
    seen = fuzzed(service, found, 12)
    assert len(found) >= OPERATIONS
    assert sum(seen.values()) > 300 and seen[422] > 50 and any(status < 300 for status in seen)
    assert tracebacks(caplog) == []


@pytest.mark.slow
def test_ten_thousand_requests_are_answered_in_words(service, caplog):
    seen = fuzzed(service, operations(service), 450)
    assert sum(seen.values()) >= 10_000
    assert tracebacks(caplog) == []
