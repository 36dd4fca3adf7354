"""Types of the API's requests and answers, shared by the server and the client."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field as DataclassField
from types import NoneType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, create_model, model_validator

from ...base.errors import UsageError
from ...base.option import Option, options_of
from ...estimator.hardware import named_hardware
from ...knobs.strategy import MAX_DEVICES
from ...models.presets import ServerModel
from ...models.request import ModelRequest, SpaceRequest
from ...runners.command.command import Command
from ...space import Space
from ...tuner.request.options import RunRequest, SearchRequest
from ..records import MOST_PRIORITY, SearchState
from ..request import LARGEST_FILE, OF_A_COMMAND, TARGETS, TRAVELLING

LARGEST_NUMBER = 1 << 53
"""Largest whole number that all JSON readers represent exactly."""
DEEPEST = 40
"""Deepest nesting of lists and mappings."""
_LONE = re.compile("[\ud800-\udfff\0]")
SEARCH_ID, KEY, IDENTIFIER = "^[0-9a-f]{12}$", "^[!-~]{1,200}$", "^[A-Za-z_][A-Za-z0-9_]{0,79}$"
PATTERNS = {
    SEARCH_ID: "must be the id of a search, 12 hexadecimal digits",
    KEY: "must have 1 to 200 printable ASCII characters and no spaces",
    IDENTIFIER: "must be the name of a Python variable, of at most 80 characters",
}
"""Sentences for texts that do not match."""


def plain(value: Any, depth: int = 0) -> None:
    """Raises ValueError unless all databases and JSON readers can represent the value."""
    if depth > DEEPEST:
        raise ValueError(f"lists and mappings must not be nested more than {DEEPEST} deep")
    if isinstance(value, str) and _LONE.search(value):
        raise ValueError("a text must not contain a NUL or half of a surrogate pair")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number must be finite")
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise ValueError(f"a whole number must not be beyond {LARGEST_NUMBER}")
    if isinstance(value, dict):
        for name, item in value.items():
            plain(name)
            plain(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            plain(item, depth + 1)


class Body(BaseModel):
    """Base of request bodies. Rejects unknown fields and values that a database cannot store."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        plain(values)
        return values


class Answer(BaseModel):
    """Base of answers. Clients ignore unknown fields, which a later server may add."""

    model_config = ConfigDict(extra="ignore")

    @classmethod
    def of(cls, record: object, **more: Any) -> Self:
        """Returns the answer with the fields of a record, some of them replaced or added."""
        values = {name: getattr(record, name) for name in cls.model_fields if hasattr(record, name)}
        return cls(**values | more)


def checked(check: Callable[..., Any], *names: str) -> AfterValidator:
    """Returns a validator that calls a function with a value and more, which raises UsageError if it is invalid."""

    def validate(value: Any) -> Any:
        try:
            check(value, *names)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(validate)


Count = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
Priority = Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]
Word = Annotated[str, Field(min_length=1, max_length=200)]
Knob = Annotated[str, Field(min_length=1, max_length=80)]
Value = bool | int | float | Annotated[str, Field(max_length=2000)]
Hardware = Annotated[Word, checked(named_hardware)]
Target = Annotated[Word, checked(ServerModel.named)]
SpaceDocument = Annotated[dict[str, JsonValue], checked(Space.from_dict)]
Knobs = Annotated[dict[Knob, Value], Field(max_length=200)]

_OWN: Mapping[str, tuple[Any, Any]] = {
    "space": (SpaceDocument | None, None),
    "allow": (Annotated[list[Literal["lossy"]], Field(max_length=1)], []),
    "override": (
        Annotated[dict[Knob, Annotated[list[Value], Field(min_length=1, max_length=1000)]], Field(max_length=200)],
        {},
    ),
    "fix": (Knobs, {}),
    "hardware": (Hardware | None, None),
    "command": (
        Annotated[str, Field(min_length=1, max_length=20_000)]
        | Annotated[list[Annotated[str, Field(max_length=4000)]], Field(min_length=1, max_length=500)],
        ...,
    ),
    "model": (Target | None, None),
    "env": (Annotated[list[Annotated[str, Field(max_length=4000)]], Field(max_length=200)], []),
    "direction": (Literal["max", "min"] | None, None),
}
"""Types and defaults of options that a server does not take as `redline.tune` does: no file, no path, no object."""


def form(name: str, largest: Mapping[str, float | None], *sections: type) -> type[Body]:
    """Returns a body with options of requests: with their names, defaults, bounds and help.

    Args:
        name: of the class.
        largest: the options, with the largest number that is taken.
        sections: requests, or sections of one.
    """
    body_fields: dict[str, Any] = {}
    for field, option in (pair for section in sections for pair in options_of(section)):
        if field.name in largest:
            kind, default = _OWN.get(field.name) or _type(field, option, largest[field.name])
            body_fields[field.name] = (kind, Field(default, description=option.help))
    body: type[Body] = create_model(name, __base__=Body, **body_fields)
    return body


def _type(field: DataclassField[Any], option: Option, largest: float | None) -> tuple[Any, Any]:
    """Returns the type and the default of an option's value, a number of which may be `largest` at most."""
    default: Any = field.default
    annotated = get_args(field.type)[0]
    kinds = get_args(annotated) or (annotated,)
    kind: Any = Word
    if option.many:
        return Annotated[list[Word], Field(max_length=50)], list(default)
    if bool in kinds:
        kind = bool
    elif option.type is not None:
        kind = Annotated[option.type, Field(ge=option.least, gt=option.above, le=largest)]
    elif option.check is not None:
        text = Word | Annotated[float, Field(gt=0, le=largest)] if float in kinds else Word
        kind = Annotated[text, checked(option.check, field.name.replace("_", " "))]
    return (kind | None if NoneType in kinds else kind), default


class Code(Body):
    """A Python file that contains a workload."""

    text: Annotated[str, Field(min_length=1, max_length=LARGEST_FILE)]
    """The file's contents."""
    name: Annotated[str, Field(pattern=IDENTIFIER)]
    """Name of the workload in the file."""


_CommandOptions: Any = form("CommandOptions", dict.fromkeys(OF_A_COMMAND), Command)
_SearchOptions: Any = form("SearchOptions", TRAVELLING, ModelRequest, SpaceRequest, SearchRequest, RunRequest)


class CommandForm(_CommandOptions):
    """A command to tune: the options of `redline.Command` that can be sent to a server."""


class SearchForm(_SearchOptions):
    """A search: the options of `redline.tune` that can be sent to a server, with one of `TARGETS`."""

    target: Target | None = None
    """A preset's name or a hub id."""
    model: Annotated[dict[str, JsonValue], Field(min_length=1, max_length=500), checked(ServerModel.of)] | None = None
    """Contents of a Hugging Face config.json."""
    devices: Count = 1
    """Devices of one trial. A server does not know those of the client."""
    workload: Code | None = None
    command: CommandForm | None = None

    @model_validator(mode="after")
    def _one_target(self) -> "SearchForm":
        targets = [name for name in TARGETS if getattr(self, name) is not None]
        if len(targets) != 1:
            raise ValueError(f"give one of {', '.join(TARGETS)}, but got {', '.join(targets) or 'none'}")
        return self

    def request(self) -> dict[str, Any]:
        """Returns the request to store: the fields that were given, and the devices."""
        return {"devices": self.devices, **self.model_dump(exclude_unset=True, exclude_none=True)}


class Submission(Body):
    """A search with its name, priority and other settings of the queue."""

    request: SearchForm
    name: Annotated[str, Field(max_length=100)] = ""
    """Shown in lists; by default the model's name."""
    priority: Priority = 0
    """The higher goes first."""
    device: Annotated[str, Field(max_length=100)] = ""
    """Kind of device, by type or a part of its name; empty for any."""


class ChangeForm(Body):
    """The field of a search that can be changed."""

    priority: Priority


class SearchAnswer(Answer):
    """The state of a search."""

    id: str
    user: str
    """Name of the owner."""
    name: str
    state: SearchState
    reason: str
    """Why it failed, ended or waits."""
    priority: int
    devices: int
    device: str
    created: float
    """UTC, seconds since 1970."""
    started: float | None
    ended: float | None
    request: dict[str, JsonValue] | None
    """The request, with values of `env` replaced by ***; None in lists."""
    best: dict[str, JsonValue] | None
    """The winner, or the best trial so far."""
    trials: int
    """Trials that have ended."""


class SearchesAnswer(Answer):
    """Searches, the newest first."""

    searches: list[SearchAnswer]
    next: str | None = None
    """Value of `after` for the next page; None at the end."""


class DeviceAnswer(Answer):
    """A kind of device of the cluster."""

    name: str
    type: str
    total: int
    busy: int
    """Number of devices that searches have."""
    memory_mib: float
    """Memory of one device, MiB."""


class QueueAnswer(Answer):
    """Running and queued searches, and the use of the devices."""

    searches: list[SearchAnswer]
    """Running and queued searches, by priority and time of submission."""
    devices: list[DeviceAnswer]
    """None while the cluster is not reached."""
    usage: dict[str, float]
    """Device-hours of each user in the last seven days."""


class ErrorDetail(Answer):
    """An error."""

    code: str
    """A word for programs: `invalid`, `not_found`, `forbidden`, ..."""
    message: str
    """A sentence for people."""
    field: str | None = None
    """Path of the field, with dots."""
    given: JsonValue = None
    """The given value."""
    rule: str | None = None
    """The rule it broke."""


class ErrorAnswer(Answer):
    """The body of every answer with status 400 or above."""

    error: ErrorDetail


def short(value: Any) -> Any:
    """Returns a value shortened for an error answer."""
    if isinstance(value, bytes):
        value = value[:200].decode("utf-8", "replace")
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        return "..."
    plain_ = len(text) <= 200 and not any(word in text for word in ("NaN", "Infinity", "\\ud"))
    return value if plain_ else text[:200]
