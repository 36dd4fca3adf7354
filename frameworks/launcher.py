"""Launchers: how they receive standard knobs, and options for a short run."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

from ..base.errors import UsageError
from ..knobs.lossy import LOSSY
from ..knobs.text import value_text

PLACED = re.compile(
    r"(?P<file>.+?\.(?:ya?ml|json|toml)(?:\.in|\.tmpl)?)(?::(?P<path>[^={}]+)=(?P<value>.*))?", re.DOTALL
)
"""Syntax of a file to be rendered: `FILE` or `FILE:PATH=VALUE`."""
ACCEPTED: Mapping[str, Sequence[Any]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "checkpoint_ratio": (0, 1),
    "fusion": (False, True),
    "kernels": (False, True),
    "zero": (0, 1, 2, 3),
    "offload": ("none", "optimizer"),
}
"""Values of standard knobs that launchers accept."""


class CommandLine(Protocol):
    """Interface of commands: a frozen dataclass with these fields."""

    @property
    def command(self) -> str | Sequence[str]:
        """Shell text, or a list of words."""

    @property
    def env(self) -> Sequence[str]:
        """Environment variables, `NAME=value`."""

    @property
    def render(self) -> Sequence[str]:
        """Files that it reads, each in the syntax of `PLACED`."""


CommandT = TypeVar("CommandT", bound=CommandLine)


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A program or a library that reads its settings from the command line or from a file."""

    name: str
    """Name for `--launcher`."""
    knobs: Mapping[str, Sequence[Any]]
    """Knobs that it accepts, with their default values to try; the first is its own default."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Template of the options for each knob in the command."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Place of each knob in its configuration file, `PATH=VALUE`."""
    short: str = ""
    """Options for a short run, which lasts until it is measured; those that the command has itself are kept."""
    bounds: str = ""
    """Options of a short run that replace the command's own: no evaluation, saving, generation, upload and logging to
    services, and the folder of the trial.
    """
    undone: tuple[str, ...] = ()
    """Options of the command that are left out of a short run, each with `VALUE` if it takes one that is not a flag."""
    accepts: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of standard knobs that it accepts, if they differ from `ACCEPTED`."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Options of a short run that are left out if the command has the other option."""
    total: str = ""
    """Option for the samples of a step."""
    own_total: bool = False
    """True if it has a default number of samples per step."""
    after: str = ""
    """Word after which options are inserted; by default they are appended."""
    several: tuple[str, ...] = ()
    """Knobs that only matter on several devices."""

    def values(self, command: CommandLine, devices: int, lossy: bool = False) -> dict[str, Sequence[Any]]:
        """Default values to try, of knobs that the command does not set itself; lossy values only if requested."""
        return {
            name: [value for value in values if lossy or value not in LOSSY.get(name, ())]
            for name, values in self.knobs.items()
            if (devices > 1 or name not in self.several)
            and (_mentions(command, name) or not self._setting_of(command, name))
        }

    def samples(self, command: CommandLine) -> str | None:
        """Samples of a step according to the command; None if it does not set them."""
        arguments = _words(_text(command))
        for word, following in zip(arguments, (*arguments[1:], "")):
            if self.total and _name(word) == self.total:
                return word.partition("=")[2] if "=" in word else following
        return None

    def _setting_of(self, command: CommandLine, knob: str) -> str | None:
        """Option or path by which a command sets a knob itself; None if it does not."""
        present = {_name(word) for word in _words(_text(command))}
        names = [_name(option) for option in _options(self.options.get(knob, ""))]
        paths = [placed_path["path"] for render in command.render if (placed_path := PLACED.fullmatch(render))]
        placed = self.paths.get(knob, "").partition("=")[0]
        return next((name for name in names if name in present), placed if placed in paths else None)

    def with_knobs(self, command: CommandT, knobs: Mapping[str, Any], *, short: bool = True) -> CommandT:
        """Returns the command with options for these knobs, and for a short run if requested.

        Args:
            command: the user's command.
            knobs: knobs by name.
            short: add the options of a short run, and leave out those that it replaces.

        Raises:
            UsageError: the command sets a knob itself, the launcher does not accept a knob, or its settings are in a
                file and none is rendered.
        """
        command_text = _text(command)
        added_knobs = self.added(command, knobs)
        for name in added_knobs:
            self._check(command, name, getattr(knobs[name], "values", ()))
        added = [option for name in added_knobs for option in _options(self.options.get(name, ""))]
        if short:
            command_text, options, _ = self._shortened(command_text)
            added += options
        render = tuple(command.render)
        if placed := [self.paths[name] for name in added_knobs if name in self.paths]:
            file = next((match["file"] for rendered in render if (match := PLACED.fullmatch(rendered))), None)
            if file is None:
                raise UsageError(
                    f"--launcher {self.name} puts knobs into its file: name it in --command-file, such as `render: ds.json`"
                )
            render += tuple(f"{file}:{place}" for place in placed)
        return cast(CommandT, replace(cast(Any, command), command=self._with(command_text, added), render=render))

    def short_note(self, command: CommandLine) -> str | None:
        """A note on the options of a short run; None if it has none."""
        _, added, replaced = self._shortened(_text(command))
        instead = f", in place of {' '.join(replaced)}" if replaced else ""
        return (
            f"trials are run with {' '.join(added)}{instead}; the winner's command has its own options"
            if added or replaced
            else None
        )

    def _shortened(self, command: str) -> tuple[str, list[str], list[str]]:
        """Returns a command without the options that a short run replaces, the options to add, and those left out."""
        added, replaced = [], []
        for option in (*_options(self.bounds), *self.undone):
            owned = _matches(command, option)
            if any("{" in match[0].replace("{trial_dir}", "") for match in owned):
                continue  # a knob's placeholder varies with the trial
            for match in reversed(owned):
                command = f"{command[: match.start()].rstrip()} {command[match.end() :].lstrip()}".strip()
            if option in self.undone:
                replaced += [match[0] for match in owned]
            else:
                replaced += [match[0] for match in owned if match[0].split() != option.split()]
                added.append(option)
        present = {plain_option(_name(word)) for word in _words(command)}
        present |= {plain_option(option) for option, alternative in self.instead.items() if alternative in present}
        added += [option for option in _options(self.short) if plain_option(_name(option)) not in present]
        return command, added, replaced

    def added(self, command: CommandLine, knobs: Iterable[str]) -> tuple[str, ...]:
        """Knobs without a place in the command, which are passed as options or in its file."""
        return tuple(
            name for name in knobs if (name in self.options or name in self.paths) and not _mentions(command, name)
        )

    def _check(self, command: CommandLine, knob: str, values: Sequence[Any]) -> None:
        """Refuses a knob that would have no effect or another effect.

        Raises:
            UsageError: the launcher cannot set the knob as requested.
        """
        if setting := self._setting_of(command, knob):
            raise UsageError(
                f"the command has {setting} itself, so {knob} cannot vary: write {{{knob}}} there, or leave it to --launcher"
            )
        accepted = self.accepts.get(knob, ACCEPTED.get(knob))
        if accepted is not None and (odd := [value for value in values if value not in accepted]):
            can = ", ".join(map(value_text, accepted))
            raise UsageError(
                f"--launcher {self.name} accepts {knob} as {can}, but got {value_text(odd[0])}; write {{{knob}}} into the "
                "command for other values"
            )

    def _with(self, command: str, options: Sequence[str]) -> str:
        added = " ".join(options)
        if not added:
            return command
        if not self.after:
            return f"{command} {added}"
        head, separator, tail = command.partition(f" {self.after} ")
        if not separator:
            raise UsageError(f"--launcher {self.name} needs '{self.after}' in the command, after which its options go")
        return f"{head}{separator}{added} {tail}"


_SEVERAL = ("report_to",)
"""Options with several values."""
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|(?!-)(?:\{[^{}]*\}|[^\s{])+)"
_FLAG = r"(?i:true|false|yes|no|on|off|[01])(?=\s|$)"


def _matches(text: str, option: str) -> list[re.Match[str]]:
    """Occurrences of an option in a command, with its value, whether that is the same or another.

    An option whose value is a flag may be without one. `a.b` includes `a.b.c` and `a.b+`, as of LightningCLI.
    """
    name, value = _name(option), option.split()[1:]
    stem = name.lstrip("-")
    pattern = re.escape(stem).replace("_", "[-_]") + r"(?:[.+][\w.+-]*)?"
    if not name.startswith("-"):
        return list(re.finditer(rf"(?<!\S)\+*{pattern}={_VALUE}", text))
    # An option of a section, as of LightningCLI, always has a value.
    takes_value = bool(value) and ("." in stem or value[0] not in ("true", "false"))
    follows = rf"\s+{_VALUE if takes_value else _FLAG}"
    many = "*" if stem in _SEVERAL else "?"
    return list(re.finditer(rf"(?<!\S)--?{pattern}(?:={_VALUE}|(?:{follows}){many})(?=\s|$)", text))


def plain_option(name: str) -> str:
    """Normal form of an option's name: most parsers take both `--max-steps` and `--max_steps`."""
    return name.replace("_", "-")


def _text(command: CommandLine) -> str:
    return command.command if isinstance(command.command, str) else shlex.join(command.command)


def _mentions(command: CommandLine, knob: str) -> bool:
    """True if a command has its own placeholder for a knob."""
    combined = f"{_text(command)} {' '.join(command.env)} {' '.join(command.render)}"
    return any(re.search(rf"\b{re.escape(knob)}\b", inside) for inside in re.findall(r"\{([^{}]*)\}", combined))


def _options(text: str) -> list[str]:
    """Splits options with their values: `--a 1 --b` to `--a 1` and `--b`."""
    options: list[str] = []
    for word in _words(text):
        if word.startswith("--") or "=" in word.partition("{")[0] or not options:
            options.append(word)
        else:
            options[-1] += f" {word}"
    return options


def _words(text: str) -> list[str]:
    """Splits at blanks outside braces."""
    words, depth = [""], 0
    for char in text:
        depth += (char == "{") - (char == "}")
        if char == " " and not depth:
            words.append("")
        else:
            words[-1] += char
    return [word for word in words if word]


def _name(option: str) -> str:
    """Name of an option: `--a` for `--a 1` and `--a=1`, `a` for `a=1`."""
    return option.split()[0].partition("=")[0]
