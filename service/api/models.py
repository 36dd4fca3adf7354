"""What the API takes and answers, as types that the server and the client share."""

import json
import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from ...base.errors import UsageError, unknown
from ..request import LARGEST_FILE, TARGETS, digest

MOST_DEVICES = 1 << 20
"""Of a trial or a worker."""
LARGEST_NUMBER = 1 << 53
"""Of whole numbers, so that every reader of JSON has the same."""
LARGEST_ID = (1 << 31) - 1
"""Of numbers that rows of the database have."""
DEEPEST = 40
"""Lists and mappings inside each other."""
ROLES = ("reader", "submitter", "admin", "worker")
STATES = ("queued", "running", "done", "failed", "cancelled")
ENDED = ("done", "failed", "cancelled")
Visibility = Literal["own", "team", "all"]
_LONE = re.compile("[\ud800-\udfff\0]")


def plain(value: Any, depth: int = 0) -> None:
    """Raises ValueError unless every database and every reader of JSON can hold it."""
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} deep")
    if isinstance(value, str) and _LONE.search(value):
        raise ValueError("a text holds a NUL or half of a surrogate pair")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise ValueError(f"a whole number is beyond {LARGEST_NUMBER}")
    if isinstance(value, dict):
        for name, each in value.items():
            plain(name)
            plain(each, depth + 1)
    elif isinstance(value, list):
        for each in value:
            plain(each, depth + 1)


class Body(BaseModel):
    """What is sent: no other fields, and nothing that a database cannot hold."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, given: Any) -> Any:
        plain(given)
        return given


class Answer(BaseModel):
    """What is answered; fields that a later server adds are no error to an earlier client."""

    model_config = ConfigDict(extra="ignore")


def checked(check: Any) -> AfterValidator:
    """Has a function that raises UsageError judge a value."""

    def judge(value: Any) -> Any:
        try:
            check(value)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(judge)


def _duration(value: str | float) -> None:
    from ...tuner.budget import parse_duration

    parse_duration(value)


def _memory(value: str | float) -> None:
    from ...tuner.budget import parse_memory

    parse_memory(value)


def _sampler(value: str) -> None:
    from ...tuner.samplers import sampler_names

    if value not in sampler_names():
        raise UsageError(unknown("sampler", value, sampler_names()))


def _hardware(value: str) -> None:
    from ...estimator.hardware import named_hardware

    named_hardware(value)


def _target(value: str) -> None:
    from ...models.server_model import ServerModel

    ServerModel.named(value)


def _contents(value: dict[str, Any]) -> None:
    from ...models.server_model import ServerModel

    ServerModel.of(value)


def _space(value: dict[str, Any]) -> None:
    from ...space import Space

    Space.from_dict(value)


Count = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
Whole = Annotated[int, Field(ge=1, le=LARGEST_NUMBER)]
Word = Annotated[str, Field(min_length=1, max_length=200)]
Knob = Annotated[str, Field(min_length=1, max_length=80)]
Value = bool | int | float | Annotated[str, Field(max_length=2000)]
Duration = Annotated[Annotated[str, Field(max_length=40)] | Annotated[float, Field(gt=0, le=1e9)], checked(_duration)]
Memory = Annotated[Annotated[str, Field(max_length=40)] | Annotated[float, Field(gt=0, le=1e12)], checked(_memory)]
Hardware = Annotated[Word, checked(_hardware)]
Target = Annotated[Word, checked(_target)]
SpaceDocument = Annotated[dict[str, JsonValue], checked(_space)]
Mapping = dict[Knob, Value]


class Code(Body):
    """A Python file with a workload in it."""

    text: Annotated[str, Field(min_length=1, max_length=LARGEST_FILE)]
    """The file."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Of the text as UTF-8."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,79}$")]
    """The name in it."""

    @model_validator(mode="after")
    def _whole(self) -> "Code":
        if digest(self.text) != self.sha256:
            raise ValueError("sha256 is not that of the text: it was changed or damaged on its way; send it again")
        return self


class CommandForm(Body):
    """A program that is tuned as it is; the fields of `redline.Command`."""

    command: (
        Annotated[str, Field(min_length=1, max_length=20_000)]
        | Annotated[list[Annotated[str, Field(max_length=4000)]], Field(min_length=1, max_length=500)]
    )
    launcher: Word | None = None
    model: Target | None = None
    """What it trains: a preset's name or a hub id."""
    env: Annotated[list[Annotated[str, Field(max_length=4000)]], Field(max_length=200)] = []
    metric: Annotated[list[Word], Field(max_length=50)] = []
    metric_file: Word | None = None
    direction: Literal["max", "min"] | None = None
    samples: Word | None = None
    require: Annotated[list[Word], Field(max_length=50)] = []
    shell: bool = False


class SpaceForm(Body):
    """What may vary, beside the model's default space."""

    space: SpaceDocument | None = None
    """In place of the default one: a document of `Space.to_dict`."""
    allow: Annotated[list[Literal["lossy"]], Field(max_length=1)] = []
    baseline: Word | None = None
    """The number format of the default configuration, which the gain is against."""
    override: Annotated[
        dict[Knob, Annotated[list[Value], Field(min_length=1, max_length=1000)]], Field(max_length=200)
    ] = {}
    """Values of knobs, in place of the space's."""
    fix: Annotated[Mapping, Field(max_length=200)] = {}
    """Knobs that do not vary."""


class TrainingForm(SpaceForm):
    """What is trained: one of `target`, `model`, `workload` and `command`."""

    target: Target | None = None
    """A preset's name or a hub id."""
    model: Annotated[dict[str, JsonValue], Field(min_length=1, max_length=500), checked(_contents)] | None = None
    """A Hugging Face config.json."""
    devices: Count = 1
    """Devices of one trial."""
    seq_len: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    global_batch: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    lora: Word | None = None


class SearchForm(TrainingForm):
    """A search: what `redline.tune` takes, as far as it travels."""

    workload: Code | None = None
    command: CommandForm | None = None
    trials: Annotated[int, Field(ge=1, le=100_000)] | None = None
    time: Duration | None = None
    device_hours: Annotated[float, Field(gt=0, le=1e9)] | None = None
    patience: Annotated[int, Field(ge=0, le=1 << 30)] | None = None
    sampler: Annotated[Word, checked(_sampler)] = "bayes"
    headroom: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    layerwise: bool = False
    soak: bool = False
    seed: Annotated[int, Field(ge=0, le=LARGEST_NUMBER)] = 0
    runner: Literal["simulate"] | None = None
    """`simulate` answers with predictions for `hardware`, which the pool need not have."""
    hardware: Hardware | None = None
    memory_limit: Memory | None = None
    trial_timeout: Duration | None = None
    measure_time: Duration | None = None
    concurrency: Annotated[int, Field(ge=1, le=4096)] | None = None

    @model_validator(mode="after")
    def _one_thing(self) -> "SearchForm":
        given = [name for name in TARGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(TARGETS)}, but got {', '.join(given) or 'none'}")
        return self

    def request(self) -> dict[str, Any]:
        """What is kept: every field that was asked for, and the devices."""
        return {"devices": self.devices, **self.model_dump(exclude_unset=True, exclude_none=True)}


class Submission(Body):
    """A search, and how it stands in the queue."""

    request: SearchForm
    """What is searched."""
    name: Annotated[str, Field(max_length=100)] = ""
    """What people call it; by default the model's name."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Higher goes first."""
    device: Annotated[str, Field(max_length=100)] = ""
    """On which device of the pool; any where empty."""
    reuse: bool = False
    """Whether a configuration that was measured before on the same device, software and seed may be answered from that."""
    visibility: Visibility = "all"
    """Who sees it beside its owner and admins."""


class ChangeForm(Body):
    """What of a search can be changed."""

    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    visibility: Visibility | None = None


class SearchAnswer(Answer):
    """A search as it stands."""

    id: str
    user: str
    """Whose it is, by name."""
    name: str
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    reason: str
    """Why it failed, ended or waits."""
    priority: int
    devices: int
    device: str
    created: float
    """UTC, seconds since 1970."""
    started: float | None
    ended: float | None
    request: dict[str, JsonValue]
    """What was asked for, values of `env` shown as ***; in lists only what is short of it."""
    best: dict[str, JsonValue] | None
    """The winner, or the best so far."""
    trials: int
    """Trials that have ended."""
    reuse: bool
    held: bool = False
    """Whether nothing of it starts until it is released."""
    visibility: Visibility = "all"
    """Who sees it beside its owner and admins."""
    created_now: bool = False
    """Of a submission: whether this call made it, and not an earlier one with the same key."""


class SearchesAnswer(Answer):
    """Searches, the newest first."""

    searches: list[SearchAnswer]
    next: str | None = None
    """What `after` is to be for the next ones; None at the end."""


class EventAnswer(Answer):
    """Something that happened."""

    id: int
    search: str | None
    time: float
    kind: str
    data: dict[str, JsonValue]


class WorkerAnswer(Answer):
    """A host that runs dry runs."""

    id: str
    name: str
    user: str
    host: str
    device: dict[str, JsonValue]
    devices: int
    busy: int
    """Devices with a dry run on them."""
    memory: float
    """Of a device, MiB."""
    software: dict[str, JsonValue]
    seen: float
    left: float | None


class QueueAnswer(Answer):
    """What runs and what waits, and why."""

    searches: list[SearchAnswer]
    """Those that are queued or running, those that go first first."""
    waiting: int
    """Dry runs that wait for devices."""
    running: int
    """Dry runs that run."""
    devices: int
    busy: int
    usage: dict[str, float]
    """Device-hours of each user in the last 30 days, as quotas count them."""


class WorkersAnswer(Answer):
    """The pool."""

    workers: list[WorkerAnswer]


class MeAnswer(Answer):
    """Whom a token is of."""

    name: str
    role: Literal["reader", "submitter", "admin", "worker"]
    device_hours: float | None
    """What may be spent; None for no limit."""
    running: int | None
    """Dry runs at once; None for no limit."""
    allow_code: bool
    priority: int = 0
    """The highest priority that they may give; an admin may give any."""


class HealthAnswer(Answer):
    """How the server is."""

    status: str
    version: str


class ErrorDetail(Answer):
    """What is wrong."""

    code: str
    """A word for programs: `invalid`, `not_found`, `forbidden`, ..."""
    message: str
    """A sentence for people."""
    field: str | None = None
    """Which field, with dots."""
    given: JsonValue = None
    """What it was."""
    rule: str | None = None
    """The rule it broke."""


class ErrorAnswer(Answer):
    """What every answer of 400 and above holds."""

    error: ErrorDetail


class EstimateForm(TrainingForm):
    """What is predicted without a device."""

    hardware: Hardware
    memory_limit: Memory | None = None
    config: Annotated[Mapping, Field(max_length=200)] | None = None
    """One configuration, in place of the best."""
    top: Annotated[int, Field(ge=1, le=100)] = 5
    layerwise: bool = False

    @model_validator(mode="after")
    def _one_thing(self) -> "EstimateForm":
        if (self.target is None) == (self.model is None):
            raise ValueError("give one of target and model")
        return self


class StudyForm(Body):
    """A study whose trials run elsewhere."""

    space: SpaceDocument
    sampler: Annotated[Word, checked(_sampler)] = "bayes"
    seed: Annotated[int, Field(ge=0, le=LARGEST_NUMBER)] = 0
    name: Annotated[str, Field(max_length=100)] = ""


class StudyAnswer(Answer):
    """A study and its trials."""

    id: str
    name: str
    trials: list[dict[str, JsonValue]]
    best: dict[str, JsonValue] | None


class AskAnswer(Answer):
    """The next trial; `config` is None where the space is exhausted."""

    trial: int | None
    config: dict[str, JsonValue] | None


class TellForm(Body):
    """How a trial ended."""

    trial: Annotated[int, Field(ge=0, le=LARGEST_NUMBER)]
    throughput: Annotated[float, Field(gt=0, le=1e18)] | None = None
    """Of what ran; None where it did not."""
    memory: Annotated[float, Field(ge=0, le=1e12)] | None = None
    """Peak memory of a device, MiB."""
    status: Literal["ok", "oom", "timeout", "crash", "wrong"] | None = None
    """By default `ok` with a throughput, else `crash`."""
    reason: Annotated[str, Field(max_length=2000)] = ""


class LeaseForm(Body):
    """Which lease is meant."""

    lease: Annotated[int, Field(ge=0, le=LARGEST_ID)]


class RenewAnswer(Answer):
    """Until when a lease lasts."""

    until: float


class JoinAnswer(Answer):
    """A worker that joined."""

    id: str
    lease_seconds: float
    """How long a lease lasts unless it is renewed."""


class OutcomeForm(LeaseForm):
    """How a dry run ended."""

    outcome: dict[str, JsonValue]


class LogAnswer(Answer):
    """How far a log is kept."""

    size: int
    """Bytes."""


def short(value: Any) -> Any:
    """A value as an error repeats it."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        return "..."
    plain_ = len(text) <= 200 and not any(each in text for each in ("NaN", "Infinity", "\\ud"))
    return value if plain_ else text[:200]
