"""Synthetic batches: tokens for language models, images with classes for classifiers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..base.errors import WorkloadError

if TYPE_CHECKING:
    import torch


Task = Literal[
    "causal", "masked", "seq2seq", "image", "pretraining", "sequence_classification", "token_classification",
    "question_answering", "multiple_choice", "speech_seq2seq", "ctc", "audio_classification", "segmentation",
    "contrastive",
]  # fmt: skip
"""Training task of a model: that of a language model, the class of an image, or another one (`models.tasks`)."""
GENERAL: tuple[Task, ...] = ("causal", "masked", "seq2seq", "image")
"""Tasks whose batches are `TokenBatches` or `ImageBatches`."""

MASKED_SHARE = 0.15
BYTE_OFFSET = 3
"""Byte b is token b + 3: the first three tokens are padding, end and unknown (ByT5, arXiv:2105.13626)."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")
"""Files that identify a folder with a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """`batches(size, seed)`: `input_ids` of random tokens and `labels`, int64, shape [size, seq_len].

    Causal: labels are the inputs (the model shifts them). Masked: 15 % of every sequence is selected, always the same
    number, so that the mean over a batch is the mean over its micro-batches. 80 % of these become the mask token, 10 %
    a random one, 10 % do not change (BERT, arXiv:1810.04805); other labels are -100. Sequence to sequence: labels are
    the same number of further tokens; the model derives its decoder's input from them.
    """

    task: Task
    """`causal`, `masked` or `seq2seq`."""
    seq_len: int
    """Tokens of a sample; sequence to sequence, of its input and of its output each."""
    vocab_size: int
    """All ids are smaller."""
    pad_id: int | None = None
    """An id that never occurs, because models treat it specially."""

    def __call__(self, size: int, seed: int) -> dict[str, "torch.Tensor"]:
        import torch

        draw = GeneratorDraw(torch.Generator().manual_seed(seed))
        tokens = random_tokens((size, window(self.task, self.seq_len)), self.vocab_size, self.pad_id, draw)
        return inputs_and_labels(
            self.task, tokens, vocab_size=self.vocab_size, pad_id=self.pad_id, mask_id=None, draw=draw
        )


class Draw(Protocol):
    """Source of random numbers; each call returns new ones."""

    def uniform(self, shape: tuple[int, int]) -> "torch.Tensor":
        """Numbers from 0 to 1, without 1."""

    def below(self, bound: int, shape: tuple[int, int]) -> "torch.Tensor":
        """Integers from 0 to `bound` - 1, int64."""


class GeneratorDraw:
    """Draws numbers from a generator of PyTorch."""

    def __init__(self, generator: "torch.Generator") -> None:
        self._generator = generator

    def uniform(self, shape: tuple[int, int]) -> "torch.Tensor":
        import torch

        return torch.rand(shape, generator=self._generator)

    def below(self, bound: int, shape: tuple[int, int]) -> "torch.Tensor":
        import torch

        return torch.randint(bound, shape, generator=self._generator)


def random_tokens(shape: tuple[int, int], vocab_size: int, pad_id: int | None, draw: Draw) -> "torch.Tensor":
    """Random tokens of a vocabulary, without its padding."""
    if pad_id is None or not 0 <= pad_id < vocab_size:
        return draw.below(vocab_size, shape)
    ids = draw.below(vocab_size - 1, shape)
    return ids + (ids >= pad_id)


def inputs_and_labels(
    task: Task,
    tokens: "torch.Tensor",
    *,
    vocab_size: int,
    pad_id: int | None,
    mask_id: int | None,
    draw: Draw,
    real: "torch.Tensor | None" = None,
) -> dict[str, "torch.Tensor"]:
    """Returns inputs and labels of a task for samples of tokens, as described in `TokenBatches`.

    Args:
        task: `causal`, `masked` or `seq2seq`.
        tokens: int64, shape [samples, window(task, seq_len)].
        vocab_size: all ids are smaller.
        pad_id: an id that is never drawn.
        mask_id: token that replaces masked ones; None for the last id.
        draw: source of random numbers for the selection.
        real: bool, shape of `tokens`: tokens that may be masked; None for all.
    """
    if task == "seq2seq":
        source, target = tokens.chunk(2, dim=1)
        return {"input_ids": source.contiguous(), "labels": target.contiguous()}
    if task == "causal":
        return {"input_ids": tokens, "labels": tokens}
    import torch

    size, length = tokens.shape
    order = draw.uniform((size, length))
    counts = torch.full((size, 1), length) if real is None else real.sum(dim=1, keepdim=True)
    if real is not None:
        order = order.masked_fill(~real, 2.0)  # after all that may be masked
    counts = (MASKED_SHARE * counts.double()).round().long().clamp(min=1)
    most = int(counts.max())
    positions = order.argsort(dim=1)[:, :most]
    chosen = torch.arange(most) < counts
    chosen_tokens = tokens.gather(1, positions)
    labels = torch.full_like(tokens, -100)
    labels.scatter_(1, positions, chosen_tokens.masked_fill(~chosen, -100))
    fate = draw.uniform((size, most))
    sampled = random_tokens((size, most), vocab_size, pad_id, draw)
    hidden = torch.full_like(chosen_tokens, vocab_size - 1 if mask_id is None else mask_id)
    replaced = torch.where(fate < 0.8, hidden, torch.where(fate < 0.9, sampled, chosen_tokens))
    return {"input_ids": tokens.scatter(1, positions, torch.where(chosen, replaced, chosen_tokens)), "labels": labels}


def window(task: Task, seq_len: int) -> int:
    """Number of tokens of a text that one sample needs."""
    return 2 * seq_len if task == "seq2seq" else seq_len


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a folder; None if there is none.

    Raises:
        WorkloadError: it cannot be loaded.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    from ..base._transformers import quiet, refusals

    with quiet() as transformers:
        try:
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except refusals(OSError) as error:
            message = " ".join(str(error).split())[:300]
            raise WorkloadError(f"the tokenizer in {folder} cannot be loaded: {message}") from error


@dataclass(frozen=True, kw_only=True)
class ImageBatches:
    """`batches(size, seed)`: `pixel_values`, float32, shape [size, channels, height, width], standard normal like
    normalised images; `labels`, int64, shape [size].
    """

    channels: int
    height: int
    width: int
    classes: int
    """All labels are smaller."""

    def __call__(self, size: int, seed: int) -> dict[str, "torch.Tensor"]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randn((size, self.channels, self.height, self.width), generator=generator)
        labels = torch.randint(self.classes, (size,), generator=generator)
        return {"pixel_values": pixels, "labels": labels}
