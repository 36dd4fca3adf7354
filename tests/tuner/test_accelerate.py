"""A loop of somebody's own trains, through `redline.accelerate`, what the same loop trains in plain PyTorch."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redline
import torch
import yaml
from redline.errors import StudyError, UsageError, WorkloadError
from torch import nn

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "vocab_size": 97, "max_position_embeddings": 40,
}  # fmt: skip
SAMPLES, TOKENS, GLOBAL_BATCH, STEPS = 20, 16, 8, 5
CLIP = 0.5
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
"""Of weights after five steps, which move them by 5e-3: some units in the last place of float32."""
STRATEGIES = {
    "one": (1, {"micro_batch": 2}),
    "tp2": (2, {"tp": 2, "micro_batch": 4}),
    "zero1": (2, {"dp": 2, "zero": 1, "micro_batch": 2}),
    "zero3": (2, {"dp": 2, "zero": 3, "micro_batch": 2}),
    "pp2": (2, {"pp": 2, "micro_batch": 2}),
    "tp2·pp2": (4, {"tp": 2, "pp": 2, "micro_batch": 2}),
}


def make_optimizer(params):
    # With the usual epsilon of 1e-8 the mere rounding of gradients would move weights.
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-2)


def make_llama(seed=0, **changed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **changed))


def make_data(ignored=True):
    """Samples of tokens; of each another number is not predicted, so that micro-batches count for more or less."""
    generator = torch.Generator().manual_seed(1)
    out = []
    for number in range(SAMPLES):
        ids = torch.randint(SIZES["vocab_size"], (TOKENS,), generator=generator)
        skipped = torch.arange(TOKENS) < (number % 9 if ignored else 0)
        out.append({"input_ids": ids, "labels": torch.where(skipped, -100, ids)})
    return out


class Net(nn.Module):
    """A module that is no Hugging Face model: no loss of its own, samples are tuples."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for each in self.layers:
            x = torch.relu(each(x))
        return self.head(x)


def cross_entropy(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def make_points():
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(6, generator=generator), number % 3) for number in range(SAMPLES)]


def plain(model, dataset, loss_of, steps=STEPS, clip=CLIP):
    """The loop in plain PyTorch, on one process: losses and weights."""
    from redline.training.data import FromDataset

    samples, optimizer, losses = FromDataset(dataset), make_optimizer(model.parameters()), []
    for step in range(steps):
        loss = loss_of(model, samples(step * GLOBAL_BATCH, GLOBAL_BATCH))
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: each.detach().clone() for name, each in model.state_dict().items()}


def own_loss(model, batch):
    return model(**batch).loss


def turns(prepared, steps=STEPS):
    """The same loop on what `accelerate` returned: losses, and on rank 0 the weights."""
    model, optimizer, loader, info = prepared
    losses, until = [], info.step + steps
    while info.step < until:
        for batch in loader:
            loss = model(**batch) if isinstance(batch, dict) else model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if info.step == until:
                break
    return losses, info.state_dict()


def llama_turns(config, seed_of_rank=False, **given):
    import torch.distributed as dist

    seed = dist.get_rank() if seed_of_rank and dist.is_initialized() else 0
    given = {"optimizer": make_optimizer, "global_batch": GLOBAL_BATCH, "clip": CLIP, **given}
    return turns(redline.accelerate(make_llama(seed), make_data(), strategy=config, **given))


def on(ranks, request, function, *args, **given):
    """On rank 0 of so many, what a function returns."""
    if ranks == 1:
        return function(*args, **given)
    pool = request.getfixturevalue({2: "two", 4: "four"}[ranks])
    return pool.run(functools.partial(function, **given), *args)[0]


def hold(found, expected):
    losses, weights = found
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert weights.keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(weights[name], value, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_built_hugging_face_module_trains_as_in_plain_pytorch(strategy, request):
    """Its own weights, uneven labels, clipping, an epoch's end between steps."""
    ranks, config = STRATEGIES[strategy]
    hold(on(ranks, request, llama_turns, config), plain(make_llama(), make_data(), own_loss))


def test_the_weights_of_rank_0_are_those_that_are_trained(two):
    """A script that does not seed builds another module on every rank."""
    found = two.run(functools.partial(llama_turns, seed_of_rank=True), {"tp": 2, "micro_batch": 8})
    hold(found[0], plain(make_llama(), make_data(), own_loss))
    assert found[1][0] == found[0][0]
    assert found[1][1] == {}, "the whole state is on rank 0"


def net_turns(config):
    torch.manual_seed(0)
    given = {"loss": cross_entropy, "optimizer": make_optimizer, "global_batch": GLOBAL_BATCH, "clip": CLIP}
    return turns(redline.accelerate(Net(), make_points(), strategy=config, **given))


@pytest.mark.parametrize("strategy", ["one", "zero1", "zero3"])
def test_a_module_of_ones_own_trains_as_in_plain_pytorch(strategy, request):
    ranks, config = STRATEGIES[strategy]
    torch.manual_seed(0)
    expected = plain(Net(), make_points(), lambda model, batch: cross_entropy(model(batch[0]), batch))
    hold(on(ranks, request, net_turns, config), expected)


def test_a_class_is_built_by_the_seed():
    given = {"loss": cross_entropy, "optimizer": make_optimizer, "global_batch": GLOBAL_BATCH, "clip": CLIP}
    found = turns(redline.accelerate(Net, make_points(), strategy={"micro_batch": 4}, seed=7, **given))
    torch.manual_seed(7)
    net, points = Net(), make_points()
    from redline.training.data import FromDataset

    first = FromDataset(points, seed=7)(0, GLOBAL_BATCH)
    assert found[0][0] == pytest.approx(cross_entropy(net(first[0]), first).item(), rel=1e-6)


def test_frozen_parameters_stay_as_they_are():
    model = make_llama()
    model.model.embed_tokens.requires_grad_(False)
    before = model.model.embed_tokens.weight.clone()
    prepared = redline.accelerate(model, make_data(), strategy={"micro_batch": 4}, global_batch=8)
    _, weights = turns(prepared, 2)
    assert torch.equal(weights["model.embed_tokens.weight"], before)
    assert not torch.equal(weights["model.layers.0.mlp.up_proj.weight"], model.model.layers[0].mlp.up_proj.weight)


def order(config):
    prepared = redline.accelerate(make_llama(), make_data(), strategy=config, global_batch=GLOBAL_BATCH)
    seen = []
    for _ in range(3):
        seen.append([batch["input_ids"][:, :3].tolist() for batch in prepared.loader])
    return seen, prepared.loader.position


def test_batches_follow_from_the_seed_alone(two):
    alone, position = order({"micro_batch": 8})
    # 20 samples are two and a half steps: the third straddles two epochs, and belongs to the first.
    assert [len(each) for each in alone] == [3, 2, 3]
    assert position == 64
    halves = two.run(order, {"dp": 2, "micro_batch": 2})
    joined = [[a + b for a, b in zip(*epoch)] for epoch in zip(halves[0][0], halves[1][0])]
    assert joined == alone
    piped = two.run(order, {"pp": 2, "micro_batch": 4})
    assert piped[0][0] == piped[1][0] == alone


def interrupted(config, folder, first):
    given = {"optimizer": make_optimizer, "global_batch": GLOBAL_BATCH, "clip": CLIP}
    prepared = redline.accelerate(make_llama(0 if first else 9), make_data(), strategy=config, **given)
    assert prepared.info.load(folder) is not first
    found = turns(prepared, 3 if first else STEPS - 3)
    prepared.info.save(folder)
    return found


def test_a_checkpoint_goes_on_in_another_configuration(two, tmp_path):
    expected = plain(make_llama(), make_data(), own_loss)
    before = two.run(interrupted, {"dp": 2, "zero": 3, "micro_batch": 2}, tmp_path / "saved", True)[0]
    behind = two.run(interrupted, {"tp": 2, "micro_batch": 4}, tmp_path / "saved", False)[0]
    hold((before[0] + behind[0], behind[1]), expected)
    assert sorted(each.name for each in (tmp_path / "saved").iterdir()) == ["step-00000003", "step-00000005"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    prepared = redline.accelerate(make_llama(), make_data(), strategy={"micro_batch": 8}, global_batch=8)
    turns(prepared, 1)
    prepared.info.save(tmp_path / "saved")
    other = redline.accelerate(
        make_llama(tie_word_embeddings=True), make_data(), strategy={"micro_batch": 8}, global_batch=8
    )
    with pytest.raises(WorkloadError, match="of another model.*lm_head"):
        other.info.load(tmp_path / "saved")


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    prepared = redline.accelerate(make_llama(), make_data(), strategy={"micro_batch": 8}, global_batch=8)
    turns(prepared, 1)
    with pytest.raises(StudyError, match="file/saved.*cannot be made"):
        prepared.info.save(tmp_path / "file" / "saved")


def evaluations(config, first, second):
    """Losses of a step, without gradients first, and of a number of samples that no micro-batch divides."""
    prepared = redline.accelerate(make_llama(), make_data(ignored=False), strategy=config, global_batch=GLOBAL_BATCH)
    model, _, loader, _ = prepared
    batch = next(iter(loader))
    model.eval()
    with torch.no_grad():
        alone = model(**batch)
        few = model(**{name: each[:second] for name, each in batch.items()})
    model.train()
    loss = model(**batch)
    return alone.item(), few.item(), loss.item(), alone.requires_grad, loss.requires_grad


def test_without_gradients_any_number_of_samples_is_evaluated():
    from redline.training.data import FromDataset

    alone, few, loss, kept, going = evaluations({"micro_batch": 4}, 8, 3)
    model, batch = make_llama(), FromDataset(make_data(ignored=False))(0, 8)
    assert alone == pytest.approx(model(**batch).loss.item(), rel=1e-6) == loss
    assert few == pytest.approx(model(**{name: each[:3] for name, each in batch.items()}).loss.item(), rel=1e-6)
    seven = evaluations({"micro_batch": 4}, 8, 7)[1]  # micro-batches of 4 and 3
    assert seven == pytest.approx(model(**{name: each[:7] for name, each in batch.items()}).loss.item(), rel=1e-6)
    assert (kept, going) == (False, True)


def halved(config):
    model, optimizer, loader, info = redline.accelerate(
        make_llama(),
        make_data(),
        strategy=config,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=8,
    )
    before = info.state_dict()
    (model(**next(iter(loader))) / 2).backward()
    optimizer.step()
    after = info.state_dict()
    return {name: (after[name] - before[name]).abs().sum() for name in before}


def test_a_loss_that_is_scaled_scales_the_gradients(two):
    from redline.training.data import FromDataset

    model, batch = make_llama(), FromDataset(make_data())(0, 8)
    (model(**batch).loss / 2).backward()
    expected = {name: (0.1 * each.grad).abs().sum() for name, each in model.named_parameters()}
    for found in (halved({"micro_batch": 8}), two.run(halved, {"pp": 2, "micro_batch": 2})[0]):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


def test_learning_rate_schedulers_of_pytorch_work_on_the_optimizer():
    model, optimizer, loader, _ = redline.accelerate(
        make_llama(), make_data(), strategy={"micro_batch": 2}, optimizer=make_optimizer, global_batch=8
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rates = []
    for batch in loader:
        model(**batch).backward()
        rates.append(optimizer.optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1e-3, 5e-4, 1e-3 / 3])


def test_info_clips_over_all_ranks(two):
    def norms(config):
        model, _, loader, info = redline.accelerate(make_llama(), make_data(), strategy=config, global_batch=8)
        model(**next(iter(loader))).backward()
        return float(info.clip(0.1)), float(info.clip(1.0)), info.grad_norm

    from redline.training.data import FromDataset

    model = make_llama()
    model(**FromDataset(make_data())(0, 8)).loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    for config in ({"tp": 2, "micro_batch": 8}, {"dp": 2, "zero": 3}, {"pp": 2, "micro_batch": 4}):
        first, second, told = two.run(norms, config)[0]
        assert first == pytest.approx(norm, rel=1e-5)
        assert second == told == pytest.approx(0.1, rel=1e-3)


# --- which configuration ---------------------------------------------------------------------------------------------


def test_without_a_strategy_the_estimate_decides():
    prepared = redline.accelerate(make_llama(), make_data(), global_batch=8)
    assert prepared.info.why.startswith("the estimate's best of ")
    assert prepared.info.predicted > 0
    assert prepared.info.samples_per_step == 8


def test_fixed_knobs_are_kept():
    info = redline.accelerate(make_llama(), make_data(), global_batch=8, fix={"micro_batch": 2, "fusion": False}).info
    assert (info.config["micro_batch"], info.config["grad_accum"], info.config["fusion"]) == (2, 4, False)


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


def test_the_best_yaml_of_a_workload_of_ones_own_serves_its_model(tmp_path):
    """Of which it knows no name: the loop has it."""
    own = redline.Workload(model=Net, batch=lambda size, seed: (torch.ones(size, 6),), loss=own_sum, global_batch=8)
    result = redline.tune(own, fix={"micro_batch": 2}, trials=1, devices=1, out=tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    copied = tmp_path / "elsewhere" / "best.yaml"
    copied.write_bytes((tmp_path / "run" / "best.yaml").read_bytes())
    for strategy in (tmp_path / "run", copied):
        found = redline.accelerate(Net(), make_points(), strategy=strategy, loss=cross_entropy, global_batch=8)
        assert found.info.config == dict(result.best.config)


def own_sum(output, batch):
    return output.sum(dim=1).mean()


def test_a_best_yaml_that_was_copied_says_what_to_train(tmp_path):
    from redline.tuner.train.strategy import read_source

    redline.tune(
        "llama-tiny", seq_len=32, global_batch=4, fix={"precision": "fp32"}, trials=1, devices=1, out=tmp_path / "run"
    )
    (tmp_path / "best-of-all.yaml").write_bytes((tmp_path / "run" / "best.yaml").read_bytes())
    assert read_source(tmp_path / "best-of-all.yaml") == read_source(tmp_path / "run")


def test_a_best_yaml_for_other_devices_is_planned_anew(tmp_path):
    found = best_yaml(tmp_path, 4, dp=4, micro_batch=2, grad_accum=1)
    info = redline.accelerate(make_llama(), make_data(), strategy=found, global_batch=8).info
    assert "which is for 4 devices" in info.why
    assert info.config["micro_batch"] * info.config["grad_accum"] == 8


# --- what is refused -------------------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from make_data()


REFUSED = {
    "an iterable": ({"dataset": Stream()}, "Stream cannot be read by number.*__len__ and __getitem__"),
    "a loader": ({"dataset": torch.utils.data.DataLoader(make_data())}, "a DataLoader decides on batches.*collate_fn"),
    "an empty one": ({"dataset": [{}][:0]}, "list that is to be trained on is empty"),
    "text": ({"dataset": [{"input_ids": "abc"}] * 8}, "part 'input_ids' of a sample is a str.*collate="),
    "lengths": (
        {"dataset": [{"input_ids": [1] * (2 + n), "labels": [1] * (2 + n)} for n in range(9)]},
        r"part 'input_ids' of the samples has the shapes \(2,\) and \(3,\).*pad",
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
def test_what_cannot_be_trained_is_refused_in_words(what):
    changed, message = REFUSED[what]
    given = {
        "model": make_llama() if "model" not in changed else None,
        "dataset": make_data(),
        "global_batch": 8,
        **changed,
    }
    with pytest.raises(UsageError, match=message):
        redline.accelerate(given.pop("model"), given.pop("dataset"), **given)


def test_a_module_without_data_is_refused():
    with pytest.raises(UsageError, match="Net is a module of your own: give a dataset"):
        redline.accelerate(Net(), loss=cross_entropy)


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
    optimizer.zero_grad()  # drops them
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


def test_what_rank_0_refuses_all_ranks_refuse(two):
    said = two.run(refused_on_all, "nowhere")
    assert said[0] == said[1] != ""


# --- under a launcher ------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, redline as rl
sys.path.insert(0, {tests!r})
from test_accelerate import make_data, make_llama, make_optimizer
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
@pytest.mark.parametrize(
    "how", ["fix={'fusion': False}", "trials=2, fix={'fusion': False}", "strategy=['zero2', 'checkpoint']"]
)
def test_torchrun_starts_the_same_loop(how, tmp_path):
    """By estimate, by dry runs that rank 0 makes on both devices, and by a list."""
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), how=how))
    parent = str(Path(redline.__file__).parent.parent)
    line = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*line, "--nproc-per-node", "2", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "PYTHONPATH": parent, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (each for each in done.stdout.splitlines() if each.startswith("LOSS"))
    _, loss, size, why = line.split(" ", 3)
    expected = plain(make_llama(), make_data(), own_loss, steps=3, clip=None)[0][-1]
    assert (float(loss), size) == (pytest.approx(expected, rel=1e-2), "2")  # the search may choose bf16
    assert ("of 2 dry runs" in why) == ("trials" in how)
