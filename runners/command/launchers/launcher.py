"""What is known of a launcher: how standard knobs are said to it, and how a short run is asked for."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....errors import UsageError
from ....results.lossy import LOSSY
from ..command import Command
from ..files import PLACED


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
    after: str = ""
    """The word behind which they are added; by default at the end."""
    several: tuple[str, ...] = ()
    """Knobs that only matter on several devices."""

    def values(self, devices: int, lossy: bool = False) -> dict[str, Sequence[Any]]:
        """The values that are tried where none are given; those that trade accuracy for speed only where asked for."""
        return {
            name: [value for value in values if lossy or value not in LOSSY.get(name, ())]
            for name, values in self.knobs.items()
            if devices > 1 or name not in self.several
        }

    def told(self, command: Command, knobs: Sequence[str], *, short: bool = True) -> Command:
        """A command with what it says of these knobs, and of a short run if it is one; what it has already stays its own.

        Raises:
            UsageError: its settings are in a file, and none is rendered.
        """
        text = command.command if isinstance(command.command, str) else shlex.join(command.command)
        said = f"{text} {' '.join(command.env)} {' '.join(command.render)}"
        mine = [name for name in knobs if f"{{{name}}}" not in said]
        options = [each for name in mine if name in self.words for each in _options(self.words[name])]
        theirs = {_name(word) for word in _words(text)}
        added = [each for each in (*options, *(_options(self.short) if short else ())) if _name(each) not in theirs]
        render = tuple(command.render)
        if placed := [self.paths[name] for name in mine if name in self.paths]:
            file = next((found["file"] for each in render if (found := PLACED.fullmatch(each))), None)
            if file is None:
                raise UsageError(f"--launcher {self.name} puts knobs into its file: name it, such as --render ds.json")
            render += tuple(f"{file}:{each}" for each in placed if f":{each.partition('=')[0]}=" not in said)
        return replace(command, command=self._with(text, added), render=render)

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
