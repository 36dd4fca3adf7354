"""A framework's names of the standard knobs, and settings of one file or command.

Each framework has one `KnobTable`. It is used to write exports, to render commands, and to read files and
commands. Settings are flat in every format: a TOML file with `[training] seq_len = 8192` is `{"training.seq_len":
8192}`, and `--seq-length 8192` is `{"seq-length": "8192"}`. Names are compared without regard to hyphens and
underscores.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..base.errors import meant
from ..knobs.strategy import STANDARD, Strategy

Settings = Mapping[str, Any]
"""Settings of a file or command by name."""
MOST = 10**12
"""Larger numbers are not sizes of a training."""
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "null", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobSettings:
    """A framework's settings of a knob: one with the knob's value, or settings for each of its values."""

    knob: str
    keys: tuple[str, ...] = ()
    """Names of the setting with the knob's value. The first is written, older ones are read too."""
    alternatives: tuple[Mapping[Any, Settings], ...] = ()
    """Settings for each value; None for a setting that must be absent. The first is written, the others are read too."""
    has_other_values: bool = False
    """True if the setting also has values that do not determine the knob's value."""

    @property
    def values(self) -> tuple[Any, ...]:
        """Values that can be written; empty if the setting has the knob's own value."""
        return tuple(self.alternatives[0]) if self.alternatives else ()

    def settings(self, value: Any, reader: "SettingsReader | None" = None) -> dict[str, Any]:
        """Settings for a value of the knob, in the alternative that a file already uses.

        Raises:
            LookupError: the framework cannot express this value.
        """
        if self.keys:
            return {self.keys[0] if reader is None else reader.name(*self.keys): value}
        chosen = self.alternatives[0]
        if reader is not None:
            used = self._match(reader)[1] or max(
                self.alternatives, key=lambda alternative: _present(alternative.get(value, {}), reader)
            )
            chosen = used if value in used else chosen
        if value not in chosen:
            raise LookupError(f"{self.knob}={value}")
        return dict(chosen[value])

    def value(self, reader: "SettingsReader") -> Any:
        """The knob's value according to settings; None if they do not set it."""
        for key in self.keys:
            if (setting := reader.get(key)) is not None:
                return number(setting)
        return self._match(reader)[0]

    def stated(self, reader: "SettingsReader") -> bool:
        """True if the value follows from a setting of the file or command rather than from defaults."""
        if self.keys:
            return any(reader.stated(key) for key in self.keys)
        value, used = self._match(reader)
        return used is not None and any(reader.stated(key) for key in used[value])

    def unknown(self, reader: "SettingsReader") -> str | None:
        """Returns the name of a setting of this knob alone whose value is in no alternative; None if there is none."""
        settings_of_values = [settings for alternative in self.alternatives for settings in alternative.values()]
        names = {name: None for settings in settings_of_values for name in settings}
        if self.has_other_values or any(len(settings) != 1 for settings in settings_of_values):
            return None
        return next(
            (name for name in names if (value := reader.get(name)) is not None and as_flag(value) is None), None
        )

    def _match(self, reader: "SettingsReader") -> tuple[Any, Mapping[Any, Settings] | None]:
        """Returns the value with the most matching settings, and the alternative that they belong to."""
        best, used, most = None, None, 0
        for alternative in self.alternatives:
            for value, expected in alternative.items():
                count = _present(expected, reader)
                if count > most and all(same_setting(reader.get(key), setting) for key, setting in expected.items()):
                    best, used, most = value, alternative, count
        return best, used


KnobTable = Mapping[str, KnobSettings]
"""A framework's settings by knob."""


def plain(name: str) -> str:
    """Normal form of a setting's name for comparisons: `--micro-batch-size` and `micro_batch_size` are the same.

    >>> plain("--micro-batch-size")
    'micro_batch_size'
    """
    return name.lstrip("-+").replace("-", "_").lower()


class OpenedFile(str):
    """Name of a file whose settings have been read."""


class SettingsReader:
    """Settings of one framework in one file or command, and the knobs read from them so far.

    Args:
        settings: settings by name.
        where: `the command`, or the file's path.
        by_last: find settings by the last part of their names, because options of a command have no sections.
    """

    def __init__(self, settings: Settings, where: str, *, by_last: bool = False) -> None:
        self.settings = dict(settings)
        self.where = where
        self.knobs: dict[str, Any] = {}
        self.defaults: set[str] = set()
        """Knobs and facts that are the framework's defaults."""
        self.notes: list[str] = []
        self.facts: dict[str, Any] = {}
        """Fields of `TrainerConfig` besides knobs: `model`, `shape`, `seq_len`, `global_batch`, `devices`, `lora`."""
        self.conventions: dict[str, Any] = {}
        """Fields of the estimator's `TrainingSetup` that follow from the settings."""
        self._by_last = by_last
        self._looked_up: set[str] = set()
        self._misunderstood: set[str] = set()
        self._plain: dict[str, tuple[str, Any]] = {}
        for name, value in self.settings.items():
            self._plain[self._key(name)] = (name, value)
        self._given = frozenset(self._plain)

    def _key(self, name: str) -> str:
        return plain(name).rpartition(".")[2] if self._by_last else plain(name)

    def has(self, key: str) -> bool:
        """True if a setting is present and neither `auto` nor empty."""
        return self.get(key) is not None

    def get(self, *keys: str) -> Any:
        """The first of these settings that is present; None if there is none. `auto` and empty values count as absent."""
        for key in keys:
            self._looked_up.add(self._key(key))
            _, value = self._plain.get(self._key(key), ("", None))
            if value is not None and value != "" and not (isinstance(value, str) and value.lower() == "auto"):
                return value
        return None

    def name(self, *keys: str) -> str:
        """Name of the first of these settings that is present; the first name if none is."""
        return next((self._plain[self._key(key)][0] for key in keys if self._key(key) in self._plain), keys[0])

    def stated(self, key: str) -> bool:
        """True if the file or command has this setting."""
        key = self._key(key)
        return key in self._given and self._plain[key][1] not in (None, "")

    def default(self, name: str, value: Any) -> None:
        """Sets a knob or a fact to the framework's default, unless it has been read."""
        values = self.knobs if name in STANDARD else self.facts
        if name not in values:
            values[name] = value
            self.defaults.add(name)

    def misunderstood(self, *keys: str) -> None:
        """Marks settings as not read although they were looked up: their values have no counterpart in the estimate."""
        self._misunderstood |= {self._key(key) for key in keys}

    def unread(self, harmless: Sequence[str]) -> dict[str, Any]:
        """Settings of the file or command that do not enter the estimate: nothing looked them up, or what they say has no
        counterpart. Those with a name in `harmless`, patterns of names, are left out.
        """
        derived = {key: (key, None) for key in self._misunderstood} | self._plain
        unread = {
            name: value for name, value in (derived[key] for key in sorted(self._misunderstood)) if not is_empty(value)
        }
        for name, value in self.settings.items():
            idle = self._key(name) in self._looked_up or is_empty(value) or isinstance(value, OpenedFile)
            if not idle and not is_harmless(name, harmless):
                unread[name] = value
        return unread

    def misspelt(self) -> Iterator[tuple[str, str]]:
        """Settings that nothing looked up, each with the absent setting of almost the same name that was looked up."""
        absent = self._looked_up - self._given
        for key in self._given - self._looked_up:
            if (near := meant(key, absent)) is not None:
                yield self._plain[key][0], near

    def set(self, key: str, value: Any) -> None:
        """Adds a setting that follows from others or is a default, unless it is present."""
        if not self.has(key):
            self._plain[self._key(key)] = (key, value)

    def override(self, key: str, value: Any) -> None:
        """Replaces a setting's value by its effective value."""
        self._plain[self._key(key)] = (self.name(key), value)

    def whole(self, *keys: str) -> int | None:
        """The first of these settings that is a whole number from 1 to `MOST`; None if there is none."""
        value = number(self.get(*keys))
        return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST else None

    def flag(self, *keys: str) -> bool | None:
        """The first of these settings as a flag; None if it is absent or not a flag."""
        return as_flag(self.get(*keys))

    def ignore(self, key: str, neutral: Any = False) -> None:
        """Marks a setting as not read unless it is absent or neutral."""
        if (value := self.get(key)) is not None and not same_setting(value, neutral):
            self.misunderstood(key)

    def note(self, sentence: str) -> None:
        """Adds a note on a setting that has no knob, has no effect, or contradicts another."""
        if sentence not in self.notes:
            self.notes.append(sentence)


@functools.cache
def _settings() -> dict[str, Any]:
    """Contents of `settings.yaml`."""
    import yaml

    content = Path(__file__).with_name("settings.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return document


def settings_of(framework: str) -> dict[str, Any]:
    """Lists of a framework's settings, of `settings.yaml`."""
    lists: dict[str, Any] = _settings().get(framework, {})
    return lists


def fields_of(section: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a frozen dataclass from a section of `settings.yaml`, whose lists become tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in section.items()}


def _patterns(text: str | None) -> tuple[str, ...]:
    """Patterns of a list with commas."""
    return tuple(pattern.strip() for pattern in (text or "").split(",") if pattern.strip())


def other_trainers() -> dict[str, tuple[str, ...]]:
    """What only files and commands of trainers have that are not read."""
    return {title: _patterns(signs) for title, signs in _settings()["others"].items()}


def knob_table(framework: str, base: KnobTable | None = None) -> KnobTable:
    """A framework's settings by knob, of `settings.yaml`; those without a value are the `base`'s."""
    lists = settings_of(framework)
    table: dict[str, KnobSettings] = {}
    for knob, value in lists.get("knobs", {}).items():
        if value is None and base is not None:
            table[knob] = base[knob]
            continue
        listed = value if isinstance(value, list) else [value]
        is_name = isinstance(listed[0], str)
        table[knob] = KnobSettings(
            knob=knob,
            keys=tuple(listed) if is_name else (),
            alternatives=() if is_name else tuple(listed),
            has_other_values=knob in lists.get("other_values", "").split(),
        )
    return table


def harmless_settings(framework: str) -> tuple[str, ...]:
    """Patterns of settings that change neither memory nor speed in a framework; `every`: in all."""
    names = dict.fromkeys((framework, settings_of(framework).get("builds_on", framework), "every"))
    return tuple(pattern for name in names for pattern in str(settings_of(name).get("harmless", "")).split())


def file_keys(framework: str) -> tuple[str, ...]:
    """Keys that a framework's files can have, where it refuses others."""
    return tuple(str(settings_of(framework).get("keys", "")).split())


def file_kind(name: str) -> str | None:
    """Framework of the file that a setting of this name refers to; None if it refers to none."""
    kind: str | None = _settings()["every"]["files"].get(plain(name))
    return kind


def is_harmless(name: str, patterns: Sequence[str]) -> bool:
    """True if a setting's name, or its last part, matches one of the patterns of settings that do not matter."""
    full = plain(name)
    return any(fnmatchcase(spelling, pattern) for pattern in patterns for spelling in {full, full.rpartition(".")[2]})


def is_empty(value: Any) -> bool:
    """True if a setting is present without a value."""
    return value is None or value == "" or value == {}


def is_off(value: Any) -> bool:
    """True if a setting's value switches it off, as no value, false, 0 and an empty list do."""
    return value in ([], {}) or value is None or as_flag(value) is False


def as_flag(value: Any) -> bool | None:
    """Converts a setting to a flag; None if it is not one."""
    if isinstance(value, bool) or value is None:
        return value
    word = str(value).lower()
    return True if word in _TRUE else False if word in _FALSE else None


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A trainer: its names of knobs, how its files and commands are recognised and read, and its defaults."""

    name: str
    """Name for `--to` and `--launcher`, if supported."""
    title: str
    knobs: KnobTable
    model: tuple[str, ...] = ()
    """Settings that name the model."""
    seq_len: tuple[str, ...] = ()
    """Settings for the tokens of a sample."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default values of knobs."""
    conventions: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    """Fields of the estimator's `TrainingSetup`, including `precision`, that differ from redline's own training for a
    configuration.
    """
    by_last: bool = False
    """True if its settings are found without their sections."""
    makes_optimizer: bool = True
    """False if the user's code makes the optimizer unless a setting names one."""
    prepare: Callable[[SettingsReader], None] = lambda reader: None
    """Adds defaults of settings before the knobs are read."""
    read: Callable[[SettingsReader], None] = lambda reader: None
    """Reads knobs that follow from several settings."""
    write: Callable[[Strategy, SettingsReader], dict[str, Any]] = lambda strategy, reader: {}
    """Settings of a strategy that are not in the table, for the file that is to be changed."""
    ignored: Mapping[str, Any] = field(default_factory=dict)
    """Settings of memory or time that the estimate ignores, with their neutral values."""
    needs_code: tuple[str, ...] = ()
    """Knobs that also need changes of the script, so that a change of the setting alone has no effect."""
    cannot: Callable[[str, Strategy, SettingsReader], bool] = lambda knob, strategy, reader: False
    """True if this file cannot set a knob's value in a strategy, because its setting would have no effect or be refused."""
    partly: tuple[str, ...] = ()
    """Knobs for which `write` supports values that are not in the table."""
    option: Callable[[str, Any, "SettingsReader"], str] = lambda name, value, reader: f"--{name} {text_of(value)}"
    """Writes a setting as an option of a command that has the settings of a reader."""
    assigns: bool = False
    """True if its commands have settings as `key=value`."""
    read_words: Callable[[Sequence[str], dict[str, Any]], tuple[str, ...]] = lambda command, settings: ()
    """Adds what the words of a command besides options say to its settings, such as a subcommand, and returns notes."""
    is_common: bool = False
    """True if its settings are also those of other trainers, so that files with them are read as those of a chosen one."""

    @property
    def signs(self) -> tuple[str, ...]:
        """What only its files have: patterns of settings, or several that only it has together, joined by ` & `."""
        return _patterns(settings_of(self.name).get("signs"))

    @property
    def programs(self) -> tuple[str, ...]:
        """Patterns of scripts, modules and programs that only its commands have."""
        return _patterns(settings_of(self.name).get("programs"))

    def recognised(self, settings: Settings) -> int:
        """Number of this framework's signs among settings."""
        return signs_among(self.signs, settings)

    def reading(self, settings: Settings, where: str) -> SettingsReader:
        """Reads knobs, facts and notes from settings."""
        reader = SettingsReader(settings, where, by_last=self.by_last)
        self.prepare(reader)
        for knob, settings_of_knob in self.knobs.items():
            value = settings_of_knob.value(reader)
            if value is None:
                continue
            if knob in STANDARD and not STANDARD[knob].can_be(value):
                reader.note(f"{reader.name(*settings_of_knob.keys)} = {value} is not a value that {knob} can have")
                reader.misunderstood(*settings_of_knob.keys)
            else:
                reader.knobs[knob] = value
                if not settings_of_knob.stated(reader):
                    reader.defaults.add(knob)
        if (model := reader.get(*self.model)) is not None:
            reader.facts.setdefault("model", str(model))
        if (length := reader.whole(*self.seq_len)) is not None:
            reader.facts.setdefault("seq_len", length)
            if not any(map(reader.stated, self.seq_len)):
                reader.defaults.add("seq_len")
            if further_lengths := [name for name in self.seq_len if reader.whole(name) not in (None, length)]:
                reader.note(
                    f"{', '.join(map(reader.name, further_lengths))}: not read beside {reader.name(*self.seq_len)} = {length}"
                )
        reader.misunderstood(*(name for name in self.seq_len if reader.has(name) and reader.whole(name) is None))
        self.read(reader)
        for name, neutral in self.ignored.items():
            reader.ignore(name, neutral)
        for knob, settings_of_knob in self.knobs.items():
            if knob not in reader.knobs and (unknown := settings_of_knob.unknown(reader)) is not None:
                reader.note(
                    f"{reader.name(unknown)} = {reader.get(unknown)} is not a value of {knob} that redline knows"
                )
                reader.misunderstood(unknown)
        for name, near in sorted(reader.misspelt()):
            reader.note(f"{name} is not a setting that redline reads; did you mean {near}?")
        reader.facts["unread"] = reader.unread(harmless_settings(self.name))
        return reader

    def settings(self, strategy: Strategy, reader: SettingsReader, knobs: Iterable[str]) -> dict[str, Any]:
        """Settings for these knobs of a strategy, by the names that a file already uses.

        Raises:
            LookupError: the framework cannot express one of the values.
        """
        wanted = set(knobs)
        changed: dict[str, Any] = {}
        for knob, knob_settings in self.knobs.items():
            if knob in wanted and (knob not in self.partly or getattr(strategy, knob) in knob_settings.values):
                changed |= knob_settings.settings(getattr(strategy, knob), reader)
        return changed | self.write(strategy, reader)


def framework_of(name: str, knobs: KnobTable, **functions: Any) -> Framework:
    """A framework with the facts of `settings.yaml`, and its functions by the names of their fields."""
    section = settings_of(name)
    names = [member.name for member in fields(Framework) if member.name in section and member.name != "knobs"]
    return Framework(name=name, knobs=knobs, **fields_of({field: section[field] for field in names}), **functions)


def signs_among(signs: Iterable[str], settings: Settings) -> int:
    """Number of signs whose settings are all present."""
    names = {plain(name) for name in settings}
    return sum(
        all(any(fnmatchcase(name, pattern) for name in names) for pattern in sign.split(" & ")) for sign in signs
    )


def text_of(value: Any) -> str:
    """A setting's value as a word of a command."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def flattened(document: Any, prefix: str = "") -> dict[str, Any]:
    """A document's values by name, with dots between the names of nested mappings.

    >>> flattened({"training": {"seq_len": 8192, "steps": 10}, "seed": 1})
    {'training.seq_len': 8192, 'training.steps': 10, 'seed': 1}
    """
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def nested(settings: Settings) -> dict[str, Any]:
    """Settings as a document of nested mappings, the inverse of `flattened`."""
    document: dict[str, Any] = {}
    for name, value in settings.items():
        *path, key = name.split(".")
        section = document
        for name_part in path:
            section = section.setdefault(name_part, {})
        section[key] = value
    return document


def _present(expected: Settings, reader: SettingsReader) -> int:
    """Number of these settings that are present."""
    return sum(reader.has(key) for key, value in expected.items() if value is not None)


def same_setting(setting: Any, expected: Any) -> bool:
    """True if a setting is as expected. An absent one counts as false."""
    if expected is None:
        return setting is None or as_flag(setting) is False
    if isinstance(expected, bool):
        return (as_flag(setting) or False) == expected and (setting is None or as_flag(setting) is not None)
    if setting is None:
        return False
    if isinstance(expected, (int, float)):
        return bool(number(setting) == expected)
    if expected == "no" and setting is False:  # as YAML 1.1 reads a bare `no`
        return True
    return str(setting).lower() == str(expected).lower()


def number(value: Any) -> Any:
    """Converts a text of a whole number or a fraction to that number; anything else is unchanged."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    if not isinstance(value, str):
        return value
    digits = value.replace("_", "")
    try:
        return int(digits)
    except ValueError:
        pass
    try:
        return float(digits)
    except ValueError:
        return value
