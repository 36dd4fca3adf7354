"""What the routes work with."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fastapi import Request

from ..store import Store

if TYPE_CHECKING:
    from ..dispatcher import Dispatcher
    from ..estimates import Estimates
    from ..helper import Helper
    from ..places import Places
    from ..runs import Runs
    from .feed import Feed
    from .limits import Rates
    from .metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the routes work with."""

    store: Store
    """The truth."""
    dispatcher: "Dispatcher"
    """Says what runs where."""
    places: "Places"
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
    rates: "Rates"
    """How often anybody may ask."""
    allow_code: bool = True
    """Whether anybody at all may submit code; whoever may is said of each user."""


def parts_of(request: Request) -> Parts:
    """The parts of the application that a request is to."""
    return cast(Parts, request.app.state.parts)
