"""Attack requests on a server."""

import contextlib
import json
import socket
import time
from urllib.parse import urlsplit

import httpx

EVIL = "/tmp/evil.py:workload"
X = {"x": [1, 2]}
NESTED = b'{"request": ' + b"[" * 300_000 + b"]" * 300_000 + b"}"
WIDE = json.dumps({"request": {"target": "gpt2-tiny", "fix": {"a": [[]] * 200_000}}}).encode()


def _json(value):
    return json.dumps(value).encode()


FILE = {"command": {"command": ["echo", "{x}"], "model": EVIL}, "override": X}
ATTACKS = {
    "a model that is a file": ("coder", "POST", "/v1/searches", _json({"request": FILE})),
    "a target that is a file": ("submitter", "POST", "/v1/searches", _json({"request": {"target": EVIL}})),
    "a body without a token": (None, "POST", "/v1/searches", WIDE),
    "a body with a forged token": ("forged", "POST", "/v1/searches", WIDE),
    "a body of 16 MiB without a token": (None, "POST", "/v1/searches", b" " * (16 << 20)),
    "a body of 16 MiB": ("submitter", "POST", "/v1/searches", b" " * (16 << 20)),
    "a body with very many values": ("submitter", "POST", "/v1/searches", WIDE),
    "code of a submitter's": ("submitter", "POST", "/v1/searches", _json({"request": FILE})),
    "a body that is nested": ("submitter", "POST", "/v1/searches", NESTED),
    "half a surrogate pair": ("submitter", "POST", "/v1/searches", b'{"request": {"target": "\\ud800"}}'),
    "a priority": ("other", "POST", "/v1/searches", _json({"request": {"target": "gpt2-tiny"}, "priority": 100})),
}  # fmt: skip
"""By name: role of the token, method, path, body."""


def attack(client, name, tokens):
    """Sends one attack and returns its status and response time, s."""
    role, method, path, body = ATTACKS[name]
    token = tokens.get(role, "redline_00000000_forged") if role else None
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    start = time.monotonic()
    answer = client.request(method, path, content=body, headers=headers)
    return answer.status_code, time.monotonic() - start


def attacked(address, tokens, end):
    """Sends all attacks in turn, at least once, until `end` (monotonic clock); returns name, status and seconds of
    each."""
    seen = []
    with httpx.Client(base_url=address, trust_env=False, timeout=60) as client:
        while not seen or time.monotonic() < end:
            seen += [(name, *attack(client, name, tokens)) for name in ATTACKS]
    return seen


@contextlib.contextmanager
def half_open(address, number):
    """Holds `number` connections open, each with an incomplete request."""
    place = urlsplit(address)
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            made = stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=30))
            made.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-slow: ")
        yield
