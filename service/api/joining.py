"""How a host describes itself that joins the pool."""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from .models import Body, Count, Word, checked

LEAST_MEMORY_MIB, MOST_MEMORY_MIB = 64, 1 << 27
"""Of a device: with less nothing runs, and there is none with more."""


def _hardware_of_a_worker(value: dict[str, Any]) -> None:
    from ..placing import hardware_of

    hardware_of(value, "")


class DeviceForm(Body):
    """A kind of device, as `Device.to_dict` has it, and what its worker knows of it."""

    type: Literal["cuda", "cpu"]
    name: Word
    count: Count
    memory_mib: Annotated[int, Field(ge=LEAST_MEMORY_MIB, le=MOST_MEMORY_MIB)]
    capability: Annotated[str, Field(pattern=r"^[0-9]{1,3}\.[0-9]{1,3}$")] | None = None
    features: Annotated[list[Word], Field(max_length=50, default_factory=list)]
    hardware: Annotated[dict[str, JsonValue], checked(_hardware_of_a_worker)] | None = None
    """The fields of `redline.Hardware`, of one device."""

    def described(self) -> dict[str, Any]:
        """As a worker's record has it."""
        return self.model_dump(exclude_unset=True)


class JoinForm(Body):
    """A host that joins the pool."""

    name: Annotated[str, Field(max_length=200)] = ""
    host: Word
    device: DeviceForm
    devices: Count
    memory_mib: Annotated[float, Field(ge=LEAST_MEMORY_MIB, le=MOST_MEMORY_MIB)]
    software: Annotated[dict[str, JsonValue], Field(max_length=100, default_factory=dict)]
