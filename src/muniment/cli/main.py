"""All commands together, and the one place where an error becomes a line on stderr and an exit code."""

import sys

import typer

import muniment
from muniment.cli import config_show, exits
from muniment.cli.add import add
from muniment.cli.certify import certify
from muniment.cli.check import check
from muniment.cli.doctor import doctor
from muniment.cli.evidence import evidence
from muniment.cli.importing import import_
from muniment.cli.memories import get
from muniment.cli.operations import operation, watch
from muniment.cli.output import OutputClosedError, fail, leave_quietly, prepare_streams, say
from muniment.cli.recall import recall
from muniment.cli.serve import serve
from muniment.errors import MunimentError

app = typer.Typer(
    name="muniment",
    help="A durable memory for AI agents: accepted means kept, and the outcome can always be asked for.",
    no_args_is_help=True,
    rich_markup_mode=None,  # Help and errors are plain text: they can be searched, and need no wide terminal.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(add)
app.command("import")(import_)
app.command()(recall)
app.command()(get)
app.command()(operation)
app.command()(watch)
app.command()(evidence)
app.command()(check)
app.command()(doctor)
app.command()(certify)
app.add_typer(config_show.app, name="config")


@app.command()
def version() -> None:
    """Print the version."""
    say(muniment.__version__)


def run(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code. Nothing but a bug leaves this as an exception."""
    prepare_streams()
    try:
        code = _run(arguments)
    except OutputClosedError:
        code = exits.CLOSED
    try:
        sys.stdout.flush()
    except OSError:  # What it is about has been said, or nobody listens.
        leave_quietly()
        return code or exits.CLOSED
    return code


def _run(arguments: list[str] | None) -> int:
    try:
        app(args=arguments, prog_name="muniment")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else exits.FAILED
    except MunimentError as error:
        fail(str(error))
        return exits.code_of(error)
    raise AssertionError("typer ends every command with SystemExit")
