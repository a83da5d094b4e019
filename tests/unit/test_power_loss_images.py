"""The states of a disk that a recording allows, on records of a few calls: none missing, none impossible."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.powerloss import SECTOR_BYTES, Recording, told_by_202, told_to
from tests.support.strace import calls_in

LOG: Final = "ledger.db"
Files = dict[str, bytes]


def quoted(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)


class Script:
    """Writes a record as strace does, and makes the files that the calls would have made."""

    def __init__(self, directory: Path) -> None:
        self.store = directory / "store"
        self.store.mkdir()
        self._record = directory / "record"
        self._record.touch()
        self.told = directory / "told"

    def _says(self, text: str) -> None:
        with self._record.open("a") as record:
            record.write(f"7 1.5 {text}\n")

    def _of(self, name: str | None) -> str:
        return f"3<{quoted(bytes(self.store if name is None else self.store / name))}>"

    def opens(self, name: str) -> None:
        path = quoted(bytes(self.store / name))
        (self.store / name).touch()
        self._says(f'openat(AT_FDCWD<{quoted(b"/")}>, "{path}", O_RDWR|O_CREAT, 0644) = {self._of(name)}')

    def writes(self, name: str, offset: int, data: bytes) -> None:
        content = bytearray((self.store / name).read_bytes().ljust(offset, b"\0"))
        content[offset : offset + len(data)] = data
        (self.store / name).write_bytes(content)
        self._says(f'pwrite64({self._of(name)}, "{quoted(data)}", {len(data)}, {offset}) = {len(data)}')

    def cuts(self, name: str, size: int) -> None:
        (self.store / name).write_bytes((self.store / name).read_bytes()[:size])
        self._says(f"ftruncate({self._of(name)}, {size}) = 0")

    def removes(self, name: str) -> None:
        (self.store / name).unlink()
        self._says(f'unlink("{quoted(bytes(self.store / name))}") = 0')

    def flushes(self, name: str | None = None, result: str = "0") -> None:
        """The directory where no file is named."""
        self._says(f"fdatasync({self._of(name)}) = {result}")

    def tells(self, line: bytes) -> None:
        self._says(f'write(5<{quoted(bytes(self.told))}>, "{quoted(line)}", {len(line)}) = {len(line)}')

    def has(self, name: str, data: bytes) -> None:
        """A file that is durable, name and all."""
        self.opens(name)
        self.writes(name, 0, data)
        self.flushes(name)
        self.flushes()

    def calls(self, text: str) -> None:
        self._says(text)

    def images(self) -> Iterator[tuple[int, Files]]:
        """Each state, with the number of lines that had been told at the latest moment that leaves it."""
        images, _ = Recording(self._record, self.store, told_to(self.told)).images()
        return ((image.told, image.files()) for image in images)

    def left(self, told: int) -> list[Files]:
        """The different states that may be left after so many lines."""
        found: list[Files] = []
        for lines, files in self.images():
            if lines == told and files not in found:
                found.append(files)
        return found


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_what_was_flushed_with_its_name_is_in_every_state(script: Script) -> None:
    script.has(LOG, b"abc")
    script.tells(b"1\n")

    assert script.left(1) == [{LOG: b"abc"}]


def test_a_name_that_was_not_flushed_may_be_missing_with_all_that_was(script: Script) -> None:
    script.opens(LOG)
    script.writes(LOG, 0, b"abc")
    script.flushes(LOG)
    script.tells(b"1\n")

    assert script.left(1) == [{}, {LOG: b"abc"}]


def test_unflushed_writes_arrive_all_or_none_or_without_one_or_the_last_alone(script: Script) -> None:
    script.has(LOG, b"0000")
    for offset in range(4):
        script.writes(LOG, offset, b"1")
    script.tells(b"1\n")

    found = {files[LOG] for files in script.left(1)}

    assert found == {b"0000", b"1111", b"0111", b"1011", b"1101", b"1110", b"0001"}


def test_a_flush_makes_durable_what_was_written_to_that_file_before(script: Script) -> None:
    script.has(LOG, b"a")
    script.has("ledger.db-wal", b"x")
    script.writes(LOG, 0, b"b")
    script.writes("ledger.db-wal", 0, b"y")
    script.flushes("ledger.db-wal")
    script.writes("ledger.db-wal", 0, b"z")
    script.tells(b"1\n")

    found = {(files[LOG], files["ledger.db-wal"]) for files in script.left(1)}

    assert found == {(b"a", b"y"), (b"b", b"y"), (b"a", b"z"), (b"b", b"z")}


def test_a_flush_that_fails_makes_nothing_durable(script: Script) -> None:
    script.has(LOG, b"a")
    script.writes(LOG, 0, b"b")
    script.flushes(LOG, "-1 EIO (Input/output error)")
    script.tells(b"1\n")

    assert {files[LOG] for files in script.left(1)} == {b"a", b"b"}


def test_a_write_that_begins_before_a_flush_and_returns_after_it_may_be_missing(script: Script) -> None:
    script.has(LOG, b"a")
    of = f"3<{quoted(bytes(script.store / LOG))}>"
    script.calls(f'pwrite64({of}, "\\x62", 1, 0 <unfinished ...>')
    (script.store / LOG).write_bytes(b"b")
    script.calls(f"fdatasync({of}) = 0")
    script.calls("<... pwrite64 resumed>) = 1")
    script.tells(b"1\n")

    assert {files[LOG] for files in script.left(1)} == {b"a", b"b"}


def test_a_write_is_torn_at_each_sector(script: Script) -> None:
    script.has(LOG, bytes(3 * SECTOR_BYTES))
    script.writes(LOG, 0, b"1" * 3 * SECTOR_BYTES)
    script.tells(b"1\n")

    old, new = bytes(SECTOR_BYTES), b"1" * SECTOR_BYTES
    found = {files[LOG] for files in script.left(1)}

    assert found == {
        old + old + old,
        new + new + new,
        new + old + old,
        old + new + new,
        new + new + old,
        old + old + new,
    }


def test_a_cut_and_a_removal_may_not_have_arrived(script: Script) -> None:
    script.has(LOG, b"abc")
    script.has("ledger.db-journal", b"j")
    script.cuts(LOG, 1)
    script.removes("ledger.db-journal")
    script.tells(b"1\n")

    found = {(files[LOG], "ledger.db-journal" in files) for files in script.left(1)}

    assert found == {(b"abc", True), (b"a", True), (b"a", False), (b"abc", False)}


def test_the_state_before_an_acknowledgement_is_one_after_it_too_if_nothing_was_flushed(
    script: Script,
) -> None:
    script.has(LOG, b"a")
    script.writes(LOG, 0, b"b")
    script.tells(b"1\n")

    assert (1, {LOG: b"a"}) in list(script.images())


@pytest.mark.parametrize(
    "call",
    [
        'rename("{path}", "{path}-old") = 0',
        "writev(3<{path}>, [{{}}], 1) = 4",
        "mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_SHARED, 3<{path}>, 0) = 7",
        "fallocate(3<{path}>, 0, 0, 4096) = 0",
        'pwrite64(3<{path}>, "\\x61\\x62"..., 3, 0) = 3',
    ],
)
def test_a_call_that_is_not_understood_is_refused(script: Script, call: str) -> None:
    script.has(LOG, b"a")
    script.calls(call.format(path=quoted(bytes(script.store / LOG))))

    with pytest.raises(AssertionError, match=r"not understood|through memory|not the whole write"):
        list(script.images())


def test_files_that_the_record_does_not_explain_are_refused(script: Script) -> None:
    script.has(LOG, b"a")
    (script.store / LOG).write_bytes(b"other")

    with pytest.raises(AssertionError, match="does not lead to the files"):
        list(script.images())


def test_an_answer_counts_from_its_first_byte_however_it_is_cut(tmp_path: Path) -> None:
    record = tmp_path / "record"
    body = b'{"operation_id":"one","payload_hash":"h"}'
    head = b"HTTP/1.1 202 Accepted\r\nContent-Length: %d\r\n\r\n" % len(body)
    pieces = [
        (b"7", head[:5]),
        (b"8", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        (b"7", head[5:]),
        (b"7", body[:9]),
        (b"7", body[9:]),
    ]
    lines = [
        f'7 1.5 write(4<{quoted(b"socket:[" + name + b"]")}>, "{quoted(data)}", {len(data)}) = {len(data)}'
        for name, data in pieces
    ]
    record.write_text("\n".join(lines))

    told = told_by_202(calls_in(record))

    assert told == {0: b'{"type":"Accepted","id":"one","payload_hash":"h"}\n'}
