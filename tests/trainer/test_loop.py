"""The loop: its samples, their weights, the updates and the end are the same for every configuration."""

import json
import math
import os
import signal
from dataclasses import replace
from itertools import chain

import pytest
import torch
from redline.base.errors import Diverged, UsageError
from redline.models.layouts.dcp import dcp_tensors
from redline.trainer.checkpoint.saver import CheckpointFolder
from redline.trainer.data import DataPlan, prepare
from redline.trainer.loop import Hyperparameters
from redline.trainer.program import _stop_requested
from texts import TOPICS
from tiers import tiered
from trainings import built, part, place, unequal

HYPER = Hyperparameters(steps=6, lr=1e-3, warmup=2)
PARTS = {
    "tp2": {"tp": 2},
    "dp2": {"dp": 2, "micro_batch": 2},
    "zero1": {"dp": 2, "zero": 1, "micro_batch": 2},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3, "micro_batch": 1},
    "pp2": {"pp": 2, "grad_accum": 4, "pipeline_schedule": "1f1b"},
    "tp2·pp2": {"tp": 2, "pp": 2, "grad_accum": 4, "pipeline_schedule": "1f1b"},
    "tp2·zero3": {"tp": 2, "dp": 2, "zero": 3},
}


def ranks(config):
    return math.prod(config.get(name, 1) for name in ("tp", "pp", "dp"))


@pytest.fixture
def run(two, four):
    """Returns `run(config, function)`, which returns rank 0's result on the ranks of `config`; `all=True` returns every
    rank's."""

    def go(config, function, all=False):
        size = ranks(config)
        found = [function()] if size == 1 else {2: two, 4: four}[size].run(function)
        return found if all else found[0]

    return go


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns `read(**plan)`, which reads samples of English texts by bytes; their cache exists before ranks read it."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts.txt").write_text("\n".join(TOPICS)[:60_000])
    lines = [json.dumps({"text": text[: 1 + 7 * number % 19]}) for number, text in enumerate(TOPICS * 3)]
    (folder / "lines.jsonl").write_text("\n".join(lines))

    def reader(name="texts.txt", seq_len=16, **plan):
        def read():
            asked = DataPlan(paths=(str(folder / name),), **plan)
            return prepare(asked, seq_len=seq_len, task="causal", vocab_size=300, cache=folder / "cache")

        read()
        return read

    return reader


# -- samples -------------------------------------------------------------------------------------------------


def seen(workload, config, read, **more):
    """Returns the part, this rank's replica, and the samples that its model got at each step."""
    steps = []

    def watch(training):
        inner = training.micro_batches
        training.micro_batches = lambda share: steps.append(share["input_ids"].tolist()) or inner(share)
        steps.append(training.world.dp_rank)

    found = part(workload, config, samples=read(), watch=watch, **more)
    return found, steps[0], steps[1:]


def together(everybody):
    """Returns the samples of each step over all replicas in order; asserts that ranks of a replica got the same."""
    replicas = {}
    for _, replica, steps in everybody:
        assert replicas.setdefault(replica, steps) == steps
    return [list(chain(*shares)) for shares in zip(*(replicas[each] for each in sorted(replicas)))]


FIVE = [{"micro_batch": 4}, PARTS["tp2"], PARTS["zero3"], PARTS["tp2·pp2"], PARTS["pp2"], {"micro_batch": 2}]


@pytest.mark.parametrize(
    ("ends", "lr"),
    tiered([((5, 11, 16, 20, 26, 32), 1e-2)], [((30, 70, 101, 130, 163, 200), 1e-3)]),
    ids=["32", "200"],
)
def test_samples_are_the_same_when_the_strategy_changes_five_times(small, run, corpus, tmp_path, ends, lr):
    workload, read, steps = small("llama", seq_len=16), corpus(seed=3), ends[-1]
    hyper = Hyperparameters(steps=steps, lr=lr, warmup=10)
    whole, _, expected = seen(workload, {"micro_batch": 8}, read, hyper=hyper)
    given, losses = [], []
    for config, until in zip(FIVE, ends):
        everybody = run(
            config,
            lambda config=config, until=until: seen(
                workload, config, read, hyper=hyper, until=until, begin=tmp_path, save=tmp_path
            ),
            all=True,
        )
        assert {each.step for each, *_ in everybody} == {until}
        given += together(everybody)
        losses += everybody[0][0].losses
    assert given == expected and len(given) == steps
    # These are the samples of the data, each once an epoch.
    samples = read()
    assert samples(0, 8)["input_ids"].tolist() == given[0]
    assert samples(8 * steps - 8, 8)["input_ids"].tolist() == given[-1]
    ids = samples.ids(0, 8 * steps)
    assert len(samples) > 1600 and len(set(ids)) == 8 * steps and (ids[1:] < ids[:-1]).any()
    assert losses == pytest.approx(whole.losses, rel=1e-4)
    assert losses[-1] < losses[0] - 1


# -- weights of samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    tiered([PARTS["zero3"], PARTS["pp2"]], [{"micro_batch": 1}, {"micro_batch": 4}, PARTS["dp2"], PARTS["tp2"]]),
    ids=str,
)
def test_every_token_has_equal_weight_in_uneven_samples(small, run, corpus, config):
    """With padded documents of 1 to 19 bytes the mean over micro-batches differs from that over tokens."""
    workload, read = small("llama"), corpus("lines.jsonl", packing="padded")
    lengths = (read()(0, 8)["labels"] != -100).sum(1)
    assert lengths.min() < 0.3 * lengths.max()
    whole = part(workload, {"micro_batch": 8}, HYPER, samples=read())
    found = run(config, lambda: part(workload, config, HYPER, samples=read()))
    assert found.losses == pytest.approx(whole.losses, rel=2e-6)
    assert found.norms == pytest.approx(whole.norms, rel=1e-4)
    # The loss is the mean over tokens.
    training, batch = built(workload, {"micro_batch": 8}, HYPER), read()(0, 8)
    logits = training.model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100)
    assert whole.losses[0] == pytest.approx(float(expected), rel=1e-6)


# -- updates -------------------------------------------------------------------------------------------------


def plain_sgd(params):
    return torch.optim.SGD(
        params, lr=0.5
    )  # unlike AdamW it depends on the scale of gradients, so that a wrong scale shows


def reference(workload, clip, steps):
    """Runs a plain loop with torch's own clipping; returns losses and norms."""
    training = built(workload, {"micro_batch": 8}, HYPER)
    losses, norms = [], []
    from redline.trainer.data import FromWorkload

    samples = FromWorkload(workload)
    for step in range(steps):
        loss = training.passes([samples(8 * step, 8)])
        norms.append(float(torch.nn.utils.clip_grad_norm_(training.model.parameters(), clip)))
        losses.append(float(loss))
        training.optimizer.step()
        training.optimizer.zero_grad()
    return losses, norms


QUICK = {"gpt2": ("tp2", "pp2"), "llama": ("zero3", "tp2·pp2")}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param(family, config, id=f"{family}-{name}", marks=() if name in QUICK[family] else pytest.mark.slow)
        for family in QUICK
        for name, config in {"one": {"micro_batch": 8}, **PARTS}.items()
    ],
)
def test_gradients_are_clipped_by_their_norm_over_every_axis_as_torch_does(small, run, family, config):
    """GPT-2's embedding is tied; in a pipeline two stages hold it."""
    workload = replace(small(family), optimizer=plain_sgd)
    losses, norms = reference(workload, 0.1, 4)
    assert min(norms) > 0.3 and len({round(each, 4) for each in losses}) == 4
    hyper = Hyperparameters(steps=4, clip=0.1, lr_schedule="constant")
    found = run(config, lambda: part(workload, config, hyper))
    assert found.norms == pytest.approx(norms, rel=2e-5)
    assert found.losses == pytest.approx(losses, rel=2e-6)
    unclipped = run(config, lambda: part(workload, config, replace(hyper, clip=0.0)))
    assert unclipped.norms[0] == pytest.approx(norms[0], rel=2e-5)
    assert abs(unclipped.losses[3] - losses[3]) > 1e-3


def decaying(workload, config):
    training = built(workload, config, replace(HYPER, weight_decay=0.3))
    names = {each: name for name, each in training.model.named_parameters()}
    decays, stays = {}, {}
    for group in training.optimizer.param_groups:
        for each in group["params"]:
            (decays if group["weight_decay"] else stays)[names[each]] = group["weight_decay"]
    return decays, stays


@pytest.mark.parametrize("name", ["tp2", "zero3"])
def test_weight_matrices_decay_and_nothing_else(small, two, name):
    workload = small("gpt2")
    decays, stays = decaying(workload, {"micro_batch": 8})
    assert set(decays.values()) == {0.3} and set(stays.values()) == {0.0}
    assert {name.rpartition(".")[2] for name in stays} == {"weight", "bias"}
    assert all("ln_" in each or each.endswith("bias") for each in stays)
    assert all(each.endswith("weight") and "ln_" not in each for each in decays)
    for found in two.run(lambda: decaying(workload, PARTS[name])):
        assert found == (decays, stays)


@pytest.mark.parametrize(
    ("schedule", "middle", "late", "end"),
    [
        ("constant", 1.0, 1.0, 1.0),
        ("linear", 0.55, 0.19, 0.1 + 0.9 / 90),
        ("cosine", 0.55, 0.1 + 0.45 * (1 + math.cos(0.9 * math.pi)), 0.1 + 0.45 * (1 + math.cos(math.pi * 89 / 90))),
        ("wsd", 1.0, 0.55, 0.1 + 0.9 / 90 / 0.2),
    ],
)
def test_the_learning_rate_is_what_its_name_says(schedule, middle, late, end):
    hyper = Hyperparameters(steps=100, warmup=10, lr_schedule=schedule, min_lr=0.1, decay=0.2)
    assert [hyper.lr_factor(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert hyper.lr_factor(10) == 1.0
    # At the middle after the warm-up, at nine tenths, and at the last step.
    assert [hyper.lr_factor(step) for step in (55, 91, 99)] == pytest.approx([middle, late, end])
    # Beyond the planned steps the factor stays at its last value.
    least = 1.0 if schedule == "constant" else 0.1
    assert [hyper.lr_factor(step) for step in (100, 5000)] == pytest.approx([least] * 2)
    values = [hyper.lr_factor(step) for step in range(10, 100)]
    assert values == sorted(values, reverse=True)


def test_an_own_optimizer_s_learning_rates_keep_their_ratio(small):
    def two_rates(params):
        first, *rest = params
        return torch.optim.SGD([{"params": [first], "lr": 1e-3}, {"params": rest, "lr": 4e-3}], lr=1.0)

    rates = []

    def watch(training):
        inner = training.update
        groups = training.optimizer.param_groups
        training.update = lambda adjust: inner(adjust) or rates.append([each["lr"] for each in groups])

    part(replace(small("llama"), optimizer=two_rates), {"micro_batch": 8}, HYPER, watch=watch)
    assert rates == [pytest.approx([1e-3 * HYPER.lr_factor(step), 4e-3 * HYPER.lr_factor(step)]) for step in range(6)]


# -- evaluation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=() if name in ("zero3", "pp2") else pytest.mark.slow)
        for name, config in PARTS.items()
    ],
)
def test_evaluations_are_equal_under_every_strategy(small, run, corpus, config):
    workload, read = small("llama"), corpus("lines.jsonl", packing="padded", held_out=0.2)
    plan = {"eval_every": 3, "eval_steps": 2}
    whole = part(workload, {"micro_batch": 8}, HYPER, samples=read(), **plan)
    found = run(config, lambda: part(workload, config, HYPER, samples=read(), **plan))
    assert found.of("evaluation", "step") == [3, 6] and found.of("evaluation", "steps") == [2, 2]
    assert found.of("evaluation", "loss") == pytest.approx(whole.of("evaluation", "loss"), rel=1e-5)
    assert whole.of("evaluation", "loss") != whole.losses[2::3]


@pytest.mark.parametrize("config", tiered([{"micro_batch": 4}, PARTS["pp2"]], [PARTS["zero3"]]), ids=str)
def test_an_evaluation_changes_nothing_of_the_training(small, run, tmp_path, config):
    """Bit for bit, with dropout, and with held-out samples from a workload's own function."""
    workload = small("gpt2", resid_pdrop=0.3)

    def losses(**plan):
        found = run(config, lambda: part(workload, config, HYPER, save=tmp_path / str(plan), **plan))
        held = dcp_tensors(CheckpointFolder(tmp_path / str(plan)).all()[0].path)
        return found.losses, {name: each.read() for name, each in held.items()}

    (plain, weights), (between, same) = losses(), losses(eval_every=2, eval_steps=2)
    assert between == plain
    assert unequal(weights, same) == []


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_an_evaluation_is_the_mean_loss_of_what_is_held_out(small, corpus, packing):
    workload, samples = small("llama", seq_len=16), corpus("lines.jsonl", packing=packing, held_out=0.2)()
    hyper = Hyperparameters(steps=2, lr=1e-2)
    found = part(workload, {"micro_batch": 4}, hyper, samples=samples, eval_every=2, eval_steps=2)
    training = built(workload, {"micro_batch": 4}, hyper)
    training.model.load_state_dict(found.weights)
    batch = samples.evaluation(0, 2 * training.samples_per_step)
    counts = (batch["labels"][:, 1:] != -100).sum(1).reshape(2, -1).sum(1)
    assert (counts[0] != counts[1]) == (packing == "padded"), "of unlike batches"
    logits = training.model.eval()(**{name: each for name, each in batch.items() if name != "labels"}).logits
    logits = logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())
    assert found.of("evaluation", "loss") == pytest.approx([expected.item()], rel=1e-6)


def test_evaluations_drop_nothing(small):
    hyper = Hyperparameters(steps=3, lr=1e-12)
    dropping = part(small("gpt2", resid_pdrop=0.5, embd_pdrop=0.5), {"micro_batch": 4}, hyper, eval_every=1)
    plain = part(small("gpt2"), {"micro_batch": 4}, hyper, eval_every=1)
    assert dropping.of("evaluation", "loss") == pytest.approx(plain.of("evaluation", "loss"), rel=1e-6)
    assert max(abs(one - other) for one, other in zip(dropping.losses, plain.losses, strict=True)) > 1e-3


# -- the end of a training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_that_one_rank_hears_ends_all_at_the_same_step_with_a_checkpoint(two, small, tmp_path, rank):
    def stop(loop):
        return place()[0] == rank and loop.step >= 3

    hyper = Hyperparameters(steps=50)
    found = two.run(lambda: part(small("llama"), {"dp": 2}, hyper, save=tmp_path, stop=stop))
    (step,) = {each.step for each in found}
    assert 3 < step <= 7 and all(each.stopped and not each.failure for each in found)
    assert [each.step for each in CheckpointFolder(tmp_path).all()] == [step]
    assert found[0].of("end") == [{"kind": "end", "step": step, "stopped": True, "failure": ""}]
    # Steps that were not logged yet are logged at the end.
    assert found[0].of("step", "step")[-1] == step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signals_and_a_stop_file_end_the_training(tmp_path, number):
    before = signal.getsignal(number)
    with _stop_requested(tmp_path) as stop_requested:
        assert not stop_requested()
        os.kill(os.getpid(), number)
        assert stop_requested()
    assert signal.getsignal(number) == before
    with _stop_requested(tmp_path) as stop_requested:
        assert not stop_requested()
        (tmp_path / "stop").touch()
        assert stop_requested()
    with _stop_requested(None) as stop_requested:  # only the first rank watches the file
        assert not stop_requested()
        os.kill(os.getpid(), number)
        assert stop_requested()


def poisoned(step, rank=0, gradient=False):
    """Returns a watch function that sets a weight of a rank, or its gradient, to nan at a step."""

    def watch(training):
        inner, weight = training.reseed, next(iter(training.model.parameters()))

        def reseed(now):
            inner(now)
            if now == step - 1 and place()[0] == rank:
                if gradient:
                    weight.register_hook(lambda grad: grad * math.nan)
                else:
                    with torch.no_grad():
                        weight.mul_(math.nan)

        training.reseed = reseed

    return watch


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize(
    ("config", "rank", "plan"),
    tiered(
        [
            ({"micro_batch": 4}, 0, {"save_every": 1, "log_every": 50}),
            (PARTS["dp2"], 1, {"save_every": 2, "eval_every": 5, "log_every": 50}),
        ],
        [
            ({"micro_batch": 4}, 0, {"save_every": 2, "eval_every": 5, "log_every": 50}),
            (PARTS["dp2"], 1, {"save_every": 1, "log_every": 50}),
        ],
    ),
)
def test_checkpoints_of_non_finite_steps_are_not_kept(small, run, tmp_path, config, rank, what, plan):
    hyper, gradient = Hyperparameters(steps=20), what == "gradient"

    def go():
        with pytest.raises(Diverged) as ended:
            part(small("llama"), config, hyper, save=tmp_path, watch=poisoned(5, rank, gradient), **plan)
        return str(ended.value)

    for text in run(config, go, all=True):
        message = "the gradients of step 5 are not finite" if gradient else "the loss of step 5 is nan"
        assert text == f"{message}: the checkpoint of step 4 was saved before; a lower --lr or a longer warmup may help"
    for each in CheckpointFolder(tmp_path).all():
        assert each.step <= 4
        assert all(stored.read().isfinite().all() for stored in dcp_tensors(each.path).values())


def test_a_training_without_a_checkpoint_says_so(small, tmp_path):
    with pytest.raises(Diverged, match="the loss of step 2 is nan: nothing was saved before"):
        part(small("llama"), {"micro_batch": 4}, HYPER, save=tmp_path, watch=poisoned(2))
    with pytest.raises(Diverged, match="the loss of step 2 is nan: nothing was saved before"):
        part(small("llama"), {"micro_batch": 4}, HYPER, watch=poisoned(2))


# -- invalid hyperparameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr_schedule": "cosin"}, "unknown lr_schedule 'cosin'; did you mean 'cosine'?"),
        ({"lr": 0.0}, "lr must be above 0, but got 0.0"),
        ({"lr": math.nan}, "lr must be above 0, but got nan"),
        ({"steps": 0}, "steps must be a whole number of at least 1, but got 0"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0, but got -1"),
        ({"min_lr": 1.5}, "min_lr must be a share from 0 to 1, but got 1.5"),
        ({"decay": 0.0}, "decay must be a share above 0, of at most 1, but got 0.0"),
        ({"clip": -1.0}, "clip must be at least 0, but got -1.0"),
        ({"clip": math.nan}, "clip must be at least 0, but got nan"),
        ({"weight_decay": math.nan}, "weight_decay must be at least 0, but got nan"),
    ],
    ids=str,
)
def test_hyperparameters_out_of_range_are_refused(given, message):
    with pytest.raises(UsageError) as refused:
        Hyperparameters(**given)
    assert message in str(refused.value)


def test_an_own_optimizer_may_have_no_rate_or_one_in_a_tensor(small):
    class Relative(torch.optim.SGD):
        """Computes its own learning rate, as transformers.Adafactor does."""

        def __init__(self, params):
            super().__init__(params, lr=1e-3)
            self.param_groups[0]["lr"] = None

        def step(self, closure=None):
            self.param_groups[0]["lr"] = 1e-3
            super().step(closure)
            self.param_groups[0]["lr"] = None

    found = part(replace(small("llama"), optimizer=Relative), {"micro_batch": 8}, HYPER)
    assert found.of("step", "lr") == [None] * HYPER.steps and all(map(math.isfinite, found.losses))

    rates = []

    def tensor_rate(params):
        made = torch.optim.Adam(params, lr=torch.tensor(1e-3), capturable=False, foreach=False)
        rates.append(made.param_groups[0]["lr"])
        return made

    found = part(replace(small("llama"), optimizer=tensor_rate), {"micro_batch": 8}, HYPER)
    expected = [1e-3 * HYPER.lr_factor(step) for step in range(HYPER.steps)]
    assert found.of("step", "lr") == pytest.approx(expected, rel=1e-6)
    assert rates[0].item() == pytest.approx(expected[-1], rel=1e-6), "the tensor that the optimizer reads is filled"
