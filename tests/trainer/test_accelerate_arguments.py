"""Arguments of `redline.accelerate`: which configuration it takes, what it refuses, and how it runs under a launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redline
import torch
import yaml
from own_loops import Net, cross_entropy, make_data, make_llama, make_points, own_loss, plain
from predicted_runner import predicted
from redline.base.errors import UsageError
from torch import nn

# --- which configuration ---------------------------------------------------------------------------------------------


def test_without_a_strategy_the_estimate_decides():
    prepared = redline.accelerate(make_llama(), make_data(), global_batch=8)
    assert prepared.info.why.startswith("the estimate's best of ")
    assert prepared.info.predicted > 0
    assert prepared.info.samples_per_step == 8


def best_yaml(folder, devices=1, **config):
    document = {
        "best": {
            "trial": 3,
            "configuration": {"micro_batch": 2, "grad_accum": 4, "precision": "fp32", **config},
            "throughput": 99.0,
        },
        "trains": {"model": "small", "workload": {"spec": "llama-tiny"}, "devices": {"used": devices}},
    }
    path = folder / "best.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_best_yaml_decides(tmp_path):
    info = redline.accelerate(make_llama(), make_data(), strategy=best_yaml(tmp_path), global_batch=8).info
    assert (info.config["micro_batch"], info.config["grad_accum"], info.predicted) == (2, 4, 99.0)
    assert info.why == f"the winner of '{tmp_path}/best.yaml'"


def test_a_winner_is_adapted_to_the_global_batch_that_is_given(tmp_path):
    given = {"strategy": best_yaml(tmp_path)}
    info = redline.accelerate(make_llama(), make_data(), global_batch=16, **given).info
    assert info.samples_per_step == 16 and (info.config["micro_batch"], info.config["grad_accum"]) == (2, 8)
    assert "nearest to the winner of" in info.why
    assert redline.accelerate(make_llama(), make_data(), **given).info.samples_per_step == 8, "that of the run"


def test_a_configuration_that_contradicts_the_global_batch_is_refused():
    config = {"micro_batch": 4, "grad_accum": 1}
    with pytest.raises(UsageError, match="dp is 4 in the configuration, but global_batch is 16: leave one of them out"):
        redline.accelerate(make_llama(), make_data(), strategy=config, global_batch=16)
    assert redline.accelerate(make_llama(), make_data(), strategy=config).info.samples_per_step == 4


def test_the_best_yaml_of_a_workload_of_ones_own_serves_its_model(tmp_path):
    """A user's own workload has no name that redline knows: the loop has the model."""
    own = redline.Workload(model=Net, batch=lambda size, seed: (torch.ones(size, 6),), loss=own_sum, global_batch=8)
    asked = {"runner": "local", "measure_time": 0.1, "trials": 1, "devices": 1}
    result = redline.tune(own, fix={"micro_batch": 2}, out=tmp_path / "run", **asked)
    (tmp_path / "elsewhere").mkdir()
    copied = tmp_path / "elsewhere" / "best.yaml"
    copied.write_bytes((tmp_path / "run" / "best.yaml").read_bytes())
    for strategy in (tmp_path / "run", copied):
        found = redline.accelerate(Net(), make_points(), strategy=strategy, loss=cross_entropy, global_batch=8)
        assert found.info.config == dict(result.best.config)


def own_sum(output, batch):
    return output.sum(dim=1).mean()


def test_a_best_yaml_that_was_copied_says_what_to_train(tmp_path):
    from redline.trainer.request import read_source

    asked = predicted("llama-tiny", "h100", seq_len=32, global_batch=4, devices=1, trials=1)
    redline.tune("llama-tiny", fix={"precision": "fp32"}, out=tmp_path / "run", **asked)
    (tmp_path / "best-of-all.yaml").write_bytes((tmp_path / "run" / "best.yaml").read_bytes())
    found = read_source(tmp_path / "best-of-all.yaml")
    assert found == read_source(tmp_path / "run") and found.config["precision"] == "fp32"


def test_a_best_yaml_for_other_devices_is_planned_again(tmp_path):
    found = best_yaml(tmp_path, 4, dp=4, micro_batch=2, grad_accum=1)
    info = redline.accelerate(make_llama(), make_data(), strategy=found, global_batch=8).info
    assert "which is for 4 devices" in info.why
    assert info.config["micro_batch"] * info.config["grad_accum"] == 8


# --- errors ----------------------------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from make_data()


REFUSED = {
    "an iterable": ({"dataset": Stream()}, "Stream cannot be indexed.*__len__ and __getitem__"),
    "a loader": ({"dataset": torch.utils.data.DataLoader(make_data())}, "a DataLoader decides on batches.*collate_fn"),
    "an empty one": ({"dataset": [{}][:0]}, "list to train on is empty"),
    "text": ({"dataset": [{"input_ids": "abc"}] * 8}, "part 'input_ids' of the samples cannot be stacked.*'str'.*collate="),
    "lengths": (
        {"dataset": [{"input_ids": [1] * (2 + n), "labels": [1] * (2 + n)} for n in range(9)]},
        r"part 'input_ids' of the samples cannot be stacked.*\[2\] at entry 0 and \[3\] at entry 1.*pad",
    ),
    "devices": ({"devices": 8}, "devices=8, but this is the only process.*torchrun --nproc-per-node 8"),
    "optimizer": (
        {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)},
        "optimizer is a SGD that is built already.*functools.partial",
    ),
    "a knob": ({"strategy": {"micro_bach": 2}}, "unknown knob 'micro_bach'; did you mean 'micro_batch'?"),
    "a file": ({"strategy": "nowhere.yaml"}, "there is no strategy 'nowhere.yaml'"),
    "a kind": ({"strategy": 7}, "strategy must be a run's folder.*got a int"),
    "a model": ({"model": 7}, "model must be a name, a Workload, a torch module.*got a int"),
    "adapters": ({"lora": "r=4"}, "lora='r=4' goes with a model's name.*peft"),
    "weights": (
        {"weights": "somewhere", "strategy": {"micro_batch": 8}},
        "weights='somewhere' goes with a Hugging Face model given by its name",
    ),
    "clip": ({"clip": -1.0, "strategy": {"micro_batch": 8}}, "clip must be a norm above 0.*-1.0"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_models_are_refused_with_a_message(what):
    changed, message = REFUSED[what]
    given = {
        "model": make_llama() if "model" not in changed else None,
        "dataset": make_data(),
        "global_batch": 8,
        **changed,
    }
    with pytest.raises(UsageError, match=message):
        redline.accelerate(given.pop("model"), given.pop("dataset"), **given)


def test_parts_of_a_step_out_of_order_are_refused():
    model, optimizer, loader, info = redline.accelerate(
        make_llama(), make_data(), strategy={"micro_batch": 4}, global_batch=8
    )
    batch = next(iter(loader))
    with pytest.raises(UsageError, match="no gradients: call the model"):
        optimizer.step()
    with pytest.raises(UsageError, match="no gradients to clip"):
        info.clip(1.0)
    model(**batch).backward()
    with pytest.raises(UsageError, match="called again before optimizer.step"):
        model(**batch)
    optimizer.zero_grad()  # drops the gradients
    with pytest.raises(UsageError, match="takes this replica's 8 samples of a step.*but got 3"):
        model(**{name: each[:3] for name, each in batch.items()})
    with pytest.raises(UsageError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    assert info.step == 0


def refused_on_all(folder):
    try:
        redline.accelerate(make_llama(), make_data(), strategy=folder)
    except UsageError as error:
        return str(error)
    return ""


def test_a_refusal_of_rank_0_is_raised_on_all_ranks(two):
    message = two.run(refused_on_all, "nowhere")
    assert message[0] == message[1] != ""


# --- under a launcher ------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, redline as rl
sys.path.insert(0, {tests!r})
from own_loops import make_data, make_llama, make_optimizer
if __name__ == "__main__":
    model, optimizer, loader, info = rl.accelerate(
        make_llama(), make_data(), devices=2, global_batch=8, optimizer=make_optimizer, {how}
    )
    for batch in loader:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if info.main:
        print("LOSS", loss.item(), info.world.size, info.why)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fix={'fusion': False}", "strategy=['zero2', 'checkpoint']"])
def test_torchrun_starts_the_same_loop(how, tmp_path):
    """The configuration comes from the estimate, or from a list."""
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1] / "support"), how=how))
    parent = str(Path(redline.__file__).parent.parent)
    line = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*line, "--nproc-per-node", "2", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "PYTHONPATH": parent, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (each for each in done.stdout.splitlines() if each.startswith("LOSS"))
    _, loss, size, reason = line.split(" ", 3)
    expected = plain(make_llama(), make_data(), own_loss, steps=3, clip=None)[0][-1]
    assert (float(loss), size) == (pytest.approx(expected, rel=1e-2), "2")  # the search may choose bf16
    assert reason.startswith("the list of optimisations" if "strategy" in how else "the estimate's best")
