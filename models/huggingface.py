"""Any Hugging Face model of a supported task as a workload, built from its configuration alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..base.errors import WorkloadError
from .architecture import Architecture, described, from_configuration, refused, without_memory
from .data import GENERAL, TokenBatches
from .families import schedule_of
from .flops import flops_of, follows_values
from .tasks import TaskData, task_data
from .workload import DEFAULT_GLOBAL_BATCH, Workload

if TYPE_CHECKING:
    from ..schedule import Schedule

MAX_DEFAULT_SEQ_LEN = 4096
"""Longest default sequence length. Many models allow 128 Ki positions."""
# Their functions in `tasks` check `seq_len`: it is that of a transcript, or must not be given.
_OWN_LENGTH = ("speech_seq2seq", "ctc", "audio_classification", "segmentation")


def hugging_face_workload(
    architecture: Architecture,
    *,
    name: str,
    spec: str,
    seq_len: int | None = None,
    global_batch: int | None = None,
    unread: tuple[str, ...] = (),
) -> Workload:
    """Returns the workload that trains an architecture from scratch, on random inputs of its task.

    Args:
        spec: identifier that is valid from any folder.
        seq_len: tokens of a sample; None for the model's positions, at most 4096.
        global_batch: samples of one optimizer step; None for 32.
        unread: fields of its configuration that its class does not have.

    Raises:
        WorkloadError: the architecture cannot be built; it has fewer than `seq_len` positions or fewer than two classes; or a
            sequence length is given for images.
    """
    inputs = _task_data(architecture, name, seq_len)
    workload = Workload(
        name=name,
        spec=spec,
        model=architecture,
        batch=inputs.batch,
        loss=inputs.loss,
        schedule=schedule_of(architecture.model_type),
        unread=unread,
        seq_len=inputs.seq_len,
        global_batch=global_batch if global_batch is not None else DEFAULT_GLOBAL_BATCH,
        identity={
            "architecture": described(architecture.configuration()),
            "task": architecture.task,
            "data": None,  # a text in earlier versions, whose runs keep their ids
        },
    )
    if architecture.task not in GENERAL and (reason := flops_of(workload).reason) and not follows_values(reason):
        # Inputs are derived from the configuration by general rules: a class that takes other inputs fails here.
        raise refused(architecture.class_name, name, f"a step of it {reason}")
    return workload


def _task_data(architecture: Architecture, name: str, seq_len: int | None) -> TaskData:
    """Returns inputs, targets and loss of the architecture's task.

    Raises:
        WorkloadError: as `hugging_face_workload`.
    """
    if architecture.task == "image":
        refuse_length(name, seq_len)
        without_memory(architecture)
    elif architecture.task in GENERAL:
        batch = _token_batches(architecture, name, seq_len)
        return TaskData(batch=batch, seq_len=batch.seq_len)

    def default_length() -> int:
        return _length(architecture, name, None, architecture.configuration().get_text_config())

    if seq_len is not None and architecture.task not in _OWN_LENGTH:
        _length(architecture, name, seq_len, architecture.configuration().get_text_config())
    return task_data(architecture, name, seq_len, default_length)


def hugging_face(
    configuration: Any,
    *,
    name: str | None = None,
    schedule: "Callable[[Schedule, Mapping[str, Any]], Any] | None" = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
) -> Workload:
    """Returns the workload that trains the model of a `transformers.PretrainedConfig`.

    Args:
        configuration: the configuration; weights are never read.
        name: name of the workload; None for its model type.
        schedule: `schedule(sch, config)`; None for the schedule of its family.
        seq_len, global_batch: as for `redline.workload`.

    Raises:
        WorkloadError: the class that the configuration names has no supported task, or transformers cannot build it.
    """
    name = name if name is not None else configuration.model_type
    workload = hugging_face_workload(
        from_configuration(configuration, name), name=name, spec=name, seq_len=seq_len, global_batch=global_batch
    )
    return workload if schedule is None else replace(workload, schedule=schedule)


def refuse_length(name: str, seq_len: int | None) -> None:
    """Raises WorkloadError if a sequence length is given for a model of images."""
    if seq_len is not None:
        raise WorkloadError(f"{name} takes images, so seq_len must not be given, but is {seq_len!r}")


def _token_batches(architecture: Architecture, name: str, seq_len: int | None) -> TokenBatches:
    """Returns batches of samples of `seq_len` tokens.

    Raises:
        WorkloadError: the architecture cannot be built, or has fewer positions.
    """
    text_config = architecture.configuration().get_text_config()
    vocab_size = getattr(text_config, "vocab_size", None)
    if not isinstance(vocab_size, int) or vocab_size < 2:
        raise WorkloadError(f"{name}: the configuration must have a vocab_size of at least 2, but has {vocab_size!r}")
    return TokenBatches(
        task=architecture.task,
        seq_len=_length(architecture, name, seq_len, text_config),
        vocab_size=vocab_size,
        pad_id=getattr(text_config, "pad_token_id", None),
    )


def _length(architecture: Architecture, name: str, seq_len: int | None, text_config: Any) -> int:
    """Returns the tokens of a sample: `seq_len`, or the model's positions up to `MAX_DEFAULT_SEQ_LEN`.

    Raises:
        WorkloadError: `seq_len` is not an integer, too small, or above the model's positions.
    """
    positions = _positions(architecture, text_config)
    max_positions = getattr(text_config, "max_position_embeddings", None)
    limit = positions or (
        max_positions if isinstance(max_positions, int) and max_positions > 0 else MAX_DEFAULT_SEQ_LEN
    )
    length = seq_len if seq_len is not None else min(limit, MAX_DEFAULT_SEQ_LEN)
    minimum = 2 if architecture.task == "causal" else 1  # a causal model predicts the second token from the first
    if isinstance(length, bool) or not isinstance(length, int) or length < minimum:
        raise WorkloadError(f"{name}: seq_len must be an integer of at least {minimum}, but got {length!r}")
    if positions is not None and length > positions:
        raise WorkloadError(f"{name}: seq_len must be at most {positions}, the model's positions, but got {length}")
    return length


def _positions(architecture: Architecture, text_config: Any) -> int | None:
    """Longest sequence with a learned position for each token; None if positions are computed, as rotary embeddings are."""
    from torch import nn

    model = without_memory(architecture)
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        # Their tables are of patches of an image.
        if any(name in path.split(".") for name in ("vision_model", "visual", "vision_tower")):
            continue
        if isinstance(module, nn.Embedding) and (leaf == "wpe" or "position" in leaf):
            # RoBERTa counts from padding_idx + 1; OPT's table has `offset` more rows than positions.
            skipped = module.padding_idx + 1 if module.padding_idx is not None else getattr(module, "offset", 0)
            return module.num_embeddings - skipped
    max_positions = getattr(text_config, "max_position_embeddings", None)
    rotary = getattr(text_config, "rope_parameters", None) is not None
    return max_positions if isinstance(max_positions, int) and not rotary else None
