"""The source of a lambda, for messages, and for files where it happens to be in the grammar."""

import ast
import linecache
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def lambda_body(function: Callable[..., Any]) -> str | None:
    """The expression that a lambda returns, as written; None for any other callable, or without a source."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != "<lambda>":
        return None
    source = "".join(linecache.getlines(code.co_filename, getattr(function, "__globals__", None)))
    spans = [span for span in code.co_positions() if None not in span]
    spans = [(span[0], span[2], span[1], span[3]) for span in spans]  # start and end as (line, column) pairs
    spans = [span for span in spans if span[:2] != span[2:]]
    if not source or not spans:
        return None
    start, end = min(span[:2] for span in spans), max(span[2:] for span in spans)
    around = [
        body
        for first, body in _lambdas(source)
        if first == code.co_firstlineno
        and (body.lineno, body.col_offset) <= start
        and end <= (body.end_lineno, body.end_col_offset)
    ]
    if not around:
        return None
    innermost = max(around, key=lambda body: (body.lineno, body.col_offset))
    return " ".join(ast.get_source_segment(source, innermost).split())


@lru_cache(maxsize=4)
def _lambdas(source: str) -> list[tuple[int, Any]]:
    """Line and body of every lambda of a file. The source is parsed, as Python did before, not run."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return [(node.lineno, node.body) for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
