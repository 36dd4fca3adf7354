"""Peak memory of a rank, term by term, for many configurations at once.

Sources: states under ZeRO, Rajbhandari et al., arXiv:1910.02054, section 3; activations, Korthikanti et al.,
arXiv:2205.05198, section 4; micro-batches in flight, Narayanan et al., arXiv:2104.04473, section 2.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from .constants import Constants
from .facts.model_facts import ModelFacts, Part
from .knob_arrays import KnobArrays
from .rank import MIB, Rank, gathered_at, kept, shared
from .setup import TrainingSetup
from .stages import Division, Group, Stage, divided, waiting

_LOSS = ("head", "loss")
"""Roles of the parts that work with logits."""
MEMORY_TERMS = (
    "parameters", "gradients", "optimizer", "master", "weight copies", "gradient copies", "activations",
    "checkpoints", "recomputation", "logits and loss", "buffers", "slack", "context", "build", "further",
)  # fmt: skip
"""Names of the terms, in the order of the breakdown; `build` is the memory of building beyond that of training, `further`
`TrainingSetup.further_mib`.
"""
DRAWN = 4.0
"""Bytes of a weight when it is initialised."""
NORM = 8.0
"""Bytes of an element of the gradient whose norm DeepSpeed computes."""
SUB_GROUP = 1e9
"""Elements that DeepSpeed updates at a time under ZeRO 3 (`sub_group_size`)."""


def peak_memory(
    facts: ModelFacts, cols: KnobArrays, setup: TrainingSetup, constants: Constants, rank: str = "fullest",
    division: Division | None = None,
) -> Mapping[str, np.ndarray]:  # fmt: skip
    """Terms of the peak of a rank, MiB, by their names in `MEMORY_TERMS`; arrays of len(cols).

    They sum to the peak. `parameters` is infinite if a model has fewer blocks than stages.

    Args:
        rank: `fullest`, or the `first` or `last` stage's, which some frameworks report.
        division: `stages.divided` of these configurations, if known.
    """
    size = len(cols)
    best = {name: np.zeros(size) for name in MEMORY_TERMS}
    best["parameters"][:] = np.inf
    most = np.full(size, -np.inf)

    def take(terms: Mapping[str, np.ndarray], indices: np.ndarray, eligible: np.ndarray | None = None) -> None:
        """Records the terms of these ranks where they are the fullest so far, among the eligible ones."""
        total = reduce(np.add, terms.values())
        fuller = (total > most[indices]) if eligible is None else eligible & (total > most[indices])
        fullest = indices[fuller]
        most[fullest] = total[fuller]
        for name in MEMORY_TERMS:
            best[name][fullest] = terms[name][fuller]

    equal_stages, cuts = divided(facts, cols, setup.balance) if division is None else division
    for equal in equal_stages:
        eligible = {"first": equal.opens, "last": equal.closes}.get(rank)
        if eligible is None or eligible.any():
            take(stage_peak(equal.stage, facts, equal.cols, setup, constants), equal.indices, eligible)
    for cut in cuts:
        chosen = {"first": cut.stages[:1], "last": cut.stages[-1:]}.get(rank, cut.stages)
        for terms in of_stages([groups for groups, _ in chosen], facts, setup, constants):
            take(terms, cut.indices)
    return best


def of_stages(
    cut: Sequence[Sequence[Group]], facts: ModelFacts, setup: TrainingSetup, constants: Constants
) -> list[Mapping[str, np.ndarray]]:
    """Terms of the peak of a rank of each stage, given as its groups of blocks, MiB."""
    return [
        together(
            [stage_peak(stage, facts, group_cols, setup, constants) for stage, group_cols in groups], groups, constants
        )
        for groups in cut
    ]


def stage_peak(
    stage: Stage, facts: ModelFacts, cols: KnobArrays, setup: TrainingSetup, constants: Constants
) -> dict[str, np.ndarray]:
    """Terms of the peak of a rank of one stage, MiB, by their names in `MEMORY_TERMS`."""
    rank = Rank(stage, facts, cols, setup)
    gathered, exchanged = _gathered(rank), _exchanged(rank)
    terms = {
        **_states(rank),
        **_copies(rank),
        **_activations(rank, constants),
        **_recomputation_or_loss(rank, constants),
        "buffers": gathered + exchanged,
    }
    if not setup.gradient_copy and not setup.gradients_stay:
        terms |= _with_gradients_that_come_and_go(rank, terms, gathered)
    terms["buffers"] = terms["buffers"] + _update(rank, terms)
    terms["slack"] = _slack(terms, constants)
    terms["context"] = rank.none + (constants.workspace_mib + constants.compiled_mib * facts.fusion) * MIB
    terms["build"] = np.maximum(_build(rank) + terms["context"] - sum(terms.values()), 0.0)
    terms["further"] = rank.none + setup.further_mib * MIB
    return {name: np.asarray(terms[name], float) / MIB for name in MEMORY_TERMS}


def together(
    of_groups: Sequence[Mapping[str, np.ndarray]], groups: Sequence[Group], constants: Constants
) -> Mapping[str, np.ndarray]:
    """The terms of a stage from those of its groups of blocks: lasting terms add up, temporary ones are those of one group at a
    time."""
    if len(of_groups) == 1:
        return of_groups[0]
    none = np.zeros_like(of_groups[0]["context"])
    terms_of_stage = {name: sum((terms[name] for terms in of_groups), none) for name in MEMORY_TERMS}
    passing = [terms["recomputation"] + terms["logits and loss"] for terms in of_groups]
    most = np.argmax(np.stack(passing), axis=0)
    for name in ("recomputation", "logits and loss"):
        terms_of_stage[name] = np.choose(most, [terms[name] for terms in of_groups])
    # Weights that stay whole do so in all groups; for weights of two blocks at a time the largest group counts.
    lasts = [not stage.blocks or int(cols.zero[0]) == 2 for stage, cols in groups]
    few = [none if stays_whole else terms["buffers"] for terms, stays_whole in zip(of_groups, lasts, strict=True)]
    lasting_buffers = sum(
        (terms["buffers"] for terms, stays_whole in zip(of_groups, lasts, strict=True) if stays_whole), none
    )
    terms_of_stage["buffers"] = lasting_buffers + np.max(np.stack(few), axis=0)
    for name in ("context", "further"):
        terms_of_stage[name] = of_groups[0][name]
    terms_of_stage["slack"] = _slack(terms_of_stage, constants)
    terms_of_stage["build"] = np.max(np.stack([terms["build"] for terms in of_groups]), axis=0)
    return {name: np.asarray(terms_of_stage[name], float) for name in MEMORY_TERMS}


def _keeps_whole_weights(rank: Rank) -> np.ndarray:
    """True where weights are whole from forward to backward, in addition to the pieces that are updated (ZeRO 2)."""
    return rank.setup.in_pieces & gathered_at("step", rank.cols.zero) & (rank.replicas > 1)


def _stored_parameters(rank: Rank, state: str) -> np.ndarray:
    """Parameters whose `state` the rank stores under its ZeRO stage: a part over all replicas, or over a group of them (HSDP)."""
    return rank.held(shared(state, rank.cols.zero))


def _states(rank: Rank) -> dict[str, np.ndarray]:
    """Weights, gradients, optimizer and master weights: P elements of each over the replicas that share them.

    Rajbhandari et al., arXiv:1910.02054, section 3.
    """
    form, trained, on_host = rank.form, rank.trained_share, rank.cols.offload == "optimizer"
    weights = np.where(
        _pieces_away(rank), 0.0, rank.held(_keeps_whole_weights(rank) | shared("weights", rank.cols.zero))
    )
    gradients = np.where(_pieces_away(rank), 0.0, _stored_parameters(rank, "gradients"))
    accumulated_whole = rank.setup.unsharded_gradients & (rank.cols.grad_accum > 1)  # until the last micro-batch
    gradients = np.where(accumulated_whole, rank.weights, gradients)
    optimizer = np.where(on_host, 0.0, _stored_parameters(rank, "optimizer") * trained)
    return {
        "parameters": weights * rank.stored_bytes,
        "gradients": gradients * trained * form.gradient,
        "optimizer": optimizer * form.optimizer,
        "master": optimizer * form.master,
    }


def _pieces_away(rank: Rank) -> np.ndarray:
    """True where pieces of weights and gradients are in host memory."""
    return rank.setup.offload_weights & (rank.cols.offload == "optimizer") & (rank.cols.zero >= 2) & (rank.replicas > 1)


def _copies(rank: Rank) -> dict[str, np.ndarray]:
    """Copies of weights in the dtype of products, unless they are gathered in it, and of gradients in the weights' dtype."""
    form = rank.form
    weights = _matrices(rank) * form.compute if form.compute < form.parameter else rank.none
    if form.frozen <= form.compute:  # those are used as they are, or expanded one product at a time
        weights = weights * rank.trained_share
    else:  # autocast caches no copies of weights without gradients: products that are not recomputed keep their own
        weights = weights * (1 - (1 - rank.trained_share) * rank.cols.checkpoint_ratio)
    if form.gathered == form.compute:
        weights = np.where((rank.cols.zero >= 3) | _keeps_whole_weights(rank), 0.0, weights)
    elif rank.setup.gather_dtype:
        # Autocast caches no copies of views of gathered tensors: products of blocks that are not recomputed keep their own.
        blocks = sum(
            (count * rank.part_weights(model_part) for model_part, count in rank.stage.blocks), start=rank.none
        )
        recomputed = np.minimum(rank.cols.checkpoint_ratio * blocks * form.compute, weights)
        weights = np.where((rank.cols.zero >= 3) | _keeps_whole_weights(rank), weights - recomputed, weights)
    # Where gradients have a buffer, a hook adds each one to it and frees it (Megatron-LM's distributed data parallelism).
    stays = rank.setup.gradient_copy and not rank.setup.gradients_stay
    gradients = rank.trained * form.parameter if stays else rank.none
    return {"weight copies": weights, "gradient copies": gradients}


def _gathered(rank: Rank) -> np.ndarray:
    """Weights that are temporarily whole: with ZeRO 3 two blocks and the parameters outside blocks; with ZeRO 2 all."""
    zero, form = rank.cols.zero, rank.form
    two_blocks = rank.two_blocks * form.gathered
    every = rank.weights * form.gathered
    return np.where(_keeps_whole_weights(rank), every, np.where(zero >= 3, np.minimum(two_blocks, every), 0.0))


def _exchanged(rank: Rank) -> np.ndarray:
    """Gradients in exchange: from ZeRO 2 on, those of two blocks before they are scattered; below, two buckets, or a second copy
    of all if they are not views of buckets (DistributedDataParallel)."""
    zero, several = rank.cols.zero, rank.replicas > 1
    all_gradients = rank.trained * rank.form.gradient
    scattered = np.minimum(rank.two_blocks, rank.trained) * rank.form.gradient
    bucket = all_gradients if rank.setup.bucket_copy else np.minimum(2 * rank.setup.bucket_mib * MIB, all_gradients)
    return np.maximum(np.where((zero >= 2) & several, scattered, 0.0), np.where((zero <= 1) & several, bucket, 0.0))


def _activations(rank: Rank, constants: Constants) -> dict[str, np.ndarray]:
    """Activations kept for micro-batches in flight: all of a block's, or only the inputs of recomputed blocks.

    Korthikanti et al., arXiv:2205.05198, section 4. If the backward pass is divided in two, the gradients of products' outputs
    are kept as well.
    """
    ratio, scores = rank.cols.checkpoint_ratio, not rank.setup.recompute_attention
    lasting, boundaries = rank.none, rank.none
    for model_part, count in rank.stage.blocks:
        full = _saved(rank, model_part, constants, scores) - _narrow_inputs(rank, model_part)
        if rank.setup.keeps_products:
            full = np.minimum(full, _products_kept(rank, model_part))
        lasting = lasting + count * (1 - ratio) * full
        boundaries = boundaries + count * ratio * (model_part.boundary / rank.sequence + _cached(rank, model_part))
    for model_part in rank.stage.ends:
        if model_part.role not in _LOSS:
            lasting = lasting + rank.per_token(model_part.saved, model_part)
    activations = lasting * rank.tokens * rank.flying
    if rank.setup.offload_activations:
        # Those of a block in use, and of one on its way.
        blocks = np.maximum(sum((count for _, count in rank.stage.blocks), rank.none), 1.0)
        activations, boundaries = np.minimum(activations, lasting * rank.tokens * 2 / blocks), rank.none
    delayed = np.where(rank.cols.pp > 1, waiting(rank.stage.ranks[-1], rank.cols), 0.0)
    if delayed.any():
        outputs = _output_gradients(rank)
        activations = activations + delayed * rank.tokens * outputs * rank.form.compute
    return {"activations": activations, "checkpoints": boundaries * rank.tokens * rank.flying}


def kept_bytes(rank: Rank, constants: Constants) -> np.ndarray:
    """Bytes of a micro-batch that forward keeps for backward."""
    terms = _activations(replace(rank, setup=rank.setup.replace(offload_activations=False)), constants)
    return (terms["activations"] + terms["checkpoints"]) / rank.flying


def _cached(rank: Rank, model_part: Part) -> "np.ndarray | float":
    """Bytes a token of the keys and values that a recomputed block returns and that are kept."""
    if model_part.attention is None or not rank.setup.keeps_cache:
        return 0.0
    return 2.0 * model_part.attention.kv_heads * model_part.attention.head_dim * rank.form.compute / rank.tp


def _narrow_inputs(rank: Rank, model_part: Part) -> np.ndarray:
    """Bytes a token by which a block keeps less if products keep their inputs in 8 bits; attention keeps its output."""
    if rank.setup.products not in ("fp8", "mxfp8", "nvfp4"):
        return rank.none
    width = model_part.attention.heads * model_part.attention.head_dim if model_part.attention is not None else 0
    inputs = sum(
        (item.count * item.rows * item.k / (rank.tp if item.split == "row" else rank.sequence)
         for item in model_part.matmuls if item.k != width or item.split != "row"),
        start=rank.none,
    )  # fmt: skip
    return (rank.form.compute - 1) * inputs


def _products_kept(rank: Rank, model_part: Part) -> np.ndarray:
    """Bytes a token that a block keeps under selective checkpointing: its input, attention's output and every other product."""
    width = rank.form.compute
    outputs = sum(
        (item.count * item.rows * item.n / (rank.tp if item.split == "column" else rank.sequence) for item in model_part.matmuls),
        start=rank.none,
    )  # fmt: skip
    heads = model_part.attention.heads * (model_part.attention.head_dim + 2) if model_part.attention is not None else 0
    return model_part.boundary / rank.sequence + width * (outputs / 2 + heads / rank.tp)


def _saved(rank: Rank, model_part: Part, constants: Constants, scores: bool = True) -> np.ndarray:
    """Bytes a token that a block keeps, on the rank whose experts get the most rows. A ring keeps no scores under any
    attention."""
    with_scores, without = (rank.per_token(model_part.saved, model_part, scores=counted) for counted in (scores, False))
    lasting = 1 - model_part.rebuilt.exchange  # a mixture that is recomputed by itself receives its rows again
    return np.where(rank.cols.cp > 1, without, with_scores) + lasting * _rows_of_experts(rank, model_part, constants)


def _rows_of_experts(rank: Rank, model_part: Part, constants: Constants) -> np.ndarray:
    """Extra bytes a token of a block's mixture that is spread over ranks."""
    return kept(model_part, rank.cols, rank.facts.precision, constants)


def _recomputation(rank: Rank, constants: Constants) -> np.ndarray:
    """One block's temporaries in backward, including all that it keeps if it is recomputed."""
    working, rebuilt = rank.none, rank.none
    for model_part, count in rank.stage.blocks:
        present = np.minimum(count, 1)  # a stage may be empty
        transient = present * rank.per_token(model_part.transient, model_part)
        transient = transient + present * model_part.rebuilt.exchange * _rows_of_experts(rank, model_part, constants)
        saved = present * _saved(rank, model_part, constants)
        working = np.maximum(working, transient)
        rebuilds = rank.setup.keeps_products | (rank.cols.checkpoint_ratio > 0)
        rebuilt = np.maximum(rebuilt, np.where(rebuilds, saved + transient, 0.0))
    return np.maximum(working, rebuilt) * rank.tokens


def _loss(rank: Rank, constants: Constants) -> np.ndarray:
    """Logits and the loss's tensors; only schedules that delay backward have several micro-batches behind the head."""
    cols, tp = rank.cols, rank.tp if rank.setup.parallel_loss in (None, True) else np.ones(len(rank.tp))
    logits, spike, formed = rank.none, rank.none, rank.none
    for model_part in rank.stage.ends:
        if model_part.role in _LOSS:
            logits = logits + rank.per_token(model_part.saved, model_part, tp)
            transient = rank.per_token(model_part.transient, model_part, tp)
            spike = np.maximum(
                spike, transient * np.minimum(0.5, model_part.chunk / rank.tokens) if model_part.chunk else transient
            )
            # With a single micro-batch the gradient stays.
            formed = formed + np.where(cols.grad_accum > 1, model_part.transient_fixed / tp, 0.0)
    flying = np.where(cols.order_that("waits"), rank.flying, np.minimum(rank.flying, 1.0))
    return (logits * flying + spike) * rank.tokens * constants.loss_factor + formed


def _recomputation_or_loss(rank: Rank, constants: Constants) -> dict[str, np.ndarray]:
    """The larger of the two: the loss is done before the last block is recomputed or differentiated."""
    loss, recomputation = _loss(rank, constants), _recomputation(rank, constants)
    at_loss = loss >= recomputation
    return {"logits and loss": np.where(at_loss, loss, 0.0), "recomputation": np.where(at_loss, 0.0, recomputation)}


def _with_gradients_that_come_and_go(
    rank: Rank, terms: Mapping[str, np.ndarray], gathered: np.ndarray
) -> dict[str, np.ndarray]:
    """The terms that differ with one micro-batch a step, in which gradients are created while activations are freed.

    The peak is at the loss, with the head's gradient, or at the end of backward, with all gradients and one block's activations.
    """
    names = ("activations", "checkpoints", "logits and loss", "recomputation")
    activations, checkpoints, loss, recomputation = (terms[name] for name in names)
    gradients, buffers = terms["gradients"], terms["buffers"]
    transient = (rank.cols.grad_accum == 1) & (checkpoints + activations + loss + recomputation > 0)
    blocks = np.maximum(sum(count for _, count in rank.stage.blocks), 1)
    at_end = gradients + recomputation + (activations + checkpoints) / blocks
    only_head = np.minimum(_of_ends(rank), rank.trained) * rank.form.gradient
    at_loss = np.where(rank.cols.zero >= 2, gathered, buffers)
    late = transient & (at_end + buffers > activations + checkpoints + loss + recomputation + only_head + at_loss)
    return {
        "gradients": np.where(transient & ~late, only_head, gradients),
        "buffers": np.where(transient & ~late, at_loss, buffers),
        "logits and loss": np.where(late, 0.0, loss),
        "activations": np.where(late, activations / blocks, activations),
        "checkpoints": np.where(late, checkpoints / blocks, checkpoints),
    }


def _update(rank: Rank, terms: Mapping[str, np.ndarray]) -> np.ndarray:
    """Memory of the update beyond what has been freed by then: an optimizer that loops over parameters copies one state at a
    time."""
    form = rank.form
    unneeded = rank.cols.fused_optimizer | (rank.cols.offload == "optimizer")
    updated = _stored_parameters(rank, "optimizer") * rank.trained_share
    updating = np.where(unneeded, 0.0, updated * max(form.master, form.parameter))
    if rank.setup.deepspeed_update:
        updating = _update_of_deepspeed(rank, updating, updated)
    whole_gradients = _stored_parameters(rank, "gradients") * rank.trained_share * form.gradient
    comes_and_goes = (
        terms["gradients"] + terms["activations"] + terms["checkpoints"] + terms["logits and loss"]
        + terms["recomputation"] + terms["buffers"] + terms["gradient copies"]
    )  # fmt: skip
    return np.maximum(updating + whole_gradients - comes_and_goes, 0.0)


def _update_of_deepspeed(rank: Rank, updating: np.ndarray, updated: np.ndarray) -> np.ndarray:
    """Memory of DeepSpeed's update beside the gradients, in place of that of the optimizer's loop.

    ZeRO 1 and 2 compute the norm of a gradient at a time in fp64, then flatten a rank's gradients and widen them to the master
    weights' dtype; the gradients are freed before the optimizer's loop (runtime/zero/stage_1_and_2.py, `step`). ZeRO 3 does so
    for `SUB_GROUP` elements at a time and keeps the gradients (runtime/zero/stage3.py, `_prepare_fp32_grad_for_sub_group`).
    Without ZeRO all gradients are widened, then flattened (`FP16_Optimizer.step`).
    """
    form, zero = rank.form, rank.cols.zero
    flattened = form.gradient + (form.master if form.master > form.gradient else 0)
    largest = np.minimum(_of_ends(rank), updated)
    whole = np.maximum(updated * flattened, largest * NORM)
    looped = np.where(updating == 0, flattened, np.maximum(flattened, 2 * max(form.master, form.parameter)))
    by_group = np.maximum(np.minimum(updated, SUB_GROUP) * looped, largest * NORM)
    unshared = updated * 2 * form.master if form.master else updating
    there = np.where(zero >= 3, by_group, np.where(zero >= 1, whole, unshared))
    return np.where(rank.cols.offload == "optimizer", 0.0, there)


def _of_ends(rank: Rank) -> np.ndarray:
    """Elements of the products outside of blocks: the head's weight, the largest."""
    elements = rank.none
    for model_part in rank.stage.ends:
        for item in model_part.matmuls:
            elements = elements + item.k * item.n * item.count / (rank.tp if item.split != "none" else 1.0)
    return elements


def _build(rank: Rank) -> np.ndarray:
    """Maximum memory of building the model: weights are initialised in float32 and cast one at a time (frozen ones are quantized
    likewise); if replicas shard them (ZeRO 2 and 3), one block is whole at a time, and the parameters outside blocks are whole
    until the end."""
    if not rank.setup.own:
        return rank.none
    form, block = rank.form, rank.none
    for model_part, _ in rank.stage.blocks:
        block = np.maximum(block, rank.part_weights(model_part))
    ends = [rank.part_weights(model_part) for model_part in rank.stage.ends]
    cast = (form.parameter < DRAWN) | ((form.frozen < DRAWN) & (rank.trained_share < 1))
    drawn = np.maximum.reduce([block, *ends]) * np.where(cast, DRAWN, 0.0)
    cut = shared("gradients", rank.cols.zero) & (rank.replicas > 1)
    pieces = rank.held(cut) * rank.stored_bytes
    by_block = pieces + rank.ends * rank.stored_bytes + np.maximum(block * DRAWN, drawn)
    return np.where(cut, by_block, rank.weights * rank.stored_bytes + drawn)


def _slack(terms: Mapping[str, np.ndarray], constants: Constants) -> np.ndarray:
    """Memory that the allocator cannot use: a share of temporary memory, and another of lasting memory. Fitted."""
    passing = terms["activations"] + terms["checkpoints"] + terms["logits and loss"] + terms["recomputation"]
    lasting = (
        terms["parameters"] + terms["gradients"] + terms["optimizer"] + terms["master"] + terms["weight copies"]
        + terms["gradient copies"] + terms["buffers"]
    )  # fmt: skip
    return constants.slack * passing + constants.slack_lasting * lasting


def _matrices(rank: Rank) -> np.ndarray:
    """Elements of the weights of products, which autocast casts."""
    total = np.zeros(len(rank.tp))
    for model_part, count in rank.stage.parts:
        for item in model_part.matmuls:
            pieces, sharers = (rank.expert_tp, rank.ep) if item.experts > 1 else (rank.tp, 1.0)
            total += count * item.k * item.n * item.count / ((pieces if item.split != "none" else 1) * sharers)
    return total


def _output_gradients(rank: Rank) -> np.ndarray:
    """Elements a token of the gradients of products' outputs, from which weight gradients are computed."""
    total = np.zeros(len(rank.tp))
    for model_part, count in rank.stage.parts:
        for item in model_part.matmuls:
            if item.trainable:
                total += count * item.count * item.rows * item.n / (rank.tp if item.split == "column" else 1)
    return total
