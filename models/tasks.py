"""Tasks of transformers' classes beside language models and image classifiers: inputs, targets and losses."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import WorkloadError
from .architecture import refused
from .data import GeneratorDraw, ImageBatches, Task, inputs_and_labels, random_tokens
from .workload import Batch

if TYPE_CHECKING:
    import torch

    from .architecture import Architecture

IMAGE_CONFIGS = ("vision_config", "backbone_config", "image_config")
"""Nested configurations of image models."""
DEFAULT_IMAGE_SIZE = 224
"""Pixels per side, as in ImageNet training."""
CHOICES = 4
"""Answers of a question, as in SWAG (arXiv:1808.05326)."""
AUDIO_SECONDS = 10
"""Length of a recording for models that take any length, s; recordings of LibriSpeech have 12 s on average."""
SAMPLING_RATE = 16_000
"""Samples per second of audio."""
FRAMES_PER_SECOND = 100
"""Frames of a spectrogram per second, one every 10 ms."""
MAX_SUBSAMPLING = 8
"""Frames of a spectrogram for each output, at most (Conformer and its successors: 4 or 8)."""
CHARACTERS_PER_SECOND = 15
"""Characters of a transcript per second of speech, as in LibriSpeech."""
PAIR_TARGETS = ("next_sentence_label", "sentence_order_label")
"""Arguments of pre-training classes for the target of a pair of sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An entry of a batch."""

    shape: tuple[int, ...] = ()
    """Shape of one sample's value."""
    kind: Literal["integers", "normal", "flags"] = "integers"
    """`integers`: int64; `normal`: float32, standard normal; `flags`: float32, 0 or 1."""
    below: int = 2
    """Bound on integers."""
    never: int | None = None
    """An integer that does not occur."""
    end: int | None = None
    """The last integer of every sample, which occurs nowhere else."""

    def integers(self, size: int, draw: GeneratorDraw) -> "torch.Tensor":
        """Random integers of `size` samples."""
        flat = random_tokens((size, math.prod(self.shape)), self.below, self.never, draw)
        if self.end is not None:
            replacement = next(number for number in range(self.below) if number not in (self.never, self.end))
            flat = flat.masked_fill(flat == self.end, replacement)
            flat[:, -1] = self.end
        return flat.reshape(size, *self.shape)


@dataclass(frozen=True, kw_only=True)
class TaskBatches:
    """`batches(size, seed)`: random inputs and targets of a task, by the arguments of the model's forward."""

    task: Task
    values: Mapping[str, Entry]
    masked: bool = False
    """True replaces some of `input_ids` as in masked language modelling and adds `labels`."""
    vocab_size: int = 0
    """Bound on masked tokens."""
    positional: bool = False
    """True makes tuples, whose last entry the model does not get."""

    def __call__(self, size: int, seed: int) -> Batch:
        import torch

        generator = torch.Generator().manual_seed(seed)
        draw = GeneratorDraw(generator)
        batch: dict[str, torch.Tensor] = {}
        for name, entry in self.values.items():
            shape = (size, *entry.shape)
            if entry.kind == "normal":
                batch[name] = torch.randn(shape, generator=generator)
            elif entry.kind == "flags":
                batch[name] = torch.randint(2, shape, generator=generator).float()
            else:
                batch[name] = entry.integers(size, draw)
        if self.masked:
            pad_id = self.values["input_ids"].never
            batch |= inputs_and_labels(
                "masked", batch["input_ids"], vocab_size=self.vocab_size, pad_id=pad_id, mask_id=None, draw=draw
            )
        return tuple(batch.values()) if self.positional else batch


@dataclass(frozen=True, kw_only=True, slots=True)
class ContrastiveLoss:
    """Loss of images and texts of a micro-batch, from the logits of a model for every pair.

    Softmax over rows and columns, the mean of both (CLIP, arXiv:2103.00020), or a sigmoid for each pair, summed over a row
    (SigLIP, arXiv:2303.15343).
    """

    sigmoid: bool

    def __call__(self, output: Any, batch: Any) -> "torch.Tensor":
        import torch
        from torch.nn.functional import cross_entropy, logsigmoid

        logits = output.logits_per_text
        if self.sigmoid:
            signs = 2 * torch.eye(logits.shape[0], device=logits.device, dtype=logits.dtype) - 1
            return -logsigmoid(signs * logits).sum(dim=-1).mean()
        pairs = torch.arange(logits.shape[0], device=logits.device)
        return (cross_entropy(logits, pairs) + cross_entropy(logits.t(), pairs)) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CtcLoss:
    """Connectionist temporal classification: the mean over samples of the loss per character.

    transformers' own loss selects the targets by their values, which no tracer can follow, and is a sum over samples by
    default.
    """

    blank: int
    zero_infinity: bool

    def __call__(self, output: Any, batch: Any) -> "torch.Tensor":
        import torch
        from torch.nn.functional import ctc_loss, log_softmax

        logits, targets = output.logits, batch[-1]
        scores = log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
        size, frames = logits.shape[:2]
        return ctc_loss(
            scores,
            targets,
            (frames,) * size,
            (targets.shape[1],) * size,
            blank=self.blank,
            zero_infinity=self.zero_infinity,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskData:
    """Data of a workload for a task."""

    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Any], "torch.Tensor"] | None = None
    """None for the model's own."""
    seq_len: int | None = None
    """Tokens of a sample; None if it has none, or several sequences."""


def task_data(architecture: "Architecture", name: str, seq_len: int | None, usual: Callable[[], int]) -> TaskData:
    """Returns inputs, targets and loss of an architecture whose task is not that of a language model.

    Args:
        architecture: class and sizes.
        name: name for errors.
        seq_len: tokens of a text or transcript; None for `usual()`.
        usual: the default, limited by the positions of the model.

    Raises:
        WorkloadError: the configuration lacks a size, or the class takes another kind of input.
    """
    return _DATA[architecture.task](_Sizes(architecture, name, seq_len, usual))


class _Sizes:
    """Sizes of an architecture's inputs."""

    def __init__(self, architecture: "Architecture", name: str, seq_len: int | None, usual: Callable[[], int]) -> None:
        self.architecture, self.name = architecture, name
        self.config = architecture.configuration()
        self.seq_len, self._usual = seq_len, usual

    @property
    def length(self) -> int:
        return self.seq_len if self.seq_len is not None else self._usual()

    def no_length(self) -> None:
        if self.seq_len is not None:
            kind = self.architecture.class_name
            raise WorkloadError(
                f"{self.name}: {kind} takes no text, so seq_len must not be given, but is {self.seq_len!r}"
            )

    @property
    def classes(self) -> int:
        """Number of classes.

        Raises:
            WorkloadError: fewer than two.
        """
        if self.config.num_labels < 2:
            raise WorkloadError(
                f"{self.name}: a classifier must have at least 2 classes, but num_labels is {self.config.num_labels}"
            )
        return self.config.num_labels

    def target(self) -> Entry:
        """Target of a sample: a class; several of them or a number, if the configuration has that `problem_type`."""
        problem = getattr(self.config, "problem_type", None)
        if problem == "multi_label_classification":
            return Entry(shape=(self.config.num_labels,), kind="flags")
        if problem == "regression" or (problem is None and self.config.num_labels == 1):
            shape = () if self.config.num_labels == 1 else (self.config.num_labels,)
            return Entry(shape=shape, kind="normal")
        return Entry(below=self.classes)

    def text(self, *shape: int) -> Entry:
        """Token ids."""
        text_config = self.config.get_text_config()
        return Entry(shape=shape, below=text_config.vocab_size, never=getattr(text_config, "pad_token_id", None))

    def image(self) -> Entry:
        """Pixels."""
        return Entry(shape=image_shape(self.config), kind="normal")

    @property
    def audio(self) -> dict[str, Entry]:
        """Waveform or spectrogram, by the name that the class takes it by.

        Raises:
            WorkloadError: it takes something else.
        """
        name, config = self.architecture.model_class.main_input_name, self.config  # type: ignore[attr-defined]
        if name == "input_values" and self.architecture.model_type == "audio-spectrogram-transformer":
            return {name: Entry(shape=(config.max_length, config.num_mel_bins), kind="normal")}
        if name == "input_values":
            return {name: Entry(shape=(AUDIO_SECONDS * SAMPLING_RATE,), kind="normal")}
        if (
            name == "input_features"
            and getattr(config, "max_source_positions", None)
            and hasattr(config, "num_mel_bins")
        ):
            # Whisper: 30 s, halved by its second convolution.
            return {name: Entry(shape=(config.num_mel_bins, 2 * config.max_source_positions), kind="normal")}
        if name == "input_features" and (width := _feature_width(config)):
            return {name: Entry(shape=(AUDIO_SECONDS * FRAMES_PER_SECOND, width), kind="normal")}
        raise refused(self.architecture.class_name, self.name, f"its input {name!r} has no known shape")


def _feature_width(config: Any) -> int | None:
    """Features of a frame."""
    for name in ("input_feat_per_channel", "feature_projection_input_dim"):
        if isinstance(width := getattr(config, name, None), int):
            return width * (getattr(config, "input_channels", 1) if name == "input_feat_per_channel" else 1)
    return None


def _image(sizes: _Sizes) -> TaskData:
    channels, height, width = image_shape(sizes.config)
    return TaskData(batch=ImageBatches(channels=channels, height=height, width=width, classes=sizes.classes))


def _pretraining(sizes: _Sizes) -> TaskData:
    parameters = inspect.signature(sizes.architecture.model_class.forward).parameters  # type: ignore[attr-defined]
    pair = [name for name in PAIR_TARGETS if name in parameters]
    if not pair or "labels" not in parameters:
        raise refused(sizes.architecture.class_name, sizes.name, "its targets are made by code of its own")
    values = {"input_ids": sizes.text(sizes.length), pair[0]: Entry()}
    vocabulary = values["input_ids"].below
    batch = TaskBatches(task="pretraining", values=values, masked=True, vocab_size=vocabulary)
    return TaskData(batch=batch, seq_len=sizes.length)


def _sequence_classification(sizes: _Sizes) -> TaskData:
    config, ids = sizes.config, sizes.text(sizes.length)
    if getattr(config, "is_encoder_decoder", False):  # it classifies by the hidden state of the end of a text
        ids = replace(ids, end=config.eos_token_id)
    values = {"input_ids": ids, "labels": sizes.target()}
    return TaskData(batch=TaskBatches(task="sequence_classification", values=values), seq_len=sizes.length)


def _token_classification(sizes: _Sizes) -> TaskData:
    values = {"input_ids": sizes.text(sizes.length), "labels": Entry(shape=(sizes.length,), below=sizes.classes)}
    return TaskData(batch=TaskBatches(task="token_classification", values=values), seq_len=sizes.length)


def _question_answering(sizes: _Sizes) -> TaskData:
    place = Entry(below=sizes.length)
    values = {"input_ids": sizes.text(sizes.length), "start_positions": place, "end_positions": place}
    return TaskData(batch=TaskBatches(task="question_answering", values=values), seq_len=sizes.length)


def _multiple_choice(sizes: _Sizes) -> TaskData:
    values = {"input_ids": sizes.text(CHOICES, sizes.length), "labels": Entry(below=CHOICES)}
    return TaskData(batch=TaskBatches(task="multiple_choice", values=values))


def _speech_seq2seq(sizes: _Sizes) -> TaskData:
    limit = getattr(sizes.config, "max_target_positions", None)
    length = sizes.seq_len if sizes.seq_len is not None else limit or AUDIO_SECONDS * CHARACTERS_PER_SECOND
    if limit is not None and length > limit:
        raise WorkloadError(
            f"{sizes.name}: seq_len must be at most {limit}, the positions of a transcript, but got {length}"
        )
    values = {**sizes.audio, "labels": sizes.text(length)}
    return TaskData(batch=TaskBatches(task="speech_seq2seq", values=values))


def _ctc(sizes: _Sizes) -> TaskData:
    sizes.no_length()
    config = sizes.config
    blank = config.pad_token_id if config.pad_token_id is not None else 0
    samples = AUDIO_SECONDS * (SAMPLING_RATE if "input_values" in sizes.audio else FRAMES_PER_SECOND)
    frames = samples // getattr(config, "inputs_to_logits_ratio", MAX_SUBSAMPLING)
    # Equal characters in a row need a blank between them: at most twice as many frames as characters.
    length = min(AUDIO_SECONDS * CHARACTERS_PER_SECOND, frames // 2)
    targets = Entry(shape=(length,), below=config.vocab_size, never=blank)
    values = {**sizes.audio, "targets": targets}
    loss = CtcLoss(blank=blank, zero_infinity=bool(getattr(config, "ctc_zero_infinity", False)))
    return TaskData(batch=TaskBatches(task="ctc", values=values, positional=True), loss=loss)


def _audio_classification(sizes: _Sizes) -> TaskData:
    sizes.no_length()
    return TaskData(
        batch=TaskBatches(task="audio_classification", values={**sizes.audio, "labels": Entry(below=sizes.classes)})
    )


def _segmentation(sizes: _Sizes) -> TaskData:
    sizes.no_length()
    pixels = sizes.image()
    labels = Entry(shape=pixels.shape[1:], below=sizes.classes)
    return TaskData(batch=TaskBatches(task="segmentation", values={"pixel_values": pixels, "labels": labels}))


def _contrastive(sizes: _Sizes) -> TaskData:
    values = {"input_ids": sizes.text(sizes.length), "pixel_values": sizes.image()}
    loss = ContrastiveLoss(sigmoid=sizes.architecture.model_type.startswith("siglip"))
    return TaskData(batch=TaskBatches(task="contrastive", values=values), loss=loss)


_DATA: Mapping[Task, Callable[[_Sizes], TaskData]] = {
    "image": _image,
    "pretraining": _pretraining,
    "sequence_classification": _sequence_classification,
    "token_classification": _token_classification,
    "question_answering": _question_answering,
    "multiple_choice": _multiple_choice,
    "speech_seq2seq": _speech_seq2seq,
    "ctc": _ctc,
    "audio_classification": _audio_classification,
    "segmentation": _segmentation,
    "contrastive": _contrastive,
}


def image_shape(configuration: Any) -> tuple[int, int, int]:
    """Channels, height and width of a configuration's images: its own sizes, or those of its nested image model."""
    nested = [getattr(configuration, name, None) for name in IMAGE_CONFIGS]
    holders = [configuration, *(config for config in nested if config is not None)]

    def setting(name: str, default: Any) -> Any:
        return next((value for config in holders if (value := getattr(config, name, None)) is not None), default)

    size = setting("image_size", DEFAULT_IMAGE_SIZE)
    height, width = (size, size) if isinstance(size, int) else size
    return setting("num_channels", 3), height, width
