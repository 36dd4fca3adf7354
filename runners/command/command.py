"""A command that is tuned, as it is asked for."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from ...base.errors import UsageError, WorkloadError, unknown
from ...base.reading import LARGEST_DOCUMENT, Malformed, parse_yaml, path_of, read_named
from ...frameworks.registry import LAUNCHERS
from ...models.request import Asked, either
from ...models.server_model import ServerModel

HIDDEN = "***"
"""What is shown in the place of a value that is not."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Somebody else's command, which is tuned as it is.

    Args:
        command: as in a shell, or its words. `{knob}` and `{expression over knobs}` stand for values, and `{trial_dir}`,
            `{trial}`, `{devices}`, `{hosts}`, `{node_rank}`, `{master_addr}` and `{master_port}` for what a trial gives;
            braces of its own are written `{{` and `}}`. It is started without a shell.
        env: variables of its environment, `NAME=value`, with `{...}` alike.
        model: what it trains, by whatever name `redline.workload` takes, so that an estimate guides the search; by default
            what the command says under a usual name, such as `--model_name_or_path`, where that is known here.
        launcher: what the command starts, where it is a known one: knobs without a place in the command are said as it wants
            them, and a short run is asked for. One of `redline.frameworks.registry.LAUNCHERS`.
        render: files it reads, written into `{trial_dir}` for every trial: `FILE`, a YAML, JSON, TOML or INI file with
            `{...}` in its values, or `FILE:PATH=VALUE`, such as `ds.json:zero_optimization.stage={zero}`.
        metric: what is read of what it says: a regular expression with a named group, such as
            `speed: (?P<tokens_per_second>[\\d.]+)`, or a name in lines of JSON, in `metric_file` or told by
            `redline.report`; `METRIC=NAME` where it is to be called otherwise, such as `tokens_per_second=perf/tps`. By default
            what known frameworks print, the steps of a progress bar among it. The first is what is tuned for.
        metric_file: a file of JSON lines or CSV that it appends to, beside what it prints, or a folder or file of TensorBoard's
            events, whose scalars are named by their tags. It may hold `{...}`: `{trial_dir}/runs`.
        direction: `max` or `min`, of a metric that is no throughput and no time of a step. Such a metric counts as it
            stands when the command ends; the others as soon as they are steady.
        samples: samples of a step, such as `{micro_batch * grad_accum}`, where times of steps are told; by default the
            product of the knobs `micro_batch`, `grad_accum` and `dp`.
        require: bounds on what it tells, such as `p99_ms < 200`; what breaks one is `wrong`.
        shell: start it by `/bin/sh -c`; values in it are quoted.
        emulate: run its first rank alone on one device, by the launcher's own mode for that (`megatron`, `torchtitan`).
    """

    command: Annotated[str | Sequence[str], Asked("A command to tune, with {knob} for values.", metavar="COMMAND")]
    launcher: Annotated[
        str | None,
        Asked(f"The trainer that it starts: {either(LAUNCHERS)}.", metavar="NAME"),
    ] = None
    model: Annotated[
        str | None,
        Asked("The model that it trains; an estimate then guides the search.", metavar="MODEL"),
    ] = None
    env: Annotated[
        Sequence[str], Asked("A variable of its environment; repeatable.", metavar="NAME=VALUE", many=True)
    ] = ()
    render: Annotated[
        Sequence[str],
        Asked("A file it reads, written to {trial_dir}; repeatable.", metavar="FILE[:PATH=VALUE]", many=True),
    ] = ()
    metric: Annotated[
        Sequence[str],
        Asked(
            "The metric to read from its output: a name, or a regular expression with a named group; repeatable.",
            metavar="NAME|RE",
            many=True,
        ),
    ] = ()
    metric_file: Annotated[
        str | None, Asked("JSON lines or CSV that it appends to, or TensorBoard's folder.", metavar="FILE")
    ] = None
    direction: Annotated[str | None, Asked("max or min, for a metric that is not a throughput.", metavar="NAME")] = None
    samples: Annotated[str | None, Asked("Samples of a step, such as '{micro_batch * 2}'.", metavar="N")] = None
    require: Annotated[
        Sequence[str], Asked("A bound on a metric, such as 'p99_ms < 200'; repeatable.", metavar="RULE", many=True)
    ] = ()
    shell: Annotated[bool, Asked("Start it in a shell.")] = False
    emulate: Annotated[bool, Asked("Run one rank of it alone, where --launcher can: megatron, torchtitan.")] = False

    @property
    def name(self) -> str:
        """What it is called: its program, or the script that an interpreter or launcher is given."""
        words = self.command.split() if isinstance(self.command, str) else list(self.command)
        script = next((word for word in words if word.endswith((".py", ".sh"))), None)
        program = next((word for word in words if "=" not in word), "command")
        return Path(script or program).stem

    @property
    def reads_files(self) -> bool:
        """Whether files that it names may be looked at before it is started."""
        return True

    @property
    def hides_env(self) -> bool:
        """Whether the values of its environment are shown to nobody."""
        return False

    def named(self, model: str) -> str | ServerModel | None:
        """The model of a name that it or its text gives, for `redline.workload`; None where it is not one.

        Raises:
            WorkloadError: `model` itself is not one.
        """
        return model

    def to_dict(self) -> dict[str, Any]:
        """What run.yaml keeps."""
        return {name: value for name, value in asdict(self).items() if value not in (None, (), [], False)}

    @classmethod
    def from_yaml(cls, path: str | Path) -> "Command":
        """A command in a file with the fields of this class.

        Raises:
            UsageError: there is no such file, or a field is missing or unknown.
        """
        where = path_of(path)
        try:
            given = parse_yaml(read_named(where, at_most=LARGEST_DOCUMENT))
        except OSError as error:
            raise UsageError(f"the command's file {where} cannot be read: {error.strerror or error}") from error
        except Malformed as error:
            raise UsageError(f"the command's file {where} is no YAML: {error}") from error
        known = [each.name for each in fields(cls)]
        if not isinstance(given, dict) or "command" not in given:
            raise UsageError(f"the command's file {where} must hold a mapping with `command`")
        if strange := [name for name in given if name not in known]:
            raise UsageError(f"the command's file {where}: {unknown('field', strange[0], known)}")
        many = ("env", "render", "metric", "require")
        values: dict[str, Any] = {
            name: [each] if name in many and isinstance(each, str) else each for name, each in given.items()
        }
        return cls(**values)


def hidden(env: Sequence[str]) -> list[str]:
    """Variables of an environment without their values."""
    return [f"{each.partition('=')[0]}={HIDDEN}" for each in env]


@dataclass(frozen=True, kw_only=True)
class ServerCommand(Command):
    """A command as a server takes it, of somebody who may run it elsewhere and as somebody else.

    Where it is resolved no file that it names is opened, and what it names as its model is a preset, a hub id, or nothing.
    What its environment holds is for its process alone, and stands in no file of the run.
    """

    def __post_init__(self) -> None:
        if self.render:
            raise UsageError(
                "a command's --render reads files of the machine that it is submitted on, and does not travel"
            )

    @property
    def reads_files(self) -> bool:
        return False

    @property
    def hides_env(self) -> bool:
        return True

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **({"env": hidden(self.env)} if self.env else {})}

    def named(self, model: str) -> ServerModel | None:
        if model == self.model:
            return ServerModel.named(model)
        with suppress(WorkloadError):
            return ServerModel.named(model)
        return None
