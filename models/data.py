"""Token batches for language models: seeded random tokens, or windows of a text."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import WorkloadError

if TYPE_CHECKING:
    import numpy as np
    import torch

Task = Literal["causal", "masked", "seq2seq", "image"]
"""What a model is trained to do: the next token, hidden tokens, another sequence, the class of an image."""

MAX_TEXT_BYTES = 4 * 1024 * 1024
"""How much of a text is read: many times what a dry run consumes, and it travels to every trial."""
MASKED_SHARE = 0.15
BYTE_OFFSET = 3
"""Byte b is token b + 3: the first three are left to padding, end and unknown (ByT5, arXiv:2105.13626)."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenText:
    """A text as tokens."""

    path: str
    """The file."""
    tokens: "np.ndarray"
    """Token ids, one dimension, of the smallest unsigned type that holds them."""
    tokenizer: str
    """`bytes`, or the folder of the tokenizer."""
    digest: str
    """SHA-256 of the text that was read, hex."""
    mask_id: int | None = None
    """The tokenizer's mask token."""


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """`batches(size, seed)`: `input_ids` and `labels`, int64, shape [size, seq_len].

    Causal: labels are the inputs (the model shifts them). Masked: 15 % of every sequence, always the same
    number so that the mean over a batch is the mean over its micro-batches, is chosen; of these 80 % become
    the mask token, 10 % a random one, 10 % stay (BERT, arXiv:1810.04805); other labels are -100. Sequence to
    sequence: labels are as many tokens again, of a text those that follow; the model makes of them what its
    decoder reads.
    """

    task: Task
    """`causal`, `masked` or `seq2seq`."""
    seq_len: int
    """Tokens of a sample; sequence to sequence, of its input and of its output each."""
    vocab_size: int
    """Ids are below."""
    pad_id: int | None = None
    """An id that never occurs: models treat it apart."""
    text: TokenText | None = field(default=None, repr=False)
    """Where the tokens come from; None draws them."""

    def __call__(self, size: int, seed: int) -> dict[str, "torch.Tensor"]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        length = window(self.task, self.seq_len)
        inputs = (
            self._random((size, length), generator)
            if self.text is None
            else _windows(self.text.tokens, (size, length), generator)
        )
        if self.task == "seq2seq":
            source, target = inputs.split(self.seq_len, dim=1)
            return {"input_ids": source.contiguous(), "labels": target.contiguous()}
        if self.task == "causal":
            return {"input_ids": inputs, "labels": inputs}
        inputs, labels = self._mask(inputs, generator)
        return {"input_ids": inputs, "labels": labels}

    def _random(self, shape: tuple[int, ...], generator: "torch.Generator") -> "torch.Tensor":
        import torch

        if self.pad_id is None or not 0 <= self.pad_id < self.vocab_size:
            return torch.randint(self.vocab_size, shape, generator=generator)
        ids = torch.randint(self.vocab_size - 1, shape, generator=generator)
        return ids + (ids >= self.pad_id)

    def _mask(self, inputs: "torch.Tensor", generator: "torch.Generator") -> tuple["torch.Tensor", "torch.Tensor"]:
        import torch

        size, length = inputs.shape
        count = max(1, round(MASKED_SHARE * length))
        order = torch.rand((size, length), generator=generator).argsort(dim=1)
        positions = order[:, :count]
        labels = torch.full_like(inputs, -100)
        labels.scatter_(1, positions, inputs.gather(1, positions))
        fate = torch.rand((size, count), generator=generator)
        drawn = self._random((size, count), generator)
        kept = inputs.gather(1, positions)
        known = self.text.mask_id if self.text is not None else None
        mask = torch.full_like(kept, self.vocab_size - 1 if known is None else known)
        replaced = torch.where(fate < 0.8, mask, torch.where(fate < 0.9, drawn, kept))
        return inputs.scatter(1, positions, replaced), labels


def _windows(tokens: "np.ndarray", shape: tuple[int, int], generator: "torch.Generator") -> "torch.Tensor":
    """Pieces of a text that begin anywhere in it, of so many samples and tokens."""
    import numpy as np
    import torch

    size, length = shape
    starts = torch.randint(len(tokens) - length + 1, (size,), generator=generator).numpy()
    picked = tokens[starts[:, None] + np.arange(length)]
    return torch.from_numpy(picked.astype(np.int64))


def window(task: Task, seq_len: int) -> int:
    """How many tokens of a text one sample takes."""
    return 2 * seq_len if task == "seq2seq" else seq_len


def read_text(path: str | Path, *, seq_len: int, vocab_size: int, folder: Path | None = None) -> TokenText:
    """A text file as tokens: by the tokenizer in `folder` if there is one, by bytes otherwise.

    The first 4 MiB are read.

    Raises:
        WorkloadError: no readable UTF-8 text, too short for one sample, or tokens beyond the vocabulary.
    """
    import hashlib

    import numpy as np

    raw = _read(Path(path))
    tokenizer = _tokenizer(folder) if folder is not None else None
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
                f"vocabulary has {vocab_size}; they do not belong together"
            )
    if len(ids) < seq_len:
        raise WorkloadError(
            f"{path} is too short: a sample has {seq_len} tokens, but the text has {len(ids)}; give a longer "
            "text or a smaller sequence length"
        )
    return TokenText(
        path=str(path), tokens=ids, tokenizer=name, digest=hashlib.sha256(raw).hexdigest(), mask_id=mask_id
    )


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TEXT_BYTES)
    except OSError as error:
        raise WorkloadError(f"cannot read the data file {path}: {error.strerror}") from None
    if not raw:
        raise WorkloadError(f"the data file {path} is empty")
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        cut = len(raw) == MAX_TEXT_BYTES and error.start > len(raw) - 4 and error.reason == "unexpected end of data"
        if not cut:
            raise WorkloadError(
                f"the data file {path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at position {error.start}"
            ) from None
        raw = raw[: error.start]
    return raw


def _tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from .._transformers import quiet, refusals

    with quiet() as transformers:
        try:
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except refusals(OSError) as error:
            last = " ".join(str(error).split())[:300]
            raise WorkloadError(f"the tokenizer in {folder} cannot be loaded: {last}") from error
