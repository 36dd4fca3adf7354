"""Disk cache of resolved requests and models: a later estimate of the same model needs neither torch nor transformers.

Facts of traced models have their own cache (`facts/disk_cache.py`). An entry is valid only for the same code, packages, model and
request; everything else is resolved again.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .. import __version__
from ..base.device import Device
from ..base.errors import SpaceError
from ..models.architecture import class_of, shape_of
from ..models.data import ImageBatches
from ..models.fingerprint import digest
from ..models.presets import PRESETS, ServerModel
from ..models.request import ModelRequest, Resolved, TrainingRequest
from ..models.resolve import configuration_file
from ..models.workload import Workload
from ..space import Space
from .facts import disk_cache
from .facts.model_facts import FactsSource, ModelFacts
from .facts.traced import derived, named, traced_variant

FORMAT = 3  # raised when what is stored changes
ROOMS = ("base", "estimator", "knobs", "models", "schedule", "space")
"""Code that decides how a model is resolved."""


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A resolved model without its workload."""

    name: str
    model_id: str
    seq_len: int | None
    trains: Mapping[str, Any]
    """The training, in run.yaml's terms."""

    @property
    def shape(self) -> Mapping[str, Any]:
        """Its shape, as returned by `redline.models.architecture.shape_of`; empty if that is None."""
        return self.trains.get("shape") or {}


@dataclass(frozen=True, kw_only=True)
class ResolvedRequest(ResolvedModel):
    """A resolved request without its workload."""

    global_batch: int
    """Samples of a step."""
    free_batch: bool
    """True if the samples of a step vary with `grad_accum`."""
    space: Space
    notes: tuple[str, ...]

    @staticmethod
    def of(resolved: Resolved) -> "ResolvedRequest":
        """The cacheable part of a resolved request."""
        model = resolved_model(resolved.workload)
        return ResolvedRequest(
            **vars(model),
            global_batch=resolved.workload.global_batch,
            free_batch=resolved.free_batch,
            space=resolved.space,
            notes=resolved.notes + _of_experts(model.shape, resolved.space),
        )


CachedT = TypeVar("CachedT", bound=ResolvedModel)


def resolved_model(workload: Workload) -> ResolvedModel:
    """The cacheable part of a workload."""
    lora, shape = getattr(workload.model, "lora", None), shape_of(workload.model)
    workload_record = {
        "id": workload.id,
        "spec": str(workload.spec),
        **({"lora": str(lora)} if lora is not None else {}),
    }
    if class_name := class_of(workload.model):
        workload_record["class"] = class_name
    if isinstance(images := workload.batch, ImageBatches):
        workload_record["sample"] = f"images of {images.height} x {images.width}"
    return ResolvedModel(
        name=workload.name,
        model_id=workload.model_id,
        seq_len=workload.seq_len,
        trains={"model": workload.name, "workload": workload_record, **({"shape": shape} if shape else {})},
    )


def _of_experts(shape: Mapping[str, Any], space: Space) -> tuple[str, ...]:
    """Assumptions about a model's experts; empty without experts."""
    if not (experts := shape.get("experts")):
        return ()
    chosen = shape.get("experts_per_token") or 1
    holders = (
        "ep shares them among ranks"
        if "ep" in space.by_name
        else "every rank holds its share of all of them: ep is not varied here"
    )
    return (
        f"mixture of {experts} experts, {chosen} a token: tokens are assumed to be spread evenly over experts; {holders}",
    )


def key_of(request: TrainingRequest, device: Device, devices: int) -> str | None:
    """Cache key of a request; None if it depends on files of code, or on models of the hub."""
    if request.space is not None:
        return None
    sent = {name: getattr(request, name) for name in ("global_batch", "allow", "override", "fix")}
    return key_of_model(request, {"asked": repr(sent), "device": repr(device), "devices": devices})


def key_of_model(request: ModelRequest, context: Mapping[str, Any] | None = None) -> str | None:
    """Cache key of a request's model, and of `more`; None if it depends on files of code, or on models of the hub."""
    target, contents = request.target, ""
    if isinstance(target, ServerModel) and target.contents is not None:
        contents = json.dumps(target.contents, default=str)
    elif not isinstance(target, (str, Path)):
        return None
    elif str(target) not in PRESETS:
        file = configuration_file(Path(target).expanduser())
        if file is None:
            return None
        contents = f"{file.resolve()} {file.read_text(encoding='utf-8', errors='replace')}"
    model = {"target": str(target), "contents": contents, "seq_len": request.seq_len, "lora": request.lora}
    made_by = {"format": FORMAT, "version": __version__, "code": _code(), "packages": _packages()}
    return digest({**model, **made_by, **(context or {})})


def load(key: str, kind: type[CachedT]) -> CachedT | None:
    """The model or the request of a key; None if there is none, or it cannot be read."""
    data = disk_cache.load_json(_file(key))
    try:
        if isinstance(data, dict) and "space" in data:
            data = {**data, "space": Space.from_dict(data["space"]), "notes": tuple(data["notes"])}
        return kind(**data) if isinstance(data, dict) else None
    except (KeyError, SpaceError, TypeError):  # written by another version, or damaged
        return None


def store(key: str, cached: ResolvedModel) -> None:
    """Stores a model or a request, unless its space has rules that cannot be written as text."""
    data = dict(vars(cached))
    if isinstance(cached, ResolvedRequest):
        try:
            data |= {"space": cached.space.to_dict(), "notes": list(cached.notes)}
        except SpaceError:
            return
    disk_cache.store_json(_file(key), data)


def _file(key: str) -> Path:
    return Path("resolved", f"{key}.json")


def _code() -> str:
    """Hash of redline's own files."""
    root = Path(__file__).parent.parent
    stats = []
    for room in ROOMS:
        for folder, _, files in os.walk(root / room):
            for name in sorted(files):
                if name.endswith((".py", ".yaml")):
                    stat = os.stat(os.path.join(folder, name))
                    stats.append(f"{folder}/{name} {stat.st_size} {stat.st_mtime_ns}")
    return digest({"files": sorted(stats)})


def _packages() -> dict[str, int]:
    """State of the installed packages: times of the last installation or removal."""
    folders = {entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")}
    return {folder: os.stat(folder).st_mtime_ns for folder in sorted(folders) if os.path.isdir(folder)}


@dataclass
class CachedFacts:
    """The facts of a cached workload: from disk, or traced if they are missing."""

    model_id: str
    device_type: str
    liger: bool
    remake: Callable[[], FactsSource]
    """Builds the source of facts by tracing."""
    _made: FactsSource | None = None

    def facts(self, *, precision: str, attention: str, fusion: bool, kernels: bool = False) -> ModelFacts:
        """The facts of one variant; raises as `TracedFacts.facts`."""
        traced = traced_variant((precision, attention, fusion, kernels), self.liger)
        stored = disk_cache.load(disk_cache.key_of(self.model_id, named(traced, self.device_type)))
        if stored is not None:
            return derived(stored, precision, kernels)
        self._made = self._made or self.remake()
        return self._made.facts(precision=precision, attention=attention, fusion=fusion, kernels=kernels)
