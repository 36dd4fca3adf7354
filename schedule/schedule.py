"""The schedule: a module of a scheduled model, with the primitives as methods."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from torch import fx, nn

from ..base.errors import ScheduleError, unknown
from .forward import layers_of
from .graph.trace import Traced
from .primitives import (
    checkpoint as checkpointing,
    data_parallel,
    experts,
    formats,
    fused_loss as fused_losses,
    graphs,
    modules,
    pipelines,
    tensor_parallel,
    tokens,
)
from .tree import ScheduledModule, Tree, primitive


class Schedule(ScheduledModule):
    """One module of a scheduled model; primitives are its methods.

    Made by `create_schedule`. `sch["encoder.layer.0"]` is the schedule of a module below, `sch.module` the module
    itself, `sch.path` its path from the root. `register_primitive` adds the user's own primitives.
    """

    annotate = modules.annotate
    cast = formats.cast
    checkpoint = checkpointing.checkpoint
    compile = modules.compile
    cut_pipeline_stage = pipelines.cut_pipeline_stage
    cut_sequence = tokens.cut_sequence
    decompose = graphs.decompose
    find = graphs.find
    float8 = formats.float8
    fork_rng = tensor_parallel.fork_rng
    fuse = graphs.fuse
    fused_loss = fused_losses.fused_loss
    hook = modules.hook
    limit_experts = experts.limit_experts
    offload = data_parallel.offload
    parallel_loss = tensor_parallel.parallel_loss
    pipeline = pipelines.pipeline
    replace = modules.replace
    replace_all = modules.replace_all
    shard = tensor_parallel.shard
    shard_data = data_parallel.shard_data
    shard_experts = experts.shard_experts
    share_samples = tokens.share_samples
    sync = tensor_parallel.sync
    trace = graphs.trace

    @property
    def graph(self) -> fx.Graph:
        """The graph of this traced module; prints as its operations.

        Raises:
            ScheduleError: it is not traced.
        """
        for layer in layers_of(self.module, Traced):
            return layer.graph
        raise ScheduleError(f"graph of '{self.name}': trace it first")

    if not TYPE_CHECKING:  # a type checker detects unknown primitives itself

        def __getattr__(self, name: str) -> NoReturn:
            # copy and pickle look these up before an instance has attributes.
            if name.startswith("__") or name in {"tree", "path"}:
                raise AttributeError(name)
            raise AttributeError(unknown("primitive", name, list_primitives(name_only=True)))


def create_schedule(module: nn.Module, mesh: Any = None) -> Schedule:
    """Returns the schedule of a model.

    Args:
        module: the model; it is rewritten in place. Made within `deferred` it takes no memory.
        mesh: a `torch.distributed.DeviceMesh` with axes out of `pp`, `dp` and `tp`, if several devices share the work.

    Raises:
        ScheduleError: not a module, or a mesh with other axes.
    """
    if not isinstance(module, nn.Module):
        raise ScheduleError(f"create_schedule needs a torch.nn.Module, but got {type(module).__name__}")
    if mesh is not None:
        if not hasattr(mesh, "mesh_dim_names") or not hasattr(mesh, "get_group"):
            raise ScheduleError(
                f"create_schedule: mesh must be a DeviceMesh with named axes, but got {type(mesh).__name__}; for all "
                "ranks in one group pass init_device_mesh('cpu', (dist.get_world_size(),), mesh_dim_names=('tp',))"
            )
        names = mesh.mesh_dim_names or ()
        unknown_axes = [name for name in names if name not in ("pp", "dp", "tp")]
        if unknown_axes or not names:
            axes = ", ".join(names) or "none"
            raise ScheduleError(f"the mesh's axes must be named out of pp, dp, tp, but they are: {axes}")
    return Schedule(Tree(module, mesh))


def register_primitive(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """Makes `function(sch, ...)` a primitive, callable as `sch.<name>(...)`; also a decorator.

    The function checks its arguments before it changes anything, so that a refused call does not change the schedule.
    Its result is returned; None becomes the schedule itself, so that calls can be chained.

    Args:
        function: first parameter is the `Schedule` it is called on. Its signature and docstring are those of the
            method.
        name: the primitive's name; the function's name by default.

    Raises:
        ScheduleError: the name is taken.
    """
    label = name or function.__name__
    if hasattr(Schedule, label):
        raise ScheduleError(f"a primitive's name must be new, but '{label}' is taken; register another name")
    if not inspect.signature(function).parameters:
        raise ScheduleError(f"primitive '{label}' must take the schedule first, but takes no parameter")
    setattr(Schedule, label, primitive(function, label))
    return function


class Primitives(dict[str, Callable[..., Any]]):
    """Primitives by name; prints as a table of names and summaries."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(
            f"{name:<{width}}  {(inspect.getdoc(method) or '').partition(chr(10))[0]}" for name, method in self.items()
        )


def list_primitives(name_only: bool = False) -> list[str] | Primitives:
    """Primitives in alphabetical order: name -> method, printed with their summaries, or only the names."""
    methods = [(name, method) for name, method in sorted(vars(Schedule).items()) if callable(method)]
    primitives = Primitives({name: method for name, method in methods if not name.startswith("_")})
    return list(primitives) if name_only else primitives
