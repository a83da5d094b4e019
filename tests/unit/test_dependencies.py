"""Dependencies: what blocks is told sorted and once, a cycle is found, a queue joins what keeps order."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muniment.core.dependencies import blocked_by, closes_cycle, turns
from muniment.model.operation import Kind

names = st.sampled_from("abcde")
graphs = st.dictionaries(names, st.lists(names, max_size=3))


def reaches(graph: Mapping[str, list[str]], start: str, goal: str) -> bool:
    """By brute force: paths of any length up to the number of names."""
    level = {start}
    for _ in range(6):
        level = {after for name in level for after in graph.get(name, [])}
        if goal in level:
            return True
    return False


@given(graphs, names, st.lists(names, max_size=3))
def test_a_cycle_is_found_where_there_is_one(
    graph: dict[str, list[str]], name: str, dependencies: list[str]
) -> None:
    whole = graph | {name: dependencies}
    found = closes_cycle(name, dependencies, lambda each: graph.get(each, []))
    assert found is reaches(whole, name, name)


def test_a_shared_dependency_is_looked_at_once() -> None:
    """A ladder of diamonds has 2^40 paths."""
    graph = {str(rung): [str(rung + 1)] * 2 for rung in range(40)}
    asked: list[str] = []

    def dependencies_of(name: str) -> list[str]:
        asked.append(name)
        return graph.get(name, [])

    assert not closes_cycle("new", ["0"], dependencies_of)
    assert len(asked) == len(set(asked)) == 41


@pytest.mark.parametrize(
    ("dependencies", "blocking"),
    [
        ([], ()),
        ([("b", False), ("a", False), ("b", False)], ("a", "b")),
        ([("a", True), ("b", False)], ("b",)),
        # UTF-16 order would put the second before the first.
        ([("\U00010000", False), ("\uffff", False)], ("\uffff", "\U00010000")),
    ],
)
def test_what_blocks_is_sorted_by_bytes_and_unique(
    dependencies: list[tuple[str, bool]], blocking: tuple[str, ...]
) -> None:
    assert blocked_by(dependencies) == blocking


@pytest.mark.parametrize(
    ("kind", "attributes", "queues"),
    [
        (Kind.ADD_MEMORY, {"name": "s"}, set()),
        (Kind.CREATE_TASK_STREAM, {"name": "s", "user_id": "u"}, {("stream", "s")}),
        (
            Kind.ADD_TASK_STEP,
            {"stream_name": "s", "idempotency_key": "k", "name": "n"},
            {("stream", "s"), ("step", "k")},
        ),
        (
            Kind.COMPLETE_STEP,
            {"stream_name": "s", "idempotency_key": "k"},
            {("stream", "s"), ("step", "k")},
        ),
        (Kind.COMPLETE_STEP, {"idempotency_key": "k"}, {("step", "k")}),
        (Kind.COMPLETE_STEP, {"stream_name": None, "idempotency_key": "k"}, {("step", "k")}),
    ],
)
def test_the_queues_of_each_kind(
    kind: Kind, attributes: dict[str, object], queues: set[tuple[str, str]]
) -> None:
    assert turns(kind, attributes) == queues


def test_a_stream_and_a_step_of_one_name_share_no_queue() -> None:
    stream = turns(Kind.CREATE_TASK_STREAM, {"name": "x"})
    assert not stream & turns(Kind.COMPLETE_STEP, {"idempotency_key": "x"})
