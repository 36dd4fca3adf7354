"""Private torch APIs that redline depends on.

Checked with torch 2.11 to 2.14. A name that is missing in a later torch raises `MissingDependency` at first use;
`tests/base/test_private_names.py` resolves all of them. torch is imported at first use.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from .errors import MissingDependency

if TYPE_CHECKING:
    from torch import Tensor, nn

CHECKED = "torch 2.11 to 2.14"
NAMES: dict[str, tuple[str, str]] = {
    # Tensors without values, and dispatch modes that see their operators.
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    "unset_fake_temporarily": ("torch._subclasses.fake_tensor", "unset_fake_temporarily"),
    "TorchDispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "DisableTorchFunctionSubclass": ("torch._C", "DisableTorchFunctionSubclass"),
    "OpOverload": ("torch._ops", "OpOverload"),
    # The backward pass.
    "run_backward": ("torch.autograd.graph", "_engine_run_backward"),
    # Arguments and results as trees.
    "TreeSpec": ("torch.utils._pytree", "TreeSpec"),
    "tree_flatten": ("torch.utils._pytree", "tree_flatten"),
    "tree_leaves": ("torch.utils._pytree", "tree_leaves"),
    "tree_map": ("torch.utils._pytree", "tree_map"),
    "tree_map_only": ("torch.utils._pytree", "tree_map_only"),
    "tree_unflatten": ("torch.utils._pytree", "tree_unflatten"),
    # The compiler's parts.
    "dynamo": ("torch", "_dynamo"),
    "aot_autograd": ("torch._dynamo.backends.common", "aot_autograd"),
    "min_cut_rematerialization_partition": ("torch._functorch.partitioners", "min_cut_rematerialization_partition"),
    "select_decomp_table": ("torch._inductor.decomposition", "select_decomp_table"),
    "PatternMatcherPass": ("torch._inductor.pattern_matcher", "PatternMatcherPass"),
    "inductor_cache_dir": ("torch._inductor.runtime.cache_dir_utils", "cache_dir"),
    # Answers of compile workers about GPUs.
    "device_properties": ("torch._dynamo.device_interface", "caching_worker_device_properties"),
    "current_devices": ("torch._dynamo.device_interface", "caching_worker_current_devices"),
    # Kinds of modules and operators.
    "ConvNd": ("torch.nn.modules.conv", "_ConvNd"),
    "DropoutNd": ("torch.nn.modules.dropout", "_DropoutNd"),
    "BatchNormNd": ("torch.nn.modules.batchnorm", "_BatchNorm"),
    "grouped_mm": ("torch", "_grouped_mm"),
    # Attention that also returns the log-sum-exp.
    "flash_attention": ("torch.ops.aten", "_scaled_dot_product_flash_attention"),
    "flash_attention_backward": ("torch.ops.aten", "_scaled_dot_product_flash_attention_backward"),
    "flash_attention_on_cpu": ("torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu"),
    "flash_attention_on_cpu_backward": ("torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    # Many tensors at once.
    "foreach_multiply": ("torch", "_foreach_mul_"),
    "foreach_norm": ("torch", "_foreach_norm"),
    # Collectives that torch.compile can trace.
    "functional_collectives": ("torch.ops", "_c10d_functional"),
    "FakeProcessGroup": ("torch._C._distributed_c10d", "FakeProcessGroup"),
    "resolve_process_group": ("torch.distributed.distributed_c10d", "_resolve_process_group"),
}
"""Name in this module -> (module, name) in torch."""
OF_MODULES = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_forward_hooks", "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook", "_compiled_call_impl", "_call_impl",
)  # fmt: skip
"""Private attributes of `nn.Module` that the functions below read or set."""


def __getattr__(name: str) -> Any:
    """Resolves a private name at its first use."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    resolved = globals()[name] = private_name(*NAMES[name], CHECKED)
    return resolved


def parameters_of(module: "nn.Module") -> "dict[str, nn.Parameter | None]":
    """Returns a module's own parameters by name, as a mutable dict; None for a parameter registered as None."""
    return module._parameters


def buffers_of(module: "nn.Module") -> "dict[str, Tensor | None]":
    """Returns a module's own buffers by name, as a mutable dict."""
    return module._buffers


def schemas_of(name: str) -> list[Any]:
    """Returns the signatures of PyTorch's operator of this name, one for each overload; empty without such an operator.

    An argument has `name`, `type`, `default_value`, `has_default_value()` and `kwarg_only`.
    """
    import torch

    packet = getattr(torch.ops.aten, name, None)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()] if packet is not None else []
    return [schema for schema in schemas if not any(argument.is_out for argument in schema.arguments)]


def unsaved_buffers_of(module: "nn.Module") -> set[str]:
    """Returns the names of a module's own non-persistent buffers, which `state_dict` omits."""
    return module._non_persistent_buffers_set


def children_of(module: "nn.Module") -> "dict[str, nn.Module | None]":
    """Returns a module's children by name, as a mutable dict that includes shared children."""
    return module._modules


def has_forward_hooks(module: "nn.Module") -> bool:
    """True if the module has forward hooks or forward pre-hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def forward_hooks_of(module: "nn.Module") -> list[Any]:
    """Returns the module's forward pre-hooks and forward hooks."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def has_backward_hooks(module: "nn.Module") -> bool:
    """True if the module has backward hooks or backward pre-hooks."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def copy_kind_of_backward_hooks(old: "nn.Module", new: "nn.Module") -> None:
    """Makes the new module's backward hooks of the same kind (full or not) as the old module's."""
    if old._is_full_backward_hook is not None:
        new._is_full_backward_hook = old._is_full_backward_hook


def call_of(module: "nn.Module") -> Any:
    """Returns the function that calling a module runs: its hooks and forward, compiled if `Module.compile` was called."""
    return module._compiled_call_impl or module._call_impl


def set_call(module: "nn.Module", call: Any) -> None:
    """Sets the function that calling a module runs."""
    module._compiled_call_impl = call


def timeout_of(group: Any, device: Any) -> Any:
    """Timeout of the collectives of a process group (a timedelta)."""
    return group._get_backend(device).options._timeout


def wrapper(kind: type, shape: Any, dtype: Any, device: Any) -> Any:
    """Returns a tensor of a wrapper subclass, without storage of its own."""
    import torch

    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def is_erased(node: Any) -> bool:
    """True if a node was erased from its graph (torch.fx)."""
    return node._erased


_NEAR = 8
"""Most operators between the log-probabilities and the loss: a gather, a cast, a sum, factors."""


def format_of_losses(loss: "Tensor") -> Any:
    """Returns the dtype in which the terms of a mean loss were computed: that of its log-probabilities, if the loss was
    computed from any, otherwise its own.

    On CUDA, autocast computes `cross_entropy` of 16-bit logits with 16-bit log-probabilities and a mean in float32.
    """
    node = loss.grad_fn
    for _ in range(_NEAR):
        if node is None:
            break
        if node.name() == "LogSoftmaxBackward0":
            return node._saved_result.dtype
        node = node.next_functions[0][0] if node.next_functions else None
    return loss.dtype


def schema_of(operator: Any) -> Any:
    """Returns an operator's schema: argument names and types, and which arguments it mutates."""
    return operator._schema


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
