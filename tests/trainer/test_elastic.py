"""A training on a Ray cluster survives the loss of a host: a new host takes its place from the latest checkpoint."""

import json
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import json, sys, threading, time
from pathlib import Path
from ray.cluster_utils import Cluster
from redline.trainer.driver import TrainListener, train
from redline.trainer.request import TrainRequest

folder = Path(sys.argv[1])
asked = dict(
    paths=(str(folder / "corpus.txt"),), steps=40, seq_len=32, global_batch=8, save_every=5, log_every=1, devices=2,
    fix={"tp": 2, "precision": "fp32", "fusion": False},
)

class Printing(TrainListener):
    def on_message(self, message):
        print("MESSAGE", message, flush=True)

def on_the_cluster():
    where = dict(out=folder / "lost", runner="ray", ray_address=cluster.address)
    done = train(TrainRequest(source="llama-tiny", **where, **asked), Printing())
    print("DONE", done.step, flush=True)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
try:
    node = cluster.add_node(num_cpus=1)
    training = threading.Thread(target=on_the_cluster, daemon=True)
    training.start()
    log = folder / "lost" / "log.jsonl"
    while training.is_alive() and not (log.exists() and '"step": 12,' in log.read_text()):
        time.sleep(0.1)
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    training.join(400)
finally:
    cluster.shutdown()
train(TrainRequest(source="llama-tiny", out=folder / "whole", **asked))
"""


def losses(folder):
    lines = [json.loads(each) for each in (folder / "log.jsonl").read_text().splitlines()]
    out = {}
    for each in lines:
        if each["kind"] == "step":
            out.setdefault(each["step"], []).append(each["loss"])
    return out, [each for each in lines if each["kind"] == "resumed"]


@pytest.mark.slow
def test_a_lost_host_is_replaced_without_effect_on_the_loss(tmp_path):
    (tmp_path / "corpus.txt").write_text("All work and no play makes a model dull. " * 400)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=590
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ranks were lost" in done.stdout and "DONE 40" in done.stdout
    found, resumed = losses(tmp_path / "lost")
    expected, never = losses(tmp_path / "whole")
    # A checkpoint that was being written when the host was lost may be complete or not.
    assert resumed and all(each["step"] in (5, 10, 15) for each in resumed) and not never
    assert found.keys() == expected.keys() == set(range(1, 41))
    assert any(len(each) > 1 for each in found.values())
    for step, each in found.items():
        assert each == pytest.approx([expected[step][0]] * len(each), rel=1e-6)
