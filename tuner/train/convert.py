"""`redline convert`: a training's checkpoint as one of another tool."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ...base.errors import StudyError, UsageError, unknown
from ...base.reading import path_of
from ...models.architecture import Architecture
from ...models.layouts.adapters import merged
from ...models.layouts.find import LAYOUTS
from ...models.layouts.hugging_face import own_generation, own_tokenizer
from ...models.layouts.lazy import LazyTensors
from ...models.layouts.save import main_dtype
from ...models.layouts.weights import LazyWeights, Weights
from ...models.lora import AdaptedArchitecture
from ...models.request import Asked, either
from ...results.trained import CHECKPOINTS, holds_training, read_document
from ...training.checkpoint.folder import Checkpoint, CheckpointFolder
from ...training.checkpoint.restoring import check, stored_in
from ...training.checkpoint.state import AVERAGE, MODEL
from ...training.data.order import BYTES
from .request import TrainRequest
from .strategy import Source

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ConvertRequest:
    """What is asked of a conversion.

    Raises:
        UsageError: a value is none that is known, or means nothing for the layout.
    """

    to: Annotated[str, Asked(f"Whose checkpoint: {either(LAYOUTS)}.", metavar="NAME")] = "hf"
    """Whose checkpoint it becomes."""
    step: Annotated[int | None, Asked("Of which step.  [default: the latest]", type=int, metavar="N")] = None
    """Of which step; None for the latest."""
    dtype: Annotated[
        str | None,
        Asked(
            "Round weights to float32, bfloat16 or float16.  [default: as --from had them, else as they are]",
            metavar="NAME",
        ),
    ] = None
    """What weights are rounded to; None for what those that the training began with were stored in, if it began with some."""
    tokenizer: Annotated[
        str | None, Asked("Folder of the tokenizer.  [default: the training's, else that of --from]", metavar="DIR")
    ] = None
    """Whose files go with a Hugging Face checkpoint; None for the training's, or that of the weights it began with."""
    average: Annotated[bool, Asked("The moving average of the weights, where one was kept.")] = False
    """Take the moving average instead of the weights."""
    merge: Annotated[bool, Asked("Add adapters to the weights that they adapt.")] = False
    """Add adapters to the weights they adapt."""

    def __post_init__(self) -> None:
        if self.to not in LAYOUTS:
            raise UsageError(unknown("layout", self.to, LAYOUTS))
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise UsageError(unknown("dtype", self.dtype, _DTYPES))
        for name in ("dtype", "tokenizer"):
            if getattr(self, name) is not None and self.to != "hf":
                raise UsageError(f"--{name} is for a Hugging Face checkpoint, and has no effect on {self.to}")
        if self.merge and self.to == "peft":
            raise UsageError("--merge makes plain weights, and peft's checkpoints are adapters; give --to hf")


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was converted."""

    checkpoint: Checkpoint
    """Which one."""
    rounded_to: str | None
    """The dtype that weights were rounded to though none was asked for: of those that the training began with."""


def convert(folder: str | Path, out: str | Path, request: ConvertRequest) -> Converted:
    """Writes a checkpoint of a training as another tool's; one file of it is in memory at a time.

    Args:
        folder: the training's.
        out: a folder that is not there yet, or empty.
        request: what it is to become.

    Raises:
        StudyError: there is no such checkpoint, or it is damaged.
        UsageError: the layout does not go with the model, or `out` cannot be written.
    """
    path = path_of(folder)
    if not holds_training(path):
        raise StudyError(f"'{folder}' holds no training; give the --out of `redline train`")
    document = read_document(path)
    trained = TrainRequest.again(folder, document["asked"])
    workload = Source.from_dict(document["source"]).workload(trained)
    if not isinstance(workload.model, Architecture):
        raise UsageError(
            f"{workload.name} is built by code of its own, for which no other tool has a checkpoint; its weights are in the "
            "folders of checkpoints, which torch.distributed.checkpoint reads"
        )
    found = _checkpoint(path, request.step)
    if damage := check(found, None):
        raise StudyError(damage)
    _check_adapters(request, workload.model, folder)
    weights = _weights(found, stored_in(found), request.average)
    if request.merge and isinstance(workload.model, AdaptedArchitecture):
        weights = merged(weights, workload.model)
    began_in = document.get("weights_dtype")
    rounded = request.to == "hf" and request.dtype is None and began_in in _DTYPES and began_in != _dtype_of(weights)
    options = _options(request, trained, began_in if rounded else request.dtype)
    LAYOUTS[request.to](weights, workload.model, path_of(out), **options)
    return Converted(checkpoint=found, rounded_to=began_in if rounded else None)


def _dtype_of(weights: Weights) -> str:
    """The dtype that most of the weights have."""
    return str(main_dtype(weights.shapes.values())).removeprefix("torch.")


def _check_adapters(request: ConvertRequest, architecture: Architecture, folder: str | Path) -> None:
    """Refuses a layout that has no place for adapters, or nothing else than those, where there are some, or none."""
    if isinstance(architecture, AdaptedArchitecture):
        if request.to != "peft" and not request.merge:
            raise UsageError(
                f"the training in '{folder}' is one of adapters: give --to peft, or --merge for a whole model"
            )
    elif request.merge or request.to == "peft":
        raise UsageError(f"the training in '{folder}' has no adapters; it was of all weights")


def _options(request: ConvertRequest, trained: TrainRequest, dtype: str | None) -> dict[str, Any]:
    """What a layout is written with beside the weights."""
    if request.to == "hf":
        import torch

        began = trained.weights if trained.weights is not None and Path(trained.weights).exists() else None
        own = None if began is None else own_tokenizer(began)
        given = request.tokenizer or trained.tokenizer
        tokenizer = own if given is None else None if given == BYTES else Path(given)
        # In another tokenizer another token ends a text.
        generation = own_generation(began) if began is not None and tokenizer == own else None
        return {"dtype": getattr(torch, dtype) if dtype else None, "tokenizer": tokenizer, "generation": generation}
    if request.to == "peft":
        return {"base": None if trained.weights is None else str(trained.weights)}
    return {}


def _checkpoint(path: Path, step: int | None) -> Checkpoint:
    there = CheckpointFolder(path / CHECKPOINTS).all()
    found = next((each for each in there if step in (None, each.step)), None)
    if found is None:
        steps = ", ".join(str(each.step) for each in there) or "none"
        raise StudyError(f"'{path}' has no checkpoint{'' if step is None else f' of step {step}'}; there are: {steps}")
    return found


def _weights(found: Checkpoint, stored: LazyTensors, average: bool) -> Weights:
    """The model's weights among the tensors of a checkpoint."""
    names = {name.removeprefix(f"{MODEL}/"): name for name in stored if name.startswith(f"{MODEL}/")}
    if average:
        averages = {name.removeprefix(f"{AVERAGE}/"): name for name in stored if name.startswith(f"{AVERAGE}/")}
        if not averages:
            raise UsageError(f"'{found.path}' has no moving average of the weights; train with --average")
        names |= averages
    return LazyWeights({name: stored[full] for name, full in names.items()})
