"""The tree of a model's modules, the primitives that were applied to it, and its drawing as text."""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import nn

from ..base._torch import buffers_of, children_of, copy_kind_of_backward_hooks, parameters_of
from ..base._transformers import initialises
from ..base.errors import MissingModuleError, ScheduleError, unknown
from .forward import layers_of
from .graph.trace import ITSELF, Call, SubgraphCall, Traced

PHASES = ("cast", "random", "offload", "checkpoint", "compile", "data")
"""Order in which `build` applies deferred work."""


@dataclass(slots=True)
class Deferred:
    """Work of a primitive that `build` applies once the weights exist."""

    path: str
    phase: str
    """One of PHASES."""
    apply: Callable[..., Any]
    """Called as `apply(sch, module, context, **arguments)`."""
    arguments: dict[str, Any]
    """Plain data."""


@dataclass(frozen=True, slots=True)
class PrimitiveCall:
    """One call of a primitive."""

    path: str
    """Path of the module it was called on; the root is the empty string."""
    primitive: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        arguments = [_short(value) for value in self.args]
        arguments += [f"{key}={_short(value)}" for key, value in self.kwargs.items()]
        return f"{self.primitive}({', '.join(arguments)})"


@dataclass(eq=False)
class Tree:
    """State shared by all schedules of one model: the root module, the mesh, and the applied steps."""

    module: nn.Module
    mesh: Any
    steps: list[PrimitiveCall] = field(default_factory=list)
    deferred: list[Deferred] = field(default_factory=list)
    annotations: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    cuts: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    shared: dict[str, Any] = field(default_factory=dict)
    """How the tokens of some blocks are shared (`parallel/sharing.py`), by path."""
    pipeline: tuple[str, int | None] | None = None
    examples: dict[str, Any] = field(default_factory=dict)
    """Example inputs, as (args, kwargs), of modules by path: tracing derives those of other modules from them."""
    hub: nn.Module | None = None
    """The Hugging Face model that contains the root and initialises its modules."""
    built: bool = False

    def below(self, path: str) -> "Tree":
        """Returns the tree of a submodule as a model of its own, with everything applied to it and below it.

        Raises:
            ScheduleError: a pipeline is cut there.
        """
        cuts_inside = [cut for cut in self.cuts if is_within(cut, path)]
        if cuts_inside:
            raise ScheduleError(f"'{path}' has the pipeline cut '{cuts_inside[0]}', so it cannot be taken by itself")

        def relative(full: str) -> str:
            return full[len(path) + 1 :]

        names = path.split(".")
        ancestors = (find_module(self.module, ".".join(names[:count])) for count in range(len(names)))
        return Tree(
            find_module(self.module, path),
            self.mesh,
            steps=[replace(step, path=relative(step.path)) for step in self.steps if is_within(step.path, path)],
            deferred=[replace(work, path=relative(work.path)) for work in self.deferred if is_within(work.path, path)],
            annotations={
                (relative(place), name): dict(values)
                for (place, name), values in self.annotations.items()
                if is_within(place, path)
            },
            shared={relative(place): sharing for place, sharing in self.shared.items() if is_within(place, path)},
            examples={relative(place): call for place, call in self.examples.items() if is_within(place, path)},
            # The innermost Hugging Face model above has the rule of initialisation for this module.
            hub=next((module for module in reversed(list(ancestors)) if initialises(module)), self.hub),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tree":
        # The mesh is shared: its process groups cannot be copied.
        return replace(
            self,
            module=copy.deepcopy(self.module, memo),
            steps=list(self.steps),
            deferred=[replace(work, arguments=dict(work.arguments)) for work in self.deferred],
            annotations={key: dict(value) for key, value in self.annotations.items()},
            cuts=list(self.cuts),
            late=list(self.late),
            shared=dict(self.shared),
            examples=dict(self.examples),
        )


class ScheduledModule:
    """One module of a scheduled model: its position, and the modules below it. `Schedule` adds the primitives."""

    def __init__(self, tree: Tree, path: str = "") -> None:
        self.tree = tree
        self.path = path

    @property
    def module(self) -> nn.Module:
        """The current module."""
        return find_module(self.tree.module, self.path)

    @property
    def mesh(self) -> Any:
        """The device mesh given to `create_schedule`, or None."""
        return self.tree.mesh

    @property
    def name(self) -> str:
        """The path for messages; for the root its class name."""
        return self.path or type(self.tree.module).__name__

    def __getitem__(self, path: str | int) -> Self:
        """Returns a module below this one by dotted path, or a member of a list by its number.

        Raises:
            ScheduleError: the module does not exist; the message names the nearest one.
        """
        full = join(self.path, str(path))
        find_module(self.tree.module, full)
        return type(self)(self.tree, full)

    def __iter__(self) -> Iterator[Self]:
        """The direct children, in order."""
        return iter([type(self)(self.tree, join(self.path, name)) for name, _ in self.module.named_children()])

    def __contains__(self, path: str) -> bool:
        module: nn.Module | None = self.module
        for name in path.split(".") if path else ():
            module = None if module is None else children_of(module).get(name)
        return module is not None

    def select(self, pattern: str) -> list[Self]:
        """Modules below whose path matches, in the model's order.

        `*`, `?` and `[...]` match within one component of the path, `**` any number of components:
        `sch.select("encoder.layer.*.attention")`, `sch.select("**.mlp")`.

        Raises:
            ScheduleError: nothing matches; the message names the nearest path.
        """
        paths = [name for name, _ in self.module.named_modules(remove_duplicate=False) if name]
        matches = [name for name in paths if _matches(pattern.split("."), name.split("."))]
        if not matches:
            generic_paths = {re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name) for name in paths}
            closest = get_close_matches(pattern, sorted(generic_paths), n=1, cutoff=0.3)
            hint = f"; the nearest path is '{closest[0]}'" if closest else ""
            raise ScheduleError(f"no module of '{self.name}' matches '{pattern}'{hint}")
        return [type(self)(self.tree, join(self.path, name)) for name in matches]

    def defer(self, phase: str, apply: Callable[..., Any], **arguments: Any) -> None:
        """Adds work for `build`, which calls `apply(sch, module, context, **arguments)` in the order of PHASES."""
        self.tree.deferred.append(Deferred(self.path, phase, apply, arguments))

    def deferred(self, apply: Callable[..., Any]) -> list[Deferred]:
        """Returns the work with this `apply` that is deferred to `build` for this module."""
        return [work for work in self.tree.deferred if work.path == self.path and work.apply is apply]

    def copy(self) -> Self:
        """An independent copy of the whole model and of everything applied to it."""
        return type(self)(copy.deepcopy(self.tree), self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self.path}', {type(self.module).__name__})"

    def __str__(self) -> str:
        return draw(self.module, self.path, self.tree.steps)


def find_module(root: nn.Module, path: str) -> nn.Module:
    """Returns the module at a dotted path.

    Raises:
        ScheduleError: the path does not exist; the message names the nearest child of the deepest module on it.
    """
    module, walked = root, ""
    for name in path.split(".") if path else ():
        if name not in children_of(module):
            parent = walked or type(root).__name__
            raise MissingModuleError(f"no module '{path}': {unknown(f'child of {parent}', name, children_of(module))}")
        child = children_of(module)[name]
        if child is None:
            raise MissingModuleError(f"no module '{path}': '{join(walked, name)}' is None in this model")
        module, walked = child, join(walked, name)
    return module


def places(root: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """Returns every (parent, child name, path) of a module in the tree; several if the module is shared."""
    occurrences = []
    for path, parent in root.named_modules():
        for name, child in children_of(parent).items():
            if child is module:
                occurrences.append((parent, name, join(path, name)))
    return occurrences


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters and buffers of a module itself, by name."""
    named_tensors = [*parameters_of(module).items(), *buffers_of(module).items()]
    return [(name, tensor) for name, tensor in named_tensors if tensor is not None]


def replace_tensor(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Replaces a parameter or buffer."""
    setattr(module, name, tensor)  # not in its dictionary alone: an LSTM also has its parameters in a list


def give_hooks(old: nn.Module, new: nn.Module) -> None:
    """Adds the hooks of `old` to `new`, after those of `new`."""
    for attribute in vars(nn.Module()):  # of torch alone: a user's attribute may have such a name too
        if "_hooks" in attribute and (hooks := getattr(old, attribute)):
            getattr(new, attribute).update(hooks)
    copy_kind_of_backward_hooks(old, new)


def called_with_path(function: Callable[..., Any], module: nn.Module, path: str) -> Any:
    """Calls a function with a module, and with its path if the function takes two arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return function(module)
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    second = len(positional) > 1 and (positional[1].default is inspect.Parameter.empty or positional[1].name == "path")
    return function(module, path) if second else function(module)


def join(*paths: str) -> str:
    """Joins dotted paths, leaving out empty ones."""
    return ".".join(path for path in paths if path)


def is_within(path: str, module: str) -> bool:
    """True if a path is that of a module, or of one below it."""
    return not module or path == module or path.startswith(module + ".")


def with_ancestors(path: str) -> list[str]:
    """Returns a path and those of the modules above it, up to the root, whose path is empty."""
    names = path.split(".") if path else []
    return [".".join(names[:depth]) for depth in range(len(names), -1, -1)]


def _matches(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_matches(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _matches(pattern[1:], path[1:])


def draw(module: nn.Module, path: str, steps: Iterable[PrimitiveCall]) -> str:
    """Draws the tree below a module, one line per module, each with its applied primitives and the operations in its
    graph.

    Equal neighbours with the same primitives share a line: `1-11: GPT2Block  x11`.

    Args:
        path: path of that module from the model's root.
    """
    applied: dict[str, list[str]] = {}
    for step in steps:
        applied.setdefault(step.path, []).append(str(step))
    lines = [_label(module) + _marks(applied.get(path, ()))]
    _children(module, path, applied, "", lines)
    return "\n".join(lines)


def _operations(module: nn.Module) -> list[str]:
    """Returns the operations that the schedule put into the graph of a module, as calls; modules are drawn as children."""
    return [
        f"{node.target.__name__}({', '.join(operand.name for operand in node.all_input_nodes if operand.target != ITSELF)})"
        for layer in layers_of(module, Traced)
        for node in layer.graph.nodes
        if isinstance(node.target, Call | SubgraphCall)
    ]


def _children(module: nn.Module, path: str, applied: dict[str, list[str]], indent: str, lines: list[str]) -> None:
    groups: list[tuple[list[str], list[str]]] = []
    # Drawn first, then compared as text: equal neighbours with a number for a name share a line.
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        body = [_label(child) + _marks(applied.get(child_path, ()))]
        _children(child, child_path, applied, "", body)
        if groups and groups[-1][1] == body and name.isdigit():
            groups[-1][0].append(name)
        else:
            groups.append(([name], body))
    groups += [([], [operation]) for operation in _operations(module)]
    for index, (names, body) in enumerate(groups):
        is_last = index == len(groups) - 1
        if not names:
            lines.append(f"{indent}{'└─ ' if is_last else '├─ '}{body[0]}")
            continue
        label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        count = f"  x{len(names)}" if len(names) > 1 else ""
        lines.append(f"{indent}{'└─ ' if is_last else '├─ '}{label}: {body[0]}{count}")
        lines.extend(f"{indent}{'   ' if is_last else '│  '}{line}" for line in body[1:])


def _label(module: nn.Module) -> str:
    name, extra = type(module).__name__, module.extra_repr()
    return f"{name}({extra})" if extra and "\n" not in extra else name


def _marks(steps: "list[str] | tuple[str, ...]") -> str:
    return f"  [{'; '.join(steps)}]" if steps else ""


def _short(value: Any) -> str:
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    if hasattr(value, "names"):  # a handle of find, which may no longer be in its graph
        return "+".join(value.names)
    if isinstance(value, (list, tuple)) and value and all(hasattr(handle, "names") for handle in value):
        return f"[{', '.join(_short(handle) for handle in value)}]"
    rendered = repr(value)
    return rendered if len(rendered) <= 40 else rendered[:37] + "..."


Extra = ParamSpec("Extra")
"""Arguments of a primitive in addition to the schedule."""
AnySchedule = TypeVar("AnySchedule", bound=ScheduledModule)


def primitive(
    function: Callable[Concatenate[Any, Extra], Any], name: str | None = None
) -> Callable[Concatenate[AnySchedule, Extra], AnySchedule]:
    """Converts a function to a method of a schedule, with its signature and docstring.

    It checks its arguments before it changes anything, so that a refused call does not change the schedule. Its result
    is returned; None becomes the schedule itself, so that calls can be chained.

    Args:
        function: first parameter is the schedule that it is called on.
        name: the method's name; the function's name by default.
    """
    label = name or function.__name__

    @functools.wraps(function)
    def method(sch: AnySchedule, *args: Extra.args, **kwargs: Extra.kwargs) -> AnySchedule:
        if sch.tree.built:
            raise ScheduleError(
                f"{label} on '{sch.name}': a primitive must come before build, but this schedule is built; "
                "create a schedule of a fresh model"
            )
        result = function(sch, *args, **kwargs)
        # After the call: a refused call is not a step.
        sch.tree.steps.append(PrimitiveCall(sch.path, label, args, kwargs))
        return sch if result is None else result

    method.__name__, method.__qualname__ = label, f"Schedule.{label}"
    return method
