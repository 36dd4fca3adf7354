"""The class of a model stands in every command's output and in the run's files."""

import json
from pathlib import Path

import pytest
import yaml
from command_line import run
from small_models import folder  # noqa: F401

BERT = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 300}  # fmt: skip
NAME = "BertForSequenceClassification"
RUN = ("--devices", "1", "--trials", "1", "--measure-time", "100ms", "--out", "run")


@pytest.fixture
def sizes(folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    return [str(folder("head", **BERT, architectures=[NAME])), "--seq-len", "16", "--global-batch", "4"]


@pytest.mark.slow
def test_the_class_is_named_by_every_command(sizes, capsys):
    code, out, err = run(capsys, "space", *sizes)
    assert code == 0 and f"head: {NAME}" in out, err
    assert json.loads(run(capsys, "space", *sizes, "--json")[1])["class"] == NAME
    code, out, err = run(capsys, "estimate", *sizes, "--hardware", "a100-80gb")
    assert code == 0 and f"head ({NAME}) on 1 x a100-80gb" in out, err
    code, out, err = run(capsys, "tune", *sizes, *RUN)
    assert code == 0 and f"head ({NAME}) on" in out + err, err
    assert yaml.safe_load(Path("run/run.yaml").read_text())["asked"]["workload"]["class"] == NAME
    assert f"head ({NAME})" in run(capsys, "show", "run")[1]
    code, out, err = run(capsys, "export", "run", "--to", "torchtitan")
    assert code == 2 and f"this run measured {NAME}" in err
    assert run(capsys, "export", "run", "--to", "accelerate")[0] == 0
    assert run(capsys, "report", "run")[0] == 0
    assert NAME in Path("run/report.html").read_text()
