"""A user's own loop trains the same weights through `redline.accelerate` as in plain PyTorch."""

import functools

import pytest
import redline
import torch
from own_loops import (
    CLIP,
    GLOBAL_BATCH,
    STEPS,
    Net,
    cross_entropy,
    make_data,
    make_llama,
    make_optimizer,
    make_points,
    own_loss,
    plain,
)
from redline.base.errors import StudyError
from tiers import tiered
from torch import nn

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
"""Tolerance of weights after five steps, which move them by 5e-3: some units in the last place of float32."""
STRATEGIES = {
    "one": (1, {"micro_batch": 2}),
    "tp2": (2, {"tp": 2, "micro_batch": 4}),
    "zero1": (2, {"dp": 2, "zero": 1, "micro_batch": 2}),
    "zero3": (2, {"dp": 2, "zero": 3, "micro_batch": 2}),
    "pp2": (2, {"pp": 2, "micro_batch": 2}),
    "tp2·pp2": (4, {"tp": 2, "pp": 2, "micro_batch": 2}),
}


def turns(prepared, steps=STEPS):
    """Runs the loop on what `accelerate` returned. Returns the losses and, on rank 0, the weights."""
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
    """Calls a function on so many ranks and returns rank 0's result."""
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


@pytest.mark.parametrize("strategy", tiered(["zero3", "pp2"], ["one", "tp2", "zero1", "tp2·pp2"]))
def test_a_built_hugging_face_module_trains_as_in_plain_pytorch(strategy, request):
    """The model has its own weights, labels are uneven, gradients are clipped, and an epoch ends between steps."""
    ranks, config = STRATEGIES[strategy]
    hold(on(ranks, request, llama_turns, config), plain(make_llama(), make_data(), own_loss))


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
    from redline.trainer.data import FromDataset

    first = FromDataset(points, seed=7)(0, GLOBAL_BATCH)
    assert found[0][0] == pytest.approx(cross_entropy(net(first[0]), first).item(), rel=1e-6)


def half_frozen(config):
    model = make_llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    given = {"optimizer": make_optimizer, "global_batch": GLOBAL_BATCH, "clip": CLIP}
    return turns(redline.accelerate(model, make_data(), strategy=config, **given))


@pytest.mark.parametrize("config", [{"micro_batch": 2}, {"micro_batch": 8}], ids=str)
def test_a_stage_may_have_nothing_to_train(two, config):
    hold(two.run(half_frozen, {"pp": 2, **config})[0], half_frozen({"micro_batch": 8}))


def order(config):
    prepared = redline.accelerate(make_llama(), make_data(), strategy=config, global_batch=GLOBAL_BATCH)
    seen = []
    for _ in range(3):
        seen.append([batch["input_ids"][:, :3].tolist() for batch in prepared.loader])
    return seen


def test_batches_follow_from_the_seed_alone(two):
    alone = order({"micro_batch": 8})
    # 20 samples are two and a half steps: the third straddles two epochs, and belongs to the first.
    assert [len(each) for each in alone] == [3, 2, 3]
    halves = two.run(order, {"dp": 2, "micro_batch": 2})
    joined = [[a + b for a, b in zip(*epoch)] for epoch in zip(*halves)]
    assert joined == alone
    piped = two.run(order, {"pp": 2, "micro_batch": 4})
    assert piped[0] == piped[1] == alone


def fetched_by_zip(loader):
    yield from (batch for batch, _ in zip(loader, range(4)))


def fetched_ahead(loader):
    waiting = []
    for batch in loader:
        waiting.append(batch)
        if len(waiting) > 2:
            yield waiting.pop(0)
    yield from waiting


@pytest.mark.parametrize("fetched", [fetched_by_zip, fetched_ahead])
def test_a_batch_that_was_fetched_and_not_trained_on_is_the_next_one(tmp_path, fetched):
    def trained(batches, steps):
        """Losses of so many steps; an epoch has 64 / 8 steps."""
        model, optimizer, loader, _ = prepared
        losses = []
        for batch in batches(loader):
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == steps and batches is not fetched_by_zip:  # this ends by itself, with a fifth batch
                break
        return losses

    def made():
        data = [make_data()[number % 20] for number in range(64)]
        return redline.accelerate(make_llama(), data, strategy={"micro_batch": 8}, global_batch=8)

    prepared = made()
    whole = trained(iter, 8)
    prepared = made()
    first = trained(fetched, 4)
    assert prepared.loader.position == 32 and len(prepared.loader) == 4
    prepared.info.save(tmp_path / "saved")
    assert first + trained(iter, 4) == whole, "the next loop"
    prepared = made()
    assert prepared.info.load(tmp_path / "saved") and prepared.loader.position == 32
    assert first + trained(iter, 4) == whole, "whoever loads it"


def interrupted(config, folder, first):
    given = {"optimizer": make_optimizer, "global_batch": GLOBAL_BATCH, "clip": CLIP}
    prepared = redline.accelerate(make_llama(0 if first else 9), make_data(), strategy=config, **given)
    assert prepared.info.load(folder) is not first
    found = turns(prepared, 3 if first else STEPS - 3)
    prepared.info.save(folder)
    return found


def test_a_checkpoint_resumes_in_another_configuration(two, tmp_path):
    expected = plain(make_llama(), make_data(), own_loss)
    before = two.run(interrupted, {"dp": 2, "zero": 3, "micro_batch": 2}, tmp_path / "saved", True)[0]
    behind = two.run(interrupted, {"tp": 2, "micro_batch": 4}, tmp_path / "saved", False)[0]
    hold((before[0] + behind[0], behind[1]), expected)
    assert sorted(each.name for each in (tmp_path / "saved").iterdir()) == ["step-00000003", "step-00000005"]


def test_a_checkpoint_replaces_only_its_own_predecessors(tmp_path):
    config = {"strategy": {"micro_batch": 8}, "global_batch": 8}
    saved = tmp_path / "saved"
    before = redline.accelerate(make_llama(), make_data(), **config)
    for _ in range(3):
        turns(before, 1)
        assert before.info.save(saved, keep=2).name == f"step-{before.info.step:08d}"
    assert sorted(each.name for each in saved.iterdir()) == ["step-00000002", "step-00000003"]
    # The new run starts from the first step and does not continue the existing one.
    again = redline.accelerate(make_llama(), make_data(), **config)
    turns(again, 1)
    with pytest.raises(
        StudyError, match=r"contains checkpoints of later steps \(3, 2\) than this one, 1, .*info\.load before"
    ):
        again.info.save(saved, keep=1)
    assert sorted(each.name for each in saved.iterdir()) == ["step-00000002", "step-00000003"]
    continued = redline.accelerate(make_llama(), make_data(), **config)
    assert continued.info.load(saved)
    turns(continued, 1)
    assert continued.info.save(saved, keep=2) == saved / "step-00000004"
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000003", "step-00000004"]


def evaluations(config, first, second):
    """Losses of a step, first without gradients, and of a number of samples that no micro-batch divides."""
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
    from redline.trainer.data import FromDataset

    alone, few, loss, kept, going = evaluations({"micro_batch": 4}, 8, 3)
    model, batch = make_llama(), FromDataset(make_data(ignored=False))(0, 8)
    assert alone == pytest.approx(model(**batch).loss.item(), rel=1e-6) == loss
    assert few == pytest.approx(model(**{name: each[:3] for name, each in batch.items()}).loss.item(), rel=1e-6)
    seven = evaluations({"micro_batch": 4}, 8, 7)[1]  # micro-batches of 4 and 3
    assert seven == pytest.approx(model(**{name: each[:7] for name, each in batch.items()}).loss.item(), rel=1e-6)
    assert (kept, going) == (False, True)


def test_neither_an_evaluation_nor_a_restart_changes_what_is_dropped(tmp_path):
    """Results are equal bit for bit; evaluations run with dropout, too."""

    def losses(steps, load=False, evaluate=False, dropout=0.5):
        model = make_llama(attention_dropout=dropout)
        given = {"optimizer": make_optimizer, "global_batch": GLOBAL_BATCH}
        prepared = redline.accelerate(model, make_data(), strategy={"micro_batch": 4, "attention": "eager"}, **given)
        assert prepared.info.load(tmp_path) is load
        found = []
        for _ in range(steps):
            found += turns(prepared, 1)[0]
            if evaluate:
                with torch.no_grad():
                    prepared.model(**make_batch(3))
        return found, prepared.info

    whole, _ = losses(4)
    assert whole != losses(4, dropout=0.0)[0], "something is dropped"
    first, info = losses(2, evaluate=True)
    info.save(tmp_path)
    assert first + losses(2, load=True, evaluate=True)[0] == whole


def make_batch(samples):
    from redline.trainer.data import FromDataset

    return FromDataset(make_data())(0, samples)


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
    from redline.trainer.data import FromDataset

    model, batch = make_llama(), FromDataset(make_data())(0, 8)
    (model(**batch).loss / 2).backward()
    expected = {name: (0.1 * each.grad).abs().sum() for name, each in model.named_parameters()}
    for found in (halved({"micro_batch": 8}), two.run(halved, {"pp": 2, "micro_batch": 2})[0]):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


def padded(samples):
    """Makes a batch as long as the longest of its samples."""
    longest = max(len(each) for each in samples)
    tokens = torch.stack([nn.functional.pad(each, (0, longest - len(each)), value=1) for each in samples])
    return {"input_ids": tokens, "labels": tokens}


def mixture_turns(config):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    samples = [torch.randint(64, (4 + 3 * number,)) for number in range(8)]
    given = {"optimizer": make_optimizer, "global_batch": 8, "seq_len": 32, "shuffle": False, "collate": padded}
    return turns(redline.accelerate(model, samples, strategy=config, **given), 2)


def test_ranks_that_share_experts_with_a_capacity_may_have_batches_of_unlike_lengths(two):
    config = {"dp": 2, "micro_batch": 2, "capacity_factor": 1.0}
    hold(two.run(mixture_turns, {**config, "ep": 2})[0], two.run(mixture_turns, config)[0])


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

    from redline.trainer.data import FromDataset

    model = make_llama()
    model(**FromDataset(make_data())(0, 8)).loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    for config in ({"tp": 2, "micro_batch": 8}, {"dp": 2, "zero": 3}, {"pp": 2, "micro_batch": 4}):
        first, second, reported = two.run(norms, config)[0]
        assert first == pytest.approx(norm, rel=1e-5)
        assert second == reported == pytest.approx(0.1, rel=1e-3)


def test_a_project_s_own_folder_is_no_place_for_checkpoints(tmp_path, monkeypatch):
    for name in (".git/HEAD", "frozen/lake.txt", "train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    monkeypatch.chdir(tmp_path)
    prepared = redline.accelerate(make_llama(), make_data(), strategy={"micro_batch": 4}, global_batch=GLOBAL_BATCH)
    with pytest.raises(
        StudyError, match=r"contains \.git, frozen, train\.py and no checkpoint.*give one that is new or empty"
    ):
        prepared.info.save(".")
    assert all((tmp_path / name).read_text() == "mine" for name in (".git/HEAD", "frozen/lake.txt", "train.py"))
    assert prepared.info.save("saved").is_dir()
