"""Tensor and pipeline parallelism by transformers' plans of an architecture.

About a hundred architectures define in their configuration how each of their weights is cut (`base_model_tp_plan`) and
the order of their modules (`base_model_pp_plan`). The plans are converted to shard, sync and fork_rng here.

Source: https://huggingface.co/docs/transformers/perf_infer_gpu_multi
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...base._torch import children_of, parameters_of
from ...base.errors import ScheduleError
from .standard import NO_PIPELINE, NO_TENSOR_PARALLEL, draws, even_ends
from .tensor_parallel import Regions, column_parallel, is_adapted, row_parallel, sequence, vocabulary

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...schedule import Schedule
    from ...schedule.parallel.collectives import Axis

COLUMNS = ("colwise", "packed_colwise")
SUMMED = "replicated_with_grad_allreduce"
BY_HEADS = "norm_by_heads"
"""Style of a norm with weights of its own for each head, in addition to those of transformers."""
WITHIN = (*COLUMNS, "rowwise", SUMMED, BY_HEADS)
"""Styles of a region: whole input, cut features, partial sums."""
NOTHING = ("local_params", "replicate")
"""Styles without an effect here: tensors are plain local tensors anyway."""
NORMS_OF_HEADS = {"q_norm": "q_proj", "k_norm": "k_proj", "q_layernorm": "q_proj", "k_layernorm": "k_proj"}
"""Norms of queries and keys, and the projections before them."""
BEFORE_HEADS = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "indexer")
"""Children of latent attention that compute on the whole input: the cut projections after them sum the gradient, and an
indexer has none."""
STYLES = (
    *(*WITHIN, *NOTHING, "packed_rowwise", "rowwise_split_input", "colwise_gather_output", "embedding_rowwise"),
    *("embedding_colwise", "moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj", "all_reduce"),
)
"""Supported styles of transformers' plans."""


def tensor_plan(sch: "Schedule") -> dict[str, str]:
    """transformers' tensor-parallel plan of a model: path (`*` for a block's number) -> style; empty if there is none."""
    plan = _plan_of_transformers(sch.module, "tp")
    return {**_latent_attention(sch, plan), **plan} if plan else {}


def _latent_attention(sch: "Schedule", plan: dict[str, str]) -> dict[str, str]:
    """Plan of multi-head latent attention, as transformers has it for DeepSeek-V2, for models whose plan leaves this
    attention whole, such as DeepSeek-V3."""
    config = sch.module.config.get_text_config()
    styles: dict[str, str] = {}
    for path, _ in sch.module.named_modules():
        parent, _, name = path.rpartition(".")
        if name != "kv_b_proj" or f"{parent}.kv_a_proj_with_mqa" not in sch or not hasattr(config, "qk_rope_head_dim"):
            continue
        pattern = ".".join("*" if component.isdigit() else component for component in parent.split("."))
        if not any(planned.startswith(pattern + ".") for planned in plan):
            # Layers of another attention beside it may have projections of the same names.
            names = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
            styles |= {f"{parent}.{projection}": style for projection, style in names.items()}
            styles[f"{parent}.kv_a_proj_with_mqa"] = "mla_kv_a_proj"
    return styles


def _plan_of_transformers(model: "nn.Module", kind: str) -> dict[str, Any]:
    base = getattr(getattr(model, "config", None), f"base_model_{kind}_plan", None)
    if not base:
        return {}
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and prefix in children_of(model) else ""
    return {**{prefix + path: style for path, style in base.items()}, **(getattr(model, f"_{kind}_plan", None) or {})}


def cut(sch: "Schedule", blocks: "Sequence[Schedule]", sequence_parallel: bool) -> None:
    """Cuts a model by transformers' plan.

    Raises:
        ScheduleError: it has no plan, the plan has an unsupported style, or the sequence cannot be cut around it.
    """
    plan = tensor_plan(sch)
    if not plan:
        raise ScheduleError(f"tp: {NO_TENSOR_PARALLEL}")
    unknown_styles = sorted(set(plan.values()) - set(STYLES))
    if unknown_styles:
        raise ScheduleError(
            f"tp: transformers' plan of this model has the style {', '.join(unknown_styles)}, not known here"
        )
    names = _names(sch)
    styles = {
        path: style
        for pattern, style in plan.items()
        for path in _matching(names, pattern)
        if not _whole_here(sch, path)
    }
    _cut_vocabulary(sch, styles)
    styles |= _left_out(sch, styles)
    drops = draws(sch)
    regions: set[str] = set()
    for path in styles:
        region = _region(sch, styles, path)
        if region and region not in regions:
            regions.add(region)
            inner_styles = {inner: style for inner, style in styles.items() if inner.startswith(region + ".")}
            _cut_region(sch[region], inner_styles, Regions(sequence_parallel), drops)
    for path, style in sorted(styles.items(), key=lambda item: not _is_parameter(sch, item[0])):
        if not any(path == region or path.startswith(region + ".") for region in regions):
            if sequence_parallel and style != "moe_tp_experts" and not _is_parameter(sch, path):
                raise ScheduleError(
                    f"sequence_parallel: no module around '{path}' contains only sharded modules, so transformers' "
                    "plan does not show where to gather the sequence"
                )
            _cut_alone(sch, path, style, sequence_parallel, drops)
    if drops:
        for parent in _around(sch, styles):
            if parent not in regions:
                for dropout in _forked(sch[parent], sequence_parallel=False):
                    dropout.fork_rng(differ=False)
    if sequence_parallel:
        _cut_sequence(sch, blocks, [*regions, *_mixtures(sch)], drops)


def _around(sch: "Schedule", styles: dict[str, str]) -> dict[str, dict[str, str]]:
    """Returns the modules with cut projections: path -> styles of its children, by path."""
    children: dict[str, dict[str, str]] = {}
    for path, style in styles.items():
        if not _is_parameter(sch, path):
            children.setdefault(path.rpartition(".")[0], {})[path] = style
    return {
        parent: child_styles
        for parent, child_styles in children.items()
        if "rowwise" in child_styles.values() and set(COLUMNS) & set(child_styles.values())
    }


def _left_out(sch: "Schedule", styles: dict[str, str]) -> dict[str, str]:
    """Returns styles for modules between cut projections that are not in `styles`.

    A norm of all features has its projections gathered, with the heads whole on each rank.

    Raises:
        ScheduleError: weights between them whose gradient cannot be derived, or values of all heads.
    """
    import inspect

    for parent in dict.fromkeys(path.rpartition(".")[0] for path in styles):
        if parent in sch and "value_embeds" in inspect.signature(sch[parent].module.forward).parameters:
            raise ScheduleError(f"tp: '{parent}' adds values of all heads, from outside, to those of a rank's heads")
    additions: dict[str, str] = {}
    for parent, child_styles in _around(sch, styles).items():
        between = {path: _style_between(sch, parent, path) for path in _uncut(sch, parent, styles)}
        if "colwise_gather_output" in between.values():
            gathered = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
            additions |= {path: gathered.get(style, style) for path, style in child_styles.items()}
            continue
        for path, style in between.items():
            if style is None:
                raise ScheduleError(
                    f"tp: '{path}' lies between cut projections, and transformers' plan does not show how its weights "
                    "are cut or their gradient summed"
                )
            additions[path] = style
    return additions


def _uncut(sch: "Schedule", parent: str, styles: dict[str, str]) -> list[str]:
    """Modules within one with cut projections whose weights stay whole and whose input may be cut."""
    uncut = []
    for name, module in sch[parent].module.named_modules():
        path = f"{parent}.{name}" if name else parent
        names = [parameter for parameter, tensor in parameters_of(module).items() if tensor is not None]
        if (
            any(f"{path}.{parameter}" not in styles for parameter in names)
            and name.partition(".")[0] not in BEFORE_HEADS
            and _layer(sch, path) not in styles
        ):
            uncut.append(path)
    return uncut


def _style_between(sch: "Schedule", parent: str, path: str) -> str | None:
    """Style of a module between cut projections; None if it is unknown."""
    name = path[len(parent) + 1 :]
    shapes = {tuple(tensor.shape) for tensor in parameters_of(sch[path].module).values() if tensor is not None}
    if name.startswith("act") and shapes <= {(), (1,)}:
        return SUMMED
    projection = f"{parent}.{NORMS_OF_HEADS.get(name)}"
    width = getattr(sch[parent].module, "head_dim", 0)
    if projection not in sch or not width or len(shapes) > 1:
        return None
    features = sch[projection].module.out_features
    by_shape = {(width,): SUMMED, (features // width, width): BY_HEADS, (features,): "colwise_gather_output"}
    return by_shape.get(shapes.pop())


def stage_ends(sch: "Schedule", stages: int) -> "list[Schedule]":
    """Even shares of the blocks, if transformers' plan has one list of blocks.

    Raises:
        ScheduleError: there is none, or more than hidden states passes between blocks or to them.
    """
    plan = _plan_of_transformers(sch.module, "pp")
    lists = [path for path in plan if path in sch and hasattr(sch[path].module, "append")]
    if len(lists) != 1:
        raise ScheduleError(f"pp: {NO_PIPELINE}")
    if getattr(sch.module.config.get_text_config(), "num_kv_shared_layers", 0):
        raise ScheduleError(
            "pp: later blocks read keys of earlier ones beside the hidden states (num_kv_shared_layers)"
        )
    parent, _, blocks = lists[0].rpartition(".")
    children = list(children_of(sch[parent].module if parent else sch.module))
    for name in children[children.index(blocks) + 1 :]:
        path = f"{parent}.{name}" if parent else name
        if path not in plan and name != "hc_head" and any(True for _ in sch[path].module.parameters()):
            raise ScheduleError(
                f"pp: transformers' pipeline plan does not show whether '{path}' is called before or after the blocks"
            )
    return even_ends(list(sch[lists[0]]), stages)


def _whole_here(sch: "Schedule", path: str) -> bool:
    """True if ranks share the samples of the block around a place and none of its layers, or if it is in experts that are
    whole.
    """
    from ...schedule.parallel.experts import is_spread
    from ...schedule.primitives.tensor_parallel import sharing_around

    holder = path if path in sch else path.rpartition(".")[0]
    components = holder.split(".")
    if any(is_spread(sch[".".join(components[:depth])].module) for depth in range(len(components), 0, -1)):
        return True
    sharing = sharing_around(sch[holder])
    return sharing is not None and sharing.tp is None


def _names(sch: "Schedule") -> list[list[str]]:
    """Paths that a plan may have, by component: those of all modules, and of parameters that are not a layer's."""
    modules = [name for name, _ in sch.module.named_modules() if name]
    own = [name for name, _ in sch.module.named_parameters() if not name.endswith((".weight", ".bias"))]
    return [name.split(".") for name in (*modules, *own)]


def _matching(names: Sequence[list[str]], path: str) -> list[str]:
    """Names that match a path of a plan; none if this model has none."""
    from fnmatch import fnmatchcase

    patterns = path.split(".")
    return [
        ".".join(components)
        for components in names
        if len(components) == len(patterns) and all(map(fnmatchcase, components, patterns))
    ]


def _region(sch: "Schedule", styles: dict[str, str], path: str) -> str | None:
    """Path of the module around a place that contains only cut modules; None if there is none."""
    parent = path.rpartition(".")[0]
    if not parent or _is_parameter(sch, path) or styles[path] not in WITHIN:
        return None
    holders = [
        f"{parent}.{name}" if name else parent
        for name, module in sch[parent].module.named_modules()
        if any(tensor is not None for tensor in parameters_of(module).values())
    ]
    inner = [styles.get(layer) for layer in {_layer(sch, holder): None for holder in holders}]
    if set(inner) <= set(WITHIN) and inner.count("rowwise") == 1 and set(inner) & set(COLUMNS):
        return parent
    return None


def _layer(sch: "Schedule", holder: str) -> str:
    """Path of the layer that a module with weights belongs to: an adapted layer consists of its original and its
    adapters.
    """
    components = holder.split(".")
    for depth in range(1, len(components)):
        path = ".".join(components[:depth])
        if is_adapted(sch[path]):
            return path
    return holder


def _cut_region(region: "Schedule", styles: dict[str, str], regions: Regions, drops: bool) -> None:
    below = len(region.path) + 1
    last_projection = next(region[path[below:]] for path, style in styles.items() if style == "rowwise")
    for path, style in styles.items():
        module = region[path[below:]]
        if style in COLUMNS:
            column_parallel(module, parts=2 if style == "packed_colwise" else 1)
        elif style == "rowwise":
            row_parallel(module)
        elif style == BY_HEADS:
            module.shard("weight", axis=0)
        else:
            module.sync("bwd_post", "all_reduce", on="parameters")
    regions.around(region, last_projection, dropout=_forked(region, regions.sequence_parallel) if drops else [])


def _forked(region: "Schedule", sequence_parallel: bool) -> "list[Schedule]":
    """Makes ranks draw different random numbers within a module with cut projections. Returns the dropouts after the last
    projection, which may need the same numbers on all ranks.

    Raises:
        ScheduleError: its code drops values both before and after that projection.
    """
    drops_output = getattr(region.module, "residual_dropout", 0)
    if drops_output and not sequence_parallel:
        if getattr(region.module, "attention_dropout", 0):
            raise ScheduleError(
                f"tp: the code of '{region.path}' drops values of each rank's heads and of the output that ranks share, so "
                "that its random numbers must differ and agree; set residual_dropout or attention_dropout to 0"
            )
        return []
    region.fork_rng()
    return [dropout for dropout in region if "Dropout" in type(dropout.module).__name__ and _is_behind(dropout.path)]


def _is_behind(path: str) -> bool:
    name = path.rpartition(".")[2]
    return "resid" in name or "out_drop" in name or "output" in name


def _cut_alone(sch: "Schedule", path: str, style: str, sequence_parallel: bool, drops: bool) -> None:
    """Cuts one place of a plan, with its own communication, as transformers does."""
    from ...schedule.primitives.tensor_parallel import tensor_parallel

    if style in NOTHING:
        return
    if _is_parameter(sch, path):
        holder, _, name = path.rpartition(".")
        dims = sch[holder].module.get_parameter(name).dim()
        if style in COLUMNS:
            sch[holder].shard(name, axis=dims - 2, parts=2 if style == "packed_colwise" else 1)
        else:
            sch[holder].shard(name, axis=dims - 1, parts=2 if style == "packed_rowwise" else 1)
        return
    module = sch[path]
    if style == "moe_tp_experts":
        if drops:
            module.fork_rng()
        if not sequence_parallel:
            # For the tokens and the weights of the experts' outputs.
            module.sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce")
    elif style in COLUMNS or style == "colwise_gather_output":
        gathered = style == "colwise_gather_output"
        column_parallel(module, parts=2 if style == "packed_colwise" else 1, gathered=gathered)
        module.sync("bwd_post", "all_reduce")
        if gathered:
            module.sync("fwd_post", "all_gather", axis=-1)
    elif style in ("rowwise", "rowwise_split_input"):
        row_parallel(module)
        if style == "rowwise_split_input":
            module.sync("fwd_pre", "scatter", axis=-1)
        module.sync("fwd_post", "all_reduce")
    elif style == "embedding_rowwise":
        module.shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
    elif style == "embedding_colwise":
        module.shard("weight", axis=1).sync("fwd_post", "all_gather", axis=-1)
    elif style == BY_HEADS:
        module.shard("weight", axis=0)
    elif style == "mla_kv_a_proj":
        # Keys' positions go to every rank's heads straight from here; the rest has its sum behind the next projection.
        width = sch.module.config.get_text_config().qk_rope_head_dim
        module.sync("bwd_pre", partial(_last_summed, features=width, axis=tensor_parallel(module, "shard")))
    elif style == "moe_identity_expert":
        module.sync("fwd_pre", partial(_share, ranks=tensor_parallel(module, "shard").size))
    elif style == "all_reduce":
        module.sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce")
    else:
        module.sync("bwd_post", "all_reduce", on="parameters")


def _last_summed(gradient: "torch.Tensor", features: int, axis: "Axis") -> "torch.Tensor":
    """Sums the last features of a gradient over the ranks."""
    import torch

    from ...schedule.parallel.collectives import all_reduce

    unsummed, summed = gradient.split([gradient.shape[-1] - features, features], dim=-1)
    return torch.cat([unsummed, all_reduce(summed, axis)], dim=-1)


def _share(tensor: "torch.Tensor", ranks: int) -> "torch.Tensor":
    """A rank's share of a tensor that every rank has and that is summed over them afterwards."""
    return tensor / ranks


def _cut_vocabulary(sch: "Schedule", styles: dict[str, str]) -> None:
    """Cuts embedding and head, if the plan cuts the head; they are removed from `styles`."""
    paths = {id(module): path for path, module in sch.module.named_modules()}
    try:
        sch.module.get_input_embeddings()
    except NotImplementedError:  # a model without tokens, such as a vision tower
        return
    head = paths.get(id(sch.module.get_output_embeddings()), "")
    embedding = paths[id(sch.module.get_input_embeddings())]
    if styles.pop(head, ""):
        styles.pop(embedding, "")
        vocabulary(sch, [embedding], head)


def _mixtures(sch: "Schedule") -> list[str]:
    """Paths of modules with only a router and its experts."""
    mixtures = []
    for path in _experts(sch):
        parent = path.rpartition(".")[0]
        siblings = {name for name, _ in sch[parent].module.named_children()} - {path.rpartition(".")[2]}
        if siblings <= {"gate", "router", "act_fn"}:
            mixtures.append(parent)
    return mixtures


def _cut_sequence(sch: "Schedule", blocks: "Sequence[Schedule]", regions: Sequence[str], drops: bool) -> None:
    """Cuts the sequence between regions, and around mixtures of experts, whose router sees the whole sequence on
    every rank and has a part of its gradient on each. Where experts are whole, a mixture gets the rank's tokens; if they
    are divided only behind the router, every rank has the whole gradient.
    """
    from ...schedule.parallel.experts import divides_tokens, is_spread

    experts = _experts(sch)
    for path in experts:
        mixture = sch[path.rpartition(".")[0]]
        if mixture.path not in regions:
            raise ScheduleError(f"sequence_parallel: '{mixture.name}' contains more than a router and experts")
        whole_experts = is_spread(sch[path].module)
        if whole_experts and divides_tokens(sch[path].module):
            mixture.sync("fwd_pre", "all_gather", axis=1, gradient="scatter").sync("fwd_post", "scatter", axis=1)
            continue
        for module in mixture:
            if module.path != path and any(True for _ in module.module.parameters(recurse=False)):
                module.sync("bwd_post", "all_reduce", on="parameters")
        if not whole_experts:
            mixture.sync("fwd_pre", "all_gather", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
    if not blocks:
        raise ScheduleError("sequence_parallel: the model has no repeated blocks that are alike")
    norms = []
    for block in blocks:
        for path, module in block.module.named_modules():
            full = f"{block.path}.{path}"
            if any(full == region or full.startswith(region + ".") for region in regions):
                continue
            if parameters_of(module) and block is blocks[0]:
                norms.append(path)
            if drops and "Dropout" in type(module).__name__:
                block[path].fork_rng()
    for name in norms:
        if "norm" not in type(blocks[0][name].module).__name__.lower():
            raise ScheduleError(
                f"sequence_parallel: '{blocks[0].path}.{name}' is neither cut nor a norm, and may need the sequence"
            )
    final_norms = [
        path
        for path, module in sch.module.named_modules()
        if path.rpartition(".")[0] == blocks[0].path.rpartition(".")[0].rpartition(".")[0]
        and "norm" in type(module).__name__.lower()
    ]
    if len(final_norms) != 1:
        raise ScheduleError(f"sequence_parallel: one norm must follow the blocks, but there are {len(final_norms)}")
    sequence(sch, blocks, norms, final_norms[0])


def _experts(sch: "Schedule") -> list[str]:
    """Paths of the modules that the plan cuts as experts."""
    plan = tensor_plan(sch)
    experts = [pattern for pattern, style in plan.items() if style == "moe_tp_experts"]
    names = _names(sch) if experts else []
    return [path for pattern in experts for path in _matching(names, pattern)]


def _is_parameter(sch: "Schedule", path: str) -> bool:
    return path not in sch
