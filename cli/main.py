"""The command group: lazy imports, readable errors, exit codes."""

import errno
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from .. import __version__
from ..base.errors import NoRoom, NothingFound, RedlineError, UsageError, replacement, unknown
from ..base.option import on_command_line
from . import exit_codes
from .streams import ReaderGone, standard_streams

_COMMANDS = {
    "tune": "Find the fastest configuration of a model on the available devices.",
    "scale": "Tune a model for increasing numbers of devices, and show how it scales.",
    "train": "Train with a run's winner on real data.",
    "convert": "Write a training's checkpoint for other tools.",
    "models": "List the predefined models.",
    "space": "Show the search space of a model on the available devices.",
    "estimate": "Predict the best configurations of a model on any hardware.",
    "check": "Predict whether another trainer's file or command fits, and how fast it is.",
    "show": "Show a run, its winner and its trials.",
    "export": "Write a run's winner for the framework you train with.",
    "report": "Write a run as an HTML page.",
    "dashboard": "Serve a page over all runs in a folder.",
    "doctor": "Check versions, devices and memory, and find missing dependencies.",
}
_SERVICE = {
    "serve": "Serve searches for a team on shared devices.",
    "submit": "Submit a search to a server.",
    "queue": "Show the running and waiting searches of a server, end or hold them.",
    "results": "Show the results, the events and the logs of a search on a server.",
    "token": "Add users and tokens of a server, change and revoke them.",
}
"""Commands of `redline serve` and its clients."""
_MODULES = {
    "models": "space",
    "convert": "train",
    "report": "pages",
    "dashboard": "pages",
    "token": "serve",
    "queue": "client",
    "results": "client",
}
"""Modules of commands that have none of their own name."""


class _Commands(click.Group):
    """Imports a command when it is called, so that the help appears quickly."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *_SERVICE]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in (*_COMMANDS, *_SERVICE):
            return None
        return getattr(import_module(f".{_MODULES.get(name, name)}", __package__), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))
        with formatter.section("Searches for a team"):
            formatter.write_dl(list(_SERVICE.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in (*_COMMANDS, *_SERVICE):
            raise UsageError(replacement("command", args[0]) or unknown("command", args[0], (*_COMMANDS, *_SERVICE)))
        return super().resolve_command(ctx, args)


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`redline COMMAND -h` shows a command's options, with examples; `--debug` shows the traceback of an error.",
)
@click.version_option(__version__, prog_name="redline")
def redline() -> None:
    """Finds the fastest way to train a model on the hardware you have."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command line and exits with its code. `--debug` anywhere shows the traceback of an error."""
    with standard_streams(), on_command_line():
        _main(arguments)


def _main(arguments: Sequence[str] | None) -> None:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in argv
    argv = [argument for argument in argv if argument != "--debug"]
    try:
        code = redline.main(argv, prog_name="redline", standalone_mode=False, obj=argv)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(exit_codes.FOUND)
    except click.ClickException as error:
        if debug:
            raise
        if isinstance(error, click.NoSuchOption) and error.ctx is not None:
            if (advice := replacement(f"option of {error.ctx.info_name}", error.option_name)) is not None:
                error = click.UsageError(advice, error.ctx)
        error.show()
        sys.exit(exit_codes.USAGE)
    except RedlineError as error:
        if debug:
            raise
        from ..results.columns import printable

        advice = "".join(f". {note}" for note in getattr(error, "__notes__", ()))
        click.echo(f"redline: {printable(f'{error}{advice}')}", err=True)
        if isinstance(error, NothingFound):
            sys.exit(exit_codes.NOTHING_FEASIBLE)
        if isinstance(error, NoRoom):
            sys.exit(exit_codes.NO_ROOM)
        sys.exit(exit_codes.USAGE if isinstance(error, (UsageError, ImportError)) else exit_codes.FAILED)
    except (KeyboardInterrupt, click.Abort):
        if debug:
            raise
        click.echo("redline: interrupted", err=True)
        code = exit_codes.INTERRUPTED
    except ReaderGone:
        sys.exit(exit_codes.FOUND)
    except OSError as error:
        if debug or error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        click.echo(f"redline: cannot use the path {str(error.filename)[:80]!r}: {error.strerror}", err=True)
        sys.exit(exit_codes.USAGE)
    if code == exit_codes.INTERRUPTED:
        # CPython remembers that an interrupt passed through `exec`, for example while a dataclass was created, and
        # would kill itself by SIGINT at its exit although the interrupt was caught. Another `exec` resets that.
        exec("")
    sys.exit(code if isinstance(code, int) else exit_codes.FOUND)
