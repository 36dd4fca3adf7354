"""Faults that a candidate can have, planted one at a time: `with fault(training): ...`."""

import itertools
import re
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
from redline.schedule.primitives import fused_loss as unformed
from torch import nn

ATTENTION = {
    "gpt2-tiny": r"transformer\.h\.\d+\.attn",
    "llama-tiny": r"model\.layers\.\d+\.self_attn",
    "bert-tiny": r"bert\.encoder\.layer\.\d+\.attention\.self",
    "t5-tiny": r"(encoder|decoder)\.block\.\d+\.layer\.\d\.(SelfAttention|EncDecAttention)",
}
"""Paths of the attention modules."""
PROJECTION = {
    "gpt2-tiny": r"transformer\.h\.\d+\.attn\.c_proj",
    "llama-tiny": r"model\.layers\.\d+\.self_attn\.o_proj",
    "bert-tiny": r"bert\.encoder\.layer\.\d+\.attention\.output\.dense",
    "t5-tiny": r"(encoder|decoder)\.block\.\d+\.layer\.\d\.(SelfAttention|EncDecAttention)\.o",
}
"""Paths of the output projections of attention."""


def found(training, pattern):
    """Modules whose path matches a pattern."""
    modules = [each for path, each in training.model.named_modules() if re.fullmatch(pattern, path)]
    assert modules
    return modules


@contextmanager
def hooks(*handles):
    try:
        yield
    finally:
        for each in handles:
            each.remove()


@contextmanager
def replaced(owner, name, value):
    """Replaces an attribute within the context."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)


def first(output, change):
    """Returns a module's output with its first tensor changed."""
    if isinstance(output, torch.Tensor):
        return change(output)
    return (change(output[0]), *output[1:])


def attention_is_zeroed(training):
    modules = found(training, PROJECTION[training.workload.name])
    return hooks(*(each.register_forward_hook(lambda m, a, output: output * 0) for each in modules))


def attention_of_one_block_is_zeroed(training):
    module = found(training, PROJECTION[training.workload.name])[-1]
    return hooks(module.register_forward_hook(lambda m, a, output: output * 0))


def one_block_is_skipped(training):
    block = training.model.get_submodule(training.outline.blocks[1])

    def skip(module, args, kwargs, output):
        before = args[0] if args else kwargs["hidden_states"]
        # The block's weights take part with a gradient of zero, or replicas would wait for them.
        return first(output, lambda tensor: before + 0 * tensor)

    return hooks(block.register_forward_hook(skip, with_kwargs=True))


def one_head_is_lost(training):
    module = found(training, PROJECTION[training.workload.name])[0]

    def lose(module, args):
        kept = torch.ones_like(args[0])
        kept[..., : kept.shape[-1] // 8] = 0
        return (args[0] * kept,)

    return hooks(module.register_forward_pre_hook(lose))


def gradients_are_scaled(training):
    return hooks(*(each.register_hook(lambda grad: grad * 0.25) for each in training.model.parameters()))


def gradients_of_one_block_are_scaled(training):
    block = training.model.get_submodule(training.outline.blocks[0])
    return hooks(*(each.register_hook(lambda grad: grad * 0.25) for each in block.parameters()))


def loss_is_not_averaged_over_micro_batches(training):
    scale = training.precision.scale
    # The passes divide by the number of micro-batches of the probe.
    return replaced(training.precision, "scale", lambda loss: scale(loss * 2))


def one_micro_batch_is_left_out(training):
    passes = training._passes

    class Without:
        def __call__(self, batches, device, watch=None, factors=None):
            return passes([batches[0]] * len(batches), device, watch, factors)

    return replaced(training, "_passes", Without())


@contextmanager
def causal_mask_is_dropped(training):
    with ExitStack() as stack:
        for each in found(training, ATTENTION[training.workload.name]):
            if each.is_causal:
                stack.enter_context(replaced(each, "is_causal", False))
                stack.enter_context(hooks(each.register_forward_pre_hook(_without_mask, with_kwargs=True)))
        yield


def _without_mask(module, args, kwargs):
    return args, {name: None if "mask" in name else value for name, value in kwargs.items()}


@contextmanager
def a_causal_mask_is_added(training):
    """For an encoder, which has no causal mask."""
    with ExitStack() as stack:
        for each in found(training, ATTENTION[training.workload.name]):
            stack.enter_context(replaced(each, "is_causal", True))
        yield


def labels_are_shifted(training):
    def shift(module, args, kwargs):
        return args, {**kwargs, "labels": kwargs["labels"].roll(1, dims=1)}

    return hooks(training.model.register_forward_pre_hook(shift, with_kwargs=True))


@contextmanager
def dropout_is_off(training):
    training.model.eval()
    try:
        yield
    finally:
        training.model.train()


@contextmanager
def dropout_is_twice_as_strong(training):
    with ExitStack() as stack:
        for each in training.model.modules():
            if isinstance(each, nn.Dropout):
                stack.enter_context(replaced(each, "p", 2 * each.p))
        yield


def a_dropout_is_added(training):
    """For a model without dropout."""
    block = training.model.get_submodule(training.outline.blocks[0])

    def drop(module, args, output):
        return first(output, lambda tensor: nn.functional.dropout(tensor, 0.1, module.training))

    return hooks(block.register_forward_hook(drop))


@contextmanager
def a_buffer_is_zeroed(training):
    buffer = next(each for _, each in training.model.named_buffers() if each.any())
    before = buffer.clone()
    buffer.zero_()
    try:
        yield
    finally:
        buffer.copy_(before)


def a_norm_is_left_out(training):
    block = training.model.get_submodule(training.outline.blocks[-1])
    norm = next(each for each in block.modules() if "Norm" in type(each).__name__)
    return hooks(norm.register_forward_hook(lambda m, args, output: args[0] + 0 * output))


def the_residual_is_scaled(training):
    block = training.model.get_submodule(training.outline.blocks[0])
    return hooks(block.register_forward_hook(lambda m, a, out: first(out, lambda tensor: 1.1 * tensor)))


def weights_differ(training):
    return _changed(training, lambda weight: weight.roll(1, 0))


@contextmanager
def _changed(training, change):
    param = training.model.get_submodule(training.outline.blocks[0]).parameters()
    param = next(each for each in param if each.dim() > 1)
    before = param.detach().clone()
    with torch.no_grad():
        param.copy_(change(before))
    try:
        yield
    finally:
        with torch.no_grad():
            param.copy_(before)


def weights_of_one_block_are_not_updated(training):
    mine = set(training.model.get_submodule(training.outline.blocks[2]).parameters())
    groups = training.optimizer.param_groups
    return replaced_item(groups[0], "params", [each for each in groups[0]["params"] if each not in mine])


@contextmanager
def replaced_item(mapping, key, value):
    before = mapping[key]
    mapping[key] = value
    try:
        yield
    finally:
        mapping[key] = before


# Faults of a loss that is computed without all logits.


def _of_chunks(change):
    """Calls `change(logits, losses)` for every chunk and uses the losses it returns; `logits` holds their gradients."""
    real = unformed.losses_

    def faulty(logits, *arguments):
        return change(logits, real(logits, *arguments))

    return replaced(unformed, "losses_", faulty)


def every_other_chunk_gives_no_gradient(training):
    turns = itertools.cycle((1, 0))

    def change(logits, losses):
        logits *= next(turns)
        return losses

    return _of_chunks(change)


def losses_of_a_chunk_are_of_one_token(training):
    return _of_chunks(lambda logits, losses: losses[:1].expand_as(losses))


@contextmanager
def the_heads_bias_is_forgotten(training):
    """Both in the logits that are inspected and in the loss."""
    linear = nn.functional.linear
    forget = lambda hidden, weight, bias=None: linear(hidden, weight)  # noqa: E731
    with replaced(unformed, "F", SimpleNamespace(linear=forget)):
        yield


@contextmanager
def the_heads_gradient_is_of_one_chunk(training):
    with replaced(torch.Tensor, "addmm_", lambda self, first, second: self.copy_(first @ second)):
        yield


# Faults on two ranks.


def gradients_are_not_reduced(training):
    """For replicas that are kept whole."""
    return replaced(training.model.replicas, "buckets", [])


@contextmanager
def one_gradient_is_not_reduced(training):
    """Each replica keeps its own gradient of one parameter, as if it were missing from a bucket."""
    own = {}
    block = training.model.get_submodule(training.outline.blocks[0])
    param = max(block.parameters(), key=lambda each: each.numel())
    passes = training._passes

    def note(grad):
        own["grad"] = own.get("grad", 0) + grad

    class Unreduced:
        def __call__(self, *args):
            own.clear()
            loss = passes(*args)
            param.grad = own["grad"]
            return loss

    with hooks(param.register_hook(note)), replaced(training, "_passes", Unreduced()):
        yield


def a_stage_is_not_updated(training):
    """The last stage of a pipeline."""
    if training.world.pp_rank == 0:
        return hooks()
    return replaced(training.optimizer, "step", lambda *args: None)


def pipeline_does_not_average_the_loss(training):
    pipeline = training.model.pipeline
    return replaced(pipeline, "_loss", lambda output, target: output.sum())


def bias_is_added_on_every_rank(training):
    from redline.schedule.parallel.exchange import BiasOnce

    return replaced(BiasOnce, "__call__", lambda self, module, inner, args, kwargs: inner(*args, **kwargs))


@contextmanager
def partial_sums_are_not_added(training):
    """Each rank continues with the partial sum of its own heads of the last attention."""
    module = found(training, PROJECTION[training.workload.name])[-1]
    before = dict(module._forward_hooks)
    module._forward_hooks.clear()
    try:
        yield
    finally:
        module._forward_hooks.update(before)


def ranks_disagree(training):
    """One rank of a layer has different gradients of norms, as if their sum over the sequence's pieces were missing."""
    block = training.model.get_submodule(training.outline.blocks[0])
    scale = 0.5 if dist.get_rank() else 1.0
    vectors = [each for each in block.parameters() if each.dim() == 1]
    return hooks(*(each.register_hook(lambda grad: grad * scale) for each in vectors))
