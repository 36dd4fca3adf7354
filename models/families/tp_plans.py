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
    found: dict[str, str] = {}
    for path, _ in sch.module.named_modules():
        around, _, name = path.rpartition(".")
        if name != "kv_b_proj" or f"{around}.kv_a_proj_with_mqa" not in sch or not hasattr(config, "qk_rope_head_dim"):
            continue
        general = ".".join("*" if part.isdigit() else part for part in around.split("."))
        if not any(each.startswith(general + ".") for each in plan):
            # Layers of another attention beside it may have projections of the same names.
            names = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
            found |= {f"{around}.{each}": style for each, style in names.items()}
            found[f"{around}.kv_a_proj_with_mqa"] = "mla_kv_a_proj"
    return found


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
    places = {
        place: style for path, style in plan.items() for place in _places(sch, path) if not _whole_here(sch, place)
    }
    _cut_vocabulary(sch, places)
    places |= _left_out(sch, places)
    drops = draws(sch)
    done: set[str] = set()
    for place in places:
        region = _region(sch, places, place)
        if region and region not in done:
            done.add(region)
            inside = {path: style for path, style in places.items() if path.startswith(region + ".")}
            _cut_region(sch[region], inside, Regions(sequence_parallel), drops)
    for place, style in sorted(places.items(), key=lambda item: not _is_parameter(sch, item[0])):
        if not any(place == each or place.startswith(each + ".") for each in done):
            if sequence_parallel and style != "moe_tp_experts" and not _is_parameter(sch, place):
                raise ScheduleError(
                    f"sequence_parallel: no module around '{place}' contains only sharded modules, so transformers' "
                    "plan does not show where to gather the sequence"
                )
            _cut_alone(sch, place, style, sequence_parallel, drops)
    if drops:
        for parent in _around(sch, places):
            if parent not in done:
                for dropout in _forked(sch[parent], sequence_parallel=False):
                    dropout.fork_rng(differ=False)
    if sequence_parallel:
        _cut_sequence(sch, blocks, [*done, *_mixtures(sch)], drops)


def _around(sch: "Schedule", places: dict[str, str]) -> dict[str, dict[str, str]]:
    """Modules with cut projections: path -> places of its children and their styles."""
    found: dict[str, dict[str, str]] = {}
    for place, style in places.items():
        if not _is_parameter(sch, place):
            found.setdefault(place.rpartition(".")[0], {})[place] = style
    return {
        parent: inside
        for parent, inside in found.items()
        if "rowwise" in inside.values() and set(COLUMNS) & set(inside.values())
    }


def _left_out(sch: "Schedule", places: dict[str, str]) -> dict[str, str]:
    """Styles of what lies between the cut projections of a module and is not in `places`.

    A norm of all features has its projections gathered, with the heads whole on each rank.

    Raises:
        ScheduleError: weights between them whose gradient cannot be derived, or values of all heads.
    """
    import inspect

    for parent in dict.fromkeys(place.rpartition(".")[0] for place in places):
        if parent in sch and "value_embeds" in inspect.signature(sch[parent].module.forward).parameters:
            raise ScheduleError(f"tp: '{parent}' adds values of all heads, from outside, to those of a rank's heads")
    found: dict[str, str] = {}
    for parent, inside in _around(sch, places).items():
        styles = {path: _style_between(sch, parent, path) for path in _uncut(sch, parent, places)}
        if "colwise_gather_output" in styles.values():
            whole = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
            found |= {place: whole.get(style, style) for place, style in inside.items()}
            continue
        for path, style in styles.items():
            if not style:
                raise ScheduleError(
                    f"tp: '{path}' lies between cut projections, and transformers' plan does not show how its weights "
                    "are cut or their gradient summed"
                )
        found |= styles
    return found


def _uncut(sch: "Schedule", parent: str, places: dict[str, str]) -> list[str]:
    """Modules within one with cut projections whose weights stay whole and whose input may be cut."""
    found = []
    for name, module in sch[parent].module.named_modules():
        path = f"{parent}.{name}" if name else parent
        names = [each for each, tensor in parameters_of(module).items() if tensor is not None]
        if (
            any(f"{path}.{each}" not in places for each in names)
            and name.partition(".")[0] not in BEFORE_HEADS
            and _layer(sch, path) not in places
        ):
            found.append(path)
    return found


def _style_between(sch: "Schedule", parent: str, path: str) -> str:
    """Style of a module between cut projections; empty if it is unknown."""
    name = path[len(parent) + 1 :]
    shapes = {tuple(each.shape) for each in parameters_of(sch[path].module).values() if each is not None}
    if name.startswith("act") and shapes <= {(), (1,)}:
        return SUMMED
    projection = f"{parent}.{NORMS_OF_HEADS.get(name)}"
    width = getattr(sch[parent].module, "head_dim", 0)
    if projection not in sch or not width or len(shapes) > 1:
        return ""
    features = sch[projection].module.out_features
    known = {(width,): SUMMED, (features // width, width): BY_HEADS, (features,): "colwise_gather_output"}
    return known.get(shapes.pop(), "")


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


def _whole_here(sch: "Schedule", place: str) -> bool:
    """True if ranks share the samples of the block around a place and none of its layers, or if it is in experts that are
    whole.
    """
    from ...schedule.parallel.experts import is_spread
    from ...schedule.primitives.tensor_parallel import sharing_around

    holder = place if place in sch else place.rpartition(".")[0]
    parts = holder.split(".")
    if any(is_spread(sch[".".join(parts[:depth])].module) for depth in range(len(parts), 0, -1)):
        return True
    sharing = sharing_around(sch[holder])
    return sharing is not None and sharing.tp is None


def _places(sch: "Schedule", path: str) -> list[str]:
    """Modules or parameters that match a path of a plan; none if this model has none."""
    from fnmatch import fnmatchcase

    parts = path.split(".")
    found = [name for name, _ in sch.module.named_modules() if name]
    found += [name for name, _ in sch.module.named_parameters() if not name.endswith((".weight", ".bias"))]
    return [
        name
        for name in found
        if name.count(".") == len(parts) - 1
        and all(fnmatchcase(have, want) for have, want in zip(name.split("."), parts))
    ]


def _region(sch: "Schedule", places: dict[str, str], place: str) -> str:
    """Path of the module around a place that contains only cut modules; empty if there is none."""
    parent = place.rpartition(".")[0]
    if not parent or _is_parameter(sch, place) or places[place] not in WITHIN:
        return ""
    holders = [
        f"{parent}.{name}" if name else parent
        for name, module in sch[parent].module.named_modules()
        if any(each is not None for each in parameters_of(module).values())
    ]
    styles = [places.get(layer) for layer in {_layer(sch, each): None for each in holders}]
    if set(styles) <= set(WITHIN) and styles.count("rowwise") == 1 and set(styles) & set(COLUMNS):
        return parent
    return ""


def _layer(sch: "Schedule", holder: str) -> str:
    """Path of the layer that a module with weights belongs to: an adapted layer consists of its original and its
    adapters.
    """
    parts = holder.split(".")
    for depth in range(1, len(parts)):
        path = ".".join(parts[:depth])
        if is_adapted(sch[path]):
            return path
    return holder


def _cut_region(region: "Schedule", inside: dict[str, str], regions: Regions, drops: bool) -> None:
    below = len(region.path) + 1
    last = next(region[path[below:]] for path, style in inside.items() if style == "rowwise")
    for path, style in inside.items():
        module = region[path[below:]]
        if style in COLUMNS:
            column_parallel(module, parts=2 if style == "packed_colwise" else 1)
        elif style == "rowwise":
            row_parallel(module)
        elif style == BY_HEADS:
            module.shard("weight", axis=0)
        else:
            module.sync("bwd_post", "all_reduce", on="parameters")
    regions.around(region, last, dropout=_forked(region, regions.sequence_parallel) if drops else [])


def _forked(region: "Schedule", sequence_parallel: bool) -> "list[Schedule]":
    """Has ranks draw different random numbers within a module with cut projections; returns the modules of dropout after the
    last projection, which may need the same ones.

    Raises:
        ScheduleError: its code drops values both before and after that projection.
    """
    behind = getattr(region.module, "residual_dropout", 0)
    if behind and not sequence_parallel:
        if getattr(region.module, "attention_dropout", 0):
            raise ScheduleError(
                f"tp: the code of '{region.path}' drops values of each rank's heads and of the output that ranks share, so "
                "that its random numbers must differ and agree; set residual_dropout or attention_dropout to 0"
            )
        return []
    region.fork_rng()
    return [each for each in region if "Dropout" in type(each.module).__name__ and _is_behind(each.path)]


def _is_behind(path: str) -> bool:
    name = path.rpartition(".")[2]
    return "resid" in name or "out_drop" in name or "output" in name


def _cut_alone(sch: "Schedule", place: str, style: str, sequence_parallel: bool, drops: bool) -> None:
    """Cuts one place of a plan, with its own communication, as transformers does."""
    from ...schedule.primitives.tensor_parallel import tensor_parallel

    if style in NOTHING:
        return
    if _is_parameter(sch, place):
        holder, _, name = place.rpartition(".")
        dims = sch[holder].module.get_parameter(name).dim()
        if style in COLUMNS:
            sch[holder].shard(name, axis=dims - 2, parts=2 if style == "packed_colwise" else 1)
        else:
            sch[holder].shard(name, axis=dims - 1, parts=2 if style == "packed_rowwise" else 1)
        return
    module = sch[place]
    if style == "moe_tp_experts":
        if drops:
            module.fork_rng()
        if not sequence_parallel:
            # For the tokens and the weights of the experts' outputs.
            module.sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce")
    elif style in COLUMNS or style == "colwise_gather_output":
        whole = style == "colwise_gather_output"
        column_parallel(module, parts=2 if style == "packed_colwise" else 1, gathered=whole)
        module.sync("bwd_post", "all_reduce")
        if whole:
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

    first, last = gradient.split([gradient.shape[-1] - features, features], dim=-1)
    return torch.cat([first, all_reduce(last, axis)], dim=-1)


def _share(tensor: "torch.Tensor", ranks: int) -> "torch.Tensor":
    """A rank's share of a tensor that every rank has and that is summed over them afterwards."""
    return tensor / ranks


def _cut_vocabulary(sch: "Schedule", places: dict[str, str]) -> None:
    """Cuts embedding and head, if the plan cuts the head; they are removed from `places`."""
    paths = {id(module): path for path, module in sch.module.named_modules()}
    try:
        sch.module.get_input_embeddings()
    except NotImplementedError:  # a model without tokens, such as a vision tower
        return
    head = paths.get(id(sch.module.get_output_embeddings()), "")
    embedding = paths[id(sch.module.get_input_embeddings())]
    if places.pop(head, ""):
        places.pop(embedding, "")
        vocabulary(sch, [embedding], head)


def _mixtures(sch: "Schedule") -> list[str]:
    """Paths of modules with only a router and its experts."""
    found = []
    for place, _ in _experts(sch):
        parent = place.rpartition(".")[0]
        others = {name for name, _ in sch[parent].module.named_children()} - {place.rpartition(".")[2]}
        if others <= {"gate", "router", "act_fn"}:
            found.append(parent)
    return found


def _cut_sequence(sch: "Schedule", blocks: "Sequence[Schedule]", regions: Sequence[str], drops: bool) -> None:
    """Cuts the sequence between regions, and around mixtures of experts, whose router sees the whole sequence on
    every rank and has a part of its gradient on each. Where experts are whole, a mixture gets the rank's tokens; if they
    are divided only behind the router, every rank has the whole gradient.
    """
    from ...schedule.parallel.experts import divides_tokens, is_spread

    experts = [path for path, style in _experts(sch)]
    for path in experts:
        mixture = sch[path.rpartition(".")[0]]
        if mixture.path not in regions:
            raise ScheduleError(f"sequence_parallel: '{mixture.name}' contains more than a router and experts")
        whole = is_spread(sch[path].module)
        if whole and divides_tokens(sch[path].module):
            mixture.sync("fwd_pre", "all_gather", axis=1, gradient="scatter").sync("fwd_post", "scatter", axis=1)
            continue
        for each in mixture:
            if each.path != path and any(True for _ in each.module.parameters(recurse=False)):
                each.sync("bwd_post", "all_reduce", on="parameters")
        if not whole:
            mixture.sync("fwd_pre", "all_gather", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
    if not blocks:
        raise ScheduleError("sequence_parallel: the model has no repeated blocks that are alike")
    norms = []
    for block in blocks:
        for path, module in block.module.named_modules():
            full = f"{block.path}.{path}"
            if any(full == each or full.startswith(each + ".") for each in regions):
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
    after = [
        path
        for path, module in sch.module.named_modules()
        if path.rpartition(".")[0] == blocks[0].path.rpartition(".")[0].rpartition(".")[0]
        and "norm" in type(module).__name__.lower()
    ]
    if len(after) != 1:
        raise ScheduleError(f"sequence_parallel: one norm must follow the blocks, but there are {len(after)}")
    sequence(sch, blocks, norms, after[0])


def _experts(sch: "Schedule") -> list[tuple[str, str]]:
    plan = tensor_plan(sch)
    return [(place, style) for path, style in plan.items() if style == "moe_tp_experts" for place in _places(sch, path)]


def _is_parameter(sch: "Schedule", place: str) -> bool:
    return place not in sch
