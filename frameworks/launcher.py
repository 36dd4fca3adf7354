"""What is known of a launcher: how standard knobs are said to it, and how a short run is asked for."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

from ..base.errors import UsageError
from ..knobs.lossy import LOSSY

PLACED = re.compile(
    r"(?P<file>.+?\.(?:ya?ml|json|toml|ini|cfg)(?:\.in|\.tmpl)?)(?::(?P<path>[^={}]+)=(?P<value>.*))?", re.DOTALL
)
"""How a file to be rendered is asked for: `FILE` or `FILE:PATH=VALUE`."""
MICRO_BATCHES = (8, 1, 2, 4, 16, 32, 64)
"""Micro-batches that are tried by default, the default of most trainers first."""
SAYABLE: Mapping[str, Sequence[Any]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "checkpoint_ratio": (0, 1),
    "fusion": (False, True),
    "kernels": (False, True),
    "zero": (0, 1, 2, 3),
    "offload": ("none", "optimizer"),
}
"""What launchers can be told of standard knobs."""


class CommandLine(Protocol):
    """What a launcher needs of a command: a frozen dataclass with these fields."""

    @property
    def command(self) -> str | Sequence[str]:
        """As in a shell, or its words."""

    @property
    def env(self) -> Sequence[str]:
        """Variables of its environment, `NAME=value`."""

    @property
    def render(self) -> Sequence[str]:
        """Files that it reads, each as `PLACED` matches it."""


Given = TypeVar("Given", bound=CommandLine)


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A program or a library that reads its settings from the command line or from a file."""

    name: str
    """What `--launcher` calls it."""
    knobs: Mapping[str, Sequence[Any]]
    """Knobs it can be told, with the values that are tried where none are given; the first is its own default."""
    words: Mapping[str, str] = field(default_factory=dict)
    """What is added to the command for each of them, as a template."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Where each stands in its configuration file, `PATH=VALUE`."""
    short: str = ""
    """What is added, so that a run writes nothing of its own and lasts until it is measured."""
    sayable: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """What it can be told of standard knobs, where that is not `SAYABLE`."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Options of a short run that are left out beside another of the command's."""
    total: str = ""
    """Its option for the samples of a step."""
    own_total: bool = False
    """Whether it has such a number of its own where none is given."""
    emulated: str = ""
    """What has it run one rank without the others, in a process of its own; empty where it cannot."""
    emulated_env: tuple[str, ...] = ()
    """Variables that tell that process its rank and how many there would be."""
    after: str = ""
    """The word behind which they are added; by default at the end."""
    several: tuple[str, ...] = ()
    """Knobs that only matter on several devices."""

    def values(self, command: CommandLine, devices: int, lossy: bool = False) -> dict[str, Sequence[Any]]:
        """The values that are tried where none are given: of what the command does not say itself, and those that trade
        accuracy for speed only where asked for."""
        return {
            name: [value for value in values if lossy or value not in LOSSY.get(name, ())]
            for name, values in self.knobs.items()
            if (devices > 1 or name not in self.several)
            and (_mentions(command, name) or not self._stated(command, name))
        }

    def samples(self, command: CommandLine) -> str | None:
        """Samples of a step, as the command says them; None where it does not."""
        words = _words(_text(command))
        for word, after in zip(words, (*words[1:], "")):
            if self.total and _name(word) == self.total:
                return word.partition("=")[2] if "=" in word else after
        return None

    def _stated(self, command: CommandLine, knob: str) -> str:
        """The option or path by which a command says itself what a knob would; empty where it does not."""
        theirs = {_name(word) for word in _words(_text(command))}
        mine = [_name(each) for each in _options(self.words.get(knob, ""))]
        paths = [each["path"] for render in command.render if (each := PLACED.fullmatch(render))]
        placed = self.paths.get(knob, "").partition("=")[0]
        return next((name for name in mine if name in theirs), placed if placed in paths else "")

    def told(self, command: Given, knobs: Mapping[str, Any], *, short: bool = True) -> Given:
        """A command with what it says of these knobs, and of a short run if it is one.

        Args:
            command: as it is asked for; what it has of a short run stays its own.
            knobs: by name.
            short: whether the run is to be short.

        Raises:
            UsageError: the command says a knob's value itself, the launcher cannot be told one, or its settings are in a
                file and none is rendered.
        """
        text = _text(command)
        known = [name for name in knobs if name in self.words or name in self.paths]
        mine = [name for name in known if not _mentions(command, name)]
        for name in mine:
            self._check(command, name, getattr(knobs[name], "values", ()))
        theirs = {_name(word) for word in _words(text)}
        theirs |= {left for left, other in self.instead.items() if other in theirs}
        added = [each for name in mine for each in _options(self.words.get(name, ""))]
        added += [each for each in _options(self.short) if short and _name(each) not in theirs]
        render = tuple(command.render)
        if placed := [self.paths[name] for name in mine if name in self.paths]:
            file = next((found["file"] for each in render if (found := PLACED.fullmatch(each))), None)
            if file is None:
                raise UsageError(f"--launcher {self.name} puts knobs into its file: name it, such as --render ds.json")
            render += tuple(f"{file}:{each}" for each in placed)
        return cast(Given, replace(cast(Any, command), command=self._with(text, added), render=render))

    def emulating(self, command: Given) -> Given:
        """A command that runs its first rank alone, on one device, with communication that does nothing.

        Raises:
            UsageError: the framework has no such mode.
        """
        if not self.emulated:
            raise UsageError(
                f"--emulate needs a framework that runs one rank without the others, as Megatron-LM and torchtitan do, but "
                f"--launcher {self.name} has no such mode; --runner emulate emulates a model in redline's own training"
            )
        text = self._with(alone(_text(command)), _options(self.emulated))
        env = (*command.env, *self.emulated_env)
        return cast(Given, replace(cast(Any, command), command=text, env=env))

    def _check(self, command: CommandLine, knob: str, values: Sequence[Any]) -> None:
        """Refuses a knob that would do nothing, or something else.

        Raises:
            UsageError: so it is.
        """
        if stated := self._stated(command, knob):
            raise UsageError(
                f"the command says {stated} itself, so that {knob} cannot vary: write {{{knob}}} there, or leave it to --launcher"
            )
        known = self.sayable.get(knob, SAYABLE.get(knob))
        if known is not None and (odd := [value for value in values if value not in known]):
            can = ", ".join(map(written, known))
            raise UsageError(
                f"--launcher {self.name} can be told {knob} as {can}, but got {written(odd[0])}; write {{{knob}}} into the "
                "command for values of its own"
            )

    def _with(self, command: str, options: Sequence[str]) -> str:
        added = " ".join(options)
        if not added:
            return command
        if not self.after:
            return f"{command} {added}"
        before, found, behind = command.partition(f" {self.after} ")
        if not found:
            raise UsageError(f"--launcher {self.name} needs '{self.after}' in the command, behind which its options go")
        return f"{before}{found}{added} {behind}"


_NO_VALUE = ("--standalone", "--run-path", "--run_path")
"""Options of torchrun that take none."""


def alone(command: str) -> str:
    """A command without the torchrun that starts its ranks: one process, whose environment says what rank it is.

    >>> alone("torchrun --nproc-per-node 8 --standalone pretrain_gpt.py --bf16")
    'python pretrain_gpt.py --bf16'
    >>> alone("python -m torch.distributed.run --nnodes=2 -m torchtitan.train")
    'python -m torchtitan.train'
    """
    words = _words(command)
    at = next((place for place, word in enumerate(words) if word.rpartition("/")[2] == "torchrun"), None)
    if at is None:
        names = ("torch.distributed.run", "torch.distributed.launch")
        at = next((place for place, word in enumerate(words) if word in names and words[place - 1] == "-m"), None)
        if at is None:
            return command
        before = words[: at - 2]
    else:
        before = words[:at]
    start, python = at + 1, ["python"]
    while start < len(words) and words[start].startswith("-"):
        word = words[start]
        if word in ("-m", "--module"):
            python = ["python", "-m"]
        elif word in ("--no-python", "--no_python"):
            python = []
        start += 1 if "=" in word or word in (*_NO_VALUE, "-m", "--module", "--no-python", "--no_python") else 2
    return " ".join([*before, *python, *words[start:]])


def written(value: Any) -> str:
    """A value as command lines have it: `true`, `false` and `none` in small letters, 8 and not 8.0."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def _text(command: CommandLine) -> str:
    return command.command if isinstance(command.command, str) else shlex.join(command.command)


def _mentions(command: CommandLine, knob: str) -> bool:
    """Whether a command has a place for a knob by itself."""
    said = f"{_text(command)} {' '.join(command.env)} {' '.join(command.render)}"
    return any(re.search(rf"\b{re.escape(knob)}\b", inside) for inside in re.findall(r"\{([^{}]*)\}", said))


def _options(text: str) -> list[str]:
    """Options with their values: `--a 1 --b` as `--a 1` and `--b`."""
    out: list[str] = []
    for word in _words(text):
        if word.startswith("--") or "=" in word.partition("{")[0] or not out:
            out.append(word)
        else:
            out[-1] += f" {word}"
    return out


def _words(text: str) -> list[str]:
    """Split at blanks that are not within braces."""
    out, depth = [""], 0
    for char in text:
        depth += (char == "{") - (char == "}")
        if char == " " and not depth:
            out.append("")
        else:
            out[-1] += char
    return [each for each in out if each]


def _name(option: str) -> str:
    """`--a 1` and `--a=1` are of `--a`, `a=1` is of `a`."""
    return option.split()[0].partition("=")[0]
