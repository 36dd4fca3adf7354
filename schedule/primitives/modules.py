"""Primitives of modules: replace, compile, hook, annotate."""

import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ...base._torch import children_of
from ...base.errors import ScheduleError, unknown
from ..forward import Layer, layers_of
from ..graph.called import check_called
from ..graph.editing import replace_subgraph
from ..materialise import Replaced
from ..tree import ScheduledModule, called_with_path, give_hooks, own_tensors, places, primitive, replace_tensor


@primitive
def replace(
    sch: ScheduledModule,
    new: nn.Module | Callable[..., Any],
    subgraph: Any = None,
    name: str | None = None,
    together: bool = False,
) -> None:
    """Replaces this module by another, or subgraphs of a traced module by a module or function.

    Parameters and buffers with matching names and shapes are kept (the same objects, so ties remain), as are hooks and
    the training mode. A warning lists the tensors that could not be kept.

    The replacement of a subgraph is called with the values of the pattern's parameters. A module in the place of a single
    call takes over hooks and exchanges; otherwise those of modules in the subgraph are refused. Unused parameters are removed
    from the model.

    Args:
        new: a module, or a factory that is called with the old module, and with its path if it takes two arguments;
            the factory runs on the old module's device, including `meta`. With `subgraph`, a module or function of its
            inputs.
        subgraph: one match or a list of matches from `find`; None replaces the module itself.
        name: with `subgraph`, the name of the new child module, or of the operation in the graph.
        together: one call of `new` replaces all subgraphs of the list: it gets the inputs of all, common ones once,
            and returns as many outputs (one module for the projections to q, k and v).

    Raises:
        ScheduleError: `new` does not yield a module; the old one is sharded (replace before sharding); or state of a
            module inside a subgraph would be lost.
    """
    if subgraph is not None:
        replace_subgraph(sch, new, subgraph, name, together)
        return
    if name is not None or together:
        raise ScheduleError(f"replace on '{sch.name}': name and together go with a subgraph")
    replacement = make(sch, sch.module, new)
    put(sch, sch.module, replacement)


def make(sch: ScheduledModule, old: nn.Module, new: nn.Module | Callable[..., Any]) -> nn.Module:
    """Returns the module that will replace `old`; the model is not changed yet."""
    check_called(sch, "replace")
    for path, submodule in old.named_modules():
        if layers_of(submodule, Layer) or "_shards" in submodule.__dict__:
            raise ScheduleError(
                f"replace on '{sch.name}': a module must be replaced before it is sharded, traced or fused, "
                f"but '{path or sch.name}' already is"
            )
    if isinstance(new, nn.Module):
        _initialised_as(new, Replaced(old, sch.path, None))
        return new
    if not callable(new):
        raise ScheduleError(
            f"replace on '{sch.name}': new must be a module or a factory called with the old module, "
            f"but got {type(new).__name__}"
        )
    if isinstance(new, type) and issubclass(new, nn.Module):
        _check_class(sch, old, new)
    tensors = [*old.parameters(), *old.buffers()]
    with torch.device(tensors[0].device) if tensors else nullcontext():
        replacement = called_with_path(new, old, sch.path)
    if not isinstance(replacement, nn.Module):
        raise ScheduleError(
            f"replace on '{sch.name}': the factory must return a module, but returned {type(replacement).__name__}"
        )
    _initialised_as(replacement, Replaced(old, sch.path, new))
    return replacement


def _initialised_as(new: nn.Module, replaced: Replaced) -> None:
    """Records which module a module on the meta device replaces; `build` initialises it from that one."""
    if new is not replaced.old and any(tensor.is_meta for tensor in [*new.parameters(), *new.buffers()]):
        new.__dict__["_replaces"] = replaced


def _check_class(sch: ScheduledModule, old: nn.Module, new: type[nn.Module]) -> None:
    """Checks that a class can be constructed from the old module alone."""
    try:
        inspect.signature(new).bind(old)
    except TypeError as error:
        raise ScheduleError(
            f"replace on '{sch.name}': a class is called with the old module, but {new.__name__} takes other arguments "
            f"({error}); pass {new.__name__}(...), or a function such as lambda old: {new.__name__}(...)"
        ) from None
    parameter = next(iter(inspect.signature(new).parameters.values()))
    if parameter.annotation in (int, float, "int", "float"):
        raise ScheduleError(
            f"replace on '{sch.name}': a class is called with the old module, but {new.__name__} takes {parameter.name}, a "
            f"number; pass {new.__name__}({parameter.name}), or lambda old: {new.__name__}(...)"
        )


def put(sch: ScheduledModule, old: nn.Module, new: nn.Module) -> None:
    """Puts `new` at every place of `old`, and warns about tensors that were not kept."""
    if new is old:
        return
    root = sch.tree.module
    occurrences = places(root, old)
    # Before anything moves: `new` may contain `old`.
    # A wrapper of `old` keeps its tensors where they are.
    notes = [] if old in set(new.modules()) else _transfer(old, new)
    new.train(old.training)
    if old is root:
        sch.tree.module = new
    for parent, name, _ in occurrences:
        children_of(parent)[name] = new
    if notes:
        warnings.warn(f"replace on '{sch.name}': not kept: {'; '.join(notes)}", stacklevel=4)


def _transfer(old: nn.Module, new: nn.Module) -> list[str]:
    """Moves to `new` the tensors of `old` with matching names and shapes, its hooks and its training mode.

    The tensors are the same objects, so that ties to the rest of the model remain.

    Returns:
        A sentence for each tensor that only one of the modules has.
    """
    notes = []
    fresh = dict(_tensors(new))
    for path, tensor in _tensors(old):
        if path not in fresh:
            notes.append(f"{path} {tuple(tensor.shape)} is not in {type(new).__name__}")
        elif fresh[path].shape != tensor.shape:
            notes.append(f"{path} is {tuple(fresh.pop(path).shape)} now, not {tuple(tensor.shape)}")
        elif isinstance(tensor, nn.Parameter) != isinstance(fresh[path], nn.Parameter):
            notes.append(f"{path} is a {'parameter' if isinstance(fresh.pop(path), nn.Parameter) else 'buffer'} now")
        else:
            del fresh[path]
            parent, _, name = path.rpartition(".")
            replace_tensor(new.get_submodule(parent), name, tensor)  # the same object, so that it stays tied
    notes.extend(f"{path} {tuple(tensor.shape)} has the value it came with" for path, tensor in fresh.items())
    give_hooks(old, new)
    new.train(old.training)
    return notes


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


# The parameter below hides the builtin.
_CLASS = type


@primitive
def replace_all(sch: ScheduledModule, type: type[nn.Module], factory: Callable[..., nn.Module]) -> None:
    """Replaces every module of a type at or below this one, as `replace` does each.

    Modules inside a replaced one are not replaced: the factory decides about them. Either all are replaced or none.

    Args:
        type: the class; modules of its subclasses count.
        factory: called with each old module, and with its path from the root if it takes two arguments; returns the
            new one.

    Raises:
        ScheduleError: the module does not exist, or `replace` refuses.
    """
    if not isinstance(type, _CLASS) or not issubclass(type, nn.Module):
        raise ScheduleError(f"replace_all on '{sch.name}': type must be a subclass of nn.Module, but got {type!r}")
    if not callable(factory) or isinstance(factory, nn.Module):
        raise ScheduleError(
            f"replace_all on '{sch.name}': factory must be a function of the old module, since each place "
            "needs a new module"
        )
    path_by_module: dict[nn.Module, str] = {}
    replaced: set[nn.Module] = set()
    for path, module in sch.module.named_modules():
        if isinstance(module, type) and module not in replaced:
            path_by_module[module] = path
            replaced.update(module.modules())
    if not path_by_module:
        class_names = {module.__class__.__name__ for module in sch.module.modules()}
        raise ScheduleError(f"replace_all on '{sch.name}': {unknown('module type', type.__name__, class_names)}")
    schedules = [(sch[path] if path else sch, old) for old, path in path_by_module.items()]
    # All factories run before the model changes, so that a refusal leaves it unchanged.
    replacements = [(schedule, old, make(schedule, old, factory)) for schedule, old in schedules]
    for schedule, old, new in replacements:
        put(schedule, old, new)


@primitive
def compile(sch: ScheduledModule, **options: Any) -> None:
    """Compiles this module with `torch.compile`, in place: no wrapper, names in `state_dict` do not change.

    Compilation happens at the first call after `build`. Compile the repeated blocks rather than the whole model:
    identical blocks share the compiled code.

    Args:
        options: keyword arguments of `torch.compile`, such as `mode`, `fullgraph`, `dynamic`, `backend`.

    Raises:
        ScheduleError: it is compiled already; or an unknown option.

    Source: https://pytorch.org/docs/stable/generated/torch.compile.html
    """
    if sch.deferred(_apply):
        raise ScheduleError(f"compile on '{sch.name}': the module is compiled already")
    check_options(sch, options)
    check_called(sch, "compile")
    sch.defer("compile", _apply, options=options)


def on_compilation(on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
    """Calls `on_begin` whenever torch.compile starts to compile a forward or backward pass in this process, and `on_end`
    when it is done or has failed. A nested compilation belongs to the outer one.
    """
    from ...base._torch import dynamo

    dynamo.on_compile_start(lambda args: on_begin())
    dynamo.on_compile_end(lambda args: on_end())


def refusals() -> int:
    """Returns how often torch.compile has given up on a function in this process, which then runs uncompiled.

    The usual reason is more shapes than `torch.compiler.config.recompile_limit`.
    """
    from ...base._torch import dynamo

    frames = dynamo.utils.counters["frames"]
    return frames["total"] - frames["ok"]


def check_options(sch: ScheduledModule, options: dict[str, Any]) -> None:
    """Raises ScheduleError for options that `torch.compile` does not accept."""
    options_of_torch = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    for name in options:
        if name not in options_of_torch:
            raise ScheduleError(f"compile on '{sch.name}': {unknown('option', name, options_of_torch)}")
    backend = options.get("backend", "inductor")
    if isinstance(backend, str):
        from ...base._torch import dynamo

        names = dynamo.list_backends(exclude_tags=())
        if backend not in names:
            raise ScheduleError(f"compile on '{sch.name}': {unknown('backend', backend, names)}")


def _apply(sch: ScheduledModule, module: nn.Module, context: Any, options: dict[str, Any]) -> None:
    module.compile(**options)


KINDS = {
    "fwd_pre": "register_forward_pre_hook",
    "fwd_post": "register_forward_hook",
    "bwd_pre": "register_full_backward_pre_hook",
    "bwd_post": "register_full_backward_hook",
}


@primitive
def hook(sch: ScheduledModule, kind: str, fn: Callable[..., Any]) -> None:
    """Calls `fn` before or after this module's forward or backward, like PyTorch's own hooks.

    Args:
        kind: `fwd_pre`: `fn(module, args)`; `fwd_post`: `fn(module, args, output)`; `bwd_pre`: `fn(module,
            grad_output)`; `bwd_post`: `fn(module, grad_input, grad_output)`.
        fn: its result, if not None, replaces the arguments, the output, the gradient with respect to the output, or
            that with respect to the input.

    Raises:
        ScheduleError: unknown kind, or `fn` is not callable.
    """
    if kind not in KINDS:
        raise ScheduleError(f"hook on '{sch.name}': {unknown('kind', kind, KINDS)}")
    if not callable(fn):
        raise ScheduleError(f"hook on '{sch.name}': fn must be callable, but got {type(fn).__name__}")
    check_called(sch, "hook")
    getattr(sch.module, KINDS[kind])(fn)


@primitive
def annotate(sch: ScheduledModule, param: str, key: str, value: Any) -> None:
    """Attaches `value` to a parameter or buffer of this module, readable as `module.<param>.<key>`.

    It survives replacement, sharding and materialisation: `build` attaches it to the final tensor.

    Raises:
        ScheduleError: no such parameter; or the key is not an identifier or is an attribute of every tensor.
    """
    tensor = tensor_of(sch, param, "annotate")
    if not key.isidentifier() or hasattr(torch.Tensor, key):
        raise ScheduleError(
            f"annotate '{param}' of '{sch.name}': key must be an identifier that tensors do not have, but got '{key}'"
        )
    setattr(tensor, key, value)
    sch.tree.annotations.setdefault((sch.path, param), {})[key] = value


def tensor_of(sch: ScheduledModule, name: str, primitive: str) -> torch.Tensor:
    """Returns a parameter or buffer of this module itself.

    Raises:
        ScheduleError: the module has none of that name.
    """
    tensors = dict(own_tensors(sch.module))
    if name not in tensors:
        raise ScheduleError(f"{primitive} on '{sch.name}': {unknown('parameter or buffer', name, tensors)}")
    return tensors[name]
