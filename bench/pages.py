"""Writes tables of benchmarks into pages, each between its own marks."""

from pathlib import Path


def put(page: Path, name: str, text: str) -> None:
    """Writes a text between `<!-- NAME -->` and `<!-- end of NAME -->` of a Markdown page.

    Raises:
        SystemExit: the page has no such marks.
    """
    marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
    whole = page.read_text(encoding="utf-8")
    before, found, rest = whole.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not found or not end:
        raise SystemExit(f"{page} has no marks for this table: it must have the lines {marks[0]} and {marks[1]}")
    page.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{after}", encoding="utf-8")
