"""The arithmetic of measured ratios, the page they are written to, and the judges of what was measured."""

from collections.abc import Iterable, Sequence

import msgspec
import pytest

from bench.measure import flushes, page
from bench.measure.bare_session import batches
from bench.measure.figures import (
    BELOW_THE_FLOOR,
    BY_KEY,
    NO_TARGET,
    REACHES_THE_AIM,
    REACHES_THE_FLOOR,
    TARGETS,
    Figure,
    Machine,
    Round,
    Run,
    quantile,
    serial_bound,
    verdict,
)
from bench.measure.mixed_load import uncommitted
from bench.measure.rounds import in_turns
from bench.measure.sse_fanout import Follower
from bench.measure.sse_fanout import complaints as complaints_of
from tests.support.strace import Call

MACHINE = Machine(
    processor="A processor",
    cores=2,
    memory_bytes=24 * 2**30,
    kernel="Linux 6.18",
    file_system="ext4",
    python="3.11.7",
    versions={"SQLite": "3.54.1"},
    commit="0123abc",
)


def figure(key: str, *pairs: tuple[float, float], note: str = "") -> Figure:
    rounds = tuple(Round(ours, limit) for ours, limit in pairs)
    return Figure(key=key, rounds=rounds, load_before=1.25, load_after=3.0, note=note)


def run_of(*figures: Figure, wrong: tuple[str, ...] = ()) -> Run:
    return Run(
        command="scripts/bench targets",
        began="2026-01-02 03:04 UTC",
        seconds=321.4,
        machine=MACHINE,
        figures=figures,
        wrong=wrong,
    )


# Arithmetic


def test_the_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_the_medians() -> None:
    found = figure("3", (10.0, 100.0), (300.0, 1000.0), (50.0, 100.0))

    assert found.ratio == 0.3
    assert found.ours / found.limit == 0.5  # The machine was ten times as fast in the second round.
    assert found.spread == (0.1, 0.5)


@pytest.mark.parametrize(
    ("key", "ratio", "expected"),
    [
        ("3", 0.32, BELOW_THE_FLOOR),
        ("3", 0.33, REACHES_THE_FLOOR),
        ("3", 0.44, REACHES_THE_FLOOR),
        ("3", 0.45, REACHES_THE_AIM),
        ("5", 3.01, BELOW_THE_FLOOR),
        ("5", 3.0, REACHES_THE_FLOOR),
        ("5", 1.5, REACHES_THE_AIM),
        ("6", 0.21, BELOW_THE_FLOOR),
        ("6", 0.02, REACHES_THE_FLOOR),
        ("7-many", 0.5, NO_TARGET),
        ("7-many", 0.99, REACHES_THE_AIM),
        ("1-thread", 0.01, NO_TARGET),
    ],
)
def test_a_verdict_knows_which_way_is_better(key: str, ratio: float, expected: str) -> None:
    assert verdict(BY_KEY[key], ratio) == expected


def test_every_floor_lies_before_its_aim() -> None:
    both = [each for each in TARGETS if each.floor is not None and each.aim is not None]

    assert len(both) >= 8
    for target in both:
        assert verdict(target, target.floor or 0) == REACHES_THE_FLOOR
        assert verdict(target, target.aim or 0) == REACHES_THE_AIM
    assert len(BY_KEY) == len(TARGETS)


def test_a_quantile_is_a_measured_value() -> None:
    values = list(range(100, 0, -1))

    assert [quantile(values, share) for share in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1, 50, 95, 99, 100]
    assert quantile([7.0], 0.99) == 7.0
    with pytest.raises(AssertionError, match="nothing was measured"):
        quantile([], 0.5)


def test_two_steps_on_one_processor() -> None:
    assert serial_bound(200.0, 200.0) == 100.0
    assert serial_bound(1000.0, 250.0) == 200.0


def test_turns_go_forth_and_back_and_results_keep_their_places() -> None:
    order: list[str] = []

    def call(name: str) -> str:
        order.append(name)
        return name

    calls = [lambda: call("a"), lambda: call("b"), lambda: call("c")]

    assert [in_turns(number, calls) for number in range(2)] == [["a", "b", "c"]] * 2
    assert order == ["a", "b", "c", "c", "b", "a"]


def test_batches_of_the_bare_session_hold_every_text_once_and_keep_the_limits() -> None:
    texts: list[Sequence[int]] = [[0] * length for length in (300, 200, 13, 600, 5, *[30] * 40, *[64] * 9)]

    found = batches(texts)

    assert sorted(map(len, texts)) == [len(text) for batch in found for text in batch]
    assert all(len(batch) <= 8 for batch in found)
    assert all(len(batch) * len(batch[-1]) <= 512 or len(batch) == 1 for batch in found)


# The page


def test_the_table_has_a_row_for_each_figure_with_its_verdict() -> None:
    found = run_of(
        figure("3", (622.0, 3500.0)),
        figure("5", (20.0, 10.0), note="311 requests/s."),
        figure("6", (0.07, 1.0)),
        wrong=(),
    )
    lines = page.section(found).splitlines()

    assert "    scripts/bench targets" in lines
    [accepts] = [line for line in lines if line.startswith("| 3 |")]
    assert accepts.endswith(
        "| 622/s | 3,500/s | **0.18** (0.18 to 0.18, 1) | >= 0.33 | >= 0.45 | below the floor | 1.2, 3.0 |"
    )
    [latency] = [line for line in lines if line.startswith("| 5 |")]
    assert latency.endswith(
        "| 20 ms | 10 ms | **2.00** (2.00 to 2.00, 1) | <= 3 | <= 1.5 | reaches the floor | 1.2, 3.0 |"
    )
    [bare] = [line for line in lines if line.startswith("| 6 |")]
    assert "| 0.07 | | **0.07**" in bare
    assert "Of 3 figures, 1 are below the floor: 3." in lines
    assert "- 5: 311 requests/s." in lines
    assert lines[-1].startswith("Everything that was counted was right")
    assert not [line for line in lines if line.endswith(" ")]


def test_what_is_wrong_stands_on_the_page() -> None:
    text = page.section(run_of(figure("6", (0.07, 1.0)), wrong=("3 of 9 accepted operations are lost",)))

    assert "**wrong**" in text
    assert text.endswith("- 3 of 9 accepted operations are lost")
    assert "Everything that was counted was right" not in text


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    before = f"# Measurements\n\nText.\n\n{page.BEGIN}\nold\n{page.END}\n\n## More\n"

    after = page.replaced(before, "\n    new\n")

    assert after == f"# Measurements\n\nText.\n\n{page.BEGIN}\n\n    new\n\n{page.END}\n\n## More\n"
    assert page.replaced(after, "    new") == after


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        page.BEGIN,
        page.END,
        f"{page.END} {page.BEGIN}",
        f"{page.BEGIN} {page.BEGIN} {page.END}",
        f"{page.BEGIN} {page.END} {page.END}",
    ],
)
def test_a_page_without_its_markers_is_left_alone(text: str) -> None:
    with pytest.raises(page.NoMarkersError):
        page.replaced(text, "new")


def test_a_run_is_read_back_as_it_was_written() -> None:
    written = run_of(figure("3", (1.0, 3.0), (2.0, 3.0), note="a note"), wrong=("one",))

    assert msgspec.json.decode(msgspec.json.encode(written), type=Run) == written


def test_the_terminal_shows_the_same_verdict() -> None:
    text = page.table(run_of(figure("3", (622.0, 3500.0)), wrong=("lost",)))

    assert "622/s / 3,500/s = 0.18 (0.18 to 0.18)  floor >= 0.33 aim >= 0.45  below the floor" in text
    assert text.endswith("WRONG           lost")


# Flushes before answers

WAL = "7</store/ledger.db-wal>"
FIRST, SECOND = "flushed-000000001", "flushed-000000002"


def record(*shown: tuple[str, str]) -> list[Call]:
    """Calls, one after the other, each returning before the next begins."""
    return [
        Call(
            thread=1,
            name=name,
            arguments=arguments,
            began=2 * place,
            returned=2 * place + 1,
            seconds=0.0,
            result=0,
            injected=False,
        )
        for place, (name, arguments) in enumerate(shown)
    ]


def asked(name: str, descriptor: int = 20) -> tuple[str, str]:
    return "read", f'{descriptor}<socket:[1]>, "POST /api/v2/operations HTTP/1.1 {name}"'


def logged(*names: str) -> tuple[str, str]:
    return "pwrite64", f'{WAL}, "{" ".join(names)}"'


def answered(descriptor: int = 20) -> tuple[str, str]:
    return "write", f'{descriptor}<socket:[1]>, "HTTP/1.1 202 Accepted"'


FLUSH = ("fdatasync", WAL)
OTHER_FLUSH = ("fdatasync", "6</store/ledger.db>")


def complaints(shown: Iterable[tuple[str, str]], *names: str) -> list[str]:
    return flushes.complaints(record(*shown), names, "flushed")


def test_answers_after_the_flush_that_covers_them_are_right() -> None:
    shown = [
        asked(FIRST),
        asked(SECOND, 21),
        logged(FIRST, SECOND),
        FLUSH,
        answered(21),
        answered(),
    ]

    assert complaints(shown, FIRST, SECOND) == []
    assert flushes.bearing(record(*shown), "flushed") == 1


def test_two_commits_are_two_flushes() -> None:
    shown = [
        asked(FIRST),
        logged(FIRST),
        FLUSH,
        answered(),
        FLUSH,
        asked(SECOND),
        logged(SECOND),
        FLUSH,
        answered(),
    ]

    assert complaints(shown, FIRST, SECOND) == []
    assert flushes.bearing(record(*shown), "flushed") == 2


@pytest.mark.parametrize(
    ("shown", "complaint"),
    [
        ([asked(FIRST), logged(FIRST), answered(), FLUSH], "no flush"),
        ([asked(FIRST), FLUSH, logged(FIRST), answered()], "no flush"),
        ([asked(FIRST), logged(FIRST), OTHER_FLUSH, answered()], "no flush"),
        ([asked(FIRST), logged(SECOND), FLUSH, answered()], "no flush"),
        ([logged(FIRST), FLUSH, asked(FIRST), answered()], "no flush"),
        ([asked(FIRST), logged(FIRST), FLUSH], "no 202"),
        ([logged(FIRST), FLUSH, answered()], "no request"),
    ],
    ids=["late", "early", "of another file", "of another operation", "before", "unanswered", "unasked"],
)
def test_control_an_answer_without_its_flush_is_noticed(shown: list[tuple[str, str]], complaint: str) -> None:
    [found] = complaints(shown, FIRST)

    assert found.startswith(FIRST)
    assert complaint in found


def test_a_flush_that_failed_covers_nothing() -> None:
    calls = record(asked(FIRST), logged(FIRST), FLUSH, answered())
    calls[2] = msgspec.structs.replace(calls[2], result=-1)

    assert len(flushes.complaints(calls, [FIRST], "flushed")) == 1


# Followers


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def frames(*sequences: int) -> bytes:
    return b"".join(b"id: %d\nevent: operation_state\ndata: {}\n\n" % each for each in sequences)


def heard(*pieces: bytes, ended: bool = True) -> Follower:
    follower = Follower(b"", kept=True)
    for piece in pieces:
        follower.data_received(piece)
    if ended:
        follower.connection_lost(None)
    return follower


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = HEAD + chunk(frames(1)) + chunk(frames(2, 3)) + chunk(frames(4)) + b"0\r\n\r\n"


def test_frames_are_counted_wherever_a_piece_ends() -> None:
    for cut in range(1, len(STREAM)):
        follower = heard(STREAM[:cut], STREAM[cut:])
        assert (follower.count, follower.whole) == (4, True), cut
        assert complaints_of([follower], 4, stalled=False) == []
    assert heard(*(STREAM[place : place + 1] for place in range(len(STREAM)))).count == 4


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (STREAM.replace(chunk(frames(2, 3)), chunk(frames(2))), "other than 4 events"),
        (STREAM.replace(chunk(frames(2, 3)), chunk(frames(3, 2))), "not 1, 2, 3"),
        (STREAM.replace(chunk(frames(2, 3)), chunk(frames(2, 2))), "not 1, 2, 3"),
        (STREAM.removesuffix(b"0\r\n\r\n"), "closed before the end"),
    ],
    ids=["missing", "out of order", "doubled", "cut"],
)
def test_control_a_follower_that_heard_something_else_is_noticed(stream: bytes, complaint: str) -> None:
    assert any(complaint in each for each in complaints_of([heard(stream)], 4, stalled=False))


def test_a_slow_follower_is_not_wrong_and_a_stalled_one_is() -> None:
    slow = heard(STREAM[:-20], ended=False)

    assert complaints_of([slow], 4, stalled=False) == []
    assert complaints_of([slow], 4, stalled=True) != []


def test_what_was_acknowledged_and_is_not_committed_is_named() -> None:
    states = {"a": "committed", "b": "processing", "c": "committed without a memory"}

    assert uncommitted(["a", "b", "c", "d"], states) == [
        "b: processing",
        "c: committed without a memory",
        "d: lost",
    ]
