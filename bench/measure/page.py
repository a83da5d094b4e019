"""A run as a section of ``docs/benchmarks.md``, between two marker comments. Pure."""

import textwrap
from typing import Final

from bench.measure.figures import BELOW_THE_FLOOR, BY_KEY, TARGETS, Figure, Run, verdict

BEGIN: Final = "<!-- targets: begin; scripts/bench targets --render writes what stands between -->"
END: Final = "<!-- targets: end -->"
COLUMNS: Final = ("#", "what", "ours", "limit", "ratio (rounds)", "floor", "aim", "", "load")
WIDTH: Final = 120
NEWLINE: Final = "\n"


class NoMarkersError(Exception):
    """A page without the two comments, once each and in order: nothing is written to it."""


def replaced(page: str, section: str) -> str:
    """The page with ``section`` between its markers, and nothing else changed. Raises ``NoMarkersError``."""
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended or BEGIN in rest or END in after or END in before:
        raise NoMarkersError(f"the page must hold {BEGIN!r} and then {END!r}, once each")
    return f"{before}{BEGIN}\n\n{section.strip(NEWLINE)}\n\n{END}{after}"


def section(run: Run) -> str:
    """The section, from its command on: the page has the heading."""
    below = [figure.key for figure in run.figures if _verdict(figure) == BELOW_THE_FLOOR]
    lines = [
        f"    {run.command}",
        "",
        _conditions(run),
        "",
        f"| {' | '.join(COLUMNS)} |".replace("  ", " "),
        "|---" * len(COLUMNS) + "|",
        *(_row(figure) for figure in run.figures),
        "",
        f"Of {len(run.figures)} figures, {len(below)} are below the floor{': ' if below else ''}"
        + ", ".join(below)
        + ".",
        *(("", *_notes(run)) if any(figure.note for figure in run.figures) else ()),
        "",
        *_right_or_wrong(run),
    ]
    return "\n".join(lines)


def _conditions(run: Run) -> str:
    machine = run.machine
    versions = ", ".join(f"{name} {version}" for name, version in sorted(machine.versions.items()))
    text = (
        f"{run.began}, commit {machine.commit}, {run.seconds:.0f} s in all. {machine.processor}, "
        f"{machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB of memory, {machine.file_system}, "
        f"{machine.kernel}, Python {machine.python}; {versions}. Ours and its limit are measured in turns; "
        "the ratio is the median of the rounds, with the lowest and the highest. The last column is the load "
        "average of one minute at the beginning and at the end of the measurement."
    )
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _row(figure: Figure) -> str:
    target = BY_KEY[figure.key]
    low, high = figure.spread
    is_ratio = any(each.limit != 1.0 for each in figure.rounds)
    cells = (
        figure.key,
        target.what,
        f"{_shown(figure.ours)}{target.unit}",
        f"{_shown(figure.limit)}{target.unit}" if is_ratio else "",
        f"**{figure.ratio:.2f}** ({low:.2f} to {high:.2f}, {len(figure.rounds)})",
        _bound(target.floor, target.better),
        _bound(target.aim, target.better),
        _verdict(figure),
        f"{figure.load_before:.1f}, {figure.load_after:.1f}",
    )
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def _verdict(figure: Figure) -> str:
    return verdict(BY_KEY[figure.key], figure.ratio)


def _bound(value: float | None, better: str) -> str:
    return "" if value is None else f"{'>=' if better == 'higher' else '<='} {value:g}"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _notes(run: Run) -> list[str]:
    return [
        textwrap.fill(f"- {figure.key}: {figure.note}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for figure in run.figures
        if figure.note
    ]


def _right_or_wrong(run: Run) -> list[str]:
    if run.wrong:
        return ["What was measured was **wrong**:", "", *(f"- {each}" for each in run.wrong)]
    return ["Everything that was counted was right: no row, event or answer was missing."]


def table(run: Run) -> str:
    """The figures for a terminal, one line each."""
    order = {target.key: place for place, target in enumerate(TARGETS)}
    lines = []
    for figure in sorted(run.figures, key=lambda each: order[each.key]):
        target = BY_KEY[figure.key]
        low, high = figure.spread
        bounds = " ".join(
            f"{name} {_bound(value, target.better)}"
            for name, value in (("floor", target.floor), ("aim", target.aim))
            if value is not None
        )
        lines += [
            f"{figure.key:<15} {target.what}",
            (
                f"{'':15} {_shown(figure.ours)}{target.unit} / {_shown(figure.limit)}{target.unit}"
                f" = {figure.ratio:.2f} ({low:.2f} to {high:.2f})  {bounds}  {_verdict(figure)}"
                f"  load {figure.load_before:.1f}, {figure.load_after:.1f}"
            ),
            *([f"{'':15} {figure.note}"] if figure.note else []),
        ]
    return "\n".join([*lines, *(f"WRONG           {each}" for each in run.wrong)])
