"""Makes a model without memory: records what its constructor does to tensors, for later replay.

Within `deferred` new tensors are on the meta device, but report the device of the future model to the constructor.
`build` then makes their values as the constructor would have: drawn, filled, computed from others, set by hand, in any
number format. Nothing is guessed: if a constructor reads something that does not exist (the value of a weight, the
random state), the model has to be made in place.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..base._torch import TorchDispatchMode
from .held import loose, own_tensors
from .random_state import full
from .recording import Recording, Unrecordable, recorded, recording_of


@contextmanager
def deferred(device: torch.device | str = "cpu") -> Iterator[None]:
    """Makes a model without memory; `build` gives it the weights that its constructor would have given it.

        with deferred():
            model = Net()
        model, optimizer = build(create_schedule(model), seed=0)

    The weights are bit-equal to those of `torch.manual_seed(0); model = Net()` on the device. Draws from Python's or
    NumPy's generators happen immediately.

    Args:
        device: device of the future model, as reported to its constructor.

    Raises:
        Unrecordable: at the end of the `with`, if the constructor reads values, or fails. Make the model in place, on
            a real device.
    """
    recording = Recording(device)
    with going_on(recording):
        try:
            yield
        except Exception as error:
            # Actual errors show again when the model is made in place.
            recording.broken = recording.broken or f"{type(error).__name__}: {error}"
            raise


@contextmanager
def recorded_operations(*tensors: torch.Tensor) -> Iterator[None]:
    """Records operations in the `with` if one of the tensors is recorded; otherwise changes nothing."""
    found = next(filter(None, map(recorded, tensors)), None)
    if found is None:
        yield
    else:
        with going_on(found[0]):
            yield


@contextmanager
def going_on(recording: Recording) -> Iterator[None]:
    """Records operations in the `with`.

    Raises:
        Unrecordable: at the end, if an operation cannot be recorded.
    """
    if recording.active:
        yield
        return
    recording.active = True
    try:
        with ExitStack() as stack:
            stack.enter_context(recording.random.in_place())
            stack.enter_context(recording.device)
            stack.enter_context(_Lens(recording))
            stack.enter_context(_truncated_draws_noted(recording))
            stack.enter_context(_Operations(recording))
            yield
            with recording.access():
                recording.follow_random_state()
            if recording.broken:  # and the constructor continued
                raise Unrecordable(recording.broken)
    except Exception as error:
        if not recording.broken:
            raise
        raise Unrecordable(f"the model cannot be made without memory: {recording.broken}") from error
    finally:
        recording.active = False


def unmaterialised(module: nn.Module) -> str:
    """Describes a tensor without memory that `build` would not materialise: an attribute of a module that is on the
    meta device itself, or a tensor outside a module; empty if there is none.
    """
    recording = recording_of(module)
    held: set[int] = set()
    for path, each in module.named_modules():
        for name, tensor in loose(each):
            if tensor.is_meta and recorded(tensor) is None:
                return f"{path}.{name}" if path else name
        held.update(place[1] for _, tensor in own_tensors(each) + loose(each) if (place := recorded(tensor)))
    if recording is None:
        return ""

    def elsewhere() -> bool:
        return any(each() is not None for number, each in enumerate(recording.storages) if number not in held)

    if elsewhere():
        gc.collect()
    return f"a tensor outside of {type(module).__name__}" if elsewhere() else ""


_META = torch.device("meta")


class _Operations(TorchDispatchMode):
    """Passes every operator to the recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.recording.plain:
            return func(*args, **kwargs)
        with self.recording.access():
            return self.recording.call(func, args, kwargs)


class _Lens(TorchFunctionMode):
    """Shows recorded tensors as if they were on the device of the future model, and prevents reading their values."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        known = isinstance(first, torch.Tensor) and not self.recording.plain
        place = recorded(first) if known else None
        if place is None and func is torch.Tensor.__deepcopy__:
            with self.recording.access():  # a real tensor's copy is real
                return func(*args, **kwargs)
        if place is None:
            return self.run(func, args, kwargs)
        device = place[0].memories[place[1]].device
        if func in _FACTS:
            return _FACTS[func](device)
        if func in _LOOKS:
            self.recording.refuse(f"it looks at the values of a tensor by {func.__name__}")
        if func in (torch.Tensor.cpu, torch.Tensor.cuda) and func.__name__ == device.type and len(args) == 1:
            return first
        if func is torch.Tensor.new_tensor:
            kwargs = {"device": device, **kwargs}
        if func is torch.Tensor.to:
            devices = {_device(each) for each in (*args[1:], *kwargs.values())}
            if _META in devices:  # tensors that the constructor puts there itself have no values
                with self.recording.access():
                    return func(torch.empty_like(first), *args[1:], **kwargs)
            if device in devices:
                args = tuple(_META if _device(each) == device else each for each in args)
                kwargs = {name: _META if _device(each) == device else each for name, each in kwargs.items()}
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function of PyTorch; a failure may be due to missing memory."""
        if func in _MAKERS and isinstance(kwargs.get("out"), torch.Tensor) and kwargs["out"].is_meta:
            kwargs = {"device": _META, **kwargs}
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self.recording.broken = self.recording.broken or f"{type(error).__name__}: {error}"
            raise


_FACTS = {
    torch.Tensor.device.__get__: lambda device: device,
    torch.Tensor.is_meta.__get__: lambda device: False,
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",
    torch.Tensor.is_cuda.__get__: lambda device: device.type == "cuda",
    torch.Tensor.get_device: lambda device: -1 if device.index is None else device.index,
}
"""Attributes of a tensor that depend on its device."""
_LOOKS = {
    torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.data_ptr,
    torch.Tensor.share_memory_,
    torch.Tensor.storage,
    torch.Tensor.untyped_storage,
}
"""Methods that reach a tensor's memory without an operator, and do not fail without memory."""


_MAKERS = {
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.logspace,
    torch.ones,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.randperm,
    torch.zeros,
}
"""Functions that make a tensor on the current device, or one that fits `out`."""


def _device(value: Any) -> torch.device | None:
    """Device named by an argument of `Tensor.to`; None if it is another argument."""
    return full(torch.device(value)) if isinstance(value, (str, torch.device)) else None


@contextmanager
def _truncated_draws_noted(recording: Recording) -> Iterator[None]:
    """Records `trunc_normal_` as one operation, because it draws again while a value is out of bounds."""
    original = getattr(nn.init, "_no_grad_trunc_normal_", None)
    if original is None:  # without it, reading the values ends the recording
        yield
        return

    def noted(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> torch.Tensor:
        with recording.access():
            known = recorded(tensor) is not None and generator is None
            if known:
                recording.draw(original, tensor, mean, std, a, b)
        return tensor if known else original(tensor, mean, std, a, b, generator)

    nn.init._no_grad_trunc_normal_ = noted
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original
