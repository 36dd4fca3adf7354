"""How a name that is not public is taken from a library: in words where it is gone."""

from importlib import import_module
from importlib.metadata import version
from typing import Any

from .errors import MissingDependency


def private_name(module: str, name: str, checked: str) -> Any:
    """What a library has under a name that is not public.

    Raises:
        MissingDependency: it is gone; says where it was, and with which versions of the library it is there.
    """
    library = module.partition(".")[0]
    try:
        owner: Any = import_module(library)
        for part in module.split(".")[1:]:
            owner = getattr(owner, part, None) or import_module(f"{owner.__name__}.{part}")
        return getattr(owner, name) if hasattr(owner, name) else import_module(f"{owner.__name__}.{name}")
    except (AttributeError, ImportError) as error:
        raise MissingDependency(
            f"{library} {version(library)} has no {module}.{name}, which redline needs and takes from there; install "
            f"{checked}, with which it was checked"
        ) from error
