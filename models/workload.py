"""Workloads: model builder, batch function, loss, optimizer, sizes, and what may vary; and those in a user's Python file."""

import hashlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from ..base.device import Device, detect
from ..base.errors import RedlineError, WorkloadError, nearest, unknown
from ..knobs.strategy import STANDARD
from ..space import Config, Space
from .fingerprint import digest, of_callable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..schedule import Schedule

Found = TypeVar("Found")
Batch = Mapping[str, Any] | tuple[Any, ...]
UNITS = ("tokens/s", "samples/s")
DEFAULT_GLOBAL_BATCH = 32  # four of the default micro-batches
_LOOKED_AT = ("micro_batch", "grad_accum", "dp", "checkpoint_ratio", "precision", "fusion", "kernels")
NEUTRAL = Config({**{name: STANDARD[name].neutral for name in _LOOKED_AT}, "fused_optimizer": True})
"""Neutral values of the standard knobs, for builders that read their configuration."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """The model and its training. Only `model`, `batch` and `loss` are needed; the rest has defaults for any model.

        Workload(
            model=lambda: Net(),
            batch=lambda size, seed: (images(size, seed), labels(size, seed)),
            loss=lambda output, batch: cross_entropy(output, batch[1]),
        )

    Raises:
        WorkloadError: a field is invalid.
    """

    model: "Callable[..., nn.Module]"
    """`model()` or `model(config)`: the module, built on the CPU, or on the meta device for its rules to initialise."""
    batch: Callable[[int, int], Batch]
    """`batch(size, seed)`: CPU tensors whose first dimension is `size`; equal for equal seeds. The model gets, from a
    dict, the entries named by the arguments of its `forward`; from a tuple, everything but the last entry, which
    is the target (with `loss=None`: everything).
    """
    loss: "Callable[[Any, Any], torch.Tensor] | None"
    """`loss(output, batch)`: a scalar, the mean over the batch's samples. None takes `output.loss`."""
    name: str = ""
    optimizer: "Callable[..., torch.optim.Optimizer] | None" = None
    """`optimizer(params)` or `optimizer(params, fused=bool)`; None for AdamW."""
    schedule: "Callable[[Schedule, Mapping[str, Any]], Any] | None" = None
    """`schedule(sch, config)` rewrites the model by primitives; None applies `checkpoint_ratio` and `fusion` to the
    repeated blocks, regardless of the model.
    """
    space: Space | Callable[..., Space] | None = None
    """The search space: a Space, or a function of any of `device`, `devices` and `workload` that makes one; None for the
    knobs that exist on the devices at hand.
    """
    seq_len: int | None = None
    """Tokens of a sample; None if samples have no tokens."""
    global_batch: int = DEFAULT_GLOBAL_BATCH
    """Samples of one optimizer step over all devices."""
    unit: str = ""
    """Unit of throughput: `tokens/s` (the default with a `seq_len`) or `samples/s`."""
    spec: str = ""
    """Identifier that is valid from any folder: a preset's name, an absolute path, a hub id, or `file.py:name` with one."""
    identity: Mapping[str, Any] | None = None
    """Identity, JSON-ready, for `id`; None takes the source text of its functions."""
    source: "FileSource | None" = None
    """File that it comes from; if set, copies in other processes are made by running that text again."""
    unread: tuple[str, ...] = ()
    """Fields of its config.json that the model's class does not have; a note names them."""
    known: dict[str, Any] = field(init=False, repr=False, default_factory=dict)
    """Cached results of functions of the workload, see `once`."""
    here: dict[str, Any] = field(init=False, repr=False, default_factory=dict)
    """The same for results that stay in this process, see `once_here`."""

    def __post_init__(self) -> None:
        for name in ("model", "batch"):
            if not callable(getattr(self, name)):
                raise WorkloadError(f"Workload: {name} must be callable, but got {_short(getattr(self, name))}")
        if _is_module(self.model):
            kind = type(self.model).__name__
            raise WorkloadError(
                f"Workload: model is a {kind} that is built already; pass a function that builds it, such as "
                f"model=lambda: {kind}(...): every trial builds its own, without weights at first"
            )
        for name in ("loss", "optimizer", "schedule"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise WorkloadError(f"Workload: {name} must be callable or None, but got {_short(value)}")
        if self.space is not None and not isinstance(self.space, Space) and not callable(self.space):
            raise WorkloadError(f"Workload: space must be a Space or a function, but got {_short(self.space)}")
        for name, least in (("seq_len", 1), ("global_batch", 1)):
            value = getattr(self, name)
            if value is None and name == "seq_len":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise WorkloadError(f"Workload: {name} must be an integer of at least {least}, but got {value!r}")
        self._check_parameters("batch", 2, "(size, seed)")
        if self.loss is not None:
            self._check_parameters("loss", 2, "(output, batch)")
            _refuse_target_loss(self.loss)
        if self.schedule is not None:
            self._check_parameters("schedule", 2, "(sch, config)")
        unit = self.unit or ("tokens/s" if self.seq_len else "samples/s")
        if unit not in UNITS:
            raise WorkloadError(f"Workload: unit must be one of {', '.join(UNITS)}, but got {self.unit!r}")
        if unit == "tokens/s" and self.seq_len is None:
            raise WorkloadError("Workload: unit 'tokens/s' needs seq_len, the tokens of a sample")
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "name", self.name or default_name(self.model))

    def _check_parameters(self, name: str, count: int, form: str) -> None:
        try:
            inspect.signature(getattr(self, name)).bind(*range(count))
        except TypeError:
            raise WorkloadError(f"Workload: {name} must be callable as {name}{form}") from None
        except ValueError:  # a builtin without a signature; errors show when it is called
            return

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "here": {}}

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.source is None:
            return super().__reduce_ex__(protocol)
        return _from_source, (self.source, self.name, self.spec, self.global_batch, self.id, self.known)

    @cached_property
    def id(self) -> str:
        """Ten hex digits of its identity: architecture, data, sizes, or the text of its file or functions."""
        return self._identity(global_batch=self.global_batch)

    @cached_property
    def model_id(self) -> str:
        """The same without the global batch: identity of what a single sample passes through."""
        return self._identity()

    def _identity(self, **sizes: Any) -> str:
        sizes_and_unit = {"seq_len": self.seq_len, **sizes, "unit": self.unit}
        if self.source is not None:
            description: Any = {"file": self.source.digest, "name": self.source.name}
        elif self.identity is not None:
            description = dict(self.identity)
        else:
            names = ("model", "batch", "loss", "optimizer", "schedule")
            description = {name: of_callable(getattr(self, name)) for name in names}
        return digest({**sizes_and_unit, "what": description})

    def own_space(self, device: Device, devices: int = 1) -> Space:
        """The workload's own space, a copy for every call; only if it has a `space`.

        Raises:
            WorkloadError: its function does not return a Space.
        """
        if isinstance(self.space, Space):
            return self.space.copy()
        assert self.space is not None
        available = {"device": device, "devices": devices, "workload": self}
        parameters = inspect.signature(self.space).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        arguments = {name: value for name, value in available.items() if takes_all or name in parameters}
        with user_code_errors(f"{self.name}: space({', '.join(arguments)})"):
            space = self.space(**arguments)
        if not isinstance(space, Space):
            raise WorkloadError(f"{self.name}: space must return a redline.Space, but returned {_short(space)}")
        return space

    def build_model(self, config: Mapping[str, Any] | None = None) -> "nn.Module":
        """Builds the module, on the current device. Without a configuration knobs have their defaults.

        Raises:
            WorkloadError: `model` returned something else.
        """
        from torch import nn

        module = self.model(config if config is not None else self.probe) if self.takes_config else self.model()
        if not isinstance(module, nn.Module):
            raise WorkloadError(f"{self.name}: model must return a torch.nn.Module, but returned {_short(module)}")
        return module

    @cached_property
    def probe(self) -> Config:
        """A configuration to inspect the model with: the default of its own space, or neutral knobs."""
        if self.space is None:
            return NEUTRAL
        return Config({**NEUTRAL, **self.own_space(detect()).default()})

    @cached_property
    def takes_config(self) -> bool:
        """True if `model` takes the configuration."""
        try:
            signature = inspect.signature(self.model)
            signature.bind()
        except ValueError:
            return False
        except TypeError:
            return True
        # A function whose parameters all have defaults gets the configuration only if its first parameter is named config.
        first_name = next(iter(signature.parameters), "")
        return first_name == "config"

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that building the model imports, for a process that imports them once and forks trials."""
        return tuple(getattr(self.model, "imports", ()))

    @property
    def takes_fused(self) -> bool:
        """True if the optimizer has a fused form."""
        if self.optimizer is None:
            return True
        try:
            parameters = inspect.signature(self.optimizer).parameters
        except ValueError:
            return False
        return "fused" in parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )

    def make_optimizer(self, params: "Iterable[nn.Parameter]", *, fused: bool) -> "torch.optim.Optimizer":
        """Makes the optimizer; AdamW with a learning rate of 1e-4 if the workload has none of its own.

        Raises:
            WorkloadError: the workload's own function returned something else.
        """
        import torch

        if self.optimizer is None:
            # Not fused leaves the choice to torch: foreach on CUDA, a loop over parameters on a CPU.
            return torch.optim.AdamW(params, lr=1e-4, fused=True if fused else None)
        optimizer = self.optimizer(params, fused=fused) if self.takes_fused else self.optimizer(params)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise WorkloadError(
                f"{self.name}: optimizer must return a torch.optim.Optimizer, but returned {_short(optimizer)}"
            )
        return optimizer

    def once(self, find: "Callable[[Workload], Found]") -> "Found":
        """Calls `find` once for the workload and caches its result; copies made later in other processes have it too."""
        return self._cached(self.known, find)

    def once_here(self, find: "Callable[[Workload], Found]") -> "Found":
        """As `once`, for results that other processes cannot have."""
        return self._cached(self.here, find)

    def _cached(self, results: dict[str, Any], find: "Callable[[Workload], Found]") -> "Found":
        name = f"{find.__module__}.{find.__qualname__}"
        if name not in results:
            results[name] = find(self)
        return results[name]

    def with_global_batch(self, samples: int) -> "Workload":
        """A copy with this global batch; cached findings, which do not depend on it, are kept."""
        if samples == self.global_batch:
            return self
        copy = replace(self, global_batch=samples)
        copy.known.update(self.known)
        copy.here.update(self.here)
        return copy

    def with_optimizer(self, optimizer: "Callable[..., torch.optim.Optimizer]") -> "Workload":
        """A copy with an optimizer, if it has none of its own; cached findings are kept."""
        copy = replace(self, optimizer=self.optimizer or optimizer)
        copy.known.update(self.known)
        return copy


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSource:
    """A Python file's text and a name in it. It is sent to other processes, where the file need not exist."""

    path: str
    """Absolute path."""
    name: str
    text: str
    """The file's text when it was read."""

    @classmethod
    def read(cls, path: Path, name: str) -> "FileSource":
        """Reads the file.

        Raises:
            WorkloadError: it cannot be read.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise WorkloadError(f"{path} is not a Python file: {error}") from None
        except OSError as error:
            near = nearest_file(path) if isinstance(error, FileNotFoundError) else ""
            raise WorkloadError(f"cannot read the Python file {path}: {error.strerror}{near}") from None
        return cls(path=str(path.resolve()), name=name, text=text)

    @property
    def digest(self) -> str:
        """SHA-256 of the text, hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def load(self) -> Workload:
        """Runs the file (once per process) and returns the workload of this name.

        Raises:
            WorkloadError: the file fails, has no such name, or the value is not a workload.
        """
        module = self._module()
        if not self.name or not hasattr(module, self.name):
            names = _candidates(module)
            if not self.name:
                listed = ", ".join(names) or "none"
                raise WorkloadError(f"{self.path} needs a name in it, {self.path}:NAME; workloads there: {listed}")
            raise WorkloadError(f"{self.path}: {unknown('workload', self.name, names)}")
        workload = getattr(module, self.name)
        if not isinstance(workload, Workload) and callable(workload):
            workload = self._call(workload)
        if not isinstance(workload, Workload):
            raise WorkloadError(
                f"{self.path}:{self.name} must be a redline.Workload or a function that returns one, "
                f"but is {type(workload).__name__} {workload!r}"
            )
        return replace(workload, source=self)

    def _call(self, function: Any) -> Any:
        try:
            inspect.signature(function).bind()
        except TypeError:
            raise WorkloadError(
                f"{self.path}:{self.name} must be a redline.Workload or callable without arguments, but is "
                f"{self.name}{inspect.signature(function)}"
            ) from None
        try:
            return function()
        except (Exception, SystemExit) as error:
            raise WorkloadError(f"{self.path}:{self.name}() failed: {located(error)}") from error

    def _module(self) -> ModuleType:
        name = f"_redline_workload_{hashlib.sha256(self.path.encode()).hexdigest()[:8]}_{self.digest[:8]}"
        if name in sys.modules:
            return sys.modules[name]
        module = ModuleType(name)
        module.__file__ = self.path
        folder = str(Path(self.path).parent)
        if folder not in sys.path:
            sys.path.append(folder)  # for modules beside the file, also when they are imported later
        try:
            code = compile(self.text, self.path, "exec")
        except (SyntaxError, ValueError) as error:  # the latter for null bytes, before Python 3.12
            line, problem = "", str(error)
            if isinstance(error, SyntaxError):
                line, problem = f":{error.lineno}" if error.lineno else "", error.msg
            raise WorkloadError(f"{self.path}{line} is not valid Python: {problem}") from error
        sys.modules[name] = module
        try:
            exec(code, module.__dict__)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise WorkloadError(f"the Python file failed: {located(error)}") from error
        except BaseException:
            del sys.modules[name]
            raise
        return module


def default_name(model: Callable[..., Any]) -> str:
    """Name of a workload that was given none."""
    return getattr(model, "__name__", type(model).__name__)


def _from_source(
    source: FileSource, name: str, spec: str, global_batch: int, identity: str, known: Mapping[str, Any]
) -> Workload:
    loaded = replace(source.load(), name=name, spec=spec, global_batch=global_batch)
    loaded.__dict__["id"] = identity
    loaded.known.update(known)
    return loaded


def _is_module(value: Any) -> bool:
    """True for a torch module; False if torch is not installed."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _refuse_target_loss(loss: Callable[..., Any]) -> None:
    """Refuses torch's own losses: their second argument is the target, not the batch."""
    module = getattr(loss, "__module__", "") or ""
    if module.startswith("torch.nn."):
        name = getattr(loss, "__name__", None) or f"{type(loss).__name__}()"
        raise WorkloadError(
            f"Workload: loss is called as loss(output, batch), but {name} takes a target in place of the batch; "
            f"pass a function that picks it, such as loss=lambda output, batch: {name}(output, batch[1])"
        )


def _short(value: Any) -> str:
    representation = re.sub(r"\s+", " ", repr(value))
    return f"{type(value).__name__} {representation if len(representation) <= 60 else representation[:57] + '...'}"


_HERE = str(Path(__file__).parent)


@contextmanager
def user_code_errors(subject: str) -> Iterator[None]:
    """Converts any error of the code within to a WorkloadError: `SUBJECT failed: FILE:LINE: Type: message`.

    redline's own errors pass unchanged, because their messages are complete.
    """
    try:
        yield
    except RedlineError:
        raise
    except Exception as error:
        raise WorkloadError(f"{subject} failed: {located(error)}") from error


def located(error: BaseException) -> str:
    """`FILE:LINE: Type: message` of an error; the line is the last one outside installed packages."""
    message = " ".join(traceback.format_exception_only(error)[-1].split())[:400]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in frames
        if not frame.filename.startswith((_HERE, "<")) and "site-packages" not in frame.filename
    ]
    return f"{lines[-1]}: {message}" if lines else message


def nearest_file(path: Path) -> str:
    """Returns the Python file of the same folder whose name is nearest, as a hint for a message; empty if there is none."""
    files = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
    return nearest(path.name, files)


def _candidates(module: ModuleType) -> list[str]:
    """Names of workloads, or without any of functions in the file that may return one."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    workloads = [name for name, value in public.items() if isinstance(value, Workload)]
    defined_here = [name for name, value in public.items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(workloads or (name for name in defined_here if inspect.isfunction(public[name])))
