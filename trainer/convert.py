"""`redline convert`: converts a training's checkpoint to another tool's format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ..base.errors import StudyError, UsageError, WorkloadError, unknown
from ..base.option import Option, either
from ..base.reading import path_of
from ..models.architecture import Architecture
from ..models.layouts.adapters import merged, write_peft
from ..models.layouts.dcp import dcp_tensors
from ..models.layouts.hugging_face import find_weights, own_generation, own_tokenizer, write_hugging_face
from ..models.layouts.weights import Weights
from ..models.lora import AdaptedArchitecture
from ..results.names import CHECKPOINTS, holds_training, read_document
from .checkpoint.saver import Checkpoint, CheckpointFolder
from .checkpoint.state import MODEL
from .data.order import BYTES
from .request import TrainingSource, TrainRequest

LAYOUTS: Mapping[str, Callable[..., None]] = {"hf": write_hugging_face, "peft": write_peft}
"""Writer of each layout: called with weights, architecture and folder."""
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ConvertRequest:
    """Request of a conversion.

    Raises:
        UsageError: a value is unknown, or has no effect on the layout.
    """

    to: Annotated[str, Option(f"Whose checkpoint: {either(LAYOUTS)}.", metavar="NAME")] = "hf"
    """Layout of the result."""
    step: Annotated[int | None, Option("Of which step.  [default: the latest]", type=int, metavar="N")] = None
    """Step of the checkpoint; None for the latest."""
    dtype: Annotated[
        str | None,
        Option(
            "Round weights to float32, bfloat16 or float16.  [default: as --from had them, else as they are]",
            metavar="NAME",
        ),
    ] = None
    """Dtype of the written weights; None for the dtype of the weights that the training began with, if any."""
    tokenizer: Annotated[
        str | None, Option("Folder of the tokenizer.  [default: the training's, else that of --from]", metavar="DIR")
    ] = None
    """Folder of the tokenizer of a Hugging Face checkpoint; None for the training's, or that of the weights it began
    with.
    """
    merge: Annotated[bool, Option("Add adapters to the weights that they adapt.")] = False
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
            raise UsageError("--merge makes plain weights, but peft's checkpoints contain adapters; give --to hf")


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Result of a conversion."""

    checkpoint: Checkpoint
    rounded_to: str | None
    """Dtype that weights were rounded to without a request: the dtype of the weights that the training began with."""


def convert(folder: str | Path, out: str | Path, request: ConvertRequest) -> Converted:
    """Writes a training's checkpoint in another tool's format. One file of it is in memory at a time.

    Args:
        folder: folder of the training.
        out: a folder that does not exist, or is empty.
        request: format of the result.

    Raises:
        StudyError: the checkpoint does not exist, it is damaged, or the training removes it meanwhile.
        UsageError: the layout does not support the model, or `out` cannot be written.
    """
    path = path_of(folder)
    if not holds_training(path):
        raise StudyError(f"'{folder}' contains no training; give the --out of `redline train`")
    document = read_document(path)
    trained = TrainRequest.again(folder, document["asked"])
    workload = TrainingSource.from_dict(document["source"]).workload(trained)
    if not isinstance(workload.model, Architecture):
        raise UsageError(
            f"{workload.name} is built by the user's code, for which no other tool has a format; its weights are in the "
            "folders of checkpoints, which torch.distributed.checkpoint reads"
        )
    checkpoint = _checkpoint(path, request.step)
    _check_adapters(request, workload.model, folder)
    weights = _weights(checkpoint)
    if checkpoint.manifest.get("from_weights") and request.to != "peft":  # frozen ones are not in the checkpoint
        initial = find_weights(str(trained.weights), workload.model)
        weights = Weights({**initial.tensors, **weights.tensors})
    if request.merge and isinstance(workload.model, AdaptedArchitecture):
        weights = merged(weights, workload.model)
    began_in = document.get("weights_dtype")
    differs = began_in in _DTYPES and f"torch.{began_in}" != str(weights.dtype)
    rounded = request.to == "hf" and request.dtype is None and differs
    options = _options(request, trained, began_in if rounded else request.dtype)
    try:
        LAYOUTS[request.to](weights, workload.model, path_of(out), **options)
    except (WorkloadError, OSError) as error:
        if checkpoint.path.exists():
            raise
        raise StudyError(
            f"the training has removed '{checkpoint.path.name}' meanwhile: convert its latest checkpoint, or resume it with a "
            "larger `keep` in --settings"
        ) from error
    return Converted(checkpoint=checkpoint, rounded_to=began_in if rounded else None)


def _check_adapters(request: ConvertRequest, architecture: Architecture, folder: str | Path) -> None:
    """Checks that the layout and the training either both have adapters, or both have none."""
    if isinstance(architecture, AdaptedArchitecture):
        if request.to != "peft" and not request.merge:
            raise UsageError(
                f"the training in '{folder}' trains adapters: give --to peft, or --merge for a whole model"
            )
    elif request.merge or request.to == "peft":
        raise UsageError(f"the training in '{folder}' has no adapters; it trains all weights")


def _options(request: ConvertRequest, trained: TrainRequest, dtype: str | None) -> dict[str, Any]:
    """Returns the options for writing a layout, apart from the weights."""
    if request.to == "hf":
        import torch

        source_weights = trained.weights if trained.weights is not None and Path(trained.weights).exists() else None
        source_tokenizer = None if source_weights is None else own_tokenizer(source_weights)
        requested = request.tokenizer or trained.tokenizer
        tokenizer = source_tokenizer if requested is None else None if requested == BYTES else Path(requested)
        # The generation settings name the end token by its id, which depends on the tokenizer.
        generation = (
            own_generation(source_weights) if source_weights is not None and tokenizer == source_tokenizer else None
        )
        return {"dtype": getattr(torch, dtype) if dtype else None, "tokenizer": tokenizer, "generation": generation}
    return {"base": None if trained.weights is None else str(trained.weights)}


def _checkpoint(path: Path, step: int | None) -> Checkpoint:
    checkpoints = CheckpointFolder(path / CHECKPOINTS).all()
    for checkpoint in checkpoints:
        if step in (None, checkpoint.step):
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints) or "none"
    raise StudyError(f"'{path}' has no checkpoint{'' if step is None else f' of step {step}'}; there are: {steps}")


def _weights(checkpoint: Checkpoint) -> Weights:
    """Returns the model's weights among the tensors of a checkpoint."""
    stored = dcp_tensors(checkpoint.path)
    prefix = f"{MODEL}/"
    return Weights({name.removeprefix(prefix): stored[name] for name in stored if name.startswith(prefix)})
