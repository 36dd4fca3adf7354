"""Architectures of transformers: modules on the meta device from a configuration, and their shapes."""

import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base._transformers import quiet, refusals, supports_flash, supports_sdpa
from ..base.device import Device
from ..base.errors import WorkloadError
from ..base.gpus import gpus_described
from .data import Task

if TYPE_CHECKING:
    from torch import nn


# Entries of a configuration that describe its checkpoint or how it runs: equal architectures may differ in them.
_NOT_ARCHITECTURE = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "attn_implementation",
    "dtype",
    "experts_implementation",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)
# Entries, also of nested configurations, that select an implementation. The knobs do so here, and for a name with a slash
# transformers would download a kernel from the hub and run it.
_IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation(_internal|_autoset)?|use_kernels|kernel_config")
_ATTENTION = re.compile(r"\w+", re.ASCII)


class _Names(NamedTuple):
    """Names in transformers for a task."""

    auto: str
    """Auto class that builds a model from a configuration."""
    mapping: str
    """Mapping from configuration classes to model classes."""
    loss: str | None = None
    """`loss_type` of models whose class name does not imply one."""


# Ordered: a class in several mappings has the first of their tasks.
_TASKS: Mapping[Task, _Names] = {
    # The labels are shifted already, so the loss is that of masked tokens.
    "seq2seq": _Names("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "ForMaskedLM"),
    "causal": _Names("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", "ForCausalLM"),
    "masked": _Names("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", "ForMaskedLM"),
    "contrastive": _Names(
        "AutoModelForZeroShotImageClassification", "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING"
    ),
    "image": _Names(
        "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "ForImageClassification"
    ),
    "speech_seq2seq": _Names("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "ForMaskedLM"),
    "ctc": _Names("AutoModelForCTC", "MODEL_FOR_CTC_MAPPING"),
    "segmentation": _Names("AutoModelForSemanticSegmentation", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING"),
    "audio_classification": _Names("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING"),
    "sequence_classification": _Names(
        "AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"
    ),
    "token_classification": _Names("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"),
    "question_answering": _Names("AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING"),
    "multiple_choice": _Names("AutoModelForMultipleChoice", "MODEL_FOR_MULTIPLE_CHOICE_MAPPING"),
    "pretraining": _Names("AutoModelForPreTraining", "MODEL_FOR_PRETRAINING_MAPPING"),
}
_PREFERRED: tuple[Task, ...] = (
    "speech_seq2seq", "contrastive", "image", "ctc", "segmentation", "sequence_classification", "audio_classification",
)  # fmt: skip
"""Order of preference among the tasks of a family without language models, if its configuration names no class."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A Hugging Face architecture: `architecture(config)` builds the module with its weights undefined."""

    model_type: str
    """The family, as transformers names it."""
    arguments: Mapping[str, Any] = field(repr=False)
    """Keyword arguments of the configuration class."""
    task: Task
    """Task, which selects the class of the family."""

    def configuration(self) -> Any:
        """Returns a new `transformers.PretrainedConfig`.

        Raises:
            WorkloadError: transformers does not accept these values.
        """
        with quiet() as transformers:
            config_class = transformers.CONFIG_MAPPING[self.model_type]
            try:
                arguments = {**_without_implementations(self.arguments), "model_type": self.model_type}
                config = config_class.from_dict(arguments)
                # Training needs no key-value cache; transformers.Trainer switches it off too.
                config.use_cache = False
                if (
                    getattr(config, "is_encoder_decoder", False)
                    and getattr(config, "decoder_start_token_id", None) is None
                ):
                    # Published configurations set it. Without it a forward pass with labels fails; T5 uses the padding token.
                    config.decoder_start_token_id = config.pad_token_id
                if self.task == "sequence_classification" and config.get_text_config().pad_token_id is None:
                    # A decoder classifies by the last token that is not padding, and refuses several samples if there is
                    # no padding token. Batches contain none, so any id will do.
                    config.pad_token_id = config.get_text_config().pad_token_id = 0
            except refusals() as error:
                raise WorkloadError(f"the configuration is not a valid {self.model_type}: {one_line(error)}") from error
        return config

    def __call__(self, config: Mapping[str, Any]) -> "nn.Module":
        """Returns the module in float32, on the current device, with the implementation of the knob `attention`.

        Raises:
            WorkloadError: transformers cannot build it.
        """
        import torch

        attention = config.get("attention") or self.default_attention
        if not isinstance(attention, str) or not _ATTENTION.fullmatch(attention):
            raise WorkloadError(
                f"attention must be the name of an implementation in transformers, such as sdpa, but got {attention!r:.80}: "
                "code of the hub's is not loaded"
            )
        with quiet() as transformers:
            auto = getattr(transformers, _TASKS[self.task].auto)
            try:
                model = auto.from_config(
                    self.configuration(),
                    attn_implementation=attention,
                    dtype=torch.float32,
                    trust_remote_code=False,
                )
            except refusals() as error:
                raise WorkloadError(
                    f"transformers cannot build this {self.model_type} with attention '{attention}': {one_line(error)}"
                ) from error
        if getattr(model, "loss_type", "") is None and (loss := _TASKS[self.task].loss) is not None:
            # transformers guesses the loss from the name of the class, and warns if it cannot.
            model.loss_type = loss
        return model

    @cached_property
    def model_class(self) -> type:
        """Class of transformers for this family and task."""
        with quiet() as transformers, gpus_described():
            mapping = getattr(transformers, _TASKS[self.task].mapping)
            return mapping[transformers.CONFIG_MAPPING[self.model_type]]

    @property
    def class_name(self) -> str:
        """Name of `model_class`, read without importing it."""
        return class_names(_TASKS[self.task].mapping, self.model_type)[0]

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that building the model imports. Importing them takes most of a second in each process."""
        return ("transformers.models.auto.modeling_auto", self.model_class.__module__, __name__)

    @property
    def default_attention(self) -> str:
        """Implementation of attention that `transformers.Trainer` uses."""
        return "sdpa" if supports_sdpa(self.model_class) else "eager"

    def attentions(self, device: Device) -> tuple[str, ...]:
        """Implementations of attention available for the architecture and the device, the default first."""
        implementations = ["sdpa", "eager"] if supports_sdpa(self.model_class) else ["eager"]
        if (
            supports_flash(self.model_class)
            and device.type == "cuda"
            and (device.capability or (0, 0)) >= (8, 0)  # FlashAttention 2 requires Ampere or newer
            and importlib.util.find_spec("flash_attn") is not None
        ):
            implementations.append("flash_attention_2")
        return tuple(implementations)


def _without_implementations(value: Any) -> Any:
    """Removes entries that select an implementation, at any depth."""
    if isinstance(value, Mapping):
        return {
            name: _without_implementations(entry)
            for name, entry in value.items()
            if not _IMPLEMENTATIONS.fullmatch(str(name))
        }
    return [_without_implementations(item) for item in value] if isinstance(value, list) else value


def from_configuration(configuration: Any, name: str, named: str | None = None) -> Architecture:
    """Returns the architecture of a `transformers.PretrainedConfig`: the class that it names, or that of its usual task.

    Args:
        configuration: the configuration.
        name: name of the workload for errors.
        named: name of the class, instead of the one in the configuration's `architectures`.

    Raises:
        WorkloadError: the class is not one of the family, or its task is not supported.
    """
    return Architecture(
        model_type=configuration.model_type,
        arguments={key: value for key, value in configuration.to_dict().items() if key not in _NOT_ARCHITECTURE},
        task=_task(configuration, name, named),
    )


def class_names(mapping: str, model_type: str) -> tuple[str, ...]:
    """Names of a family's model classes in a mapping of transformers; empty if it has none."""
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, f"{mapping}_NAMES").get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _task(configuration: Any, name: str, class_name: str | None) -> Task:
    """Task of the class `class_name`, of the class in the configuration's `architectures`, or the family's usual task.

    Raises:
        WorkloadError: the class is not one of the family, or its task is not supported.
    """
    model_type = configuration.model_type
    class_by_task: dict[Task, str] = {
        task: classes[0]
        for task, task_names in _TASKS.items()
        if (classes := class_names(task_names.mapping, model_type))
    }
    class_name = class_name or next(iter(configuration.architectures or ()), None)
    image_text_classes = class_names("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", model_type)
    if image_text_classes and (class_name or image_text_classes[0]) in image_text_classes:
        raise refused(
            image_text_classes[0],
            name,
            "it takes images with its text, and no batch of both is made here (its text_config alone, as a config.json of its "
            "own, is a language model)",
        )
    if class_name is None:
        return _usual_task(configuration, name, class_by_task)
    for task, task_class in class_by_task.items():
        if task_class == class_name:
            return task
    supported = ", ".join(dict.fromkeys(class_by_task.values()))
    raise refused(
        class_name,
        name,
        "architectures names a class without one of the supported tasks"
        + (f" (those of {model_type}: {supported}; name one of them in architectures)" if supported else ""),
    )


def _usual_task(configuration: Any, name: str, tasks: Collection[Task]) -> Task:
    """Task of a configuration that names no class, among those of its family.

    Raises:
        WorkloadError: the family has no supported task.
    """
    if not tasks:
        raise WorkloadError(
            f"{name}: transformers has no class of type '{configuration.model_type}' with a supported task; describe it by a "
            "redline.Workload of your own (--workload FILE:NAME)"
        )
    is_encoder_decoder = getattr(configuration, "is_encoder_decoder", False)
    if is_encoder_decoder and "seq2seq" in tasks:
        return "seq2seq"
    if is_encoder_decoder and "speech_seq2seq" in tasks:
        return "speech_seq2seq"
    preferred: Task = "causal" if getattr(configuration, "is_decoder", False) else "masked"
    return next(task for task in (preferred, "masked", "causal", "seq2seq", *_PREFERRED, *tasks) if task in tasks)


def described(configuration: Any) -> dict[str, Any]:
    """Returns the architecture as JSON-ready data, independent of the checkpoint and of the version of transformers."""
    entries = configuration.to_diff_dict()
    return {
        **{key: value for key, value in entries.items() if key not in (*_NOT_ARCHITECTURE, "use_cache")},
        "model_type": configuration.model_type,
    }


def class_of(model: Any) -> str | None:
    """Returns the name of the transformers class of a workload's model; None for a user's model."""
    return model.class_name if isinstance(model, Architecture) else None


def without_memory(architecture: Architecture) -> "nn.Module":
    """Returns the model on the meta device.

    Raises:
        WorkloadError: its sizes contradict each other.
    """
    import torch

    try:
        with torch.device("meta"):
            return architecture({})
    except (RuntimeError, AssertionError) as error:
        raise WorkloadError(f"no {architecture.model_type} can have these sizes: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Returns the message of an error on one line, at most 300 characters; the name of its class if it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__


NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("qk_nope_head_dim", "head_dim"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
    "tied": ("tie_word_embeddings",),
    "activation": ("hidden_act", "activation_function"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "dropout": ("hidden_dropout", "resid_pdrop", "hidden_dropout_prob"),
    "attention_dropout": ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
    "attention_bias": ("attention_bias",),
    "mlp_bias": ("mlp_bias",),
    "rope": ("rope_parameters",),
    "window": ("sliding_window",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_intermediate": ("moe_intermediate_size",),
    "experts_per_token": ("num_experts_per_tok",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "parallel_residual": ("use_parallel_residual",),
}
"""Sizes by their name in run.yaml, with their names in the families' configurations; the first name present counts."""
PLAIN_DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")
"""Families of plain decoders that the sizes in `NAMES` describe."""


def shape_of(model: Any) -> dict[str, Any] | None:
    """Returns the shape of a model for run.yaml: its `family` and those of the sizes in `NAMES` that its configuration has, such
    as `layers`, `hidden`, `heads` and `vocabulary`.

    None if the model is not a single stack of blocks over tokens: an encoder-decoder, a model of images, a user's model.
    """
    if not isinstance(model, Architecture) or model.task not in ("causal", "masked"):
        return None
    configuration = model.configuration().get_text_config()
    sizes: dict[str, Any] = {"family": model.model_type}
    for size, names in NAMES.items():
        value = next((value for name in names if (value := getattr(configuration, name, None)) is not None), None)
        if value is not None:
            sizes[size] = dict(value) if isinstance(value, Mapping) else value
    # Configurations of GPT-2, GPT-Neo and others leave it None; their models then use four times the hidden size.
    sizes.setdefault("intermediate", 4 * sizes["hidden"])
    return sizes


def refused(class_name: str, name: str, why: str) -> WorkloadError:
    """Error for a class that is not built, with the workload to write."""
    end = "" if why.endswith(("?", ".")) else "."
    return WorkloadError(f"{name}: {class_name} is not trained here: {why}{end}\n" + "\n".join(_sketch(class_name)))


def _sketch(class_name: str) -> Iterator[str]:
    """Yields the lines of a `rl.Workload` for a class of transformers."""
    yield "Describe its training in a file, train.py, and give --workload train.py:workload:"
    yield ""
    yield "    import redline as rl"
    yield f"    from transformers import AutoConfig, {class_name}"
    yield ""
    yield "    config = AutoConfig.from_pretrained('FOLDER')"
    yield "    workload = rl.Workload("
    yield f"        model=lambda: {class_name}(config),"
    yield "        batch=...,  # batch(size, seed): a dict of CPU tensors by the arguments of forward, targets included"
    yield "        loss=lambda output, batch: ...,  # the mean over the batch; None for output.loss"
    yield "    )"
