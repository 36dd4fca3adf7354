"""Key-value caches of transformers among a module's arguments."""

import sys
from typing import Any


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with None for every cache: run twice, a module would write it twice."""
    module = sys.modules.get("transformers.cache_utils")
    if module is None:
        return args, kwargs
    args = tuple(None if isinstance(each, module.Cache) else each for each in args)
    return args, {key: None if isinstance(value, module.Cache) else value for key, value in kwargs.items()}
