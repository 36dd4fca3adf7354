"""What the routes work with."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from fastapi import Request

from ..store import Store
from .connections import Rates

if TYPE_CHECKING:
    from ..child_processes import Helper
    from ..dispatcher import Dispatcher
    from ..estimates import Estimates
    from ..runs import Runs
    from ..searchers import SearcherSlots
    from .feed import Feed
    from .metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the routes work with."""

    store: Store
    """The truth."""
    dispatcher: "Dispatcher"
    """Says what runs where."""
    slots: "SearcherSlots"
    """Says which searches run."""
    runs: "Runs"
    """What searches leave."""
    feed: "Feed"
    """Events, live."""
    estimates: "Estimates"
    """Predicts."""
    studies: "Helper"
    """Calls what `studies.py` has."""
    url: str
    """Of the database."""
    metrics: "Metrics"
    """What is counted."""
    rates: Rates
    """How often a user may ask."""
    failures: Rates = field(default_factory=lambda: Rates(0.5, 20))
    """How often an address may try a wrong token."""
    strangers: Rates = field(default_factory=lambda: Rates(20, 200))
    """How often an address may ask without a token for what costs something."""
    most_queued: int = 1000
    """Searches that a user who is no admin may have queued."""
    allow_code: bool = True
    """Whether anybody at all may submit code; whoever may is said of each user."""
    workloads: bool = True
    """Whether that code may be a workload's file, which searchers run as the server's user."""


def parts_of(request: Request) -> Parts:
    """The parts of the application that a request is to."""
    return cast(Parts, request.app.state.parts)
