"""A rank of a stage, and the quantities that several terms of its memory and time share.

| symbol | meaning |
|---|---|
| E, P | experts of a layer; ranks that share them (`ep`) |
| s | deviation of an expert's rows from their mean, as a share of it (`Constants.expert_spread`) |
| f | capacity of an expert, relative to the mean of its rows (`capacity_factor`) |

Source of the imbalance: the largest of P normal numbers lies about sqrt(2 ln P) deviations above their mean (Cramer 1946, section
28.6).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..knobs.meaning import EXCHANGES, FORMATS
from .constants import Constants
from .facts.model_facts import ModelFacts, Part, PerToken, bytes_of
from .knob_arrays import KnobArrays
from .setup import OPTIMIZERS, TrainingSetup
from .stages import Stage, in_flight

MIB = 1024.0**2
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}  # of an element


@dataclass(frozen=True, slots=True)
class Formats:
    """Bytes an element, at one precision of one setup."""

    parameter: int
    """Stored weights."""
    gradient: int
    """Kept gradients."""
    master: int
    """A further copy of the weights; 0 without one."""
    optimizer: float
    """All states of the optimizer."""
    compute: int
    """Weights in products."""
    gathered: int
    """Weights that replicas shard, when they are gathered."""
    frozen: float
    """Weights that are not trained."""


def formats(setup: TrainingSetup, precision: str, frozen_bits: float | None = None) -> Formats:
    """Bytes of each element at `precision` under the setup's conventions; `frozen_bits` as in `ModelFacts`."""
    number_formats = FORMATS[precision]
    parameter = BYTES[setup.parameter_dtype or number_formats.weights]
    master = 0 if setup.master_weights in (None, "none") else BYTES[setup.master_weights]
    gradient = setup.gradient_dtype or setup.parameter_dtype or number_formats.gradients
    compute = min(number_formats.compute_bytes, parameter)
    # torch's optimizers keep their states in the dtype of the updated parameters.
    state = BYTES[setup.optimizer_dtype] if master else min(parameter, BYTES[setup.optimizer_dtype])
    bits = setup.frozen_bits if setup.frozen_bits is not None else frozen_bits
    # Frozen weights of 16 bits are those of products; a training in float32 keeps them in float32.
    frozen = parameter if bits is None else compute if bits == 16 else bits / 8
    return Formats(
        parameter=parameter,
        gradient=BYTES[gradient],
        master=master,
        optimizer=OPTIMIZERS[setup.optimizer] * state * setup.state_share,
        compute=compute,
        gathered=BYTES[setup.gather_dtype]
        if setup.gather_dtype
        else BYTES[number_formats.gathered]
        if setup.own
        else compute,
        frozen=frozen,
    )


def shared(state: str, zero: np.ndarray) -> np.ndarray:
    """True where replicas share `state`: booleans, of the shape of `zero`."""
    return np.array([state in exchange.cut for exchange in EXCHANGES.values()])[zero]


def gathered_at(when: str, zero: np.ndarray) -> np.ndarray:
    """True where weights are gathered at the `when` of an `Exchange`: booleans, of the shape of `zero`."""
    return np.array([exchange.gathered == when for exchange in EXCHANGES.values()])[zero]


def local_parameters(
    stage: Stage, facts: ModelFacts, tp: np.ndarray, slices: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Parameters of a stage on one tensor-parallel rank, and those of all its experts, cut over `slices` ranks (None: `tp`); both
    end stages have a copy of a tied embedding."""
    slices = tp if slices is None else slices
    total, experts = np.zeros(len(tp)), np.zeros(len(tp))
    for model_part, count in stage.parts:
        total += count * _cut(model_part, tp, slices)
        experts += count * _experts(model_part, slices)
    return total + tied_copy(stage, facts, tp), experts


def tied_copy(stage: Stage, facts: ModelFacts, tp: np.ndarray) -> np.ndarray:
    """Parameters of the last stage's copy of a tied embedding that the first stage has; 0 in others."""
    if not facts.tied or not stage.last or stage.first:
        return np.zeros(len(tp))
    embeddings = (model_part for model_part in facts.parts if model_part.role == "embedding")
    return sum(
        (min(model_part.sharded, facts.vocabulary * _width(facts)) / tp for model_part in embeddings), np.zeros(len(tp))
    )


def _cut(model_part: Part, tp: np.ndarray, slices: np.ndarray) -> np.ndarray:
    """Parameters of a part on one tensor-parallel rank that has all experts, each cut over `slices` ranks."""
    return (
        model_part.parameters
        - model_part.sharded
        + model_part.sharded / tp
        + (_experts(model_part, slices) - _experts(model_part, tp))
    )


def _experts(model_part: Part, slices: np.ndarray) -> np.ndarray:
    """Parameters of a part's experts on one of the ranks that each is cut over."""
    return (
        model_part.experts / slices
        if model_part.experts <= model_part.sharded
        else np.full(len(slices), float(model_part.experts))
    )


def _width(facts: ModelFacts) -> int:
    heads = [item.k for model_part in facts.parts if model_part.role == "head" for item in model_part.matmuls]
    return heads[0] if heads else 0


def per_token(
    bytes_: PerToken,
    model_part: Part,
    tp: np.ndarray,
    sequence: np.ndarray,
    splits: np.ndarray,
    seq_len: int,
    scores: bool = True,
) -> np.ndarray:
    """Bytes of a token on one rank; `sequence` is the divisor of sequence parallelism, `splits` that of experts' rows."""
    total = bytes_.whole + bytes_.sequence / sequence + bytes_.sharded / tp + bytes_.rows / splits
    if scores and bytes_.scores and model_part.attention is not None:
        total = total + bytes_.scores * model_part.attention.heads * seq_len / tp
    return total


@dataclass(frozen=True)
class Rank:
    """A rank of one stage. Arrays of len(cols)."""

    stage: Stage
    facts: ModelFacts
    cols: KnobArrays
    setup: TrainingSetup

    @cached_property
    def none(self) -> np.ndarray:
        """Zeros."""
        return np.zeros(len(self.cols))

    @cached_property
    def tp(self) -> np.ndarray:
        """Tensor-parallel degree."""
        return self.cols.tp.astype(float)

    @cached_property
    def replicas(self) -> np.ndarray:
        """Ranks that train the same weights."""
        return self.cols.replicas.astype(float)

    @cached_property
    def accum(self) -> np.ndarray:
        """Micro-batches of a step."""
        return self.cols.grad_accum.astype(float)

    @property
    def seq_len(self) -> int:
        """Tokens of a sample, 1 if samples have no tokens."""
        return self.setup.seq_len or 1

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens of a micro-batch on the rank."""
        return self.cols.micro_batch * float(self.seq_len) / self.cols.sequence_ranks

    @cached_property
    def sequence(self) -> np.ndarray:
        """Divisor of sequence parallelism."""
        return np.where(self.cols.sequence_parallel, self.tp, 1.0)

    @cached_property
    def ep(self) -> np.ndarray:
        """Replicas that share experts."""
        return self.cols.ep.astype(float)

    @cached_property
    def expert_tp(self) -> np.ndarray:
        """Ranks that each expert is cut over."""
        return self.cols.expert_tp.astype(float)

    def per_token(
        self, bytes_: PerToken, model_part: Part, tp: np.ndarray | None = None, *, scores: bool = True
    ) -> np.ndarray:
        """Bytes of a token of a part on the rank, or as divided by `tp`."""
        tp = self.tp if tp is None else tp
        return per_token(bytes_, model_part, tp, self.sequence, self.cols.token_splits, self.seq_len, scores)

    @cached_property
    def _parameters(self) -> tuple[np.ndarray, np.ndarray]:
        return local_parameters(self.stage, self.facts, self.tp, self.expert_tp)

    @cached_property
    def weights(self) -> np.ndarray:
        """Parameters of the rank, as if whole: pieces over replicas with the same parameters count as one."""
        total, experts = self._parameters
        return total - experts + experts / self.ep

    @cached_property
    def expert_weights(self) -> np.ndarray:
        """Those of them whose group of replicas is another one: experts that replicas, or the ranks of a layer, share."""
        return np.where((self.ep > 1) | (self.cols.token_splits > 1), self._parameters[1] / self.ep, 0.0)

    def held(self, cut: np.ndarray) -> np.ndarray:
        """Parameters of which the rank stores something, where all replicas `cut` them, or not."""
        total, experts = self._parameters
        return np.where(cut, (total - experts + experts / self.cols.token_splits) / self.cols.shard_ranks, self.weights)

    @cached_property
    def trained_share(self) -> np.ndarray:
        """Share of the rank's parameters that are trained."""
        total = self._parameters[0]
        frozen = sum(
            (
                count * (model_part.frozen - min(model_part.frozen, model_part.sharded) * (1 - 1 / self.tp))
                for model_part, count in self.stage.parts
            ),
            self.none,
        )
        return np.divide(np.maximum(total - frozen, 0.0), total, where=total > 0, out=np.zeros(len(total)))

    @property
    def trained(self) -> np.ndarray:
        """Those of the rank's parameters that are trained."""
        return self.weights * self.trained_share

    @cached_property
    def form(self) -> Formats:
        """Bytes of an element of each state."""
        return formats(self.setup, self.facts.precision, self.facts.frozen_bits)

    @cached_property
    def stored_bytes(self) -> np.ndarray:
        """Mean bytes of a stored weight: trained ones and frozen ones."""
        return self.trained_share * self.form.parameter + (1 - self.trained_share) * self.form.frozen

    @cached_property
    def flying(self) -> np.ndarray:
        """Micro-batches whose activations the rank stores at once."""
        return in_flight(self.stage.ranks[0], self.cols.pp, self.cols)

    @cached_property
    def two_blocks(self) -> np.ndarray:
        """Parameters of two blocks, one in use and one prefetched, and those outside blocks."""
        block = self.none
        for model_part, _ in self.stage.blocks:
            block = np.maximum(block, self.part_weights(model_part))
        return 2 * block + self.ends

    @cached_property
    def ends(self) -> np.ndarray:
        """Parameters outside blocks."""
        return sum(
            (self.part_weights(model_part) for model_part in self.stage.ends),
            tied_copy(self.stage, self.facts, self.tp),
        )

    def part_weights(self, model_part: Part) -> np.ndarray:
        """Parameters of a part on the rank."""
        experts = _experts(model_part, self.expert_tp)
        return _cut(model_part, self.tp, self.expert_tp) - experts + experts / self.ep


def imbalance(experts: int, ep: np.ndarray, constants: Constants) -> np.ndarray:
    """Ratio of the rows of the fullest of P ranks to their mean, 1 for one rank: 1 + s sqrt(P / E) sqrt(2 ln P), and at most P,
    if one rank has all."""
    ranks = np.minimum(ep, experts).astype(float)
    deviation = constants.expert_spread * np.sqrt(ranks / experts)
    return np.minimum(1 + deviation * np.sqrt(2 * np.log(ranks)), ranks)


def uneven(part: Part, cols: KnobArrays, constants: Constants) -> np.ndarray:
    """The imbalance of a part's mixtures; 1 without mixtures, and for experts with a capacity, which all compute as many rows."""
    experts = max((item.experts for item in part.matmuls), default=1)
    if experts == 1:
        return np.ones(len(cols))
    return np.where(cols.capacity_factor > 0, 1.0, imbalance(experts, cols.ep, constants))


def chosen(part: Part) -> float:
    """Experts of a token."""
    return max((item.rows * item.experts for item in part.matmuls if item.experts > 1), default=0.0)


def filled(cols: KnobArrays) -> np.ndarray:
    """Rows that experts compute, relative to those routed to them: f with a capacity, some of whose places may be empty."""
    return np.where(cols.capacity_factor > 0, cols.capacity_factor, 1.0)


def kept(part: Part, cols: KnobArrays, precision: str, constants: Constants) -> np.ndarray:
    """Extra bytes a token that the fullest rank keeps of a part compared with a rank that has all experts: inputs and outputs of
    products for its additional rows (fewer with f < 1), and the returned rows, from which the gradient of the experts' weights is
    computed."""
    excess = uneven(part, cols, constants) * filled(cols) - 1
    width, tp = bytes_of(precision), cols.expert_tp
    extra = np.where((cols.ep > 1) | (cols.capacity_factor > 0), part.routed * width * filled(cols), 0.0)
    for item in part.matmuls:
        if item.experts > 1:
            k, n = (size / tp if item.split == side else size for side, size in (("row", item.k), ("column", item.n)))
            extra = extra + excess * width * item.rows * item.count * (k + n)
    return extra / cols.token_splits
