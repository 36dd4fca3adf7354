"""Primitives of pipeline parallelism: the ends of stages, and the order of micro-batches."""

from collections.abc import Sequence

from torch import nn

from ...base.errors import ScheduleError, unknown
from ...knobs.meaning import PIPELINE_SCHEDULES
from ..parallel.collectives import axis_of
from ..parallel.partition import check_divided
from ..tree import ScheduledModule, find_module, is_within, primitive, with_ancestors


@primitive
def cut_pipeline_stage(sch: ScheduledModule, late: Sequence[str] = ()) -> None:
    """Ends a pipeline stage after this module; modules that the model registers later belong to the next stage.

    `build` then returns this rank's part of the model with `model.pipeline`, whose `step(**batch)` runs forward and
    backward in micro-batches. The module may return tuples or mappings. Every stage gets the same batch, so masks and
    positions need not be sent. Weights tied across stages stay equal.

    Args:
        late: paths from the root of modules that belong to the last stage although the model registers them earlier
            (OPT's last norm precedes its layers).

    Raises:
        ScheduleError: the module is the root; the mesh has no `pp` axis; the module is cut already, or above or below
            another cut; it is inside a module that occurs several times, or inside one that runs as a unit (checkpoint,
            compile, trace); or a late module does not exist.

    Source: https://pytorch.org/docs/stable/distributed.pipelining.html
    """
    label = f"cut_pipeline_stage on '{sch.name}'"
    root = sch.tree.module
    if not sch.path:
        raise ScheduleError(f"{label}: a stage ends after a module below the root")
    if axis_of(sch.mesh, "pp") is None:
        raise ScheduleError(f"{label}: the mesh must have an axis named pp; pass create_schedule(model, mesh=...)")
    for cut in sch.tree.cuts:
        if cut == sch.path:
            raise ScheduleError(f"{label}: the pipeline is cut here already")
        if is_within(cut, sch.path) or is_within(sch.path, cut):
            raise ScheduleError(f"{label}: a cut must not be inside a module that is cut too, but '{cut}' is a cut")
    order: dict[str, int] = {}
    paths: dict[nn.Module, list[str]] = {}
    for position, (path, module) in enumerate(root.named_modules(remove_duplicate=False)):
        order[path] = position
        paths.setdefault(module, []).append(path)
    outer_first = with_ancestors(sch.path)[::-1]
    # Such a module is called several times, in more than one stage.
    for path in outer_first[1:]:
        if other_paths := ", ".join(alias for alias in paths[find_module(root, path)] if alias != path):
            raise ScheduleError(
                f"{label}: a cut must not be in a module that occurs several times, but '{path}' is also {other_paths}"
            )
    for path in outer_first[:-1]:
        check_divided(sch.tree, find_module(root, path), path)
    for path in late:
        find_module(root, path)
    sch.tree.late += [path for path in late if path not in sch.tree.late]
    # In the model's order, whatever the order of the calls.
    sch.tree.cuts = sorted([*sch.tree.cuts, sch.path], key=order.__getitem__)


@primitive
def pipeline(sch: ScheduledModule, schedule: str = "1f1b", micro_batches: int | None = None) -> None:
    """Sets the order in which a batch runs through the stages of `cut_pipeline_stage`.

    Args:
        schedule: `gpipe`: all forwards, then all backwards; `1f1b`: a backward as soon as possible, so that fewer
            activations are kept; `interleaved`: 1F1B with several stages per rank; `zero_bubble`: gradients of weights
            are computed separately, when a rank would wait (ZB1P), with one or more stages per rank; `zbv`: the same
            with two stages per rank in the shape of a V, so that the first rank has the first and the last stage.
            Default without this call: `1f1b` with one stage per rank, `interleaved` with more.
        micro_batches: number of micro-batches of a batch; by default the number of stages.

    Raises:
        ScheduleError: not the root; unknown schedule; fewer than 1 micro-batch; or called before.

    `build` refuses combinations that a schedule cannot run: see `schedule/parallel/pipeline.py`.

    Source: https://pytorch.org/docs/stable/distributed.pipelining.html; Narayanan et al., arXiv:2104.04473; Qi et al.,
    Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
    """
    label = f"pipeline on '{sch.name}'"
    if sch.path:
        raise ScheduleError(f"{label}: there is one pipeline, so call it on the root's schedule")
    if schedule not in PIPELINE_SCHEDULES:
        raise ScheduleError(f"{label}: {unknown('schedule', schedule, PIPELINE_SCHEDULES)}")
    if micro_batches is not None and (isinstance(micro_batches, bool) or micro_batches < 1):
        raise ScheduleError(f"{label}: micro_batches must be at least 1, but got {micro_batches!r}")
    if sch.tree.pipeline is not None:
        raise ScheduleError(f"{label}: it is set already")
    sch.tree.pipeline = (schedule, micro_batches)
