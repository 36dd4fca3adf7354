"""The command to tune, as in the user's request."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ...base.errors import UsageError, WorkloadError, unknown
from ...base.option import Option, either
from ...base.reading import LARGEST_DOCUMENT, Malformed, parse_yaml, path_of, read_named
from ...frameworks.registry import LAUNCHERS
from ...models.presets import ServerModel

HIDDEN = "***"
"""Shown instead of a hidden value."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to tune.

    Args:
        command: as in a shell, or as a list of words. `{knob}` and `{expression over knobs}` are replaced by values, and
            `{trial_dir}`, `{trial}`, `{devices}`, `{hosts}`, `{devices_per_host}`, `{node_rank}`, `{master_addr}`,
            `{master_port}` and `{global_batch}` by those of the trial; literal braces are written `{{` and `}}`. It is
            started without a shell.
        env: environment variables, `NAME=value`, with `{...}` as well.
        model: the model that it trains, in any form that `redline.workload` accepts, so that an estimate guides the
            search; by default the value of a usual option of the command, such as `--model_name_or_path`, if redline
            knows that model.
        launcher: the trainer that it starts, if it is a known one. Knobs without a place in the command are passed as
            options of that trainer, and a short run is requested. One of `redline.frameworks.registry.LAUNCHERS`.
        render: files that it reads, written into `{trial_dir}` for every trial: `FILE`, a YAML, JSON or TOML file with `{...}` in
            its values, or `FILE:PATH=VALUE`, such as `ds.json:zero_optimization.stage={zero}`.
        metric: metrics to read from its output: a regular expression with a named group, such as
            `speed: (?P<tokens_per_second>[\\d.]+)`, or a name in JSON lines or reported by
            `redline.report`; `METRIC=NAME` to rename it, such as `tokens_per_second=perf/tps`. The first one is the
            objective.
        direction: `max` or `min`, for a metric that is neither a throughput nor a step time. Such a metric counts with
            its last value when the command ends; the others as soon as they are steady.
        samples: samples per step, such as `{micro_batch * grad_accum}`, if step times are reported; by default the
            product of the knobs `micro_batch`, `grad_accum` and `dp`.
        require: bounds on metrics, such as `p99_ms < 200`; a trial that breaks one is `wrong`.
        no_observe: do not observe its training from inside, which is done by a `sitecustomize` on its PYTHONPATH; its speed
            is then read from what it prints.
    """

    command: Annotated[str | Sequence[str], Option("A command to tune, with {knob} for values.", metavar="COMMAND")]
    launcher: Annotated[str | None, Option(f"The trainer that it starts: {either(LAUNCHERS)}.", metavar="NAME")] = None
    model: Annotated[
        str | None, Option("The model that it trains; an estimate then guides the search.", metavar="MODEL")
    ] = None
    env: Annotated[
        Sequence[str], Option("Variables of its environment: NAME=VALUE, or a list.", many=True, in_file=True)
    ] = ()
    render: Annotated[
        Sequence[str],
        Option("Files it reads, written to {trial_dir}: FILE[:PATH=VALUE], or a list.", many=True, in_file=True),
    ] = ()
    metric: Annotated[
        Sequence[str],
        Option(
            "The metric to read from its output: a name, or a regular expression with a named group; repeatable.",
            metavar="NAME|RE",
            many=True,
        ),
    ] = ()
    direction: Annotated[str | None, Option("max or min, for a metric that is not a throughput.", in_file=True)] = None
    samples: Annotated[str | None, Option("Samples of a step, such as '{micro_batch * 2}'.", in_file=True)] = None
    require: Annotated[
        Sequence[str], Option("Bounds on metrics, such as 'p99_ms < 200', or a list.", many=True, in_file=True)
    ] = ()
    no_observe: Annotated[
        bool, Option("Read only what it prints; observe nothing inside its processes.", in_file=True)
    ] = False
    reads_files: ClassVar[bool] = True
    """True if files that it names may be read before it is started."""
    hides_env: ClassVar[bool] = False
    """True if the values of its environment must not be shown."""

    def __post_init__(self) -> None:
        for name in ("env", "render", "metric", "require"):
            if isinstance(value := getattr(self, name), str):  # a sequence of one text, not of its letters
                object.__setattr__(self, name, (value,))

    @property
    def name(self) -> str:
        """The name of its program, or of the script that an interpreter or launcher runs."""
        words = self.command.split() if isinstance(self.command, str) else list(self.command)
        script = next((word for word in words if word.endswith((".py", ".sh"))), None)
        program = next((word for word in words if "=" not in word), "command")
        return Path(script or program).stem

    def named(self, model: str) -> str | ServerModel | None:
        """Returns the model for `redline.workload` of a name in the command; None if it is not the name of a model.

        Raises:
            WorkloadError: `model` was given explicitly and does not exist.
        """
        return model

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields for run.yaml."""
        return {name: value for name, value in asdict(self).items() if value not in (None, (), [], False)}

    @classmethod
    def from_yaml(cls, path: str | Path) -> "Command":
        """Reads a command from a file with the fields of this class.

        Raises:
            UsageError: the file does not exist, or a field is missing or unknown.
        """
        file = path_of(path)
        try:
            settings = parse_yaml(read_named(file, at_most=LARGEST_DOCUMENT))
        except OSError as error:
            raise UsageError(f"the command's file {file} cannot be read: {error.strerror or error}") from error
        except Malformed as error:
            raise UsageError(f"the command's file {file} is not valid YAML: {error}") from error
        names = [field.name for field in fields(cls)]
        if not isinstance(settings, dict) or "command" not in settings:
            raise UsageError(f"the command's file {file} must contain a mapping with `command`")
        if unknown_fields := [name for name in settings if name not in names]:
            raise UsageError(f"the command's file {file}: {unknown('field', unknown_fields[0], names)}")
        repeatable = ("env", "render", "metric", "require")
        values: dict[str, Any] = {
            name: [value] if name in repeatable and isinstance(value, str) else value
            for name, value in settings.items()
        }
        return cls(**values)


def hidden(env: Sequence[str]) -> list[str]:
    """Returns environment variables, `NAME=value`, with `HIDDEN` instead of their values."""
    return [f"{variable.partition('=')[0]}={HIDDEN}" for variable in env]


@dataclass(frozen=True, kw_only=True)
class ServerCommand(Command):
    """A command submitted to a server, by a user who may run it on another host and as another user.

    No file that it names is opened when it is resolved, and its model can only be a preset or a hub id. The values of
    its environment are passed to its process only and appear in no file of the run.
    """

    reads_files = False
    hides_env = True

    def __post_init__(self) -> None:
        if self.render:
            raise UsageError(
                "a command's `render` reads files of the submitting machine and cannot be sent to a server; leave it out"
            )

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **({"env": hidden(self.env)} if self.env else {})}

    def named(self, model: str) -> ServerModel | None:
        if model == self.model:
            return ServerModel.named(model)
        with suppress(WorkloadError):
            return ServerModel.named(model)
        return None
