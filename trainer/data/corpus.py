"""Rows of a corpus: text files, and tables that `datasets` reads."""

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...base.errors import MissingDependency, WorkloadError, unknown
from ...base.reading import path_of
from ...models.architecture import one_line

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

RowKind = Literal["text", "conversation", "tokens"]


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

    A row of texts has `text`: a document, or a line of a text file. A row of conversations has `messages`. A row of tokens
    has `input_ids`, and `labels` if the source has them.

    Args:
        field: column with the text or the messages.
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
    kind = str(read.features[field])
    messages = getattr(read.features[field], "feature", None)
    if isinstance(messages, dict) and {"role", "content"} <= set(messages):
        return _named(read, field, "messages"), "conversation"
    if getattr(read.features[field], "dtype", None) in ("string", "large_string"):
        return _named(read, field, "text"), "text"
    raise WorkloadError(
        f"{source.path}: '{field}' must contain a text, or a list of messages with role and content, but contains {kind[:200]}"
    )


def _named(read: "datasets.Dataset", field: str, name: str) -> "datasets.Dataset":
    rows = read.select_columns([field])
    return rows if field == name else rows.rename_column(field, name)
