"""Targets of exports, their results, and their input: a configuration, its sizes, and a record of the knobs carried over."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from ..base.errors import UsageError
from ..knobs.layers import own_knobs, uniform
from ..knobs.lossy import LOSSY, lossy_values
from ..knobs.meaning import Exchange, Formats, exchange_of, formats_of, pipeline_schedule_of
from ..knobs.strategy import MAX_DEVICES, STANDARD, is_even, is_whole
from ..knobs.text import value_text
from ..results.columns import fold
from ..results.measurement import Trial

SEQUENCES = ("sp", "cp")
"""Degrees that cut sequences over ranks."""
WRITERS = {"sp": "deepspeed and python", "cp": "megatron, torchtitan and python"}
"""Targets that support them."""
_SHAPE = ("family", "layers", "hidden", "heads", "intermediate", "vocabulary")
"""Required sizes of a model."""


PORT = 29500
"""Port of the first host unless MASTER_PORT is set: torchrun's default."""
FIRST = f'"$MASTER_ADDR:${{MASTER_PORT:-{PORT}}}"'
"""Address of the first host, in a shell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Distribution of processes over hosts, the same number on each."""

    count: int
    """Number of hosts."""
    each: int
    """Number of processes, and so of devices, on each host."""

    @classmethod
    def of(cls, processes: int, per_host: int | None) -> "Hosts":
        """The fewest hosts for a number of processes, at most `per_host` on each; one if that is unknown."""
        most = per_host or processes
        count = next(n for n in range(1, processes + 1) if processes % n == 0 and processes // n <= most)
        return cls(count=count, each=processes // count)

    def __str__(self) -> str:
        return f"{self.count} hosts of {self.each}" if self.count > 1 else "one host"

    def torchrun(self) -> str:
        """torchrun with its options, for a shell; the same on each host, with MASTER_ADDR the first host."""
        if self.count == 1:
            return f"torchrun --nproc-per-node {self.each}"
        return (
            f"torchrun --nnodes {self.count} --nproc-per-node {self.each} --rdzv-backend c10d --rdzv-endpoint {FIRST}"
        )


MEASURED_WITH: Mapping[str, str] = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment variables of every trial that affect the speed on a CPU. OpenMP threads that spin while they wait make
a step several times slower as soon as anything else runs on the machine; sleeping threads cost nothing measurable.
"""


Form = Literal["yaml", "json", "shell", "python", "env"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A framework, or a plain format, that a configuration can be exported to."""

    name: str
    """Name for `--to`."""
    about: str
    """Short description."""
    stem: str
    """Default name of its file, without the suffix."""
    forms: Mapping[str, Callable[["ExportInput", str], str]]
    """For each form `body(setup, comment)`, which returns the text. `comment` contains the notes as lines without
    comment signs; a form with comments inserts them. The first form is the default.
    """
    silent: frozenset[str] = frozenset()
    """Forms without comments."""
    checked: tuple[str, str] | None = None
    """Package of the framework, with the version that exports were checked against."""
    pipelines: bool = True
    """True if it supports pipeline stages."""
    sequences: tuple[str, ...] = ()
    """Those of `sp` and `cp` that it supports."""
    runs: bool = False
    """True if it can treat runs of blocks unlike each other (`strategy`)."""
    uneven: bool = False
    """True if it supports stages with given numbers of blocks (`stage_blocks`)."""
    trains: tuple[str, ...] = ("",)
    """Endings of the classes of transformers that it can train; by default those of all."""
    use: Callable[[str], str] | None = None
    """How a file of that name is used, if `start` does not show it."""
    start: Callable[["ExportInput", str], str] | None = None
    """Shell line that starts a training with a file of that name (quoted for a shell) on one host, or that runs on
    each of several hosts, with MASTER_ADDR the first host's name and NODE_RANK each host's number from 0. Further
    arguments can be appended. None if there is nothing to start.
    """

    def setup(self, trial: Trial, document: Mapping[str, Any] | None) -> "ExportInput":
        """Input of an export to this target."""
        setup = ExportInput(trial, document, self)
        if setup.command and self.start is not None:
            raise UsageError(
                f"{self.name} states a training of redline's own, but this run measured a command: the winner's command is in "
                "winner/command.sh of the run's folder; --to yaml, json and env write what was tuned"
            )
        if setup.model_class and not setup.model_class.endswith(self.trains):
            raise UsageError(
                f"{self.name} trains language models (*{', *'.join(self.trains)}), but this run measured "
                f"{setup.model_class}: its settings would start another training; --to accelerate and --to python keep the model"
            )
        return setup

    def runs_whole(self, config: Mapping[str, Any]) -> bool:
        """True if its file runs a configuration on all its devices."""
        lacking = [name for name in SEQUENCES if name not in self.sequences] + ([] if self.pipelines else ["pp"])
        return all(config.get(name, 1) == 1 for name in lacking) and (self.uneven or config.get("stage_blocks") is None)

    def file(self, form: str) -> str:
        """Default name of a file of that form."""
        return self.stem + SUFFIXES[form]


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A configuration exported to a target."""

    target: str
    """Name of the target."""
    form: str
    """`yaml`, `json`, `shell`, `python` or `env`; it determines the suffix of a file."""
    text: str
    """The file's text."""
    notes: tuple[str, ...]
    """Warnings, and what could not be carried over. They are in the text too, except for a form without comments."""
    use: tuple[str, ...]
    """Instructions, in lines; in the text too, likewise."""
    devices: int
    """Devices of one training."""
    comments_inside: bool
    """True if the text contains the notes."""


class ExportInput:
    """A configuration to write for another framework.

    A target reads each knob that it supports and adds a `note` about anything that its framework cannot do. A knob
    that was not read becomes a note, so that nothing is dropped silently.

    Args:
        trial: trial with the configuration.
        document: the run's run.yaml; None if only the trials are known.
        target: the framework. Without pipeline stages there, the file runs on 1/pp of the devices, and likewise for each of
            `sp` and `cp` that it does not support.

    Raises:
        UsageError: the configuration's sizes are not whole numbers, or contradict each other.
    """

    def __init__(self, trial: Trial, document: Mapping[str, Any] | None, target: Target) -> None:
        request = (document or {}).get("asked", {})
        self.trial = trial
        self.config = dict(trial.config) if target.runs else self._without_runs(trial, target.name)
        if is_even(self._stage_blocks()):
            self.config.pop("stage_blocks", None)
        elif not target.uneven:
            raise UsageError(
                f'cannot export trial {trial.number} to {target.name}: stage_blocks="{self.config["stage_blocks"]}" gives stages '
                f"different numbers of blocks, which {target.name} cannot state; --to megatron and --to python can"
            )
        self._standard = {
            name: value for name, value in self.config.items() if name not in STANDARD or STANDARD[name].can_be(value)
        }
        self.target = target.name
        self.notes: list[str] = []
        """Limitations of the export, one sentence each."""
        self._used: set[str] = set()
        self._whole = False
        self.model: str = str(request.get("model") or "")
        """Name of the model; empty if unknown."""
        workload = request.get("workload") or {}
        self.spec: str = str(workload.get("spec") or "")
        """Identifier of the model: a preset's name, a path, a hub id, `file.py:name`; empty for a callable."""
        self.model_class: str = str(workload.get("class") or "")
        """Class of the model in transformers; empty if unknown, or for other models."""
        self.command: str = str(workload.get("command") or "")
        """Options of the tuned command; empty if the run measured redline's own training. Only what was tuned is known
        of a command's training.
        """
        optimizer = workload.get("optimizer")
        self.optimizer: Mapping[str, Any] = optimizer if isinstance(optimizer, Mapping) else {}
        """Class of the workload's own optimizer, and its settings; empty for the AdamW of others, or if unknown."""
        self.missing: list[str] = []
        """Parts of the training that the export does not carry, which its first line names."""
        self.lora: str = str(workload.get("lora") or "")
        """Adapters, in the format of `--lora`; empty for all weights."""
        self.seq_len: int | None = request.get("seq_len")
        """Tokens of a sample."""
        self.seed: int = request.get("seed") or 0
        """Seed of weights and data."""
        shape = {name: value for name, value in (request.get("shape") or {}).items() if value is not None}
        self.layers: int = shape.get("layers", 0)
        """Number of blocks of the model; 0 if unknown."""
        self.shape: Mapping[str, Any] = shape if all(name in shape for name in _SHAPE) else {}
        """The model's sizes by the names in run.yaml (`redline.models.architecture`); empty if unknown."""
        self.simulated: bool = bool(request.get("simulated"))
        """True if the trial is a prediction."""
        self.emulated: bool = bool(request.get("emulated"))
        """True if some of its ranks ran alone on one device."""
        devices = request.get("devices") or {}
        self.device_type: str = str(devices.get("type") or "cuda")
        """`cuda` or `cpu`."""
        self.tp, self.sp, self.cp, self.pp = (self._size(name) for name in ("tp", "sp", "cp", "pp"))
        split = self.tp * self.sp * self.cp * self.pp
        measured = trial.measured.devices if trial.measurement is not None else None
        total = measured or devices.get("used")
        self.dp = self._size("dp") if "dp" in self.config else max(1, (total or 1) // split)
        """Replicas with their own samples."""
        shared = {name: getattr(self, name) for name in SEQUENCES}
        self.replicas = self.dp * prod(ranks for name, ranks in shared.items() if name in target.sequences)
        """Ranks that share what ZeRO shards: the replicas, times the ranks that share a sequence if the target
        supports them.
        """
        self.devices = split * self.dp
        """Devices of one training."""
        if self.devices > MAX_DEVICES:
            raise UsageError(f"cannot export trial {trial.number}: it is for {self.devices:,} devices")
        self.processes = self.tp * self.replicas * (self.pp if target.pipelines else 1)
        """Number of devices that the exported file runs on."""
        per_host = devices.get("per_host")
        self.per_host: int | None = per_host if isinstance(per_host, int) and per_host > 0 else None
        """Devices of a host; None if unknown."""
        self.hosts = Hosts.of(self.processes, self.per_host)
        """Hosts that the exported file runs on."""
        host = ((document or {}).get("environment") or {}).get("host") or {}
        self._cores: int = host.get("cores") or 1
        self._used.update(("tp", "sp", "cp", "pp", "dp", "micro_batch", "grad_accum"))
        for name, ranks in shared.items():
            if ranks > 1 and name not in target.sequences:
                self.note(
                    f"{name}={ranks} has no counterpart here: this file runs on {self.processes} instead of {self.devices} "
                    f"devices, each with {ranks} times the tokens and activations; {WRITERS[name]} cut them so"
                )
        if self.pp == 1:
            self._used.update(("pipeline_schedule", "virtual_stages"))
        if self.exchange.hsdp == 1:
            self._used.add("hsdp")
        self._used.update(name for name in ("ep", "etp", "capacity_factor") if not self.has(name))
        self.micro_batch, self.grad_accum = self._batch(request.get("global_batch"))

    @staticmethod
    def _without_runs(trial: Trial, target: str) -> dict[str, Any]:
        """Returns the configuration with the knobs that have the same effect as its strategy for each run of blocks.

        Raises:
            UsageError: it treats blocks unlike each other, which the target cannot state.
        """
        config = dict(trial.config)
        strategy = config.get("strategy")
        if strategy is None or not STANDARD["strategy"].can_be(strategy):
            return config
        knobs_of_config = own_knobs(config)
        knobs = uniform(strategy, **knobs_of_config)
        if knobs is None:
            raise UsageError(
                f'cannot export trial {trial.number} to {target}: strategy="{strategy}" treats blocks unlike each other, '
                f"which {target} cannot state; --to python can, or export another trial by --trial N"
            )
        del config["strategy"]
        return {
            **config,
            **({"zero": knobs.zero} if knobs.zero != knobs_of_config["zero"] else {}),
            "checkpoint_ratio": float(knobs.ckpt),
        }

    def _stage_blocks(self) -> str | None:
        """`stage_blocks` of a pipeline; None if it has no effect, or is not a value of the knob."""
        stage_blocks = self.config.get("stage_blocks")
        return stage_blocks if STANDARD["stage_blocks"].can_be(stage_blocks) and self.config.get("pp", 1) != 1 else None

    @property
    def global_batch(self) -> int | None:
        """Samples of one optimizer step: micro-batch x accumulation x replicas; None if unknown."""
        if self.micro_batch is None or self.grad_accum is None:
            return None
        return self.micro_batch * self.grad_accum * self.dp

    @property
    def own_workload(self) -> bool:
        """True if the workload is defined in a user's file."""
        return ".py:" in self.spec

    def torchrun(self) -> str:
        """torchrun with its options, for a shell; a rank on a CPU gets the threads and the environment of the trial."""
        threads = self._cores // self.hosts.each
        # torchrun itself gives each of several ranks a single thread, and a single rank all threads.
        several = self.device_type == "cpu" and self.hosts.each > 1 and threads > 1
        variables = dict(MEASURED_WITH) if self.device_type == "cpu" else {}
        if several:
            variables["OMP_NUM_THREADS"] = str(threads)
        return " ".join([*(f"{name}={value}" for name, value in variables.items()), self.hosts.torchrun()])

    @property
    def found(self) -> str:
        """Origin of the trial's numbers: `measured`, or `predicted`."""
        return "predicted" if self.simulated else "measured"

    def marks(self) -> tuple[str, ...]:
        """Warnings about the configuration, one sentence each."""
        warnings: list[str] = []
        if self.missing:
            warnings.append(f"does not carry {', '.join(self.missing)}")
        if not self.trial.ok:
            warnings.append(ending(self.trial))
        if self.simulated:
            warnings.append("predicted, simulated: nothing was run")
        if self.emulated:
            warnings.append("emulated: some ranks ran alone on one device, and communication was priced")
        lossy_knobs = {name for name, lossy in LOSSY.items() if self._standard.get(name) in lossy}
        for name in sorted(lossy_knobs):
            value = self._standard[name]
            exact = "fp32 or bf16" if name == "precision" else "a run without"
            warnings.append(f"{name}={value_text(value)} trains differently from {exact}: {LOSSY[name][value]}")
        if further := [name for name in self.trial.lossy if name not in lossy_knobs]:
            settings = lossy_values(self.config, further)
            warnings.append(f"{settings} trades accuracy for speed: it trains differently from a run without")
        return tuple(warnings)

    def knob(self, name: str) -> Any:
        """Value of a standard knob, neutral if the configuration does not have it."""
        self._used.add(name)
        return self._standard.get(name, STANDARD[name].neutral)

    @property
    def formats(self) -> Formats:
        """Number formats of the training, and of the reduction of gradients."""
        self._used.add("precision")
        return formats_of(self._standard)

    @property
    def exchange(self) -> Exchange:
        """Communication of its replicas."""
        return exchange_of(self._standard, self.replicas)

    def has(self, name: str) -> bool:
        """True if the configuration has a knob of that name with a value other than the neutral one."""
        return name in self._standard and (name not in STANDARD or self._standard[name] != STANDARD[name].neutral)

    def note(self, sentence: str) -> None:
        """Adds a sentence on what could not be carried over, and what to do instead."""
        self.notes.append(sentence)

    def note_unless_neutral(self, name: str, instead: str) -> None:
        """Adds a note that a knob has no counterpart, unless it is neutral."""
        value = self.knob(name)
        if value != STANDARD[name].neutral:
            self.note(f"{name}={value_text(value)} has no counterpart here: {instead}")

    def take_all(self) -> dict[str, Any]:
        """Returns the whole configuration and marks it as carried over."""
        self._used.update(self.config)
        self._whole = True
        return dict(self.config)

    def order_of_stages(self) -> str | None:
        """Order of a pipeline's micro-batches, by the knob's value; None without a pipeline."""
        self._used.update(("pipeline_schedule", "virtual_stages"))
        return pipeline_schedule_of(self._standard, self.grad_accum) if self.pp > 1 else None

    def finish(self) -> tuple[str, ...]:
        """All notes, including one for each knob that was not read."""
        for name in self.config:
            if name not in self._used or (name not in self._standard and not self._whole):
                self.note(
                    f"{name}={value_text(self.config[name])} is not known to the export to {self.target}: "
                    "follow it in your own code"
                )
        return tuple(self.notes)

    def _size(self, name: str) -> int:
        value = self.config.get(name, STANDARD[name].neutral)
        if not is_whole(value) or value < 1:
            raise UsageError(
                f"cannot export trial {self.trial.number}: {name} must be a whole number of at least 1, "
                f"but is {value!r}"
            )
        return value

    def _batch(self, total: int | None) -> tuple[int | None, int | None]:
        micro = self._size("micro_batch") if "micro_batch" in self.config else None
        steps = self._size("grad_accum") if "grad_accum" in self.config else None
        if self.command or (micro is not None and steps is not None):
            return micro, steps
        share = None if total is None else total // self.dp
        if total is not None and total % (self.dp * (micro or steps or 1)):
            raise UsageError(
                f"cannot export trial {self.trial.number}: the global batch, {total}, is not a multiple of "
                f"dp x micro_batch, {self.dp} x {micro or steps or 1}"
            )
        if micro is not None and share is not None:
            return micro, share // micro
        if micro is not None:
            self.note(
                "the run does not state its global batch: this file accumulates no gradients; set what yours does"
            )
            return micro, 1
        if steps is not None:
            return None if share is None else share // steps, steps
        return share, None if share is None else 1


def ending(trial: Trial) -> str:
    """Returns a sentence on the end of a trial that did not finish."""
    if trial.measurement is None:
        return f"trial {trial.number} has not ended: whether it works is not known"
    reason = f" ({fold(trial.measured.reason)})" if trial.measured.reason else ""
    return f"trial {trial.number} did not run to its end, it ended as {trial.measured.status}{reason}"


SUFFIXES: Mapping[str, str] = {"yaml": ".yaml", "json": ".json", "shell": ".sh", "python": ".py", "env": ".env"}
"""File suffix of each form."""


def hashed(comment: str) -> str:
    """Lines of a comment, each after `#`."""
    return "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())


def as_yaml(content: Callable[[ExportInput], Any]) -> Callable[[ExportInput, str], str]:
    """Returns the form of a target whose file is this content in YAML."""

    def body(setup: ExportInput, comment: str) -> str:
        import yaml

        return hashed(comment) + yaml.safe_dump(content(setup), sort_keys=False, allow_unicode=True)

    return body


def as_json(content: Callable[[ExportInput], Any]) -> Callable[[ExportInput, str], str]:
    """Returns the form of a target whose file is this content in JSON, without the comment."""
    return lambda setup, comment: json.dumps(content(setup), indent=2) + "\n"


def sourced(file: str) -> str:
    """A file's name (quoted for a shell) for `source`, which searches PATH for a name without a slash."""
    return file if "/" in file else f"./{file}"
