"""HTTP requests to a server. Errors of the server are raised as redline's, failures to reach it as `ConnectionError`."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from ..base.errors import (
    AttemptOver,
    KeyTaken,
    LeaseOver,
    MissingDependency,
    NotFound,
    Refused,
    ServiceError,
    StorageAhead,
    StorageUnavailable,
    UsageError,
)

TIMEOUT_S = 30.0
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_SERVICE = (AttemptOver, KeyTaken, LeaseOver, NotFound, Refused, StorageAhead, StorageUnavailable)
_KINDS: dict[str, type[Exception]] = {
    **{each.code: each for each in _SERVICE},
    **dict.fromkeys(("invalid", "malformed", "too_large"), UsageError),
    **dict.fromkeys(("not_ready", ServiceError.code), StorageUnavailable),
}


class ServerUnreachable(ServiceError, ConnectionError):
    """The server cannot be reached or does not answer."""


class Transport:
    """Sends requests to one server. Thread-safe.

    Args:
        server: its address, such as `http://127.0.0.1:8700`.
        token: of the user.
        verify: file with the certificates to trust; None for the system's.
        pinned: file whose first certificate is the only one trusted, for any host name; replaces `verify`.

    Raises:
        UsageError: the address, the token or the file of certificates is invalid.
    """

    def __init__(self, server: str, token: str, verify: str | None = None, *, pinned: str | None = None) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise MissingDependency(
                f"requests to a server need {error.name}, which is not installed: pip install 'redline[service]'"
            ) from error
        parts = urlsplit(server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"a server's address must be like http://127.0.0.1:8700, but got '{server}'")
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise UsageError("a server needs a token: --token, or REDLINE_TOKEN; `redline token new` makes one")
        self.server = server.rstrip("/")
        headers = {"authorization": f"Bearer {token}"}
        trusted: Any = True if verify is None else _trusting(verify)
        if pinned is not None:
            trusted = _pinning(pinned)
        # Requests to this machine must not go through a proxy that the environment sets.
        local = parts.hostname in ("127.0.0.1", "localhost", "::1")
        self._client = httpx.Client(
            base_url=self.server, headers=headers, timeout=TIMEOUT_S, verify=trusted, trust_env=not local,
            limits=httpx.Limits(max_connections=100),
        )  # fmt: skip

    def json(self, method: str, path: str, **more: Any) -> Any:
        """Returns the answer as data; None if it is empty.

        Raises:
            ServerUnreachable: the server cannot be reached.
            UsageError: its certificate is not trusted.
            RedlineError: the error that the server answers.
        """
        answer = self.send(method, path, **more)
        return answer.json() if answer.content else None

    def send(self, method: str, path: str, **more: Any) -> Any:
        """Returns the answer as an httpx response. Raises as `json` does."""
        import httpx

        try:
            answer = self._client.request(method, path, **more)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if answer.status_code >= 400:
            refused(answer)
        return answer

    @contextmanager
    def stream(self, path: str, **more: Any) -> Iterator[Iterator[str]]:
        """Yields the lines of an answer as they arrive. Raises as `json` does."""
        import httpx

        timeout = httpx.Timeout(TIMEOUT_S, read=3 * TIMEOUT_S)
        try:
            with self._client.stream("GET", path, timeout=timeout, **more) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    refused(answer)
                yield answer.iter_lines()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _unreachable(self, error: Exception) -> Exception:
        if (reason := _distrusted(error)) is not None:
            return UsageError(
                f"the certificate of {self.server} is not trusted: {reason}; give --trust (in Python trust=) the file of that "
                "certificate, or of the authority that signed it"
            )
        return ServerUnreachable(f"the server {self.server} does not answer: {str(error) or type(error).__name__}")


def _trusting(file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=file)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{file} cannot be read as certificates in PEM: {error.strerror or error}") from None


def _pinning(file: str) -> ssl.SSLContext:
    """Returns a context that trusts one certificate under any host name, for use on the server's own machine, whose
    address the certificate may not contain.
    """
    text = Path(file).read_text(encoding="ascii", errors="replace")
    first = text[text.find(_BEGIN) : text.find(_END) + len(_END)]
    made = ssl.create_default_context(cadata=first)
    made.check_hostname = False
    made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return made


def _distrusted(error: BaseException | None) -> str | None:
    """Why a certificate is not trusted; None if the error has another cause."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        error = error.__cause__ or error.__context__
    return None


def refused(answer: Any) -> NoReturn:
    """Raises the error that an answer with status 400 or above contains."""
    try:
        found = answer.json()["error"]
        code, message = str(found["code"]), str(found["message"])
    except (ValueError, KeyError, TypeError):
        code, message = "", f"the server answered {answer.status_code}: {answer.text[:200]}"
    if code in _KINDS:
        raise _KINDS[code](message)
    if answer.status_code in (401, 403):
        raise Refused(message)
    if answer.status_code in (429, 502, 503, 504):
        raise ServerUnreachable(message)
    raise ServiceError(message)
