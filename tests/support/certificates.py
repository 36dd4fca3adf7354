"""A certificate authority for tests, and certificates that it signs."""

import shutil
import subprocess

import pytest


def authority(folder, names="IP:127.0.0.1,DNS:localhost"):
    """Returns the files of an authority's certificate, of a server's certificate for `names`, and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    ours, key, signed, request = (folder / name for name in ("authority.pem", "key.pem", "signed.pem", "request.pem"))
    (folder / "names").write_text(f"subjectAltName={names}\nbasicConstraints=CA:FALSE\n")
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl("req", "-x509", *made, "-keyout", folder / "its-key.pem", "-out", ours, "-days", "2", "-subj", "/CN=ours")
    _openssl("req", *made, "-keyout", key, "-out", request, "-subj", "/CN=redline")
    _openssl(
        "x509", "-req", "-in", request, "-CA", ours, "-CAkey", folder / "its-key.pem", "-CAcreateserial",
        "-out", signed, "-days", "2", "-extfile", folder / "names",
    )  # fmt: skip
    return ours, signed, key


def _openssl(*arguments):
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
