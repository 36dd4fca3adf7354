"""How a name that is not public is taken from a library: in words where it is gone."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

from .errors import MissingDependency


def resolver(names: Mapping[str, tuple[str, str]], checked: str, namespace: dict[str, Any]) -> Callable[[str], Any]:
    """A module's `__getattr__` that looks a name up when it is first asked for.

    Args:
        names: of the module, and where the library has them: module and name.
        checked: versions of the library that have them, as pip takes them.
        namespace: the module's `globals()`, which keeps what was found.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        namespace[name] = private_name(*names[name], checked)
        return namespace[name]

    return find


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
