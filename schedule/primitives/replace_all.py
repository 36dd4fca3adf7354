"""replace_all: replace every module of a type."""

from collections.abc import Callable

from torch import nn

from ...base.errors import ScheduleError, unknown
from ..primitive import primitive
from ..tree import ScheduledModule
from .replace import make, put

# The parameter below hides the builtin.
_CLASS = type


@primitive
def replace_all(sch: ScheduledModule, type: type[nn.Module], factory: Callable[..., nn.Module]) -> None:
    """Replaces every module of a type at or below this one, as `replace` does each.

    Modules inside of one that is replaced are left to the factory. Either all are replaced or none.

    Args:
        type: the class; modules of its subclasses count.
        factory: called with each old module, and with its path from the root where it takes two; returns the new one.

    Raises:
        ScheduleError: there is no such module; what `replace` refuses.
    """
    if not isinstance(type, _CLASS) or not issubclass(type, nn.Module):
        raise ScheduleError(f"replace_all on '{sch.name}': type must be a subclass of nn.Module, but got {type!r}")
    if not callable(factory) or isinstance(factory, nn.Module):
        raise ScheduleError(
            f"replace_all on '{sch.name}': factory must be a function of the old module, since each place "
            "needs a module of its own"
        )
    found: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for path, module in sch.module.named_modules():
        if isinstance(module, type) and module not in inside:
            found[module] = path
            inside.update(module.modules())
    if not found:
        known = {each.__class__.__name__ for each in sch.module.modules()}
        raise ScheduleError(f"replace_all on '{sch.name}': {unknown('module type', type.__name__, known)}")
    made = [(sch[path] if path else sch, old) for old, path in found.items()]
    pairs = [(at, old, make(at, old, factory)) for at, old in made]
    for at, old, new in pairs:
        put(at, old, new)
