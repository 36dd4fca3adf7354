"""Peak memory of a rank, term by term, for many configurations at once.

Sources: states under ZeRO, Rajbhandari et al., arXiv:1910.02054, section 3; activations, Korthikanti et al.,
arXiv:2205.05198, section 4; micro-batches in flight, Narayanan et al., arXiv:2104.04473, section 2.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..results.meaning import EXCHANGES, FORMATS
from .columns import Columns
from .constants import Constants
from .model_facts import ModelFacts, Part, PerToken
from .setup import OPTIMIZERS, TrainingSetup
from .stages import Stage, staged

MIB = 1024.0**2
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MEMORY_TERMS = (
    "parameters", "gradients", "optimizer", "master", "weight copies", "gradient copies", "activations",
    "checkpoints", "recomputation", "logits and loss", "buffers", "slack", "context",
)  # fmt: skip
"""Names of the terms, in the order of the breakdown."""


@dataclass(frozen=True, slots=True)
class Formats:
    """Bytes an element, at one precision of one setup."""

    parameter: int
    """Weights as they are stored."""
    gradient: int
    """Gradients as they are kept."""
    master: int
    """A further copy of the weights; 0 for none."""
    optimizer: int
    """All states of the optimizer."""
    compute: int
    """Weights in products."""
    gathered: int
    """Weights that are cut over replicas, where they are gathered."""


def formats(setup: TrainingSetup, precision: str) -> Formats:
    """What each element takes at `precision` under the setup's conventions."""
    own = FORMATS[precision]
    parameter = BYTES[setup.parameter_dtype or own.weights]
    master = 0 if setup.master_weights in (None, "none") else BYTES[setup.master_weights]
    kept = setup.gradient_dtype or setup.parameter_dtype or own.gradients
    compute = parameter if own.compute == own.weights else 2
    # torch's optimizers keep their states in the dtype of what they update.
    state = BYTES[setup.optimizer_dtype] if master else min(parameter, BYTES[setup.optimizer_dtype])
    return Formats(
        parameter=parameter,
        gradient=BYTES[kept],
        master=master,
        optimizer=OPTIMIZERS[setup.optimizer] * state,
        compute=compute,
        gathered=BYTES[own.gathered] if setup.own else compute,
    )


def cut(what: str, zero: np.ndarray) -> np.ndarray:
    """Where replicas share `what` among them: booleans, of the shape of `zero`."""
    return np.array([what in each.cut for each in EXCHANGES.values()])[zero]


def gathered_at(when: str, zero: np.ndarray) -> np.ndarray:
    """Where weights are collected `when` an `Exchange` says so: booleans, of the shape of `zero`."""
    return np.array([each.gathered == when for each in EXCHANGES.values()])[zero]


def local_parameters(stage: Stage, facts: ModelFacts, tp: np.ndarray) -> np.ndarray:
    """Parameters of a stage on one tensor-parallel rank; of a tied embedding both end stages have a copy."""
    total = np.zeros(len(tp))
    for part, count in (*stage.blocks, *((each, each.count) for each in stage.ends)):
        total += count * (part.parameters - part.sharded + part.sharded / tp)
    if facts.tied and stage.last and not stage.first:
        for part in facts.parts:
            if part.role == "embedding":
                total += min(part.sharded, facts.vocabulary * _width(facts)) / tp
    return total


def _width(facts: ModelFacts) -> int:
    heads = [item.k for part in facts.parts if part.role == "head" for item in part.matmuls]
    return heads[0] if heads else 0


def _matrices(stage: Stage, tp: np.ndarray) -> np.ndarray:
    """Elements of the weights of products: those that autocast casts."""
    total = np.zeros(len(tp))
    for part, count in (*stage.blocks, *((each, each.count) for each in stage.ends)):
        for item in part.matmuls:
            total += count * item.k * item.n * item.count / (tp if item.split != "none" else 1)
    return total


def per_token(
    bytes_: PerToken, part: Part, tp: np.ndarray, sequence: np.ndarray, seq_len: int, scores: bool = True
) -> np.ndarray:
    """Bytes of a token on one rank; `sequence` is what sequence parallelism divides by."""
    out = bytes_.whole + bytes_.sequence / sequence + bytes_.sharded / tp
    if scores and bytes_.scores and part.attention is not None:
        keys = min(seq_len, part.attention.window or seq_len)
        out = out + bytes_.scores * part.attention.heads * keys / tp
    return out


def peak_memory(
    facts: ModelFacts, cols: Columns, setup: TrainingSetup, constants: Constants, rank: str = "fullest"
) -> Mapping[str, np.ndarray]:
    """Terms of the peak of a rank, MiB, by their names in `MEMORY_TERMS`; arrays of len(cols).

    They sum to the peak. Infinity in `parameters` where a model has fewer blocks than stages.

    Args:
        rank: `fullest`, or `first`: those of the first stage, which is what some frameworks report.
    """
    size = len(cols)
    best = {name: np.zeros(size) for name in MEMORY_TERMS}
    best["parameters"][:] = np.inf
    for split, at in cols.splits():
        part = cols.take(at)
        worst: dict[str, np.ndarray] | None = None
        found = staged(facts, split, setup.balance, part)
        for stage, own in found[: 1 if rank == "first" else None]:
            terms = stage_peak(stage, split.pp, facts, own, setup, constants)
            if worst is None:
                worst = terms
                continue
            more = sum(terms.values()) > sum(worst.values())
            worst = {name: np.where(more, terms[name], worst[name]) for name in MEMORY_TERMS}
        if worst is not None:
            for name in MEMORY_TERMS:
                best[name][at] = worst[name]
    return best


def stage_peak(
    stage: Stage, pp: int, facts: ModelFacts, cols: Columns, setup: TrainingSetup, constants: Constants
) -> dict[str, np.ndarray]:
    """Terms of the peak of a rank of one stage, MiB, by their names in `MEMORY_TERMS`."""
    tp, dp, zero = cols.tp.astype(float), cols.dp.astype(float), cols.zero
    seq = setup.seq_len or 1
    tokens = cols.micro_batch * float(seq)
    sequence = np.where(cols.sequence_parallel, tp, 1.0)
    form = formats(setup, facts.precision)
    weights = local_parameters(stage, facts, tp)
    none = np.zeros(len(tp))

    # States, divided over the replicas, or those of a group (HSDP), as ZeRO's stage says.
    share = cols.shares.astype(float)
    state_share = np.where(cut("optimizer", zero), share, 1.0)
    gradient_share = np.where(cut("gradients", zero), share, 1.0)
    # Weights that are whole from forward to backward only are so beside the pieces that are updated.
    beside = setup.own & gathered_at("step", zero) & (dp > 1)
    weight_share = np.where(cut("weights", zero) | beside, share, 1.0)
    parameters = weights * form.parameter / weight_share
    gradients = weights * form.gradient / gradient_share
    on_host = cols.offload == "optimizer"
    optimizer = np.where(on_host, 0.0, weights * form.optimizer / state_share)
    master = np.where(on_host, 0.0, weights * form.master / state_share)

    # Copies of weights and gradients in the dtype of the products.
    autocast = form.compute < form.parameter
    weight_copies = _matrices(stage, tp) * form.compute if autocast else none
    gradient_copies = weights * form.parameter if setup.gradient_copy else none

    # Whole blocks that ZeRO-3 gathers: the one at work and the one fetched ahead; their gradients before
    # they are scattered, likewise from ZeRO-2 on.
    block = none
    for each, _ in stage.blocks:
        block = np.maximum(block, each.parameters - each.sharded + each.sharded / tp)
    ends = sum((each.parameters - each.sharded + each.sharded / tp for each in stage.ends), start=none)
    kept = cols.gathered_ratio * sum(
        (count * (each.parameters - each.sharded + each.sharded / tp) for each, count in stage.blocks),
        start=none,
    )
    gathered = np.where(zero >= 3, (2 * block + ends + kept) * form.gathered, 0.0)
    gathered = np.where(zero >= 3, np.minimum(gathered, weights * form.gathered), gathered)
    gathered = np.where(beside, weights * form.gathered, gathered)
    scattered = np.where((zero >= 2) & (dp > 1), np.minimum(2 * block + ends, weights) * form.gradient, 0.0)
    # Without views into them, DistributedDataParallel's buckets are a second copy of the gradients.
    bucket = np.where(
        (zero <= 1) & (dp > 1),
        weights * form.gradient
        if setup.bucket_copy
        else np.minimum(2 * setup.bucket_mib * MIB, weights * form.gradient),
        0.0,
    )
    buffers = gathered + np.maximum(scattered, bucket)
    if form.gathered == form.compute:
        weight_copies = np.where((zero >= 3) | beside, 0.0, weight_copies)  # gathered in that dtype already

    # Activations of the micro-batches in flight.
    gpipe = cols.order_that("waits")
    flying = in_flight(stage.ranks[0], pp, cols)
    ratio = cols.checkpoint_ratio
    keeps_scores = not setup.recompute_attention
    kept, boundaries, working, rebuilt = none, none, none, none
    for each, count in stage.blocks:
        full = per_token(each.saved, each, tp, sequence, seq, keeps_scores)
        boundary = each.boundary / sequence
        kept = kept + count * (1 - ratio) * full
        boundaries = boundaries + count * ratio * boundary
        working = np.maximum(working, per_token(each.transient, each, tp, sequence, seq))
        # A block that is recomputed has all that it keeps there beside the temporaries of its backward.
        whole = per_token(each.saved, each, tp, sequence, seq) + per_token(
            each.transient, each, tp, sequence, seq
        )
        rebuilt = np.maximum(rebuilt, np.where(ratio > 0, whole, 0.0))
    loss_parts = none
    spike = none
    formed = none
    loss_tp = tp if setup.parallel_loss in (None, True) else np.ones(len(tp))
    for each in stage.ends:
        is_loss = each.role in ("head", "loss")
        amount = per_token(each.saved, each, loss_tp if is_loss else tp, sequence, seq)
        if is_loss:
            loss_parts = loss_parts + amount
            own = per_token(each.transient, each, loss_tp, sequence, seq)
            spike = np.maximum(spike, own * np.minimum(0.5, each.chunk / tokens) if each.chunk else own)
            # Of a single micro-batch it is the gradient that stays.
            formed = formed + np.where(cols.grad_accum > 1, each.transient_fixed / loss_tp, 0.0)
        else:
            kept = kept + amount
    # Only the gpipe schedule has several micro-batches behind the head at once.
    loss_flying = np.where(gpipe, flying, np.minimum(flying, 1.0))
    activations = kept * tokens * flying
    delayed = waiting(stage.ranks[-1], cols) if pp > 1 else none
    if delayed.any():
        activations = activations + delayed * tokens * _output_gradients(stage, tp) * form.compute
    checkpoints = boundaries * tokens * flying
    loss = (loss_parts * loss_flying + spike) * tokens * constants.loss_factor + formed
    recomputation = np.maximum(working, rebuilt) * tokens
    # The loss is done with before the last block is recomputed or differentiated.
    at_loss = loss >= recomputation
    loss = np.where(at_loss, loss, 0.0)
    recomputation = np.where(at_loss, 0.0, recomputation)

    # With one micro-batch a step, gradients come into being as activations go: the peak is at the loss, with
    # the head's gradient, or at the end of backward, with all of them and one block's activations.
    if not setup.gradient_copy:
        transient = (cols.grad_accum == 1) & (checkpoints + activations + loss + recomputation > 0)
        blocks = max(sum(count for _, count in stage.blocks), 1)
        at_end = gradients + recomputation + (activations + checkpoints) / blocks
        at_loss = activations + checkpoints + loss + recomputation
        late = transient & (at_end > at_loss)
        head = sum(
            (item.k * item.n * item.count / (tp if item.split != "none" else 1.0)
             for each in stage.ends for item in each.matmuls),
            start=none,
        )  # fmt: skip
        gradients = np.where(transient & ~late, np.minimum(head, weights) * form.gradient, gradients)
        buffers = np.where(transient & ~late & (zero >= 2), gathered, buffers)
        loss = np.where(late, 0.0, loss)
        activations = np.where(late, activations / blocks, activations)
        checkpoints = np.where(late, checkpoints / blocks, checkpoints)

    # The update: an optimizer that loops over parameters needs a copy of a state at a time.
    updating = np.where(
        cols.fused_optimizer | on_host, 0.0, weights * max(form.master, form.parameter) / state_share
    )
    whole_gradients = weights * form.gradient / gradient_share
    comes_and_goes = gradients + activations + checkpoints + loss + recomputation + buffers + gradient_copies
    more = updating + whole_gradients - comes_and_goes
    buffers = buffers + np.maximum(more, 0.0)

    lasting = parameters + gradients + optimizer + master + weight_copies + gradient_copies + buffers
    slack = (
        constants.slack * (activations + checkpoints + loss + recomputation)
        + constants.slack_lasting * lasting
    )
    slack = slack if setup.reserved_memory else none
    context = none + (constants.workspace_mib + constants.compiled_mib * facts.fusion) * MIB
    values = (
        parameters, gradients, optimizer, master, weight_copies, gradient_copies, activations, checkpoints,
        recomputation, loss, buffers, slack, context,
    )  # fmt: skip
    return {name: np.asarray(value, float) / MIB for name, value in zip(MEMORY_TERMS, values, strict=True)}


def in_flight(rank: int, pp: int, cols: Columns) -> np.ndarray:
    """Micro-batches, of m in all, whose activations rank r of a pipeline of p holds at once, with v chunks a rank.

    - `gpipe`: m
    - `1f1b`: p - r (Narayanan et al., arXiv:2104.04473, section 2.2)
    - `interleaved`: (2 (p - 1 - r) + (v - 1) p + 1) / v, what goes forward before the first chunk comes back;
      in the first rank 1 + (p - 1) / (p v) times as many as 1F1B (Korthikanti et al., arXiv:2205.05198, section
      4.2.3)
    - `zero_bubble`, `zbv`: p, since what 1F1B lets go in later ranks waits there for the gradients of its
      weights (Qi et al., arXiv:2401.10241, sections 2.3 and 6)
    """
    accum, chunks = cols.grad_accum.astype(float), cols.virtual_stages
    depth = np.full(len(cols), float(pp - rank))
    rounds = (2 * (pp - 1 - rank) + (chunks - 1) * pp + 1) / chunks
    depth = np.where(cols.order_that("in_rounds"), rounds, depth)
    depth = np.where(cols.order_that("splits_backward"), float(pp), depth)
    # Without stages every micro-batch is done with before the next.
    return np.where((pp > 1) & cols.order_that("waits"), accum, np.minimum(accum, depth if pp > 1 else 1.0))


def waiting(rank: int, cols: Columns) -> np.ndarray:
    """Micro-batches of a rank whose backward pass has gone by but for the gradients of weights.

    `zero_bubble`: r, or with several chunks r of these (torch's ScheduleInterleavedZeroBubble; Qi et al.,
    arXiv:2401.10241, section 2.3); `zbv`: none while activations are at their peak.
    """
    late = cols.order_that("splits_backward") & ~cols.order_that("v_shaped")
    delayed = np.where(late, rank / cols.virtual_stages, 0.0)
    return np.minimum(cols.grad_accum, delayed)


def _output_gradients(stage: Stage, tp: np.ndarray) -> np.ndarray:
    """Elements a token of the gradients of products' outputs, from which those of weights are computed."""
    total = np.zeros(len(tp))
    for part, count in (*stage.blocks, *((each, each.count) for each in stage.ends)):
        for item in part.matmuls:
            if item.trainable:
                total += count * item.count * item.rows * item.n / (tp if item.split == "column" else 1)
    return total
