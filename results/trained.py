"""A training's folder: its request, its configurations, and its log.

train.yaml          the request, and the configurations with the steps from which they apply
log.jsonl           lines for steps at intervals, evaluations, checkpoints and other events
checkpoints/        the latest ones
data/               the corpus as tokens
logs/               output of ranks, one file per start
stop                while it exists, the training ends at its next step, with a checkpoint
out-of-memory.json  written if ranks of a launcher ran out of memory, with their configuration; removed by the next
                    start
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import StudyError
from ..base.reading import LARGEST_DOCUMENT, JsonLines, Malformed, parse_yaml, read_inside
from ..base.writing import cannot_write, write_yaml

DOCUMENT, LOG, CHECKPOINTS = "train.yaml", "log.jsonl", "checkpoints"
DATA, LOGS, STOP, OUT_OF_MEMORY = "data", "logs", "stop", "out-of-memory.json"
FORMAT = 1
_END = 1 << 20
"""Size of the end of a log that is read for its last steps, bytes."""


def holds_training(path: Path) -> bool:
    """True if the folder contains a training."""
    return (path / DOCUMENT).is_file()


def read_document(path: Path) -> dict[str, Any]:
    """Returns the contents of train.yaml.

    Raises:
        StudyError: it is missing, damaged, or of another version.
    """
    file = path / DOCUMENT
    try:
        document = parse_yaml(read_inside(path, DOCUMENT, at_most=LARGEST_DOCUMENT))
    except OSError as error:
        reason = error.strerror or error
        raise StudyError(f"'{path}' contains no training: {DOCUMENT} cannot be read ({reason})") from error
    except Malformed as error:
        raise StudyError(f"'{file}' is damaged: {str(error)[:200]}") from error
    shapes = {"asked": dict, "strategies": list}
    if not isinstance(document, dict) or any(not isinstance(document.get(k), t) for k, t in shapes.items()):
        raise StudyError(f"'{file}' is damaged: it must contain {' and '.join(shapes)}")
    if document.get("format") != FORMAT:
        raise StudyError(f"'{file}' has format {document.get('format')!r}, but this version reads {FORMAT}")
    if not document["strategies"] or not all(_is_strategy(strategy) for strategy in document["strategies"]):
        raise StudyError(f"'{file}' is damaged: strategies must be a list of steps with their configurations")
    return document


def _is_strategy(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("step"), int)
        and isinstance(value.get("devices"), int)
        and isinstance(value.get("configuration"), dict)
    )


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Writes train.yaml.

    Raises:
        StudyError: it cannot be written; the old file is unchanged.
    """
    try:
        write_yaml(path / DOCUMENT, {"format": FORMAT, **document})
    except OSError as error:
        raise cannot_write(path, error) from error


def highest_step(folder: Path) -> int:
    """Returns the highest step in the end of the log; 0 if there is none."""
    reader = JsonLines(folder, LOG, max(0, log_size(folder) - _END))
    steps = (line.get("step") for line in reader.lines() if line.get("kind") in ("step", "evaluation"))
    return max((step for step in steps if isinstance(step, int)), default=0)


def log_size(folder: Path) -> int:
    """Returns the size of the log, bytes; 0 if there is none."""
    path = folder / LOG
    return path.stat().st_size if path.exists() else 0
