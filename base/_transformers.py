"""Access to transformers, and the private transformers APIs that redline depends on.

Checked with transformers 5.0 to 5.23. transformers is imported at first use.
"""

import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

OF_MODELS = (
    "_supports_sdpa", "_supports_flash_attn", "_init_weights", "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_save", "_supports_attention_backend",
)  # fmt: skip
"""Private attributes of its models that are read or called here."""


def listed_names() -> frozenset[str]:
    """Names in the tables of its model types and classes, from their source: importing them takes seconds."""
    spec = find_spec("transformers")
    tables = Path(spec.origin).parent.glob("models/auto/*.py") if spec is not None and spec.origin else ()
    return frozenset(name for table in tables for name in re.findall(r'"([^"\n]+)"', table.read_text("utf-8")))


@contextmanager
def quiet() -> Iterator[ModuleType]:
    """Yields transformers with its warnings off; they are about checkpoints, and none is loaded here."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield transformers
    finally:
        transformers.logging.set_verbosity(verbosity)


@contextmanager
def values_unread() -> Iterator[None]:
    """Keeps transformers' models from reading the values of their inputs, which meta and fake tensors do not have.

    Each row is treated as one sequence. Otherwise transformers reads the positions to detect packed sequences, and
    builds a mask if it cannot; without a mask attention takes a cheaper path (grouped keys are not repeated). The
    warning about padding is off.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    model = getattr(modeling, "PreTrainedModel", None)
    patched: dict[tuple[Any, str], Callable[..., Any]] = {
        (masking, "find_packed_sequence_indices"): lambda position_ids: None,
        (model, "warn_if_padding_and_no_attention_mask"): lambda self, *args, **kwargs: None,
    }
    originals = {(owner, name): getattr(owner, name) for owner, name in patched if hasattr(owner, name)}
    for owner, name in originals:
        setattr(owner, name, patched[owner, name])
    try:
        yield
    finally:
        for (owner, name), value in originals.items():
            setattr(owner, name, value)


def refusals(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Returns the exceptions that transformers raises for invalid values, and `others`."""
    from huggingface_hub.errors import StrictDataclassError

    return (
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        StrictDataclassError,
        TypeError,
        ValueError,
        *others,
    )


def supports_sdpa(model_class: Any) -> bool:
    """True if a family supports attention by `torch.nn.functional.scaled_dot_product_attention`."""
    return bool(model_class._supports_sdpa)


def supports_flash(model_class: Any) -> bool:
    """True if a family supports attention by the flash-attn package."""
    return bool(model_class._supports_flash_attn)


def attends_by_name(model: Any) -> bool:
    """True if all attention of the model is looked up by the name in its configuration."""
    return bool(getattr(model, "_supports_attention_backend", False))


def change_attention(model: "nn.Module", make: Callable[[str], str]) -> None:
    """Changes the attention name in every configuration of a model.

    Args:
        model: the model.
        make: returns the new name, given the present one.
    """
    configs = {id(submodule.config): submodule.config for submodule in model.modules() if hasattr(submodule, "config")}
    for config in configs.values():
        config._attn_implementation_internal = make(config._attn_implementation)


def initialises(module: "nn.Module") -> bool:
    """True if a module is a model of transformers, which initialises the modules below it."""
    # A wrapper that forwards attributes, such as peft's, is not.
    return hasattr(type(module), "_init_weights") and hasattr(type(module), "initialize_weights")


def initialise(model: Any, module: "nn.Module") -> None:
    """Initialises a module's weights as its model family does."""
    model._init_weights(module)


def experts_by_shapes_alone(config: Any) -> None:
    """Makes a mixture of experts compute results whose shapes do not depend on values; does nothing for other models.

    The other implementations in transformers sort the tokens by expert.
    """
    if getattr(config, "_experts_implementation", None):
        config._experts_implementation = "batched_mm"


def as_loaded(model: Any, stored: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns a checkpoint's tensors as `from_pretrained` loads them: by the model's names, renamed, merged and
    split.

    Args:
        model: the model, which may be on the meta device.
        stored: tensors (or objects that torch functions accept as tensors) by their names in the checkpoint.

    Returns:
        The tensors, and the names (in the model's naming) of tensors that the model does not have.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, state = model.base_model_prefix, model.state_dict()
    loaded: dict[str, Any] = {}
    unused: list[str] = []
    pending: dict[str, Any] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            unused.append(name)
        elif pattern is None:
            loaded[name] = stored[key]
        else:
            rule = pending.setdefault(name, copy.deepcopy(by_pattern[pattern]))
            rule.add_tensor(name, key, pattern, stored[key])
    for name, rule in pending.items():
        converted = rule.convert(name, model=model, config=model.config)
        loaded |= {key: value[0] if isinstance(value, list) else value for key, value in converted.items()}
    return loaded, unused


def as_saved(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's tensors as `save_pretrained` writes them: by a checkpoint's names, tied tensors once.

    Args:
        model: the model, which may be on the meta device.
        tensors: tensors (or objects that torch functions accept as tensors) by the model's names.
    """
    from transformers.core_model_loading import revert_weight_conversion

    saved = {name: tensor for name, tensor in tensors.items() if name not in (model._keys_to_ignore_on_save or ())}
    declared = set(model.all_tied_weights_keys)
    for names in tied(model):
        here = sorted(name for name in names if name in saved)
        doubled = [name for name in here if name in declared] + [name for name in here if name not in declared]
        for name in doubled[: len(here) - 1]:
            del saved[name]
    return revert_weight_conversion(model, saved)


def tied(model: "nn.Module") -> list[list[str]]:
    """Returns the names of tied parameters, in groups of at least two."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def may_be_left(model: Any, name: str) -> bool:
    """True if a checkpoint tensor that the model does not have may be ignored."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    return any(re.search(pattern, name) for pattern in patterns)


def may_be_missing(model: Any, name: str) -> bool:
    """True if a checkpoint may lack this tensor because the model computes it."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_missing or ())
