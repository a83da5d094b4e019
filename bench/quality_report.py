"""The result of a run, and its tables in Markdown. Pure."""

import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from bench.measure.figures import Machine
from bench.quality_data import MULTI_HOP, SetName
from bench.quality_measures import Drawn, Interval, Measures, interval, resamples
from bench.quality_recall import Answered, Cost, Ranked


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of ``bench.quality``, as it is written to a file."""

    command: str
    began: str
    machine: Machine
    set_name: SetName
    measured: str
    """Exactly what, in words."""
    seed: int
    held_out: frozenset[str]
    """Scopes whose questions are reported apart."""
    ranked: tuple[Ranked, ...]
    load: tuple[float, float] | None = None
    """Load average before, and after the last window."""


class Column(NamedTuple):
    """One measure over the questions that it is about."""

    title: str
    value: Callable[[Measures], float]
    category: str | None = None


COLUMNS: Final[dict[SetName, tuple[Column, ...]]] = {
    "locomo": (
        Column("R@5", lambda each: each.at_5),
        Column("R@10", lambda each: each.at_10),
        Column("R@50", lambda each: each.at_50),
        Column("in 4 KiB", lambda each: each.in_4k),
        Column("in 8 KiB", lambda each: each.in_8k),
        Column("multi-hop: all in 8 KiB", lambda each: each.all_in_8k, MULTI_HOP),
    ),
    "longmemeval": (
        Column("turns R@10", lambda each: each.at_10),
        Column("turns R@50", lambda each: each.at_50),
        Column("in 4 KiB", lambda each: each.in_4k),
        Column("in 8 KiB", lambda each: each.in_8k),
        Column("sessions any@5", lambda each: each.sessions_any_5),
        Column("sessions all@10", lambda each: each.sessions_all_10),
    ),
}


def text(run: Run, reference: int) -> str:
    """The whole report; differences are to the window of ``reference`` tokens, where it was measured."""
    return "\n".join(_lines(run, reference))


def _lines(run: Run, reference: int) -> Iterator[str]:
    yield from (f"{run.set_name}: {run.measured}", "")
    if run.load is not None:
        yield from (f"load average: {run.load[0]:.1f} before, {run.load[1]:.1f} after", "")
    scopes = frozenset(answer.scope for answer in run.ranked[0].answered)
    groups = {"all": scopes}
    if run.held_out:
        for name, chosen in (("held out", scopes & run.held_out), ("tuned on", scopes - run.held_out)):
            groups = {f"{name}: {', '.join(sorted(chosen))}": chosen, **groups}
    for title, chosen in groups.items():
        yield from (f"### {title}", "", *means(run, chosen), "")
        if any(each.part_tokens_max == reference for each in run.ranked):
            yield from (f"Difference to {reference} tokens:", "", *differences(run, chosen, reference), "")
    yield from (*by_category(run), "", *costs(run.ranked))


def means(run: Run, scopes: Collection[str]) -> Iterator[str]:
    """One row a way to rank: percent, and the interval of 95 %."""
    columns = COLUMNS[run.set_name]
    counts = [len(_values(run.ranked[0], scopes, column)) for column in columns]
    yield _row(
        "parts of at most", *(f"{each.title} (n = {n})" for each, n in zip(columns, counts, strict=True))
    )
    yield _row(*["---"] * (len(columns) + 1))
    drawn = _drawn(counts, run.seed)
    for ranked in run.ranked:
        cells = []
        for column in columns:
            values = _values(ranked, scopes, column)
            cells.append(_percent(interval(values, drawn[len(values)])))
        yield _row(ranked.name, *cells)


def differences(run: Run, scopes: Collection[str], reference: int) -> Iterator[str]:
    """Each way to rank less the reference, in points, question by question."""
    columns = COLUMNS[run.set_name]
    base = next(each for each in run.ranked if each.part_tokens_max == reference)
    drawn = _drawn([len(_values(base, scopes, column)) for column in columns], run.seed)
    yield _row("parts of at most", *(column.title for column in columns))
    yield _row(*["---"] * (len(columns) + 1))
    for ranked in run.ranked:
        if ranked is base or ranked.part_tokens_max is None:
            continue
        cells = []
        for column in columns:
            pairs = zip(_values(ranked, scopes, column), _values(base, scopes, column), strict=True)
            values = [ours - theirs for ours, theirs in pairs]
            cells.append(_percent(interval(values, drawn[len(values)]), sign="+"))
        yield _row(ranked.name, *cells)


def by_category(run: Run) -> Iterator[str]:
    """The first measure with ten places, for each kind of question."""
    kinds = sorted({answer.category for answer in run.ranked[0].answered})
    counts = [sum(answer.category == kind for answer in run.ranked[0].answered) for kind in kinds]
    yield _row("R@10", *(f"{kind} (n = {n})" for kind, n in zip(kinds, counts, strict=True)))
    yield _row(*["---"] * (len(kinds) + 1))
    for ranked in run.ranked:
        found = ([each.measures.at_10 for each in ranked.answered if each.category == kind] for kind in kinds)
        yield _row(ranked.name, *(f"{statistics.mean(values) * 100:.1f}" for values in found))


def costs(ranked: Sequence[Ranked]) -> Iterator[str]:
    """What each window took."""
    yield _row(
        *("parts of at most", "parts", "parts a memory", "tokens a part", "vectors, MB", "database, MB"),
        *("import, s", "child's CPU, s", "CPU for 1,000 tokens, s", "recall p50, ms"),
    )
    yield _row(*["---"] * 10)
    for each in ranked:
        if each.cost is not None:
            yield _row(each.name, *_cost(each.cost))


def _cost(cost: Cost) -> Iterator[str]:
    yield f"{cost.parts:,}"
    yield f"{cost.parts / cost.memories:.2f}"
    yield f"{cost.tokens / cost.parts:.1f}"
    yield f"{cost.vector_bytes / 1e6:.1f}"
    yield f"{cost.ledger_bytes / 1e6:.1f}"
    yield f"{cost.import_seconds:.0f}"
    yield f"{cost.child_cpu_seconds:.0f}"
    yield f"{cost.child_cpu_seconds * 1000 / cost.tokens:.2f}"
    yield f"{statistics.median(cost.recall_seconds) * 1e3:.0f}"


def _values(ranked: Ranked, scopes: Collection[str], column: Column) -> list[float]:
    return [
        column.value(answer.measures)
        for answer in ranked.answered
        if answer.scope in scopes and _is_about(answer, column)
    ]


def _is_about(answer: Answered, column: Column) -> bool:
    return column.category is None or answer.category == column.category


def _drawn(counts: Sequence[int], seed: int) -> dict[int, Drawn]:
    return {count: resamples(count, seed) for count in set(counts)}


def _percent(found: Interval, sign: str = "") -> str:
    mean, low, high = (each * 100 for each in (found.mean, found.low, found.high))
    return f"{mean:{sign}.1f} ({low:{sign}.1f} to {high:{sign}.1f})"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
