"""Synthetic and text batches: token windows for language models, images with classes for classifiers."""

import codecs
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..base.errors import WorkloadError

if TYPE_CHECKING:
    import numpy as np
    import torch


Task = Literal[
    "causal", "masked", "seq2seq", "image", "pretraining", "sequence_classification", "token_classification",
    "question_answering", "multiple_choice", "speech_seq2seq", "ctc", "audio_classification", "segmentation",
    "contrastive",
]  # fmt: skip
"""Training task of a model: that of a language model, the class of an image, or another one (`models.tasks`)."""
GENERAL: tuple[Task, ...] = ("causal", "masked", "seq2seq", "image")
"""Tasks whose batches are `TokenBatches` or `ImageBatches`."""

MAX_TEXT_BYTES = 4 * 1024 * 1024
"""Number of bytes of a text that are read: much more than a dry run needs, and they are sent to every trial."""
MASKED_SHARE = 0.15
BYTE_OFFSET = 3
"""Byte b is token b + 3: the first three tokens are padding, end and unknown (ByT5, arXiv:2105.13626)."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")
"""Files that identify a folder with a tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenText:
    """A text as tokens."""

    path: str
    tokens: "np.ndarray"
    """Token ids, one dimension, of the smallest unsigned type that represents them."""
    tokenizer: str
    """`bytes`, or the folder of the tokenizer."""
    digest: str
    """SHA-256 of the text that was read, hex."""
    mask_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """`batches(size, seed)`: `input_ids` and `labels`, int64, shape [size, seq_len].

    Causal: labels are the inputs (the model shifts them). Masked: 15 % of every sequence is selected, always the same
    number, so that the mean over a batch is the mean over its micro-batches. 80 % of these become the mask token, 10 %
    a random one, 10 % do not change (BERT, arXiv:1810.04805); other labels are -100. Sequence to sequence: labels are
    the same number of further tokens, of a text those that follow; the model derives its decoder's input from them.
    """

    task: Task
    """`causal`, `masked` or `seq2seq`."""
    seq_len: int
    """Tokens of a sample; sequence to sequence, of its input and of its output each."""
    vocab_size: int
    """All ids are smaller."""
    pad_id: int | None = None
    """An id that never occurs, because models treat it specially."""
    text: TokenText | None = field(default=None, repr=False)
    """Source of the tokens; None for random tokens."""

    def __call__(self, size: int, seed: int) -> dict[str, "torch.Tensor"]:
        import torch

        draw = GeneratorDraw(torch.Generator().manual_seed(seed))
        shape = (size, window(self.task, self.seq_len))
        if self.text is None:
            tokens = random_tokens(shape, self.vocab_size, self.pad_id, draw)
        else:
            tokens = _windows(self.text.tokens, shape, draw)
        mask_id = self.text.mask_id if self.text is not None else None
        return inputs_and_labels(
            self.task, tokens, vocab_size=self.vocab_size, pad_id=self.pad_id, mask_id=mask_id, draw=draw
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


def _windows(tokens: "np.ndarray", shape: tuple[int, int], draw: Draw) -> "torch.Tensor":
    """Pieces of a text at random positions, with the given number of samples and tokens."""
    import numpy as np
    import torch

    size, length = shape
    starts = draw.below(len(tokens) - length + 1, (size, 1)).numpy()
    picked = tokens[starts + np.arange(length)]
    return torch.from_numpy(picked.astype(np.int64))


def window(task: Task, seq_len: int) -> int:
    """Number of tokens of a text that one sample needs."""
    return 2 * seq_len if task == "seq2seq" else seq_len


def read_text(path: str | Path, *, seq_len: int, vocab_size: int, folder: Path | None = None) -> TokenText:
    """Reads a text file as tokens: by the tokenizer in `folder` if there is one, by bytes otherwise.

    The first 4 MiB are read.

    Raises:
        WorkloadError: the file is not readable UTF-8 text, too short for one sample, or has tokens beyond the
            vocabulary.
    """
    import hashlib

    import numpy as np

    raw = text_bytes(Path(path))
    tokenizer = load_tokenizer(folder) if folder is not None else None
    if tokenizer is None:
        name, mask_id = "bytes", None
        ids = np.frombuffer(raw, dtype=np.uint8).astype(np.uint16) + BYTE_OFFSET
        if vocab_size < 256 + BYTE_OFFSET:
            raise WorkloadError(
                f"{path}: text by bytes needs a vocabulary of at least {256 + BYTE_OFFSET} tokens, but the "
                f"model has {vocab_size}; give a model folder with a tokenizer"
            )
    else:
        name, mask_id = str(folder), tokenizer.mask_token_id
        encoded = tokenizer(raw.decode("utf-8", errors="ignore"), add_special_tokens=False, verbose=False)
        ids = np.asarray(encoded["input_ids"], dtype=np.uint32)
        if len(ids) and int(ids.max()) >= vocab_size:
            raise WorkloadError(
                f"{path}: the tokenizer in {folder} yields token {int(ids.max())}, but the model's "
                f"vocabulary has {vocab_size}; they do not match"
            )
    if len(ids) < seq_len:
        raise WorkloadError(
            f"{path} is too short: a sample has {seq_len} tokens, but the text has {len(ids)}; give a longer "
            "text or a smaller sequence length"
        )
    return TokenText(
        path=str(path), tokens=ids, tokenizer=name, digest=hashlib.sha256(raw).hexdigest(), mask_id=mask_id
    )


def text_bytes(path: Path) -> bytes:
    """Returns the begin of a UTF-8 text, at most `MAX_TEXT_BYTES`. Raises WorkloadError if it cannot be read."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TEXT_BYTES)
    except OSError as error:
        raise WorkloadError(f"cannot read the data file {path}: {error.strerror}") from None
    if not raw:
        raise WorkloadError(f"the data file {path} is empty")
    try:
        # The limit may have cut a character, which an unfinished text may end with.
        text = codecs.getincrementaldecoder("utf-8")().decode(raw, final=len(raw) < MAX_TEXT_BYTES)
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"the data file {path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at position {error.start}"
        ) from None
    return text.encode()


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
