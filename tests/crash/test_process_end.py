"""How a server process ends, and what the next one finds: asked to, killed, refused, or by a fault."""

import json
import os
import shutil
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import apsw
import httpx
import pytest

from muniment.adapters.embedders.synthetic import SyntheticEmbedder
from muniment.adapters.files.directory import OWNER_FILE, owner
from muniment.adapters.sqlite.store import LEDGER_FILE, SqliteReader
from muniment.core.planning import model_digest
from muniment.model import command
from tests.support import operations, stores, submissions, truth
from tests.support.live import OPERATIONS, executor_pid, patched
from tests.support.server import Server
from tests.support.truth import Accepted, Fact, Indexed, Stood
from tests.support.wrapped import WrappedServer

EXIT_DONE: Final = 0
EXIT_FAULT: Final = 1
EXIT_REFUSED: Final = 3
ANSWER_SECONDS: Final = 20.0
SETTLE_SECONDS: Final = 60.0
IN_FLIGHT_SECONDS: Final = 1.0
"""After this long a request to a stopped child is on its way."""
REST_SECONDS: Final = 0.3
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
TERMINAL: Final = ("committed", "rejected")


def client_of(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=ANSWER_SECONDS)


def accepted(client: httpx.Client, operation: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(OPERATIONS, json=operation)
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    return found


def receipt(client: httpx.Client, name: str) -> dict[str, Any]:
    answer = client.get(f"{OPERATIONS}/{name}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def until(client: httpx.Client, name: str, *states: str) -> dict[str, Any]:
    give_up = time.monotonic() + SETTLE_SECONDS
    while (found := receipt(client, name))["state"] not in states:
        assert time.monotonic() < give_up, found
        time.sleep(0.01)
    return found


def facts_of(*found: dict[str, Any]) -> Iterator[Fact]:
    for each in found:
        yield Accepted(each["operation_id"], each["payload_hash"])
        yield Stood(each["operation_id"], each["state"])


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    address = urlsplit(server.url)
    assert address.hostname
    assert address.port
    with socket.create_connection((address.hostname, address.port), timeout=ANSWER_SECONDS) as connection:
        yield connection


def read_until(connection: socket.socket, ending: bytes) -> bytes:
    """Read up to ``ending``, or to the end of the stream where that is empty."""
    data = b""
    while not (ending and ending in data):
        more = connection.recv(65536)
        if not more:
            assert not ending, f"the stream ended before {ending!r}: {data!r}"
            return data
        data += more
    return data


def expecting(operation: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """A POST in three pieces: the head, which asks to be told when it is read, and two halves of the body."""
    body = json.dumps(operation).encode()
    head = f"POST {OPERATIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    ending = f"content-length: {len(body)}\r\nconnection: close\r\nexpect: 100-continue\r\n\r\n"
    return (head + ending).encode(), body[: len(body) // 2], body[len(body) // 2 :]


# Asked to end


def drained(data: Path, number: signal.Signals, **settings: Any) -> list[Fact]:
    """Ask a server to end that has an open stream and a POST half sent; return what it acknowledged."""
    with Server(data, **settings) as server:
        with client_of(server) as client:
            committed = accepted(client, submissions.memory("committed"))
            blocked = accepted(client, {**submissions.memory("blocked"), "dependencies": ["never"]})
            done = until(client, "committed", "committed")
            until(client, "blocked", "blocked")
        head, first, rest = expecting(submissions.memory("half-sent"))
        with connected(server) as stream, connected(server) as posting, connected(server) as idle:
            stream.sendall(f"GET {OPERATIONS}/blocked/events HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            read_until(stream, b"id: 3\n")
            posting.sendall(head)
            read_until(posting, CONTINUE)
            posting.sendall(first)
            os.kill(server.pid, number)
            # The stream ends in order, so the server has heard. Only then comes the rest of the body.
            assert read_until(stream, b"").endswith(b"0\r\n\r\n")
            assert read_until(idle, b"") == b""
            time.sleep(REST_SECONDS)
            posting.sendall(rest)
            answer = read_until(posting, b"")
        assert server.wait() == EXIT_DONE
    head_text, _, body = answer.removeprefix(CONTINUE).partition(b"\r\n\r\n")
    assert head_text.startswith(b"HTTP/1.1 202 "), f"the open POST got {answer!r}"
    return list(facts_of(committed, blocked, done, json.loads(body)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_server_that_is_asked_to_end_drains(tmp_path: Path, number: signal.Signals) -> None:
    data = tmp_path / "store"

    facts = drained(data, number)

    assert owner(data) is None
    assert sorted(path.name for path in data.iterdir()) == ["ledger.db", "lock", "probe"]
    truth.verify(data, facts)
    with Server(data) as server, client_of(server) as client:
        last = until(client, "half-sent", "committed")
        assert server.terminate() == EXIT_DONE
    truth.verify(data, facts_of(last))


def test_control_an_answer_that_is_not_waited_for_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(
        (AssertionError, ConnectionError), match=r"the open POST got|Broken pipe|reset by peer"
    ):
        drained(tmp_path / "store", signal.SIGTERM, drain_seconds=0.01)

    stores.checked(tmp_path / "store")


def test_an_open_request_cannot_keep_a_server_for_ever(tmp_path: Path) -> None:
    data = tmp_path / "store"
    head, first, _ = expecting(submissions.memory("never-sent"))
    with Server(data, drain_seconds=0.5) as server, connected(server) as posting:
        posting.sendall(head)
        read_until(posting, CONTINUE)
        posting.sendall(first)
        assert server.terminate() == EXIT_DONE
    assert stores.checked(data).operations == 0


# Killed


def long_text(words: int) -> str:
    return " ".join(f"Line {number} of the ledger names box {number * 7}." for number in range(words // 8))


def killed_and_gone_on(data: Path, tally: Path, environ: Mapping[str, str] | None = None) -> list[Fact]:
    """Kill a server in the middle of a long memory, start it again, and let everything end."""
    with Server(data, executor_tally=tally, environ=environ) as server:
        with client_of(server) as client:
            first = accepted(client, submissions.memory("long", long_text(40_000)))
            others = [accepted(client, submissions.memory(f"short-{n}", f"Short {n}.")) for n in range(3)]
            give_up = time.monotonic() + SETTLE_SECONDS
            while (shown := receipt(client, "long"))["executor_progress_seq"] < 8:
                assert time.monotonic() < give_up, shown
        server.kill()
        assert shown["state"] == "processing", "the text is too short to be killed in its middle"
        assert owner(data) is None
        assert (data / OWNER_FILE).exists()
        with closing(SqliteReader(data / LEDGER_FILE)) as reader:
            numbers, saved = reader.read(
                lambda reads: ({row["id"]: row["n"] for row in reads.rows("operation")}, truth.indexed(reads))
            )
        facts: list[Fact] = list(facts_of(first, *others, shown))
        facts += [Indexed(name, index, digest) for (name, index), digest in saved.items()]

        server.start()
        with client_of(server) as client:
            ended = [until(client, name, *TERMINAL) for name in ("long", "short-0", "short-1", "short-2")]
        assert server.terminate() == EXIT_DONE

    assert {each["state"] for each in ended} == {"committed"}
    embedded = Counter(line.split()[-1] for line in tally.read_text("utf-8").splitlines())
    once = {f"{numbers[name]}:{index}" for name, index in saved}
    print(f"killed with {len(once)} parts saved of {ended[0]['result']['parts']}")
    assert 0 < len(once) < ended[0]["result"]["parts"]
    assert once <= embedded.keys()
    again = sorted(label for label in once if embedded[label] != 1)
    assert not again, f"embedded again: {again[:3]}"
    return [*facts, *facts_of(*ended)]


def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    facts = killed_and_gone_on(tmp_path / "store", tmp_path / "tally")

    truth.verify(tmp_path / "store", facts)


EMBEDS_EVERYTHING: Final = """
from muniment.adapters.sqlite.rows import SqliteReads
def everything(self, plan_n, after, limit):
    return [row for row in self.parts(plan_n) if row["part_index"] > after][:limit]
SqliteReads.missing_parts = everything
"""


def test_control_work_that_is_done_again_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="embedded again"):
        killed_and_gone_on(
            tmp_path / "store", tmp_path / "tally", patched(tmp_path / "patch", EMBEDS_EVERYTHING)
        )

    stores.checked(tmp_path / "store")


def test_a_killed_child_is_evidence_and_its_operation_goes_on(tmp_path: Path) -> None:
    data = tmp_path / "store"
    with Server(data) as server:
        server.wait_ready("search_ready")
        with client_of(server) as client:
            before = accepted(client, submissions.memory("before"))
            done_before = until(client, "before", "committed")
            child = executor_pid(server)
            os.kill(child, signal.SIGSTOP)
            accepted(client, submissions.memory("in-flight", long_text(2000)))
            until(client, "in-flight", "validated")
            time.sleep(IN_FLIGHT_SECONDS)
            os.kill(child, signal.SIGKILL)
            done = until(client, "in-flight", *TERMINAL)
            assert executor_pid(server) != child
            untouched = receipt(client, "before")
        assert server.terminate() == EXIT_DONE

    assert done["state"] == "committed"
    assert done["executor_exit_count"] == 1
    assert "SIGKILL" in done["executor_last_exit"]
    assert done["executor_generation"] > done_before["executor_generation"]
    assert untouched == done_before
    truth.verify(data, facts_of(before, done_before, done))


# Refused


def serve_once(data: Path, **settings: Any) -> tuple[int, str]:
    """Start a server that ends by itself; return its exit status and what it said."""
    server = WrappedServer(data, [], log_dir=data.parent, **settings)
    server.launch()
    try:
        return server.wait(60.0), server.log
    finally:
        server.close()


def test_a_second_server_is_refused_and_told_where_the_first_one_is(tmp_path: Path) -> None:
    data = tmp_path / "store"
    with Server(data) as first:
        (tmp_path / "second").mkdir()
        second = WrappedServer(data, [], log_dir=tmp_path / "second")
        status = second.start_or_end()
        with client_of(first) as client:
            after = accepted(client, submissions.stream("after"))
            until(client, "after", "committed")
        assert first.terminate() == EXIT_DONE

    assert status == EXIT_REFUSED
    assert len(second.log.splitlines()) == 1
    assert "is owned by another process and serves at http://127.0.0.1:" in second.log
    truth.verify(data, facts_of(after))


def test_a_newer_store_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    data = tmp_path / "store"
    stores.sqlite(data).close()
    with closing(apsw.Connection(str(data / LEDGER_FILE))) as connection:
        connection.execute("PRAGMA user_version = 99")
    before = {path.name: path.read_bytes() for path in data.iterdir()}

    status, said = serve_once(data)

    assert status == EXIT_REFUSED
    assert "has format 99" in said
    assert "Start the newer version" in said
    assert (data / LEDGER_FILE).read_bytes() == before[LEDGER_FILE]
    with closing(apsw.Connection(str(data / LEDGER_FILE))) as connection:
        connection.execute("PRAGMA user_version = 1")
    stores.checked(data)


def test_another_model_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "store"
    with Server(data) as server, client_of(server) as client:
        accepted(client, submissions.memory("kept"))
        kept = until(client, "kept", "committed")
        assert server.terminate() == EXIT_DONE

    status, said = serve_once(data, embedder="bundled")

    assert status == EXIT_REFUSED
    assert "this store was built with model synthetic-hashed-words" in said
    assert "Configure the first, or use another data directory." in said
    truth.verify(data, facts_of(kept))
    with Server(data) as server, client_of(server) as client:
        assert receipt(client, "kept") == kept
        assert server.terminate() == EXIT_DONE
    truth.verify(data, facts_of(kept))


# By a fault


def almost_committed(data: Path) -> Accepted:
    """A store in which one memory has all its parts, and only the commit is missing."""
    identity = SyntheticEmbedder().identity
    asked = operations.memory("almost", "Whole. And nearly kept.")
    vector = struct.pack(f"<{identity.dimensions}f", 1.0, *[0.0] * (identity.dimensions - 1))
    with closing(stores.sqlite(data)) as store:
        store.transact([command.ReserveGeneration(now=1), asked])
        store.transact([command.Advance(n=1, now=2)])
        store.transact([operations.plan(1, asked, parts=2, model=identity)])
        store.transact(
            [
                command.SaveParts(
                    n=1,
                    plan=1,
                    generation=1,
                    model_digest=model_digest(identity),
                    vectors=((0, vector), (1, vector)),
                    now=3,
                )
            ]
        )
    return Accepted(asked.operation_id, asked.payload_hash)


def flip_digest(data: Path) -> None:
    """Change one hexadecimal digit of a part's digest; the same again puts it back."""
    with closing(apsw.Connection(str(data / LEDGER_FILE))) as connection:
        digest = str(connection.execute("SELECT digest FROM part WHERE part_index = 1").fetchall()[0][0])
        flipped = f"{int(digest[0], 16) ^ 1:x}{digest[1:]}"
        connection.execute("UPDATE part SET digest = ? WHERE part_index = 1", (flipped,))


def test_a_fault_ends_the_process_and_says_why(tmp_path: Path) -> None:
    data = tmp_path / "store"
    fact = almost_committed(data)
    flip_digest(data)

    status, said = serve_once(data)

    assert status == EXIT_FAULT
    assert "operation 1 must not commit: part 1: has another digest than the source's bytes" in said
    assert owner(data) is None
    flip_digest(data)
    truth.verify(data, [fact, Stood("almost", "processing")])
    with Server(data) as server, client_of(server) as client:
        ended = until(client, "almost", *TERMINAL)
        assert server.terminate() == EXIT_DONE
    assert ended["state"] == "committed"
    truth.verify(data, [fact, *facts_of(ended)])


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "store"
    almost_committed(data)
    damaged = tmp_path / "damaged"
    shutil.copytree(data, damaged)
    with (damaged / LEDGER_FILE).open("r+b") as file:
        file.write(b"This is no ledger")

    status, said = serve_once(damaged)

    assert status == EXIT_REFUSED
    assert "ledger.db" in said
    stores.checked(data)
