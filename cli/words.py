"""Text in the terminal: differences, durations, memory, and a line with the current step of a command."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..knobs.text import config_text

if TYPE_CHECKING:
    from rich.live import Live


def difference(
    config: Mapping[str, Any],
    base: Mapping[str, Any] | None,
    derived: frozenset[str],
    lossy: Collection[str] = (),
) -> str:
    """Returns the knobs of `config` that differ from `base`, on one line.

    Args:
        config: the configuration.
        base: the configuration to compare with; None for all knobs.
        derived: knobs that depend on others and are left out.
        lossy: knobs whose value in `config` trades accuracy for speed.
    """
    chosen = {name: value for name, value in config.items() if name not in derived}
    if base is None:
        return config_text(chosen, lossy)
    changes = {name: value for name, value in chosen.items() if name not in base or base[name] != value}
    return config_text(changes, lossy) if changes else "the default configuration"


def duration(seconds: float) -> str:
    """Returns `1:05` or `1:00:05`."""
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remaining_seconds:02}" if hours else f"{minutes}:{remaining_seconds:02}"


def memory(mib: float) -> str:
    """Returns `212 MiB`, or `12.3 GiB` from 10 GiB upwards."""
    return f"{mib / 1024:,.1f} GiB" if mib >= 10 * 1024 else f"{mib:,.0f} MiB"


class Status:
    """A line on standard error with the current step; no output if that is not a terminal."""

    def __enter__(self) -> "Status":
        from rich.console import Console

        self._console = Console(stderr=True)
        self._live: Live | None = None
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def update(self, doing: str) -> None:
        """Shows another text."""
        from rich.live import Live

        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(f"{doing} ...", refresh=True)

    def clear(self) -> None:
        """Removes the line."""
        if self._live is not None:
            self._live.stop()
            self._live = None
