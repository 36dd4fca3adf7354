"""A command and another tool's file: what the file has it told."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base.errors import UsageError
from ...frameworks.launcher import PLACED
from ...frameworks.stated_space import ForeignSpace
from .command import Command

_TRIAL_DIR = "{trial_dir}"


def completed(command: Command, foreign: ForeignSpace) -> Command:
    """A command that is told what the file has it told; what it says already stays its own.

    The file itself, and others that are rendered, are read where they are written for a trial.

    Raises:
        UsageError: a file is rendered that the command does not read.
    """
    words = command.command
    for option, value in foreign.options:
        words = _told(words, option, value)
    placed = [found for each in foreign.render if (found := PLACED.fullmatch(each))]
    own = {(found["file"], found["path"]) for each in command.render if (found := PLACED.fullmatch(each))}
    render = (*command.render, *(each[0] for each in placed if (each["file"], each["path"]) not in own))
    for file in dict.fromkeys(each["file"] for each in placed):
        words = _reading(words, file)
        if _TRIAL_DIR not in (words if isinstance(words, str) else " ".join(words)):
            raise UsageError(
                f"the command does not read {file}, which is written for every trial: name it there, as {file} or as "
                f"{_TRIAL_DIR}/{Path(file).name}"
            )
    more: dict[str, Any] = {}
    if foreign.metric is not None and not command.metric:
        more = {"metric": (foreign.metric,), "direction": command.direction or foreign.direction}
    return replace(command, command=words, render=render, **more)


def _told(words: str | Sequence[str], option: str, value: str) -> str | Sequence[str]:
    """A command with an option that has a value: in the place of a value that it has, unless that is a template."""
    joined = option.endswith("=")
    said = f"{option}{value}" if joined else f"{option} {value}"
    if isinstance(words, str):
        gap = "" if joined else r"(?:=|\s+)"
        found = re.search(rf"(?:^|(?<=\s)){re.escape(option)}{gap}(?P<value>\S+)", words)
        if found is None:
            return f"{words} {said}"
        return words if "{" in found["value"] else words[: found.start("value")] + value + words[found.end("value") :]
    parts = option.split() if joined else [option]
    for at in range(len(words) - len(parts) + 1):
        here = list(words[at : at + len(parts)])
        if here[:-1] != parts[:-1]:
            continue
        if joined and here[-1].startswith(parts[-1]):
            return (
                words
                if "{" in here[-1]
                else [*words[: at + len(parts) - 1], f"{parts[-1]}{value}", *words[at + len(parts) :]]
            )
        if not joined and here[-1] == option and at + 1 < len(words):
            return words if "{" in words[at + 1] else [*words[: at + 1], value, *words[at + 2 :]]
    return [*words, *(said.split(" ", len(parts) - 1) if joined else (option, value))]


def _reading(words: str | Sequence[str], file: str) -> str | Sequence[str]:
    """A command that reads a file where it is written for a trial."""
    there = f"{_TRIAL_DIR}/{Path(file).name}"
    if isinstance(words, str):
        return re.sub(rf"(?:(?<=[\s=])|^)(?:\./)?{re.escape(shlex.quote(file))}(?=\s|$)", lambda match: there, words)
    return [there if Path(each) == Path(file) else each for each in words]
