"""Devices and the links between them, in the numbers that the estimator needs. The table is `hardware.yaml`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..base.device import liger_obstacle
from ..base.errors import UsageError, unknown
from ..base.reading import LARGEST_DOCUMENT, Malformed, parse_yaml, path_of, read_named
from ..knobs.meaning import FLOAT8
from .facts.device_operators import CPU, CUDA, CUDA_7

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")


LEAST_GIB = 0.1
"""Minimum memory of a device for training, GiB."""
MOST_DEVICES = 1024
"""Devices of a node."""
SLOWEST_TFLOPS, SLOWEST_GB_PER_S = 1e-4, 0.1
"""The slowest arithmetic and the slowest memory that a device can have; slower measurements were disturbed."""

_LIMITS = {
    "memory_gib": (LEAST_GIB, 10_000),
    "memory_gb_per_s": (SLOWEST_GB_PER_S, 1e6),
    "host_gb_per_s": (0.01, 1e5),
    "devices_per_node": (1, MOST_DEVICES),
    "achievable": (0.01, 1.0),
    "watts": (1.0, 10_000),
    "cores": (0.01, 10_000),
}
"""Smallest and largest value of each number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link between devices."""

    name: str
    gb_per_s: float
    """Bandwidth of one device in one direction, 1e9 bytes/s."""
    latency_us: float
    """Time of an empty message between two devices, us."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A kind of device and its usual cluster."""

    name: str
    """A name in `DEVICES`, or that of a file."""
    memory_gib: float
    """Total memory of a device, GiB; training can use `Constants.context_mib` less."""
    tflops: Mapping[str, float]
    """Peak dense rate of matrix products by dtype, 1e12 FLOP/s: fp32, and any of tf32, bf16, fp16, fp8 that it supports."""
    memory_gb_per_s: float
    """Memory bandwidth, 1e9 bytes/s."""
    intra_node: Link
    """Between the devices of a node."""
    inter_node: Link
    """Between nodes, a device's share of what its node has."""
    devices_per_node: int
    """Devices of a node."""
    host_gb_per_s: float = 25.0
    """Between a device and host memory, 1e9 bytes/s in one direction."""
    achievable: float = 0.8
    """Share of the peak rate of half precision that the best large matrix product reaches."""
    watts: float | None = None
    """Power limit of a device, W; None if unknown. Products are slower on a device with a lower limit."""
    kind: str = "cuda"
    """`cuda`, `rocm`, `hpu` (Gaudi) or `cpu`."""
    cores: float | None = None
    """Cores of a node if its devices are ranks on a CPU; None for other devices."""
    measured_runs: int = 0
    """Training runs on it that the constants were held against; with few of them intervals are wider."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each number, by field name."""
    note: str = ""
    """Remarks on the numbers for the user."""

    def __post_init__(self) -> None:
        subject = f"hardware {self.name}"
        if not isinstance(self.tflops, Mapping):
            raise UsageError(f"{subject}: tflops must map dtypes to numbers, but got {self.tflops!r}")
        numbers = {name: (getattr(self, name), *limits) for name, limits in _LIMITS.items()}
        for dtype, rate in self.tflops.items():
            if dtype not in DTYPES:
                raise UsageError(f"{subject}: tflops: {unknown('dtype', dtype, DTYPES)}")
            numbers[f"tflops.{dtype}"] = (rate, SLOWEST_TFLOPS, 1e6)
        if "fp32" not in self.tflops:
            raise UsageError(f"{subject}: tflops must hold the rate of fp32, but holds {sorted(self.tflops)}")
        for name in ("intra_node", "inter_node"):
            link = getattr(self, name)
            numbers[f"{name}.gb_per_s"] = (link.gb_per_s, 1e-3, 1e5)
            numbers[f"{name}.latency_us"] = (link.latency_us, 0.0, 1e6)
        for name, (value, low, high) in numbers.items():
            if value is None and name in ("watts", "cores"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise UsageError(f"{subject}: {name} must be a number from {low:g} to {high:g}, but got {value!r}")
        if self.devices_per_node != int(self.devices_per_node):
            raise UsageError(f"{subject}: devices_per_node must be an integer, but got {self.devices_per_node!r}")

    def rate(self, precision: str) -> float:
        """Peak FLOP/s of matrix products at a value of the knob `precision`.

        fp32 runs on the general cores, as torch does by default; a device that lacks the dtype uses its next larger one.
        """
        order = {
            "fp32": ("fp32",),
            "tf32": ("tf32", "fp32"),
            "bf16": ("bf16", "fp32"),
            "bf16_pure": ("bf16", "fp32"),
            "fp16": ("fp16", "bf16", "fp32"),
            "mxfp8": ("fp8", "bf16", "fp16", "fp32"),
            "nvfp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
            **dict.fromkeys(FLOAT8, ("fp8", "bf16", "fp16", "fp32")),
        }.get(precision, ("fp32",))
        return next(self.tflops[dtype] for dtype in order if dtype in self.tflops) * 1e12

    @property
    def chip(self) -> str:
        """Chip of the device, or of the one that its file names as `base`, by which kernels are known."""
        return device_name(self.sources.get("base", self.name)).chip

    @property
    def operators(self) -> str:
        """Device whose operators run: `CPU`, `CUDA` or `CUDA_7`; a GPU without bf16 is older than compute capability 8.0."""
        if self.kind == "cpu":
            return CPU
        return CUDA if "bf16" in self.tflops else CUDA_7

    @property
    def liger(self) -> bool:
        """True if the knob `kernels` puts Liger-Kernel's modules there: on GPUs, if it is installed where this runs."""
        return self.kind != "cpu" and liger_obstacle("cuda") is None

    @property
    def shares_cores(self) -> bool:
        """True if there are more devices than cores: one computes while another waits."""
        return self.cores is not None and self.devices_per_node > self.cores

    @property
    def unmeasured(self) -> str | None:
        """A remark for predictions without a measured run of this device; None for others."""
        if self.measured_runs or self.kind == "cpu":
            return None
        return f"no training on {self.name} was measured: the intervals are those of an unknown device"

    @property
    def memory_mib(self) -> float:
        """Memory of a device, MiB."""
        return self.memory_gib * 1024

    def to_yaml(self, path: str | Path) -> None:
        """Writes a file that `from_yaml` reads."""
        import yaml

        Path(path).write_text(yaml.safe_dump(asdict(self), sort_keys=False))

    @classmethod
    def from_yaml(cls, path: str | Path) -> "Hardware":
        """Reads a file with the fields of this class; `base: NAME` fills missing fields from a known device.

        Raises:
            UsageError: the file does not exist, or a field is missing, unknown or impossible.
        """
        file = Path(path)
        try:
            data = parse_yaml(read_named(path_of(file), at_most=LARGEST_DOCUMENT))
        except OSError as error:
            raise UsageError(f"hardware file {file} cannot be read: {error.strerror or error}") from error
        except Malformed as error:
            raise UsageError(f"hardware file {file} is not YAML: {error}") from error
        if not isinstance(data, dict):
            raise UsageError(f"hardware file {file} must hold a mapping, but holds {type(data).__name__}")
        return cls.from_mapping(data, name=file.stem, where=f"hardware file {file}")

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], *, name: str, where: str) -> "Hardware":
        """As `from_yaml`, from a mapping."""
        values = dict(data)
        base = values.pop("base", None)
        field_names = {field.name for field in fields(cls)}
        for key in values:
            if key not in field_names:
                raise UsageError(f"{where}: {unknown('field', key, field_names | {'base'})}")
        if base is not None:
            values = {"measured_runs": 0, **values} if {"tflops", "memory_gb_per_s"} & set(values) else values
            try:
                start = find_hardware(str(base))
            except UsageError as error:
                raise UsageError(f"{where}: base: {error}") from None
            values = {
                **{field: getattr(start, field) for field in field_names},
                "sources": {"base": start.sources.get("base", start.name)},
                "name": name,
                **values,
            }
        values.setdefault("name", name)
        needed = ("memory_gib", "tflops", "memory_gb_per_s", "intra_node", "inter_node", "devices_per_node")
        missing = [field for field in needed if field not in values]
        if missing:
            raise UsageError(
                f"{where} lacks {', '.join(missing)}; give {'them' if len(missing) > 1 else 'it'}, or "
                "`base:` with the name of a known device"
            )
        for link in ("intra_node", "inter_node"):
            if not isinstance(values[link], Link):
                values[link] = _link(values[link], f"{where}: {link}")
        try:
            return cls(**values)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None

    def shared(self, ranks: int) -> "Hardware":
        """The hardware of each of `ranks` ranks of a CPU: they share the cores and the bandwidth that were measured as one
        device.

        Raises:
            UsageError: the memory is too small for them.
        """
        if ranks == 1:
            return self
        most = min(int(self.memory_gib / LEAST_GIB), MOST_DEVICES)
        if ranks > most:
            raise UsageError(
                f"{ranks:,} ranks on one CPU would have {self.memory_gib * 1024 / ranks:,.0f} MiB of its "
                f"{self.memory_gib * 1024:,.0f} MiB each; at most {max(most, 1):,} have room there: give fewer devices"
            )
        return self.replace(
            tflops={name: max(rate / ranks, SLOWEST_TFLOPS) for name, rate in self.tflops.items()},
            memory_gb_per_s=self.memory_gb_per_s / ranks,
            memory_gib=self.memory_gib / ranks,
            devices_per_node=ranks,
        )

    def replace(self, **changes: Any) -> "Hardware":
        """A copy with some fields changed."""
        return replace(self, **changes)


def _link(data: Any, source: str) -> Link:
    names = [name.name for name in fields(Link)]
    if not isinstance(data, Mapping):
        raise UsageError(f"{source} must be a mapping with {', '.join(names)}, but is {data!r}")
    for key in data:
        if key not in names:
            raise UsageError(f"{source}: {unknown('field', key, names)}")
    missing = [name for name in ("gb_per_s", "latency_us") if name not in data]
    if missing:
        raise UsageError(f"{source} lacks {', '.join(missing)}")
    return Link(**{"name": "link", **data})


_MEMORY = re.compile(r"(?<![\w.])(\d+)[ -]?(?:gib|gb|g)\b")
_WORD = re.compile(r"[a-z]+[0-9]*[a-z]*|[0-9]+[a-z]*")
# Makers, product lines, kinds of memory and sockets, which do not identify the chip.
_MAKERS = "nvidia|amd|intel|geforce|tesla|instinct|radeon|gpu|tensor|core|vf|dgxs|generation"
_SAYS_NOTHING = re.compile(rf"{_MAKERS}|sxm\d?|ac|oam|hbm\d?e?|gddr\d\w*")
_BOARDS = ("pcie", "nvl")
_SHORT = {
    number: f"rtx{number}" for number in ("3080", "3090", "4070", "4080", "4090", "5080", "5090", "a5000", "a6000")
}
_SHORT |= {"habanagaudi2": "gaudi2", "habanagaudi3": "gaudi3", "hl225": "gaudi2", "hl325": "gaudi3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceName:
    """The parts of a device's name."""

    chip: str
    """Name of the chip without blanks, such as `h100` or `rtx4090`; unrecognised parts of the name are included."""
    memory_gb: int | None
    """Memory in the name, GB; None if the name has none."""
    board: str
    """`pcie` or `nvl` for a card of a chip that also comes as a module; empty if the name has neither."""

    @property
    def text(self) -> str:
        """The chip and its memory in the format of the hardware table, to search for similar names."""
        return self.chip if self.memory_gb is None else f"{self.chip}-{self.memory_gb}gb"

    def could_be(self, device: "DeviceName", memory_gib: float) -> bool:
        """True if this name can mean a device of the other's chip with `memory_gib` of memory, within 10 %."""
        if self.chip != device.chip:
            return False
        return self.memory_gb is None or abs(self.memory_gb - memory_gib) < 0.1 * memory_gib


def device_name(name: str) -> DeviceName:
    """Parses a name as users write it, or as nvidia-smi and `torch.cuda.get_device_name` print it.

    >>> device_name("NVIDIA H100 80GB HBM3")
    DeviceName(chip='h100', memory_gb=80, board='')
    >>> device_name("NVIDIA GeForce RTX 4090").chip, device_name("rtx4090").chip, device_name("4090").chip
    ('rtx4090', 'rtx4090', 'rtx4090')
    >>> device_name("NVIDIA A100-PCIE-40GB")
    DeviceName(chip='a100', memory_gb=40, board='pcie')
    """
    plain = name.lower().replace("_", "-").replace("pci-e", "pcie")
    memory = _MEMORY.search(plain)
    if memory is not None:
        plain = f"{plain[: memory.start()]} {plain[memory.end() :]}"
    name_words = [word for word in _WORD.findall(plain) if not _SAYS_NOTHING.fullmatch(word)]
    chip = "".join(word for word in name_words if word not in _BOARDS)
    return DeviceName(
        chip=_SHORT.get(chip, chip),
        memory_gb=int(memory[1]) if memory is not None else None,
        board=next((word for word in name_words if word in _BOARDS), ""),
    )


def find_hardware(spec: "str | Path | Hardware") -> Hardware:
    """The hardware of a name or a YAML file; `Hardware` is returned unchanged.

    A name may be written as users do (`h100`, `rtx4090`) or as drivers print it (`NVIDIA H100 80GB HBM3`). If several devices
    match, the most common one is returned. If the table has only another board, that one is returned. `note` states both.

    Raises:
        UsageError: no hardware has that name; the message contains the nearest.
    """
    if isinstance(spec, Hardware):
        return spec
    name = str(spec)
    if name not in DEVICES and name.endswith((".yaml", ".yml")):
        return Hardware.from_yaml(name)
    hardware = _in_table(name)
    if hardware is not None:
        return hardware
    if Path(name).is_file():
        return Hardware.from_yaml(name)
    raise UsageError(f"{_unknown(name)}\n{_file_for(name)}")


def named_hardware(name: str) -> Hardware:
    """As `find_hardware`, for a name only: no file is read.

    Raises:
        UsageError: the table has no such name; the message contains the nearest.
    """
    hardware = _in_table(name)
    if hardware is None:
        raise UsageError(_unknown(name))
    return hardware


def _in_table(name: str) -> Hardware | None:
    if name in DEVICES:
        return DEVICES[name]
    device = device_name(name)
    matches = [
        hardware for hardware in DEVICES.values() if device.could_be(device_name(hardware.name), hardware.memory_gib)
    ]
    return _most_common(name, device, matches) if matches else None


def _file_for(given_name: str) -> str:
    """How to describe a device that the table lacks, by its differences from the nearest one."""
    stem = re.sub(r"[^a-z0-9]+", "-", given_name.lower()).strip("-") or "device"
    return (
        f"For another device write its datasheet's numbers into a file and give --hardware {stem}.yaml: "
        f"`base: {_nearest(given_name).name}`, and a line for each number that differs, such as memory_gib, memory_gb_per_s, "
        "watts, devices_per_node, or `tflops: {fp32: 60, bf16: 120}`"
    )


def _unknown(given_name: str) -> str:
    chips = {name: device_name(name).chip for name in DEVICES}
    names = {*DEVICES, *(chip for name, chip in chips.items() if chip != name.replace("-", ""))}
    return unknown("hardware", given_name, names, like=_nearest(given_name).name)


def _nearest(given_name: str) -> Hardware:
    """The device with the most similar chip, of the memory that is nearest to the name's."""
    device = device_name(given_name)
    chips = [device_name(name).chip for name in DEVICES]
    (chip,) = get_close_matches(device.chip, chips, n=1, cutoff=0.0) or chips[:1]
    alike = [hardware for hardware in DEVICES.values() if device_name(hardware.name).chip == chip]
    wanted = alike[0].memory_gib if device.memory_gb is None else device.memory_gb
    return min(alike, key=lambda hardware: abs(hardware.memory_gib - wanted))


def _most_common(name: str, device: DeviceName, matches: Sequence[Hardware]) -> Hardware:
    """The most common of these, with its uncertainties as its note."""
    taken = next((match for match in matches if match.name in MOST_COMMON), matches[0])
    notes = []
    if len(matches) > 1:
        other_names = ", ".join(match.name for match in matches if match is not taken)
        notes.append(f"'{name}' is taken for {taken.name}, the most common; there is {other_names} too")
    if device.board and taken.intra_node.name.startswith("NVLink"):
        notes.append(
            f"'{name}' is taken for {taken.name}, whose numbers are the SXM module's: a card is slower, and "
            f"so are its links; a YAML file with `base: {taken.name}` corrects them"
        )
    return taken.replace(note="; ".join(notes)) if notes else taken


def recognise(name: str, memory_mib: float) -> Hardware | None:
    """The hardware with this driver name; None if it is not in `DEVICES`.

    Args:
        name: as `torch.cuda.get_device_name` returns it, such as `NVIDIA A100-SXM4-40GB`.
        memory_mib: its memory, which distinguishes variants of one chip, and parts of one (MIG).
    """
    seen = device_name(name)
    if seen.chip in ("v100", "h100", "h200") and seen.board:
        return None  # its clocks differ from the SXM module's
    matches = [
        hardware
        for hardware in DEVICES.values()
        if device_name(hardware.name).chip == seen.chip and abs(hardware.memory_mib - memory_mib) < 0.1 * memory_mib
    ]
    nearest = min(matches, key=lambda match: abs(match.memory_mib - memory_mib), default=None)
    if nearest is not None and seen.board and nearest.intra_node.name.startswith("NVLink"):
        return nearest.replace(intra_node=LINKS["PCIe 4 x16"])  # a bridge joins two cards only
    return nearest


_MAMF = "Bekman, Machine Learning Engineering (2024), accelerators, MAMF table"


def _read() -> tuple[dict[str, Link], dict[str, Hardware]]:
    """Links and devices of `hardware.yaml`, by name."""
    document = parse_yaml(Path(__file__).with_name("hardware.yaml").read_bytes())
    links = {name: Link(name=name, **rates) for name, rates in document["links"].items()}
    devices = {}
    for name, row in document["devices"].items():
        sheet, network = row.pop("sheet"), row.pop("network")
        devices[name] = Hardware(
            name=name,
            intra_node=links[row.pop("intra_node")],
            inter_node=links[row.pop("inter_node")],
            devices_per_node=row.pop("devices_per_node", 8),
            sources={
                **dict.fromkeys(("tflops", "memory_gb_per_s", "watts", "intra_node"), sheet),
                "memory_gib": f"{sheet}; GiB that the driver reports",
                "inter_node": network,
                "achievable": _MAMF if "achievable" in row else "assumed",
                "host_gb_per_s": "four fifths of the PCIe generation's rate, as bandwidthTest reports",
            },
            **row,
        )
    return links, devices


LINKS, DEVICES = _read()
"""Links and devices of the table, by name."""
MOST_COMMON = ("v100-32gb", "a100-80gb")
"""Meaning of the bare name of a chip that several devices share."""
