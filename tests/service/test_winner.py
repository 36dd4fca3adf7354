"""Every view of a search names the confirmed winner, not the fastest row of trials.csv, which was measured only once."""

import json
import re

import pytest
import redline as rl
import yaml
from click.testing import CliRunner
from redline.cli.main import redline as command_line
from redline.cli.submit import followed
from redline.results import Measurement, RunFolder, Status, summary
from redline.service.records import SearchState
from redline.space import Config
from redline.trainer.request import read_source
from redline.tuner.result import make_result
from redline.views.dashboard import Library
from served import SEARCH, SPACE

ASKED = {"model": "gpt2-tiny", "workload": {"id": "x", "spec": "gpt2-tiny"}, "space": SPACE}
FIRST = (100.0, 150.0, 145.0)
"""Throughputs of trials 0 to 2, with micro_batch 1, 2 and 4."""
AGAIN = {0: (99.0, 101.0, 100.0), 1: (139.0, 140.0, 141.0)}
"""Throughputs of re-measured trials: trial 1 is confirmed at 140; trial 2 was measured once, at 145."""


@pytest.fixture(scope="module")
def search(service):
    """A finished search of the service, with its trials in the service's database."""
    with service.client() as client:
        made = client.post("/v1/searches", json=SEARCH).json()["id"]
    service.store.give_devices(made, "H100", 1)
    folder = service.parts.runs.folder(made)
    knobs = {"micro_batch": [1, 2, 4, 8]}
    with RunFolder.open(folder, ASKED, knobs=knobs, make_config=Config) as run:
        for number, throughput in enumerate(FIRST):
            run.start(Config({"micro_batch": 2**number}), sampler="default" if number == 0 else "bayes")
            run.finish(number, Measurement(status=Status.OK, throughput=throughput, unit="tokens/s"))
        for number, throughputs in AGAIN.items():
            run.remeasure(number, throughputs)
        run.write_best(["redline", "tune", "gpt2-tiny"])
        result = make_result(run.trials(), ["micro_batch"], folder=folder, ended="trials", interrupted=False)
    service.store.take_devices(made, SearchState.DONE, "trials", result.to_dict()["best"])
    return made


def test_everything_that_names_a_winner_names_the_confirmed_one(service, search, monkeypatch, tmp_path):
    monkeypatch.setenv("REDLINE_SERVER", service.address)
    monkeypatch.setenv("REDLINE_TOKEN", service.tokens["reader"])
    folder = service.parts.runs.folder(search)

    def cli(*arguments):
        done = CliRunner().invoke(command_line, [str(each) for each in arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    def winner_of(data):
        return data["trial"], data["throughput"]

    with service.client("reader") as client, service.rl("reader") as remote:
        run = remote.search(search)
        get = lambda path: client.get(path).json()  # noqa: E731
        exported = {
            "API export": client.get(f"/v1/searches/{search}/export/yaml").text,
            "redline results --to": cli("results", search, "--to", "yaml"),
            "Client.export": run.export("yaml"),
            "redline export": cli("export", folder, "--to", "yaml"),
        }
        listed = next(each for each in get("/v1/searches")["searches"] if each["id"] == search)
        page = get(f"/runs/api/run?run={search}")["document"]
        terminal = {
            "redline results": cli("results", search),
            "redline show": cli("show", folder),
            "redline submit --wait": waited(run),
        }
        found = {
            "best.yaml": winner_of(yaml.safe_load((folder / "best.yaml").read_text())["best"]),
            "/v1/searches": winner_of(listed["best"]),
            "/v1/searches/ID": winner_of(get(f"/v1/searches/{search}")["best"]),
            "/best": winner_of(get(f"/v1/searches/{search}/best")["best"]),
            "Client.best": (run.best.trial.number, run.best.throughput),
            "redline results --json": winner_of(json.loads(cli("results", search, "--json"))["best"]),
            "page": winner_of(page["headline"]["winner"]),
            "report": winner_of(report_of(cli, folder, tmp_path)["headline"]["winner"]),
            "View": told_of(summary.best(rl.results.View(folder).trials())),
        }
    assert found == dict.fromkeys(found, (1, 140.0))
    assert [each["best"] for each in Library(folder).lines()] == [140.0]
    assert read_source(folder).config == {"micro_batch": 2}
    for name, text in exported.items():
        assert re.search(r"micro_batch\W+2\b", text), name
    for name, text in terminal.items():
        assert re.search(r"trial 1\b", text) and "140" in text, (name, text)


def told_of(trial):
    return trial.number, trial.throughput


def waited(run):
    """Returns the output of `redline submit --wait`."""
    from click import command

    out = CliRunner().invoke(command("wait")(lambda: followed(run)), [], standalone_mode=False)
    assert out.return_value == 0, out.output
    return out.output


def report_of(cli, folder, tmp_path):
    """Returns the document in the page of `redline report`."""
    cli("report", folder, "-o", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    return json.loads(re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)[1])
