"""TLS: a server with a certificate, clients that trust it and ones that do not, and a proxy in front."""

import os
import ssl
import subprocess
import sys
import time

import httpx
import pytest
import redline as rl
from certificates import authority
from processes import until
from redline.base.errors import UsageError
from redline.service.client import ServerUnreachable
from redline.service.serve_options import ServeOptions
from redline.service.server import _check
from served import served
from server_process import Server


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of an authority's certificate, a server's certificate and its key."""
    return authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def service(tmp_path_factory, files):
    _, certificate, key = files
    with served(tmp_path_factory.mktemp("service"), ssl_certfile=certificate, ssl_keyfile=key) as running:
        yield running


def test_a_client_that_trusts_the_authority_gets_in(service, files, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
    with rl.Client(service.address, token=service.tokens["submitter"]) as client:
        assert service.address.startswith("https://") and client.me().name == "submitter"


def test_a_client_that_does_not_trust_it_is_told_what_to_give(service):
    start = time.monotonic()
    with rl.Client(service.address, token=service.tokens["submitter"], patience_s=60) as client:
        with pytest.raises(
            UsageError, match=r"the certificate of https://127.* is not trusted: .*; set .* SSL_CERT_FILE"
        ):
            client.me()
        with pytest.raises(UsageError, match="is not trusted"):
            next(client.events())
    assert time.monotonic() - start < 30, "what trying again does not mend is not tried again"


def test_unencrypted_requests_are_not_answered(service):
    with pytest.raises(ServerUnreachable, match="does not answer"):
        rl.Client(service.address.replace("https", "http"), token="redline_x", patience_s=0.1).me()


def test_files_that_are_none_are_refused_in_words(tmp_path, files):
    ours, certificate, key = files
    (tmp_path / "notes").write_text("nothing of the kind")
    for given, other in ((tmp_path / "notes", key), (certificate, None), (ours, key)):
        with pytest.raises(UsageError, match="cannot be used .*: give a certificate and its key, in PEM"):
            _check(ServeOptions(data=tmp_path, certificate=given, key=other))
    _check(ServeOptions(data=tmp_path, certificate=certificate, key=key))


def test_the_cookie_is_for_encrypted_pages_only_where_the_pages_are_encrypted(service, files, tmp_path):
    token = service.tokens["reader"]
    trusted = ssl.create_default_context(cafile=files[0])
    with httpx.Client(base_url=service.address, verify=trusted, timeout=60, trust_env=False) as client:
        assert "secure" in client.post("/login", data={"token": token}).headers["set-cookie"].lower()
    with served(tmp_path) as plain, plain.client(None) as client:
        data = {"token": plain.tokens["reader"]}
        assert "secure" not in client.post("/login", data=data).headers["set-cookie"].lower()


def test_behind_a_proxy_its_word_counts_and_a_stranger_s_does_not(tmp_path, caplog):
    caplog.set_level("INFO", "redline.audit")
    headers = {"x-forwarded-proto": "https", "x-forwarded-for": "203.0.113.9", "host": "redline.example.org"}
    for proxy, secure in (("127.0.0.1", True), ("203.0.113.1", False)):
        (folder := tmp_path / proxy).mkdir()
        with served(folder, proxy=proxy) as service, service.client(None, headers=headers) as client:
            answer = client.post("/login", data={"token": service.tokens["reader"]})
            cookie = answer.headers["set-cookie"]
            assert answer.status_code == 303 and "httponly" in cookie.lower()
            assert ("secure" in cookie.lower()) is secure and cookie.startswith(
                f"redline-session-{443 if secure else 80}="
            )
            assert caplog.messages[-1] == f"reader logs in from {'203.0.113.9' if secure else '127.0.0.1'}"
            # The server accepts a form of its own page behind the proxy and refuses one of another site.
            own, other = "https://redline.example.org", "https://elsewhere.example.org"
            status = [client.post("/logout", headers={"origin": each}).status_code for each in (own, other)]
            assert status == [303 if secure else 403, 403]


@pytest.mark.slow
def test_serve_with_a_certificate_is_reached_by_its_public_name(tmp_path, monkeypatch):
    ours, certificate, key = authority(tmp_path, "DNS:localhost")
    server = Server(tmp_path, "--port", "0", "--certificate", str(certificate), "--key", str(key), "--devices", "1")
    try:
        token, address = server.line("REDLINE_TOKEN=(.*)"), server.line("serve on (https://[^,]*),")
        named = address.replace("127.0.0.1", "localhost")
        monkeypatch.setenv("SSL_CERT_FILE", str(ours))
        with rl.Client(named, token=token) as client:
            assert until(lambda: client.queue().devices, 120)[0].total == 1
        command = [sys.executable, "-m", "redline.cli", "queue", "--server", named]
        monkeypatch.delenv("SSL_CERT_FILE")
        environment = {**os.environ, "REDLINE_TOKEN": token}
        asked = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert asked.returncode == 2 and "is not trusted" in asked.stderr and "Traceback" not in asked.stderr
        environment["SSL_CERT_FILE"] = str(ours)
        asked = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert asked.returncode == 0, asked.stderr
    finally:
        server.end(15)
    assert "Traceback" not in server.log.read_text()
