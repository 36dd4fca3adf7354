"""A schedule drawn as text."""

from collections.abc import Iterable

from torch import fx, nn

from .calls import PrimitiveCall
from .forward import layers_of
from .graph.operations import Call, SubgraphCall, SyncCall
from .graph.trace import ITSELF, Traced


def draw(module: nn.Module, path: str, steps: Iterable[PrimitiveCall]) -> str:
    """The tree below a module, a line a module, each with what was applied to it, and what was put into its graph.

    Neighbours that are the same and carry the same primitives share a line: `1-11: GPT2Block  x11`.

    Args:
        module: where the tree begins.
        path: of that module from the model's root.
        steps: what was applied to the model.
    """
    applied: dict[str, list[str]] = {}
    for step in steps:
        applied.setdefault(step.path, []).append(str(step))
    lines = [_label(module) + _marks(applied.get(path, ()))]
    _children(module, path, applied, "", lines)
    return "\n".join(lines)


def _operations(module: nn.Module) -> list[str]:
    """What the schedule put into the graph of a module, as calls; modules are drawn as children."""
    return [
        f"{node.target.__name__}({', '.join(each.name for each in node.args if _shown(each))})"
        for layer in layers_of(module, Traced)
        for node in layer.graph.nodes
        if isinstance(node.target, Call | SubgraphCall | SyncCall)
    ]


def _shown(given: object) -> bool:
    return isinstance(given, fx.Node) and given.target != ITSELF


def _children(module: nn.Module, path: str, applied: dict[str, list[str]], indent: str, lines: list[str]) -> None:
    groups: list[tuple[list[str], list[str]]] = []
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        body = [_label(child) + _marks(applied.get(below, ()))]
        _children(child, below, applied, "", body)
        if groups and groups[-1][1] == body and name.isdigit():
            groups[-1][0].append(name)
        else:
            groups.append(([name], body))
    groups += [([], [each]) for each in _operations(module)]
    for index, (names, body) in enumerate(groups):
        last = index == len(groups) - 1
        if not names:
            lines.append(f"{indent}{'└─ ' if last else '├─ '}{body[0]}")
            continue
        label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        count = f"  x{len(names)}" if len(names) > 1 else ""
        lines.append(f"{indent}{'└─ ' if last else '├─ '}{label}: {body[0]}{count}")
        lines.extend(f"{indent}{'   ' if last else '│  '}{line}" for line in body[1:])


def _label(module: nn.Module) -> str:
    name, extra = type(module).__name__, module.extra_repr()
    return f"{name}({extra})" if extra and "\n" not in extra else name


def _marks(steps: "list[str] | tuple[str, ...]") -> str:
    return f"  [{'; '.join(steps)}]" if steps else ""
