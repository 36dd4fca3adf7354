"""The files of deploy/ match the program: their commands exist, their parts belong together."""

import configparser
import contextlib
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import warnings
from pathlib import Path

import click
import kubernetes_validate
import pytest
import redline as rl
import yaml
from certificates import authority
from house import ROOT
from jsonschema import ValidationError
from processes import until
from redline.cli.main import redline as command_line
from redline.runners.place.ray_host import free_port
from served import served

DEPLOY = ROOT / "deploy"


def accepted(arguments):
    """Raises if redline's command line does not accept the arguments."""
    # As the group creates it: click keeps a command's help option from its first context.
    parent = click.Context(command_line, info_name="redline", **command_line.context_settings)
    command = command_line.get_command(parent, arguments[0])
    assert command is not None, arguments
    command.make_context(arguments[0], list(arguments[1:]), parent=parent)


def accepted_by_ray(arguments):
    """Raises if Ray's command line does not accept the arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.scripts.scripts import cli

    name, *options = arguments
    cli.commands[name].make_context(name, options)


def documents(name):
    return [each for each in yaml.safe_load_all((DEPLOY / name).read_text()) if each]


def containers(document):
    """Yields every container of a manifest, at any depth."""
    if isinstance(document, dict):
        yield from document.get("containers", [])
        for each in document.values():
            yield from containers(each)
    elif isinstance(document, list):
        for each in document:
            yield from containers(each)


def test_the_image_starts_an_existing_command_as_an_unprivileged_user():
    lines = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text()).splitlines()
    by_name = dict(line.partition(" ")[::2] for line in lines)
    assert int(by_name["USER"]) >= 1000
    assert yaml.safe_load(by_name["ENTRYPOINT"]) == ["redline"]
    accepted(yaml.safe_load(by_name["CMD"]))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = re.search(r"\.\[([\w,]+)\]", (DEPLOY / "Dockerfile").read_text())[1].split(",")
    assert set(extras) <= set(setup["options.extras_require"])


def test_the_unit_starts_a_command_that_exists_and_starts_it_again():
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str
    unit.read(DEPLOY / "redline.service")
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/redline")
    accepted(arguments)
    assert unit["Service"]["Restart"] == "always" and unit["Service"]["User"] != "root"


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kuberay.yaml"])
def test_manifests_have_what_their_kinds_need(name):
    found = documents(name)
    for each in found:
        assert re.fullmatch("[a-z0-9-]{1,63}", each["metadata"]["name"])
        validate(each)
    for each in (container for document in found for container in containers(document)):
        assert each["image"].startswith("redline:") and each["resources"]["requests"].keys() >= {"cpu", "memory"}
        if each.get("command") == ["ray"]:
            accepted_by_ray(each["args"])
        elif "args" in each:
            accepted([re.sub(r"\$\((\w+)\)", "sqlite:///x.db", word) for word in each["args"]])


def test_a_manifest_s_parts_name_each_other():
    served = {each["kind"]: each for each in documents("kubernetes.yaml")}
    deployment, service = served["Deployment"]["spec"], served["Service"]["spec"]
    assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"] == service["selector"]
    assert deployment["replicas"] == 1 and deployment["strategy"]["type"] == "Recreate"
    pool = {each["kind"]: each for each in documents("kuberay.yaml")}
    cluster, queue = pool["RayCluster"], pool["LocalQueue"]
    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
    assert queue["spec"]["clusterQueue"] == pool["ClusterQueue"]["metadata"]["name"]
    flavor = pool["ClusterQueue"]["spec"]["resourceGroups"][0]["flavors"][0]
    assert flavor["name"] == pool["ResourceFlavor"]["metadata"]["name"]
    workers = cluster["spec"]["workerGroupSpecs"][0]
    gpus = workers["replicas"] * int(
        workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    )
    head = f"{cluster['metadata']['name']}-head-svc:6379"
    server, node = deployment["template"]["spec"]["containers"]
    assert {"name": "RAY", "value": head} in server["env"] and f"--address={head}" in node["args"]
    quota = {each["name"]: each["nominalQuota"] for each in flavor["resources"]}
    assert int(quota["nvidia.com/gpu"]) >= gpus


def run(*command, timeout=60, **options):
    """Returns the exit code and the output of a checker."""
    found = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    return found.returncode, found.stdout + found.stderr


def test_the_image_s_recipe_has_nothing_that_a_linter_knows_to_be_wrong():
    hadolint = Path(sys.executable).with_name("hadolint")
    assert hadolint.is_file(), "hadolint is not installed: pip install 'redline[test]'"
    assert run(str(hadolint), "--no-color", str(DEPLOY / "Dockerfile")) == (0, "")


@pytest.fixture
def proxied(tmp_path):
    """A server behind nginx with the rules of deploy/nginx.conf, on a port of this host; deadlines are shorter."""
    if (nginx := shutil.which("nginx")) is None:
        pytest.skip("no nginx on this machine: apt-get install nginx-light")
    authority_file, certificate, key = authority(tmp_path)
    port = free_port("127.0.0.1")
    with served(tmp_path) as service:
        text = (DEPLOY / "nginx.conf").read_text()
        for old, new in (
            ("443", str(port)),
            ("/etc/ssl/redline.pem", str(certificate)),
            ("/etc/ssl/redline.key", str(key)),
            ("http://127.0.0.1:8700", service.address),
            ("client_header_timeout 10s", "client_header_timeout 1s"),
            ("client_body_timeout 30s", "client_body_timeout 1s"),
        ):
            assert old in text
            text = text.replace(old, new)
        folders = "".join(
            f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        http = f"http {{ {folders} access_log off; {text} }}"
        (tmp_path / "nginx.conf").write_text(f"daemon off; pid {tmp_path}/pid; events {{}} {http}")
        with subprocess.Popen([nginx, "-c", str(tmp_path / "nginx.conf"), "-e", str(tmp_path / "errors")]) as process:
            until(lambda: process.poll() is not None or listens(port))
            try:
                yield service, port, authority_file
            finally:
                process.terminate()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_behind_the_proxy_slow_requests_end_and_events_come_at_once(proxied, monkeypatch):
    service, port, trusted = proxied
    context = ssl.create_default_context(cafile=trusted)

    def connected():
        return context.wrap_socket(
            socket.create_connection(("127.0.0.1", port), timeout=30), server_hostname="localhost"
        )

    with connected() as slow_headers, connected() as slow_body:
        slow_headers.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-slow: ")
        slow_body.sendall(b"POST /v1/searches HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert b"200 OK" not in slow_headers.recv(1000) and b"200 OK" not in slow_body.recv(1000)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    with rl.Client(f"https://localhost:{port}", token=service.tokens["submitter"]) as client:
        run = client.submit("gpt2-tiny")
        events = run.events()
        assert next(events).data["state"] == "queued"
        service.store.add_event(run.id, "said", {"message": "at once"})
        assert next(events).data == {"message": "at once"}
        events.close()
        run.cancel()
    with contextlib.ExitStack() as held:
        connections = [held.enter_context(connected()) for _ in range(140)]
        for connection in connections:
            connection.sendall(b"GET /v1/events HTTP/1.1\r\nhost: x\r\nconnection: keep-alive\r\nauthorization: Bearer "
                               + service.tokens["reader"].encode() + b"\r\n\r\n")  # fmt: skip
        answers = [connection.recv(12) for connection in connections]
    assert answers.count(b"HTTP/1.1 200") == 128 and answers.count(b"HTTP/1.1 503") == 12


def test_systemd_takes_the_unit(tmp_path):
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("no systemd-analyze on this machine: apt-get install systemd")
    text = (DEPLOY / "redline.service").read_text()
    # systemd-analyze reports programs that are not installed.
    (tmp_path / "redline.service").write_text(text.replace("/opt/redline/bin/redline", sys.executable))
    code, output = run(analyze, "verify", "--man=no", "--recursive-errors=no", str(tmp_path / "redline.service"))
    ours = [line for line in output.splitlines() if "redline.service" in line]
    assert (code, ours) == (0, [])


def validate(document):
    """Raises if Kubernetes would refuse a document or it has a field that Kubernetes does not know.

    Of a custom resource the templates are checked, as the pods that they create.
    """
    if document["apiVersion"].partition("/")[0] not in ("kueue.x-k8s.io", "ray.io"):
        kubernetes_validate.validate(document, "1.33", strict=True)
        return
    spec = document.get("spec", {})
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]] if document["kind"] == "RayCluster" else []:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        kubernetes_validate.validate(pod, "1.33", strict=True)


@pytest.mark.parametrize(
    ("name", "kind", "path", "value"),
    [
        ("kubernetes.yaml", "Deployment", ("spec", "replica"), 1),
        ("kubernetes.yaml", "Service", ("spec", "ports", 0, "port"), "http"),
        ("kuberay.yaml", "RayCluster", ("spec", "headGroupSpec", "template", "spec", "containers", 0, "imagee"), "x"),
    ],
)
def test_a_manifest_with_a_mistake_is_found(name, kind, path, value):
    document = next(each for each in documents(name) if each["kind"] == kind)
    *way, last = path
    place = document
    for step in way:
        place = place[step]
    place[last] = value
    with pytest.raises(ValidationError):
        validate(document)
