"""``muniment check``: whether what is stored is what was promised."""

from typing import Annotated

import typer

from muniment.cli import exits, options, outcome
from muniment.cli.output import note, safe_line, say, say_json
from muniment.cli.settings import configured, flags
from muniment.errors import InvalidField, NotFound


def check(
    directory: Annotated[
        str | None, typer.Argument(metavar="DATA_DIR", help="Data directory. [default: the configured one]")
    ] = None,
    data_dir: options.DataDir = None,
    as_json: options.AsJson = False,
    config: options.ConfigFile = None,
) -> None:
    """Verify a data directory, read-only, also while a server owns it.

    Exit code 0: nothing is wrong. 1: each finding is printed. 4: there is no memory in the directory.
    """
    if directory is not None and data_dir is not None:
        raise InvalidField("DATA_DIR", "is given twice")
    path = configured(flags(data_dir=directory or data_dir), config).data_path
    if not path.is_dir() or not any(path.iterdir()):
        raise NotFound(f"there is no memory in {path}")
    from muniment import wiring

    report = wiring.check(path)
    if as_json:
        say_json(report)
    for finding in () if as_json else report.findings:
        say(safe_line(f"{finding.file}: {finding.table}: {finding.row}: {finding.problem}"))
    if report.owned_by is not None:
        note(f"a server at {report.owned_by} owns it: this is one consistent state of what it writes")
    if report.findings:
        outcome.finish(exits.FAILED)
    if not as_json:
        say(
            f"ok: {report.operations} operations, {report.memories} memories, "
            f"state_digest {report.state_digest}"
        )
