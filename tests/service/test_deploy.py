"""The files of deploy/ say what the program takes: their commands exist, their parts belong together."""

import configparser
import re
import shlex

import click
import pytest
import yaml
from house import ROOT
from redline.tuner.cli.main import redline as command_line

DEPLOY = ROOT / "deploy"


def accepted(arguments):
    """Whether redline's command line takes these words."""
    # As the group makes it: click keeps a command's help option from its first context.
    parent = click.Context(command_line, info_name="redline", **command_line.context_settings)
    command = command_line.get_command(parent, arguments[0])
    assert command is not None, arguments
    command.make_context(arguments[0], list(arguments[1:]), parent=parent)


def documents(name):
    return [each for each in yaml.safe_load_all((DEPLOY / name).read_text()) if each]


def containers(document):
    """Every container of a manifest, wherever it stands."""
    if isinstance(document, dict):
        yield from document.get("containers", [])
        for each in document.values():
            yield from containers(each)
    elif isinstance(document, list):
        for each in document:
            yield from containers(each)


def test_the_image_starts_a_command_that_exists_as_nobody_special():
    lines = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text()).splitlines()
    steps = [line.partition(" ")[::2] for line in lines if line and not line.startswith("#")]
    said = dict(steps)
    assert steps[0][0] == "FROM" and ":" in said["FROM"] and not said["FROM"].endswith(":latest")
    assert said["USER"] == "redline"
    assert yaml.safe_load(said["ENTRYPOINT"]) == ["redline"]
    accepted(yaml.safe_load(said["CMD"]))
    known = {"FROM", "RUN", "COPY", "USER", "WORKDIR", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in steps} <= known
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
        assert each["apiVersion"] and each["kind"] and re.fullmatch("[a-z0-9-]{1,63}", each["metadata"]["name"])
    for each in (container for document in found for container in containers(document)):
        assert each["image"].startswith("redline:") and each["resources"]["requests"].keys() >= {"cpu", "memory"}
        if "args" in each:
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
    joined = next(each for each in containers(cluster["spec"]["headGroupSpec"]) if "args" in each)["args"]
    assert int(joined[joined.index("--devices") + 1]) == gpus
    quota = {each["name"]: each["nominalQuota"] for each in flavor["resources"]}
    assert int(quota["nvidia.com/gpu"]) >= gpus
