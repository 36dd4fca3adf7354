"""What people and drivers call a device, taken apart: the chip, its memory, and the board it sits on."""

import re
from dataclasses import dataclass

_MEMORY = re.compile(r"(?<![\w.])(\d+)[ -]?(?:gib|gb|g)\b")
_WORD = re.compile(r"[a-z]+[0-9]*[a-z]*|[0-9]+[a-z]*")
# Makers, product lines, kinds of memory and sockets: a chip is the same without them.
_MAKERS = "nvidia|amd|geforce|tesla|instinct|radeon|gpu|tensor|core|vf|dgxs"
_SAYS_NOTHING = re.compile(rf"{_MAKERS}|sxm\d?|oam|hbm\d?e?|gddr\d\w*")
_BOARDS = ("pcie", "nvl")
_SHORT = {"4090": "rtx4090"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceName:
    """The parts of a device's name."""

    chip: str
    """Without blanks, such as `h100` or `rtx4090`; whatever else the name says is part of it."""
    memory_gb: int | None
    """As the name states it; None where it does not."""
    board: str
    """`pcie` or `nvl` for a card of a chip that also comes as a module; empty where the name says neither."""

    @property
    def text(self) -> str:
        """The chip and its memory as the table of hardware writes them, to look for near names."""
        return self.chip if self.memory_gb is None else f"{self.chip}-{self.memory_gb}gb"

    def could_be(self, other: "DeviceName", memory_gib: float) -> bool:
        """Whether this may name a device of the other's chip with so much memory, GiB, a tenth aside."""
        if self.chip != other.chip:
            return False
        return self.memory_gb is None or abs(self.memory_gb - memory_gib) < 0.1 * memory_gib


def device_name(text: str) -> DeviceName:
    """A name as people write it, or as nvidia-smi and `torch.cuda.get_device_name` print it.

    >>> device_name("NVIDIA H100 80GB HBM3")
    DeviceName(chip='h100', memory_gb=80, board='')
    >>> device_name("NVIDIA GeForce RTX 4090").chip, device_name("rtx4090").chip, device_name("4090").chip
    ('rtx4090', 'rtx4090', 'rtx4090')
    >>> device_name("NVIDIA A100-PCIE-40GB")
    DeviceName(chip='a100', memory_gb=40, board='pcie')
    """
    plain = text.lower().replace("_", "-").replace("pci-e", "pcie")
    memory = _MEMORY.search(plain)
    if memory is not None:
        plain = f"{plain[: memory.start()]} {plain[memory.end() :]}"
    words = [word for word in _WORD.findall(plain) if not _SAYS_NOTHING.fullmatch(word)]
    chip = "".join(word for word in words if word not in _BOARDS)
    return DeviceName(
        chip=_SHORT.get(chip, chip),
        memory_gb=int(memory[1]) if memory is not None else None,
        board=next((word for word in words if word in _BOARDS), ""),
    )
