"""fused_loss: the cross-entropy of a head, and its gradients, without the logits of a micro-batch."""

import copy

import pytest
import redline as rl
import torch
from live import Live
from numeric import gradients, same, within
from redline.base.errors import ScheduleError
from redline.schedule import comparison
from redline.schedule.primitives.fused_loss import FusedLogits, formed, formed_for, most_chunk
from torch import nn
from torch.nn import functional as F

H, V = 16, 97


class Model(nn.Module):
    """A small language model: hidden states and a head, tied unless it has a bias."""

    def __init__(self, bias=False):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(V, H), nn.Linear(H, H), nn.Linear(H, V, bias=bias)
        if not bias:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def made(seed, bias=False):
    """A model, and a copy with a fused loss."""
    torch.manual_seed(seed)
    plain = Model(bias)
    sch = rl.create_schedule(copy.deepcopy(plain))
    sch["head"].fused_loss()
    return plain, rl.build(sch)[0]


def data(seed, samples, tokens):
    generator = torch.Generator().manual_seed(seed + 1)
    inputs = torch.randint(V, (samples, tokens), generator=generator)
    labels = torch.randint(V, (samples, tokens), generator=generator)
    labels[torch.rand(samples, tokens, generator=generator) < 0.3] = -100
    return inputs, labels


def masked(logits, labels, **options):
    """The loss of BERT and T5."""
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), **options)


def causal(logits, labels):
    """The loss of transformers' ForCausalLMLoss."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return masked(logits.float(), labels)


def shifted(logits, labels):
    """The loss in older models and in many scripts."""
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(logits.flatten(0, 1), labels.flatten())


def summed(logits, labels):
    """The loss with `num_items_in_batch`."""
    return masked(logits, labels, reduction="sum") / labels.numel()


def run(model, loss, inputs, labels, half=False):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        value = loss(model(inputs), labels)
    value.backward()
    return value.detach(), gradients(model)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("bias", [False, True], ids=["tied", "bias"])
@pytest.mark.parametrize("loss", [masked, causal, shifted, summed])
# Two whole chunks and two tokens; three tokens and two.
@pytest.mark.parametrize("shape", [(3, 86), (1, 5)], ids=str)
def test_loss_and_gradients_are_those_of_formed_logits(seed, shape, loss, bias, half):
    plain, fused = made(seed, bias)
    inputs, labels = data(seed, *shape)
    expected, found = run(plain, loss, inputs, labels, half), run(fused, loss, inputs, labels, half)
    assert formed_for(fused.head) == {"cross_entropy": False}
    assert found[0].dtype == expected[0].dtype == torch.float32
    allowed = comparison.allowance(plain, labels.numel(), dtype=torch.bfloat16 if half else None)
    within(abs(found[0] / expected[0] - 1), comparison.loss_allowance(allowed, labels.numel()), "the loss")
    same(found[1], expected[1], allowed)


def test_only_ignored_tokens_give_a_nan_mean_and_zero_gradient(seed):
    plain, fused = made(seed)
    inputs, labels = data(seed, 2, 40)
    labels.fill_(-100)
    expected, found = run(plain, masked, inputs, labels), run(fused, masked, inputs, labels)
    assert expected[0].isnan() and found[0].isnan()
    for grads in (expected[1], found[1]):
        assert all(not each.any() for each in grads.values())


# Memory


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_the_logits_of_a_micro_batch_are_never_there(half):
    plain, fused = made(0)
    inputs, labels = data(0, 8, 128)
    peak, largest = {}, {}
    for model in (plain, fused):
        with Live() as live:
            run(model, causal, inputs, labels, half)
        peak[model], largest[model] = live.peak, live.largest
    logits = inputs.numel() * V * 4
    assert largest[plain] >= logits and peak[plain] >= 2 * logits
    # Logits of a chunk, in float32 and in the head's format.
    chunk = most_chunk(H) * V * 6
    assert largest[fused] < logits / 2
    # The rest is hidden states of the three layers with their gradients, and the head's gradient.
    states, head = inputs.numel() * H * 4, V * H * 4
    assert peak[fused] < chunk + 2 * head + 7 * states < peak[plain] / 2


# Other uses of logits


def test_to_look_at_logits_forms_them_with_their_gradient(seed):
    plain, fused = made(seed, bias=True)
    inputs, _ = data(seed, 2, 40)
    expected, found = plain(inputs), fused(inputs)
    assert isinstance(found, FusedLogits)
    assert (found.shape, found.dtype, found.device, found.dim()) == (
        expected.shape, expected.dtype, expected.device, 3,
    )  # fmt: skip
    assert formed_for(fused.head) == {}
    same(found * 1, expected, comparison.allowance(plain, 1))
    assert formed_for(fused.head) == {"mul": True}
    for logits in (expected, found):
        (torch.log_softmax(logits, -1)[..., 3].sum() + logits.argmax(-1).sum()).backward()
    same(gradients(fused), gradients(plain), comparison.allowance(plain, inputs.numel()))


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": 0.1}, {"reduction": "none"}, {"weight": torch.linspace(0.5, 1, V)}],
    ids=str,
)
def test_a_loss_that_is_not_fused_is_right_all_the_same(seed, options):
    plain, fused = made(seed)
    inputs, labels = data(seed, 2, 40)
    labels[labels < 0] = 5
    loss = lambda logits, labels: masked(logits, labels, **options).mean()  # noqa: E731
    expected, found = run(plain, loss, inputs, labels), run(fused, loss, inputs, labels)
    same(found[1], expected[1], comparison.allowance(plain, labels.numel()))
    assert formed_for(fused.head)["cross_entropy"] is True


@pytest.mark.parametrize(
    ("take", "stays"),
    [
        (lambda z: z[:, 1:], True), (lambda z: z[0], True), (lambda z: z[..., -1, :], True),
        (lambda z: z[..., 1], False), (lambda z: z[:, :, :5], False),
        (lambda z: z[z.new_ones(2, 3).bool()], False), (lambda z: z.to(torch.bfloat16), True),
        (lambda z: z.to("cpu"), True), (lambda z: z.view(6, V), True), (lambda z: z.reshape(-1, 3, V), True),
        (lambda z: z.view(-1), False), (lambda z: z.flatten(), False), (lambda z: z.transpose(1, 2), False),
    ],
)  # fmt: skip
def test_a_part_of_the_tokens_stays_unformed_and_a_part_of_the_vocabulary_does_not(seed, take, stays):
    plain, fused = made(seed)
    inputs, _ = data(seed, 2, 3)
    expected, found = take(plain(inputs)), take(fused(inputs))
    assert isinstance(found, FusedLogits) is stays
    assert found.shape == expected.shape and found.dtype == expected.dtype
    same(formed(found), expected, comparison.allowance(plain, 1, dtype=expected.dtype))


# The schedule


def test_verify_holds_and_names_in_the_state_stay():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=V, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config)
    names = list(model.state_dict())
    sch = rl.create_schedule(model)
    tokens = torch.randint(V, (3, 31))
    with rl.verify(sch, {"input_ids": tokens, "labels": tokens}):
        sch["lm_head"].fused_loss()
    model, _ = rl.build(sch)
    assert list(model.state_dict()) == names
    assert isinstance(model(input_ids=tokens).logits, FusedLogits)
    assert [each.primitive for each in sch.tree.steps] == ["fused_loss"]


def test_unsupported_losses_are_refused():
    sch = rl.create_schedule(Model())
    with pytest.raises(ScheduleError, match=r"must be an nn\.Linear, but is a Embedding"):
        sch["embed"].fused_loss()
    sch["head"].fused_loss()
    with pytest.raises(ScheduleError, match="fused already"):
        sch["head"].fused_loss()
    model, _ = rl.build(sch)
    loss = masked(model(torch.arange(6).view(2, 3)), torch.arange(6))
    loss.backward(retain_graph=True)
    with pytest.raises(ScheduleError, match="backward can be called only once"):
        loss.backward()
    with pytest.raises(ScheduleError, match="use bf16"), torch.autocast("cpu", torch.float16):
        model(torch.arange(6).view(2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_on_a_gpu_it_is_the_same_in_less_memory(seed, half):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    tokens, hidden, vocabulary = 4096, 128, 8192
    torch.manual_seed(seed)
    plain = nn.Linear(hidden, vocabulary).cuda()
    sch = rl.create_schedule(nn.Sequential(copy.deepcopy(plain)))
    sch["0"].fused_loss()
    fused, _ = rl.build(sch, device=torch.device("cuda"))
    states, target = (
        torch.randn(tokens, hidden, device="cuda"),
        torch.randint(vocabulary, (tokens,), device="cuda"),
    )
    loss, grads, peak = {}, {}, {}
    for model in (plain, fused):
        mine = states.clone().requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss[model] = F.cross_entropy(model(mine), target)
        loss[model].backward()
        peak[model] = torch.cuda.max_memory_allocated() - before
        grads[model] = {
            "states": mine.grad,
            "weight": next(p.grad for p in model.parameters() if p.dim() > 1),
        }
    allowed = comparison.allowance(plain, tokens, dtype=torch.bfloat16 if half else None)
    within(abs(loss[fused] / loss[plain] - 1), comparison.loss_allowance(allowed, tokens), "the loss")
    same(grads[fused], grads[plain], allowed)
    assert peak[fused] < tokens * vocabulary * 4 / 2 < peak[plain]
