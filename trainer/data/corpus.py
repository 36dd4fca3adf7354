"""Rows of a corpus (text files, and tables that `datasets` reads) and their tokens."""

import errno
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...base.errors import MissingDependency, WorkloadError, unknown
from ...base.reading import path_of
from ...models.architecture import one_line
from ...models.data import BYTE_OFFSET, load_tokenizer
from .order import BYTES

if TYPE_CHECKING:
    import datasets


ENDINGS = {
    ".txt": "text", ".md": "text", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".jsonl.gz": "json",
    ".ndjson.gz": "json",
    ".json.gz": "json", ".parquet": "parquet",
}  # fmt: skip
"""Reader by file ending."""
TOKENS, LABELS = "input_ids", "labels"
"""Columns of a tokenised data set, as transformers names them."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OTHER_SPLITS = {"valid", "validation", "val", "test", "eval", "dev"}
"""First words of the names of files that are not for training."""
_ABOUT_DATA = ("readme", "license", "dataset_info", "dataset_infos", "state")
"""Names, without ending, of files beside data that are not data."""

RowKind = Literal["text", "tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A data file, or the folder of a saved data set."""

    path: Path
    reader: str
    """A value of `ENDINGS`, or `folder`."""

    def stamps(self) -> list[tuple[str, int, int]]:
        """Path, size in bytes and time of the last change in ns of each of its files, to detect changed data without
        reading it.
        """
        files = sorted(self.path.iterdir()) if self.reader == "folder" else [self.path]
        stats = [(os.path.abspath(file), file.stat()) for file in files if file.is_file()]
        return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def find_sources(paths: Iterable[str]) -> list[Source]:
    """Sources in files and folders, those of a folder by name.

    Raises:
        WorkloadError: a path does not exist or is of an unknown kind.
    """
    return [source for path in paths for source in _sources_at(path_of(path))]


def _sources_at(path: Path) -> list[Source]:
    if path.is_dir():
        return _in_folder(path)
    if not path.is_file():
        raise WorkloadError(f"the data file or folder {path} does not exist")
    if path.suffix in (".bin", ".idx"):
        raise WorkloadError(
            f"{path}: token files of nanoGPT and Megatron are not read; give the texts, or a data set with a column "
            f"'{TOKENS}'"
        )
    reader = ENDINGS.get(_ending(path))
    if reader is None:
        raise WorkloadError(f"{path}: {unknown('ending of a data file', _ending(path) or 'none', ENDINGS)}")
    return [Source(path=path, reader=reader)]


def _in_folder(folder: Path) -> list[Source]:
    """A saved data set, or files of one kind; if their names begin with those of splits, only those of training."""
    if (folder / "dataset_dict.json").is_file():
        if not (folder / "train").is_dir():
            names = sorted(path.name for path in folder.iterdir() if path.is_dir())
            raise WorkloadError(f"{folder} has no split 'train'; give the folder of one of {', '.join(names)}")
        folder = folder / "train"
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return [Source(path=folder, reader="folder")]
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and _is_data(path.relative_to(folder))]
    if not files:
        raise WorkloadError(f"the folder {folder} contains no data: no file ends in {', '.join(ENDINGS)}")
    readers = sorted({ENDINGS[_ending(path)] for path in files})
    if len(readers) > 1:
        raise WorkloadError(
            f"the folder {folder} contains data of several kinds ({', '.join(readers)}); name the files"
        )
    splits = {path: re.split(r"[-_.]", path.name.lower())[0] for path in files}
    training = [path for path in files if splits[path] in ("train", "training")]
    if training and _OTHER_SPLITS & set(splits.values()):
        files = training
    return [Source(path=path, reader=readers[0]) for path in files]


def _is_data(path: Path) -> bool:
    ending = _ending(path)
    hidden = any(component.startswith(".") for component in path.parts)
    return not hidden and ending in ENDINGS and path.name.lower().removesuffix(ending) not in _ABOUT_DATA


def _ending(path: Path) -> str:
    """Ending of a file's name, including what precedes `.gz`."""
    return "".join(path.suffixes[-2:] if path.suffix.lower() == ".gz" else path.suffixes[-1:]).lower()


def read_rows(source: Source, field: str, cache: Path) -> "tuple[datasets.Dataset, RowKind]":
    """Returns the rows of a source, and their kind.

    A row of texts has `text`: a document, or a line of a text file. A row of tokens has `input_ids`, and `labels` if the
    source has them.

    Args:
        field: column with the text.
        cache: folder for the rows, which are mapped into memory.

    Raises:
        WorkloadError: the source cannot be read, or has no such column.
        MissingDependency: `datasets` is not installed.
    """
    library = _library()
    try:
        if source.reader == "text" and not source.path.stat().st_size:  # `datasets` refuses an empty file
            return library.Dataset.from_dict({"text": [""]}), "text"
        if source.reader == "folder":
            read: datasets.Dataset = library.load_from_disk(str(source.path))
        else:
            # A text file may begin with a mark of its encoding.
            options = {"keep_linebreaks": True, "encoding": "utf-8-sig"} if source.reader == "text" else {}
            read = library.load_dataset(
                source.reader, data_files=[str(source.path)], split="train", cache_dir=str(cache), **options
            )
    except Exception as error:  # datasets raises what its readers raise, in classes of many packages
        raise _first_cause(error, source) from error
    return (read, "text") if source.reader == "text" else _selected(read, source, field)


def _first_cause(error: BaseException, source: Source) -> Exception:
    """Returns the error that `datasets` wraps: redline's own, a full disk, or a WorkloadError with its text."""
    while not isinstance(error, WorkloadError) and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, WorkloadError) or (isinstance(error, OSError) and error.errno in _FULL):
        return error
    return WorkloadError(f"{source.path} cannot be read: {one_line(error)}")


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency("training data is read by datasets: pip install 'redline[data]'") from error
    return datasets


def _selected(read: "datasets.Dataset", source: Source, field: str) -> "tuple[datasets.Dataset, RowKind]":
    """The columns that are trained on."""
    names = read.column_names
    if field not in names and TOKENS in names:
        return read.select_columns([name for name in (TOKENS, LABELS) if name in names]), "tokens"
    if field not in names:
        raise WorkloadError(
            f"{source.path}: {unknown('field', field, names)} Name the one with the text by `field: NAME` in --settings."
        )
    if getattr(read.features[field], "dtype", None) in ("string", "large_string"):
        rows = read.select_columns([field])
        return rows if field == "text" else rows.rename_column(field, "text"), "text"
    raise WorkloadError(
        f"{source.path}: '{field}' must contain a text, but contains {str(read.features[field])[:200]}; other rows, such as "
        f"conversations, are trained on as tokens, in columns '{TOKENS}' and '{LABELS}'"
    )


_END_OF_BYTES = 1  # as in ByT5, whose bytes start at BYTE_OFFSET
_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a tokenizer's folder that determine its tokens."""
_QUIET: Mapping[str, Any] = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
Rows = Mapping[str, Sequence[Any]]
"""Rows of a data set, by column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """A tokenizer, or bytes. Its methods return the columns `tokens`, `trained` (1 for predicted tokens, uint8) and
    `last` (True if a document ends there), a row for each document or piece that is not empty.
    """

    name: str
    """`bytes`, or the folder."""
    tokenizer: Any
    """Tokenizer of transformers; None for bytes."""
    size: int
    """All ids are smaller."""
    prefix: tuple[int, ...]
    """Tokens before each text, such as the beginning of a sequence."""
    suffix: tuple[int, ...]
    """Tokens after each text: the tokenizer's own, and always the end-of-text token if there is one."""
    end_id: int | None
    """Token that ends a text."""
    pad_id: int | None
    mask_id: int | None

    def texts(self, rows: Rows) -> dict[str, list[Any]]:
        """Encodes rows of `text`, with `first` and `last` for a piece of a document: True if it begins or ends it."""
        texts = rows["text"]
        if None in texts:
            raise WorkloadError("a row has no text: its value is null; leave such rows out")
        not_empty = [number for number, document in enumerate(texts) if document]
        complete = [True] * len(texts)
        begins, ends = rows.get("first", complete), rows.get("last", complete)
        encoded: dict[str, list[Any]] = {"tokens": [], "trained": [], "last": []}
        for number, ids in zip(not_empty, self._ids([texts[number] for number in not_empty])):
            tokens = np.concatenate(
                [np.asarray(ids_of_part, dtype=np.uint32) for ids_of_part in
                 (self.prefix if begins[number] else (), ids, self.suffix if ends[number] else ())]
            )  # fmt: skip
            encoded["tokens"].append(tokens)
            encoded["trained"].append(np.ones(len(tokens), dtype=np.uint8))
            encoded["last"].append(ends[number])
        return encoded

    def _ids(self, texts: list[str]) -> list[Any]:
        if self.tokenizer is None:
            return [
                np.frombuffer(document.encode("utf-8"), dtype=np.uint8).astype(np.uint32) + BYTE_OFFSET
                for document in texts
            ]
        return list(self.tokenizer(texts, add_special_tokens=False, **_QUIET)["input_ids"]) if texts else []


def encoded_tokens(rows: Rows) -> dict[str, list[Any]]:
    """Returns rows of `input_ids`, and of `labels` if there are any, with the columns of `Encoder`.

    Raises:
        WorkloadError: a label is neither its token nor -100.
    """
    tokens = [np.asarray(ids, dtype=np.int64) for ids in rows[TOKENS]]
    trained = [np.ones(len(ids), dtype=np.uint8) for ids in tokens]
    if LABELS in rows:
        trained = []
        for ids, row_labels in zip(tokens, rows[LABELS]):
            labels = np.asarray(row_labels, dtype=np.int64)
            if labels.shape != ids.shape or ((labels != ids) & (labels != -100)).any():
                raise WorkloadError(
                    f"'{LABELS}' must be those of '{TOKENS}', or -100 for tokens that are not predicted"
                )
            trained.append((labels != -100).astype(np.uint8))
    if any(len(ids) and ids.min() < 0 for ids in tokens):
        raise WorkloadError(f"'{TOKENS}' has a negative number")
    return {
        "tokens": [ids.astype(np.uint32) for ids in tokens],
        "trained": trained,
        "last": [True] * len(tokens),
    }


def encoder_of(folder: str | None) -> Encoder:
    """Returns the encoder of a tokenizer's folder, or that of bytes for None or `bytes`.

    Raises:
        WorkloadError: the folder contains no tokenizer, or one that cannot be loaded.
    """
    if folder is None or folder == BYTES:
        return Encoder(
            name=BYTES, tokenizer=None, size=256 + BYTE_OFFSET, prefix=(), suffix=(_END_OF_BYTES,),
            end_id=_END_OF_BYTES, pad_id=0, mask_id=None,
        )  # fmt: skip
    tokenizer = load_tokenizer(Path(folder)) if Path(folder).is_dir() else None
    if tokenizer is None:
        raise WorkloadError(f"{folder} contains no tokenizer; give the folder that its tokenizer.json is in")
    # Older classes have another token at the end of a text: the separator.
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    prefix, suffix = _special_tokens(tokenizer)
    if end is not None and end not in suffix[-1:]:
        suffix = (*suffix, end)
    return Encoder(
        name=folder, tokenizer=tokenizer, size=max(tokenizer.get_vocab().values()) + 1, prefix=prefix, suffix=suffix,
        end_id=end, pad_id=tokenizer.pad_token_id, mask_id=tokenizer.mask_token_id,
    )  # fmt: skip


def _special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Special tokens that a tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    with_special = tokenizer("a")["input_ids"]
    for begin in range(len(with_special) - len(plain) + 1):
        if with_special[begin : begin + len(plain)] == plain:
            return tuple(with_special[:begin]), tuple(with_special[begin + len(plain) :])
    raise WorkloadError(
        f"the tokenizer in {tokenizer.name_or_path} makes other tokens of a text where it marks its ends"
    )


def tokenizer_digest(folder: str | None) -> str:
    """SHA-256 of the files that determine the tokens, hex; `bytes` without a tokenizer."""
    if folder is None or folder == BYTES:
        return BYTES
    total = hashlib.sha256()
    for name in _FILES:
        if (file := Path(folder) / name).is_file():
            total.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()
