"""The options of `redline serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..base.option import Option, check_options
from ..tuner.budget import parse_duration, parse_memory

PORT = 8700


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `redline serve`.

    Raises:
        UsageError: a value is invalid.
    """

    data: Annotated[str | Path, Option("Folder for searches and logs.", metavar="DIR")] = "redline-service"
    storage: Annotated[
        str | None, Option("sqlite:///FILE or postgresql://...  [default: redline.db in --data]", metavar="URL")
    ] = None
    host: Annotated[str, Option("Address to listen on.", metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[
        int, Option("Port; if it is in use, the next free one. 0 for any.", type=int, least=0, most=65535)
    ] = PORT
    certificate: Annotated[str | Path | None, Option("TLS certificate, in PEM.", metavar="FILE")] = None
    key: Annotated[str | Path | None, Option("Key of the certificate, if in another file.", metavar="FILE")] = None
    proxy: Annotated[str, Option("Address of a proxy whose X-Forwarded-* headers are trusted.", metavar="ADDRESS")] = (
        "127.0.0.1"
    )
    ray_address: Annotated[
        str | None, Option("A Ray cluster whose devices are used in place of this host's.", metavar="ADDRESS")
    ] = None
    devices: Annotated[int | None, Option("Number of devices of this host.  [default: all]", type=int, least=1)] = None
    searches: Annotated[
        int, Option("Searches that run at once. Each is a process with some 500 MiB of memory.", type=int, least=1)
    ] = 8
    slice: Annotated[
        str | float | None,
        Option(
            "Time after which a running search gives way to others that wait, between trials.  [default: never]",
            check=parse_duration,
            metavar="TIME",
        ),
    ] = None
    allow_code: Annotated[bool, Option("Accept code from users with the role.", flag="allow-code/--no-code")] = True
    queued: Annotated[int, Option("Queued searches of a user. Admins have no limit.", type=int, least=1)] = 1000
    search_memory: Annotated[
        str | float,
        Option("Memory of a search's process beyond what all of them need.", check=parse_memory, metavar="SIZE"),
    ] = "4GiB"
    keep_searches: Annotated[
        float | None,
        Option("Days after which ended searches and their folders are deleted.  [default: never]", type=float, least=0),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def folder(self) -> Path:
        """The server's folder."""
        return Path(self.data)

    @property
    def slice_s(self) -> float | None:
        """Time after which a search gives way, s; None for never."""
        return parse_duration(self.slice, "--slice")

    @property
    def memory_mib(self) -> float:
        """Memory limit of a search's process, MiB."""
        mib = parse_memory(self.search_memory)
        assert mib is not None
        return mib
