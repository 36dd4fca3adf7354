"""`redline serve`: searches for a team."""

from typing import Any

import click

from ..service.serve_options import ServeOptions
from .options import options_for


@click.command(
    epilog="""\b
Examples:
  redline serve
  redline serve --data /srv/redline --devices 8 --port 8700
  redline serve --ray-address head:6379 --slice 30m
  redline serve --storage postgresql://redline@db/redline --host 0.0.0.0 --certificate tls.pem
""",
)
@options_for(ServeOptions)
def serve(**option_values: Any) -> None:
    """Serve searches for a team: a queue in a database, searches on Ray, an API, web pages.

    Without --ray-address, Ray is started on this host. All processes may be killed at any time: started again with the same
    --data, they continue. The first start prints the token of the user 'admin'; `redline token` creates others.
    """
    options = ServeOptions(**option_values)
    from ..service.server import exposed, serve as run

    if (warning := exposed(options)) is not None:
        click.echo(f"note: {warning}", err=True)
    run(options, say=click.echo)
