"""Task rules: one stream a name and owner, one step a key and stream, one completion; equal again is fine."""

from typing import Any

import pytest

from muniment.core import tasks
from muniment.core.tables import Row
from muniment.core.tasks import Effect, Refused
from muniment.errors import InvariantBroken
from muniment.model.operation import Kind

SECRET = "caller text"


class World:
    """Streams and steps as a ledger would hold them; effects are carried out as they are decided."""

    def __init__(self) -> None:
        self.object = 0
        self._streams: list[Row] = []
        self._steps: list[Row] = []
        self._attributes: dict[int, dict[str, Any]] = {}

    def streams(self, name: str) -> list[Row]:
        return [row for row in self._streams if row["name"] == name]

    def stream_name(self, stream_n: int) -> str | None:
        return next((row["name"] for row in self._streams if row["object_n"] == stream_n), None)

    def steps(self, stream_n: int) -> list[Row]:
        return [row for row in self._steps if row["stream_n"] == stream_n]

    def find_steps(self, idempotency_key: str) -> list[Row]:
        return [row for row in self._steps if row["idempotency_key"] == idempotency_key]

    def attributes(self, object_n: int) -> dict[str, Any]:
        return self._attributes[object_n]

    def decide(self, kind: Kind, **payload: Any) -> Effect | Refused:
        self.object += 1
        decided = tasks.decide(kind, payload, self, f"stream:{self.object}", f"step:{self.object}")
        if isinstance(decided, Refused):
            assert SECRET not in decided.error, "a refusal is kept for ever, caller text is not"
            return decided
        self._attributes[self.object] = payload
        objects = (decided.stream, decided.step, decided.completion)
        assert sum(each is not None for each in objects) <= 1
        if decided.stream is not None:
            row = {"object_n": decided.stream.object, "key": decided.stream.key, **decided.text}
            self._streams.append(row)
        if decided.step is not None:
            step = decided.step
            self._steps.append(
                {
                    "object_n": step.object,
                    "key": step.key,
                    "stream_n": step.stream,
                    "ordinal": step.ordinal,
                    "completed_by": None,
                    **decided.text,
                }
            )
        if decided.completion is not None:
            [row] = [row for row in self._steps if row["object_n"] == decided.completion.step]
            row["completed_by"] = decided.completion.by
        return decided

    def stream(self, name: str = SECRET, **rest: Any) -> Any:
        return outcome(self.decide(Kind.CREATE_TASK_STREAM, name=name, **rest))

    def step(self, key: str = SECRET, stream: str = SECRET, name: str = SECRET, **rest: Any) -> Any:
        return outcome(
            self.decide(Kind.ADD_TASK_STEP, idempotency_key=key, stream_name=stream, name=name, **rest)
        )

    def complete(self, key: str = SECRET, **rest: Any) -> Any:
        return outcome(self.decide(Kind.COMPLETE_STEP, idempotency_key=key, **rest))


def outcome(decided: Effect | Refused) -> Any:
    return decided.reason if isinstance(decided, Refused) else decided.result


def test_a_stream_is_one_a_name_owner_and_agent() -> None:
    world = World()
    assert world.stream() == {"id": "stream:1", "existing": False}
    assert world.stream(user_id=None, description=None) == {"id": "stream:1", "existing": True}
    assert world.stream(user_id="u") == {"id": "stream:3", "existing": False}
    assert world.stream(user_id="u", agent_id="a") == {"id": "stream:4", "existing": False}
    assert world.stream(user_id="") == {"id": "stream:5", "existing": False}
    assert world.stream(description="another") == "stream_differs"


def test_a_step_is_one_a_key_and_stream() -> None:
    world = World()
    assert world.step() == "stream_not_found"
    world.stream()
    world.stream("second")
    assert world.step() == {"id": "step:4", "task_stream_id": "stream:2", "existing": False}
    assert world.step(ordinal=None, description=None) == {
        "id": "step:4",
        "task_stream_id": "stream:2",
        "existing": True,
    }
    assert world.step(ordinal=1)["existing"] is True
    assert world.step(stream="second")["id"] == "step:7"
    assert world.step(user_id="u") == "stream_not_found"
    for differing in ({"name": "other"}, {"ordinal": 2}, {"ordinal": 0}, {"description": ""}):
        assert world.step(**differing) == "step_differs"


@pytest.mark.parametrize(("given", "stored"), [({}, 1), ({"ordinal": None}, 1), ({"ordinal": 0}, 0)])
def test_an_absent_ordinal_is_one_and_zero_is_zero(given: dict[str, Any], stored: int) -> None:
    world = World()
    world.stream()
    world.step(**given)
    assert world._steps[0]["ordinal"] == stored


def test_a_completion_is_once_and_equal_again() -> None:
    world = World()
    assert world.complete() == "step_not_found"
    world.stream()
    world.step()
    first = world.complete(result={"a": 1, "b": [1]})
    assert first == {"id": "step:3", "status": "completed", "existing": False}
    assert world.complete(result={"b": [1], "a": 1}) == first | {"existing": True}
    for differing in ({"a": 1.5, "b": [1]}, {"a": True, "b": [1]}, None, {}):
        assert world.complete(result=differing) == "completion_differs"
    assert world.complete() == "completion_differs"


def test_true_and_one_are_two_results_and_null_is_an_absent_one() -> None:
    world = World()
    world.stream()
    for key, result in (("k1", 1), ("k2", None)):
        world.step(key)
        world.complete(key, result=result)
    assert world.complete("k1", result=True) == "completion_differs"
    assert world.complete("k1", result=1)["existing"] is True
    assert world.complete("k2")["existing"] is True
    assert world.complete("k2", result=False) == "completion_differs"


def test_a_key_in_several_streams_needs_the_stream() -> None:
    world = World()
    for name in ("one", "two"):
        world.stream(name)
        world.step(stream=name)
    ambiguous = world.decide(Kind.COMPLETE_STEP, idempotency_key=SECRET)
    assert isinstance(ambiguous, Refused)
    assert ambiguous.reason == "step_ambiguous"
    assert "step:2, step:4" in ambiguous.error
    assert "stream_name" in ambiguous.error
    assert world.complete(stream_name="two")["id"] == "step:4"
    assert world.complete(stream_name="three") == "step_not_found"


def test_a_memory_is_no_task_operation() -> None:
    with pytest.raises(InvariantBroken):
        World().decide(Kind.ADD_MEMORY, content="c")
