"""What the ingesting child gets to do: full requests, fair ones, and suspects alone."""

import itertools
from collections import Counter
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muniment.core import ingestion
from muniment.core.ingestion import (
    PLAN_BYTES_MAX,
    SUSPECT_WAIT_SECONDS,
    EmbedRequest,
    Ingestion,
    Limits,
    Piece,
    PlanRequest,
    Request,
    alike,
    retry_seconds,
)

TOKENS_MAX: Final = 64
RETRY_SECONDS_MAX: Final = 30.0
LIMITS: Final = Limits(batch_tokens_max=TOKENS_MAX, retry_seconds_max=RETRY_SECONDS_MAX)
PLANNING: Final = -1
Key = tuple[int, int]


def pieces(tokens: list[int]) -> list[Piece]:
    return [Piece(index, count, index * 10, index * 10 + 10) for index, count in enumerate(tokens)]


def keys(request: Request) -> list[Key]:
    if isinstance(request, PlanRequest):
        return [(n, PLANNING) for n in request.operations]
    return [(n, piece.index) for n, piece in request.pieces]


class World:
    """A child that keeps two requests, ends on poison, and is told everything that it must be told."""

    def __init__(
        self, texts: dict[int, list[int]], poison: set[Key], work: type[Ingestion] = Ingestion
    ) -> None:
        self.work = work(LIMITS)
        self.texts = texts
        self.poison = poison
        self.now = 0.0
        self.with_child: list[Request] = []
        self.done: Counter[Key] = Counter()
        self.lost: Counter[Key] = Counter()
        self.tried: dict[Key, list[float]] = {}
        self.ended: set[int] = set()
        for n in texts:
            self.work.admit(n, 100, isolated=False, now=0.0)

    def ask(self) -> bool:
        """Fill the child; True if it got something."""
        got = False
        while len(self.with_child) < 2 and (request := self.work.next(self.now)) is not None:
            self.check(request)
            self.with_child.append(request)
            got = True
        return got

    def check(self, request: Request) -> None:
        """What holds of every request."""
        if isinstance(request, EmbedRequest):
            tokens = sum(piece.tokens for _, piece in request.pieces)
            assert tokens <= TOKENS_MAX or len(request.pieces) == 1
        assert not any(other.alone for other in self.with_child)
        if request.alone:
            assert not self.with_child
        for key in keys(request):
            assert self.done[key] == 0, "embedded again"
            if self.lost[key]:
                assert request.alone
                assert keys(request) == [key]
        if request.alone and len(keys(request)) == 1:
            self.tried.setdefault(keys(request)[0], []).append(self.now)

    def answer(self) -> None:
        """The child answers its first request, or ends on it and takes both along."""
        first = self.with_child[0]
        if not self.poison.isdisjoint(keys(first)):
            gone, self.with_child = self.with_child, []
            for request in gone:
                self.lost.update(keys(request))
                self.work.lost(request, self.now)
            return
        self.with_child.pop(0)
        self.done.update(keys(first))
        self.work.succeeded(first)
        if isinstance(first, PlanRequest):
            for n in first.operations:
                self.work.has_plan(n, 100 + n, pieces(self.texts[n]), complete=True, now=0.0)
        for n in first.operations:
            job = self.work.job(n)
            if job is not None and job.done:
                self.work.drop(n)
                self.ended.add(n)

    def run(self, steps: int) -> None:
        """Work until nothing is left, or so many answers were given. Time moves only where it must."""
        for _ in range(steps):
            self.ask()
            if self.with_child:
                self.answer()
                self.now += 0.01
            else:
                moment = self.work.wake_at(self.now)
                if moment is None:
                    return
                self.now = moment


texts = st.dictionaries(
    st.integers(1, 12), st.lists(st.integers(1, TOKENS_MAX + 10), min_size=1, max_size=12), min_size=1
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[int, list[int]], set[Key]]:
    chosen = draw(texts)
    everything = [(n, index) for n, counts in chosen.items() for index in range(PLANNING, len(counts))]
    return chosen, draw(st.sets(st.sampled_from(everything), max_size=3))


@given(worlds())
def test_all_that_is_healthy_is_done_once_whatever_is_poison(
    drawn: tuple[dict[int, list[int]], set[Key]],
) -> None:
    chosen, poison = drawn
    world = World(chosen, poison)
    world.run(600)

    unplanned = {n for n, index in poison if index == PLANNING}
    reachable = {
        (n, index)
        for n, counts in chosen.items()
        for index in range(PLANNING, 0 if n in unplanned else len(counts))
    }
    assert dict.fromkeys(reachable - poison, 1) == dict(world.done)
    assert world.ended == chosen.keys() - {n for n, _ in poison}
    assert world.work.stuck() == len(chosen) - len(world.ended)


@given(worlds())
def test_what_fails_alone_is_tried_ever_more_rarely_and_never_given_up(
    drawn: tuple[dict[int, list[int]], set[Key]],
) -> None:
    chosen, poison = drawn
    world = World(chosen, poison)
    world.run(1500)

    unplanned = {n for n, index in poison if index == PLANNING}
    for key in poison:
        if key[0] in unplanned and key[1] != PLANNING:
            continue
        moments = world.tried[key]
        pauses = [later - earlier for earlier, later in itertools.pairwise(moments)]
        assert len(pauses) > 4
        for count, pause in enumerate(pauses, start=1):
            assert pause >= retry_seconds(count, RETRY_SECONDS_MAX) - 1e-6


def test_the_pause_doubles_up_to_its_bound() -> None:
    assert [retry_seconds(failures, 30.0) for failures in (1, 2, 3, 5, 6, 7, 5000)] == [
        1.0,
        2.0,
        4.0,
        16.0,
        30.0,
        30.0,
        30.0,
    ]


def test_a_long_memory_holds_no_short_one_back() -> None:
    world = World({1: [16] * 4000}, set())
    for _ in range(20):
        world.ask()
        world.answer()
    world.texts |= {2: [16, 16], 3: [16]}
    for n in (2, 3):
        world.work.admit(n, 100, isolated=False, now=0.0)
    answers = 0
    while not {2, 3} <= world.ended:
        world.ask()
        world.answer()
        answers += 1
    assert answers <= 6
    assert 1 not in world.ended


def test_parts_of_many_memories_share_a_request() -> None:
    world = World({n: [10] for n in range(1, 31)}, set())
    sizes = []
    while len(world.ended) < 30:
        world.ask()
        sizes += [len(keys(world.with_child[0]))]
        world.answer()
    assert sizes[0] == 30, "one request plans them all"
    assert sizes[1:] == [6, 6, 6, 6, 6]


PARTS = st.lists(st.integers(1, TOKENS_MAX + 10), min_size=1, max_size=40)


@given(PARTS)
def test_the_part_whose_turn_it_is_goes_with_those_nearest_in_length(tokens: list[int]) -> None:
    parts = list(enumerate(pieces(tokens)))
    chosen = [n for n, _ in alike(parts, TOKENS_MAX)]

    assert len(set(chosen)) == len(chosen)
    assert 0 in chosen
    lengths = [tokens[n] for n in chosen]
    assert lengths == sorted(lengths)
    assert sum(lengths) <= TOKENS_MAX or chosen == [0]
    shorter = [tokens[n] for n in range(len(tokens)) if n not in chosen and tokens[n] < lengths[-1]]
    longer = [tokens[n] for n in range(len(tokens)) if n not in chosen and tokens[n] > lengths[0]]
    assert max(shorter, default=0) <= lengths[0], "one in between was left out"
    assert min(longer, default=999) >= lengths[-1], "one in between was left out"
    room = TOKENS_MAX - sum(lengths)
    assert max(shorter, default=999) > room, "room was left"
    assert min(longer, default=999) > room, "room was left"


def padded(work: type[Ingestion]) -> float:
    """Tokens with padding for each one without, were every request one inference."""
    lengths = [12, 30] * 60
    world = World({n: [length] for n, length in enumerate(lengths, start=1)}, set(), work)
    width = 0
    while len(world.ended) < len(lengths):
        world.ask()
        request = world.with_child[0]
        if isinstance(request, EmbedRequest):
            width += len(request.pieces) * max(piece.tokens for _, piece in request.pieces)
        world.answer()
    return width / sum(lengths)


def answers_until_taken(work: type[Ingestion]) -> int:
    """How often the child answers until the one long part is done, in a steady stream of short ones."""
    world = World({n: [10] for n in range(1, 41)} | {41: [60]}, set(), work)
    for answers in range(100):
        if 41 in world.ended:
            return answers
        n = 42 + 10 * answers
        world.texts |= {more: [10] for more in range(n, n + 10)}
        for more in range(n, n + 10):
            world.work.admit(more, 100, isolated=False, now=0.0)
        world.ask()
        world.answer()
    return 100


def test_parts_of_one_length_share_a_request() -> None:
    assert padded(Ingestion) < 1.15


def test_a_part_of_a_rare_length_waits_for_those_before_it_alone() -> None:
    assert answers_until_taken(Ingestion) <= 2 * (40 * 10 // TOKENS_MAX + 4)


def test_a_suspect_gets_its_turn_under_a_steady_stream_of_healthy_work() -> None:
    world = World({1: [10], 2: [10]}, {(1, 0)})
    n = 2
    while (1, 0) not in world.tried:
        n += 1
        world.texts[n] = [60]
        world.work.admit(n, 100, isolated=False, now=0.0)
        world.ask()
        world.answer()
        world.now += 0.1
        assert world.now < 3 * SUSPECT_WAIT_SECONDS
    assert world.now > SUSPECT_WAIT_SECONDS


def test_stuck_memories_are_counted_apart() -> None:
    world = World({1: [10], 2: [10]}, {(1, 0)})
    world.run(5)
    assert world.ended == {2}
    assert world.work.stuck() == 1
    assert world.work.stuck_operations(9) == [1]
    moment = world.work.wake_at(world.now)
    assert moment is not None
    request = world.work.next(moment)
    assert request is not None
    assert world.work.stuck() == 1, "also while it is tried again"
    world.work.lost(request, moment)
    assert world.work.stuck() == 1
    assert len(world.work) == 1
    world.work.drop(1)
    assert world.work.wake_at(world.now) is None


def test_what_saw_a_child_end_before_shares_no_request_until_it_succeeds() -> None:
    work = Ingestion(LIMITS)
    work.resume(1, 100, 7, isolated=True)
    work.resume(2, 100, 8, isolated=False)
    for job in work.hungry(10):
        work.more(job.n, pieces([10, 10, 50]), complete=True, now=0.0)
    first = work.next(0.0)
    second = work.next(0.0)
    assert isinstance(first, EmbedRequest)
    assert isinstance(second, EmbedRequest)
    assert first.operations == second.operations == (2,)
    assert work.next(0.0) is None
    work.succeeded(first)
    work.succeeded(second)
    third = work.next(0.0)
    assert third is not None
    assert third.alone
    assert keys(third) == [(1, 0)]
    assert work.next(0.0) is None
    work.succeeded(third)
    fourth = work.next(0.0)
    assert fourth is not None
    assert not fourth.alone
    assert keys(fourth) == [(1, 1), (1, 2)]


def test_what_saw_a_child_end_before_is_planned_alone() -> None:
    work = Ingestion(LIMITS)
    work.admit(1, 100, isolated=True, now=0.0)
    work.admit(2, 100, isolated=False, now=0.0)
    assert work.next(0.0) == PlanRequest((2,))
    assert work.next(0.0) is None
    work.succeeded(PlanRequest((2,)))
    assert work.next(0.0) == PlanRequest((1,), alone=True)


def test_a_memory_of_many_parts_is_loaded_in_pieces() -> None:
    work = Ingestion(LIMITS)
    work.resume(1, 100, 7, isolated=False)
    (job,) = work.hungry(4)
    assert work.hungry(4) == []
    work.more(1, pieces([10, 10]), complete=False, now=0.0)
    assert job.last == 1
    assert work.hungry(4) == [job]
    work.more(1, [Piece(2, 10, 20, 30)], complete=True, now=0.0)
    assert work.hungry(4) == []
    request = work.next(0.0)
    assert request is not None
    assert keys(request) == [(1, 0), (1, 1), (1, 2)]
    work.succeeded(request)
    assert job.done


def test_sources_are_planned_together_within_a_bound_of_bytes() -> None:
    work = Ingestion(LIMITS)
    for n, size in enumerate([PLAN_BYTES_MAX - 10, 10, 1, 10 * PLAN_BYTES_MAX, 5], start=1):
        work.admit(n, size, isolated=False, now=0.0)
    asked = []
    while (request := work.next(0.0)) is not None:
        asked.append(keys(request))
    assert asked == [[(1, -1), (2, -1)], [(3, -1)], [(4, -1)], [(5, -1)]]


# Controls: rules that are taken away must not pass unnoticed


class SharesWithSuspects(Ingestion):
    def lost(self, request: Request, now: float) -> None:
        super().lost(request, now)
        for suspect in list(self._suspects.values()):
            self._clear(suspect)
            if suspect.piece is not None:
                self._jobs[suspect.n].pieces.appendleft(suspect.piece)
            else:
                self._unplanned.append(suspect.n)


class TriesAtOnce(Ingestion):
    def lost(self, request: Request, now: float) -> None:
        super().lost(request, now)
        for key, suspect in self._suspects.items():
            self._suspects[key] = msgspec.structs.replace(suspect, due=now)


class GivesUp(Ingestion):
    def lost(self, request: Request, now: float) -> None:
        super().lost(request, now)
        for n in request.operations:
            self.drop(n)


class Overfills(Ingestion):
    def __init__(self, limits: Limits) -> None:
        super().__init__(msgspec.structs.replace(limits, batch_tokens_max=2 * TOKENS_MAX))


class InTurnAlone(Ingestion):
    """As the parts come."""

    def _plan_or_embed(self) -> Request | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ingestion, "LOOK_AHEAD", 1)
            return super()._plan_or_embed()


class ShortestFirst(Ingestion):
    """Little is padded, and what is long starves."""

    def _plan_or_embed(self) -> Request | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                ingestion,
                "alike",
                lambda parts, most: alike(sorted(parts, key=lambda each: each[1].tokens), most),
            )
            return super()._plan_or_embed()


def test_control_parts_that_go_as_they_come_are_padded() -> None:
    assert padded(InTurnAlone) > 1.4


def test_control_what_is_longest_starves_where_no_turn_is_kept() -> None:
    assert answers_until_taken(ShortestFirst) == 100


@pytest.mark.parametrize("mutant", [SharesWithSuspects, TriesAtOnce, GivesUp, Overfills])
def test_control_a_broken_rule_is_noticed(mutant: type[Ingestion]) -> None:
    chosen = {n: [20, 20, 20] for n in range(1, 8)}
    world = World(chosen, {(3, 1)}, mutant)
    with pytest.raises(AssertionError):
        judge(world)


def judge(world: World) -> None:
    world.run(200)
    assert world.ended == world.texts.keys() - {3}
    moments = world.tried[3, 1]
    assert all(
        later - earlier >= retry_seconds(count, RETRY_SECONDS_MAX) - 1e-6
        for count, (earlier, later) in enumerate(itertools.pairwise(moments), start=1)
    )
    assert world.work.job(3) is not None


def test_the_controls_judge_passes_what_is_right() -> None:
    judge(World({n: [20, 20, 20] for n in range(1, 8)}, {(3, 1)}))
