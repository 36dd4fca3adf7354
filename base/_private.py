"""Lazy lookup of a library's private names, with an error that explains a missing one."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

from .errors import MissingDependency


def resolver(names: Mapping[str, tuple[str, str]], checked: str, namespace: dict[str, Any]) -> Callable[[str], Any]:
    """Returns a module's `__getattr__` that resolves a name at first use.

    Args:
        names: name in the module -> (module, name) in the library.
        checked: versions of the library that have these names, as pip takes them.
        namespace: the module's `globals()`, where resolved names are cached.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        namespace[name] = private_name(*names[name], checked)
        return namespace[name]

    return find


def private_name(module: str, name: str, checked: str) -> Any:
    """Returns the object that a library has under a private name.

    Raises:
        MissingDependency: the name does not exist. The message states its former place and the versions that have it.
    """
    library = module.partition(".")[0]
    try:
        owner: Any = import_module(library)
        for component in module.split(".")[1:]:
            owner = getattr(owner, component, None) or import_module(f"{owner.__name__}.{component}")
        return getattr(owner, name) if hasattr(owner, name) else import_module(f"{owner.__name__}.{name}")
    except (AttributeError, ImportError) as error:
        raise MissingDependency(
            f"{library} {version(library)} has no {module}.{name}, which redline needs; install "
            f"{checked}, with which it was checked"
        ) from error
