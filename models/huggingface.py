"""Any Hugging Face language model or image classifier as a workload, built from its configuration alone."""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import WorkloadError
from .data import Task, TokenBatches, read_text, window
from .device import Device
from .families import schedule_of
from .images import ImageBatches
from .workload import DEFAULT_GLOBAL_BATCH, Workload

if TYPE_CHECKING:
    from torch import nn

DEFAULT_IMAGE_SIZE = 224
"""Pixels on a side, as in ImageNet training."""
MAX_DEFAULT_SEQ_LEN = 4096
"""Longest sequence that is chosen where nobody said how long: many models allow 128 Ki positions."""
# What describes a checkpoint rather than an architecture.
_NOT_ARCHITECTURE = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)


@contextmanager
def quiet() -> Iterator[ModuleType]:
    """transformers, with its warnings off: they speak of checkpoints, and there is none."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield transformers
    finally:
        transformers.logging.set_verbosity(before)


def refusals() -> tuple[type[Exception], ...]:
    """What transformers raises on values that it does not take."""
    from huggingface_hub.errors import StrictDataclassError

    return (
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        StrictDataclassError,
        TypeError,
        ValueError,
    )


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A Hugging Face architecture: `architecture(config)` builds the module with its weights undefined."""

    model_type: str
    """The family, as transformers names it."""
    arguments: Mapping[str, Any] = field(repr=False)
    """Keyword arguments of its configuration class."""
    task: Task
    """`causal`, `masked`, `seq2seq` or `image`."""

    def configuration(self) -> Any:
        """A fresh `transformers.PretrainedConfig`.

        Raises:
            WorkloadError: transformers does not take these values.
        """
        with quiet() as transformers:
            kind = _config_class(transformers, self.model_type)
            try:
                # Training needs no key-value cache; transformers.Trainer switches it off too.
                made = kind.from_dict({**self.arguments, "model_type": self.model_type})
                made.use_cache = False
                if self.task == "seq2seq" and getattr(made, "decoder_start_token_id", None) is None:
                    # Published configurations have it; T5's convention.
                    made.decoder_start_token_id = made.pad_token_id
            except refusals() as error:
                raise WorkloadError(
                    f"the configuration is no valid {self.model_type}: {_one_line(error)}"
                ) from error
        return made

    def __call__(self, config: Mapping[str, Any]) -> "nn.Module":
        """The module in float32, on the current device, with the knob `attention` followed.

        Raises:
            WorkloadError: transformers cannot build it.
        """
        import torch

        attention = config.get("attention") or self.default_attention
        with quiet() as transformers:
            auto = getattr(transformers, _AUTO[self.task])
            try:
                model = auto.from_config(
                    self.configuration(),
                    attn_implementation=attention,
                    dtype=torch.float32,
                    trust_remote_code=False,
                )
            except refusals() as error:
                raise WorkloadError(
                    f"transformers cannot build this {self.model_type} with attention '{attention}': "
                    f"{_one_line(error)}"
                ) from error
        if getattr(model, "loss_type", "") is None:
            # transformers guesses the loss from the name of the class, and warns where it cannot.
            model.loss_type = _LOSS[self.task]
        return model

    @cached_property
    def model_class(self) -> type:
        """The class transformers has for this family and task."""
        with quiet() as transformers:
            mapping = getattr(transformers, _MAPPING[self.task])
            return mapping[_config_class(transformers, self.model_type)]

    @property
    def imports(self) -> tuple[str, ...]:
        """What building the model imports; most of a second, were it done in every trial."""
        return ("transformers.models.auto.modeling_auto", self.model_class.__module__, __name__)

    @property
    def default_attention(self) -> str:
        """What `transformers.Trainer` would run with."""
        return "sdpa" if self.model_class._supports_sdpa else "eager"

    def attentions(self, device: Device) -> tuple[str, ...]:
        """Implementations of attention that the architecture and the device have, the default first."""
        found = ["sdpa", "eager"] if self.model_class._supports_sdpa else ["eager"]
        if (
            self.model_class._supports_flash_attn
            and device.type == "cuda"
            and (device.capability or (0, 0)) >= (8, 0)
            and importlib.util.find_spec("flash_attn") is not None
        ):
            found.append("flash_attention_2")
        return tuple(found)


_AUTO = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image": "AutoModelForImageClassification",
}
# What transformers computes for labels that are shifted already is that of masked tokens.
_LOSS = {
    "causal": "ForCausalLM",
    "masked": "ForMaskedLM",
    "seq2seq": "ForMaskedLM",
    "image": "ForImageClassification",
}
_MAPPING = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}
_ENDINGS: dict[Task, tuple[str, ...]] = {
    "masked": ("ForMaskedLM", "ForPreTraining"),
    "causal": ("ForCausalLM", "LMHeadModel"),
    "seq2seq": ("ForConditionalGeneration",),
    "image": ("ForImageClassification",),
}


def hugging_face_workload(
    architecture: Architecture,
    *,
    name: str,
    spec: str,
    seq_len: int | None = None,
    global_batch: int | None = None,
    data: str | Path | None = None,
    folder: Path | None = None,
) -> Workload:
    """The workload of training an architecture from scratch: `language_model`, or `image_classifier`.

    Raises:
        WorkloadError: as they do; a sequence length or a text is given for images.
    """
    if architecture.task != "image":
        return language_model(
            architecture,
            name=name,
            spec=spec,
            seq_len=seq_len,
            global_batch=global_batch,
            data=data,
            folder=folder,
        )
    refuse_text(name, seq_len, data)
    return image_classifier(architecture, name=name, spec=spec, global_batch=global_batch)


def hugging_face(
    configuration: Any,
    *,
    name: str | None = None,
    schedule: Any = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    data: str | Path | None = None,
) -> Workload:
    """The workload of training what a `transformers.PretrainedConfig` describes.

    Args:
        configuration: the configuration; weights are never read.
        name: what people call it; None for its model type.
        schedule: `schedule(sch, config)`; None for that of its family.
        seq_len, global_batch, data: as `redline.workload` takes them.

    Raises:
        WorkloadError: transformers cannot build a language model or an image classifier of it.
    """
    name = name if name is not None else configuration.model_type
    made = hugging_face_workload(
        from_configuration(configuration, name),
        name=name,
        spec=name,
        seq_len=seq_len,
        global_batch=global_batch,
        data=data,
    )
    return made if schedule is None else replace(made, schedule=schedule)


def refuse_text(name: str, seq_len: int | None, data: str | Path | None) -> None:
    """Refuses what images do not have.

    Raises:
        WorkloadError: a sequence length or a text is given.
    """
    for what, value in (("seq_len", seq_len), ("data", data)):
        if value is not None:
            raise WorkloadError(f"{name} takes images, so that {what} must not be given, but is {value!r}")


def image_classifier(
    architecture: Architecture, *, name: str, spec: str, global_batch: int | None = None
) -> Workload:
    """The workload of training a classifier on images of the configuration's size, 224 where it has none.

    Raises:
        WorkloadError: the architecture cannot be built, or has fewer than two classes.
    """
    configuration = architecture.configuration()
    size = getattr(configuration, "image_size", None) or DEFAULT_IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    if configuration.num_labels < 2:
        raise WorkloadError(
            f"{name}: a classifier must have at least 2 classes, but num_labels is {configuration.num_labels}"
        )
    _empty(architecture)
    return Workload(
        name=name,
        spec=spec,
        model=architecture,
        batch=ImageBatches(
            channels=getattr(configuration, "num_channels", 3),
            height=height,
            width=width,
            classes=configuration.num_labels,
        ),
        loss=None,
        schedule=schedule_of(architecture.model_type),
        global_batch=global_batch if global_batch is not None else DEFAULT_GLOBAL_BATCH,
        identity={"architecture": _architecture_of(configuration), "task": architecture.task, "data": None},
    )


def language_model(
    architecture: Architecture,
    *,
    name: str,
    spec: str,
    seq_len: int | None = None,
    global_batch: int | None = None,
    data: str | Path | None = None,
    folder: Path | None = None,
) -> Workload:
    """The workload of training an architecture from scratch.

    Args:
        architecture: what is built.
        name: what people call it.
        spec: how it was asked for.
        seq_len: tokens of a sample; None for as many as the model has positions, 4096 at most.
        global_batch: samples of one optimizer step; None for 32.
        data: a text file; None draws random tokens.
        folder: where a tokenizer may be.

    Raises:
        WorkloadError: the architecture cannot be built, has fewer positions, or the data does not fit it.
    """
    configuration = architecture.configuration()
    text_config = configuration.get_text_config()
    vocab_size = getattr(text_config, "vocab_size", None)
    if not isinstance(vocab_size, int) or vocab_size < 2:
        raise WorkloadError(
            f"{name}: the configuration must have a vocab_size of at least 2, but has {vocab_size!r}"
        )
    positions = _positions(architecture, text_config)
    length = seq_len if seq_len is not None else min(positions or MAX_DEFAULT_SEQ_LEN, MAX_DEFAULT_SEQ_LEN)
    least = 2 if architecture.task == "causal" else 1
    if isinstance(length, bool) or not isinstance(length, int) or length < least:
        raise WorkloadError(f"{name}: seq_len must be an integer of at least {least}, but got {length!r}")
    if positions is not None and length > positions:
        raise WorkloadError(
            f"{name}: seq_len must be at most {positions}, the model's positions, but got {length}"
        )
    text = None
    if data is not None:
        text = read_text(
            data, seq_len=window(architecture.task, length), vocab_size=vocab_size, folder=folder
        )
    return Workload(
        name=name,
        spec=spec,
        model=architecture,
        batch=TokenBatches(
            task=architecture.task,
            seq_len=length,
            vocab_size=vocab_size,
            pad_id=getattr(text_config, "pad_token_id", None),
            text=text,
        ),
        loss=None,
        schedule=schedule_of(architecture.model_type),
        seq_len=length,
        global_batch=global_batch if global_batch is not None else DEFAULT_GLOBAL_BATCH,
        identity={
            "architecture": _architecture_of(configuration),
            "task": architecture.task,
            "data": [text.digest, text.tokenizer if text.tokenizer == "bytes" else "tokenizer"]
            if text
            else None,
        },
    )


def from_configuration(configuration: Any, name: str) -> Architecture:
    """The architecture a `transformers.PretrainedConfig` describes.

    Raises:
        WorkloadError: transformers has no language model and no image classifier for it.
    """
    with quiet() as transformers:
        kinds = [task for task in _MAPPING if type(configuration) in getattr(transformers, _MAPPING[task])]
    if not kinds:
        raise WorkloadError(
            f"{name}: transformers has no language model and no image classifier of type "
            f"'{configuration.model_type}'; describe it by a redline.Workload of your own (--workload "
            "FILE:NAME)"
        )
    return Architecture(
        model_type=configuration.model_type,
        arguments={k: v for k, v in configuration.to_dict().items() if k not in _NOT_ARCHITECTURE},
        task=_task(configuration, kinds),
    )


def _task(configuration: Any, kinds: list[Task]) -> Task:
    if len(kinds) == 1:
        return kinds[0]
    for each in configuration.architectures or ():
        for task in kinds:
            if each.endswith(_ENDINGS[task]):
                return task
    if getattr(configuration, "is_encoder_decoder", False) and "seq2seq" in kinds:
        return "seq2seq"
    preferred: Task = "causal" if getattr(configuration, "is_decoder", False) else "masked"
    return preferred if preferred in kinds else kinds[0]


def _config_class(transformers: ModuleType, model_type: str) -> type:
    return transformers.CONFIG_MAPPING[model_type]


def _architecture_of(configuration: Any) -> dict[str, Any]:
    """The architecture as plain data, without what a checkpoint or a version of transformers adds."""
    values = configuration.to_diff_dict()
    return {
        **{key: value for key, value in values.items() if key not in (*_NOT_ARCHITECTURE, "use_cache")},
        "model_type": configuration.model_type,
    }


def _positions(architecture: Architecture, text_config: Any) -> int | None:
    """Longest sequence with a position of its own; None where positions are computed, as rotary ones are."""
    from torch import nn

    model = _empty(architecture)
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (leaf == "wpe" or "position" in leaf):
            # RoBERTa counts from padding_idx + 1; OPT's table has `offset` rows more than positions.
            skipped = (
                module.padding_idx + 1 if module.padding_idx is not None else getattr(module, "offset", 0)
            )
            return module.num_embeddings - skipped
    limit = getattr(text_config, "max_position_embeddings", None)
    rotary = getattr(text_config, "rope_parameters", None) is not None
    return limit if isinstance(limit, int) and not rotary else None


def _empty(architecture: Architecture) -> "nn.Module":
    """The model on the meta device.

    Raises:
        WorkloadError: its sizes contradict each other.
    """
    import torch

    try:
        with torch.device("meta"):
            return architecture({})
    except (RuntimeError, AssertionError) as error:
        raise WorkloadError(
            f"no {architecture.model_type} can have these sizes: {_one_line(error)}"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
