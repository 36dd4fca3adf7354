"""Writing of `report.html`."""

from pathlib import Path

from ...base.errors import StudyError
from ...base.reading import path_of
from ...base.writing import write_atomic
from .document import document
from .page import page
from .run_files import RunFiles

NAME = "report.html"
"""File name of the report in the folder of a run."""


def write_report(run: str | Path, output: str | Path | None = None) -> Path:
    """Writes the report of a run and returns its path.

    Args:
        run: the folder of the run, finished or still running, or a table of trials (CSV).
        output: the file to write; None for `report.html` in the folder of the run, or, for a table of another
            name, that name with `.html`.

    Raises:
        StudyError: there is no run, a required file is missing, or the report cannot be written.
    """
    source = RunFiles.read(run)
    if output is None:
        alone = Path(run).is_file() and source.table != "trials.csv"
        output = source.folder / (Path(source.table).stem + ".html" if alone else NAME)
    output = path_of(output)
    if output.is_dir():
        output = output / NAME
    content = page(document(source))
    try:
        write_atomic(output, content.encode(), durable=False)
    except OSError as error:
        raise StudyError(f"cannot write '{output}': {error.strerror or error}; give another file with -o") from error
    return output
