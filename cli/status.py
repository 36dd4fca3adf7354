"""A line with the current step of a command that takes seconds."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live


class Status:
    """A line on standard error with the current step; no output if that is not a terminal.

    No thread redraws it: variants are traced in forked processes, and forking is unsafe beside threads.
    """

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
