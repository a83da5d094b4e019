"""What a disk may hold after a loss of power, rebuilt from one recording of a program's system calls.

Writes, sizes and names that were not flushed when the power goes may be on the disk or not, in any
combination: a disk and a file system reorder them. A recording tells what was written, flushed and
acknowledged in which order; ``images`` gives, for each moment of it, the states of the disk in which

- nothing of what was not flushed has arrived (``none``), or everything (``all``),
- everything but one change (``one dropped``), or the last change alone (``last only``),
- everything, and of one file's last write some of its sectors (``torn``).

A file's name is a change of its directory, which has a flush of its own: without one, a file that was made
may be gone with all its bytes, and one that was removed may be back (as SQLite sees it, too). The index of
the log, ``-shm``, is left out: it is made anew from the log after each crash.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from muniment.adapters.sqlite.store import LEDGER_FILE
from tests.support.strace import Call, calls_in
from tests.support.truth import Accepted

SECTOR_BYTES: Final = 512
RECORDED: Final = (
    *("openat", "write", "pwrite64", "ftruncate", "fallocate", "fdatasync", "fsync", "unlink", "unlinkat"),
    *("pwritev", "pwritev2", "writev", "rename", "renameat", "renameat2", "link", "linkat", "msync", "mmap"),
)
"""Everything that changes a file or its name; what is not understood below is refused, not overlooked."""
ANSWERS: Final = ("write", "writev", "sendto", "sendmsg")
SOCKETS: Final = ("socket:", "TCP:")
ACCEPTED: Final = b"HTTP/1.1 202"
HEXADECIMAL: Final = "-xx"
LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
REBUILT: Final = "-shm"

QUOTED: Final = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(?:\.\.\.)?')
DESCRIPTOR: Final = re.compile(r"\d+<([^>]*)>")
OPENED: Final = re.compile(r"\) += \d+<([^>]*)>$")
HARMLESS_MAPPINGS: Final = ("MAP_PRIVATE", "PROT_READ, MAP_SHARED")


class Write(msgspec.Struct, frozen=True):
    """Bytes at an offset of a file; a gap before them reads as zeros."""

    file: int
    offset: int
    data: bytes


class Resize(msgspec.Struct, frozen=True):
    """A file is cut, or grows by zeros."""

    file: int
    size: int


class Named(msgspec.Struct, frozen=True):
    """A name is given to a file, or taken away (None)."""

    name: str
    file: int | None


Change = Write | Resize | Named


class Image(msgspec.Struct):
    """One state of the disk: what is durable, and the changes that have arrived besides."""

    kind: str
    line: int
    """Line of the record, counted from 0, at which the power goes."""
    waiting: frozenset[str]
    """Names of the files that have changes which were not flushed; ``.`` is the directory."""
    told: int
    """Acknowledgements until then. With several moments that leave this state, those of the latest."""
    durable: tuple[bytes, ...]
    names: Mapping[str, int]
    changes: tuple[Change, ...]
    since: int = 0
    until: int | None = None
    without: int | None = None
    instead: Write | None = None
    """Which of the changes have arrived: a range of them, one missing, or a part of it in its place."""

    def arrived(self) -> Iterator[Change]:
        """The changes that are on the disk."""
        for index, change in enumerate(self.changes[self.since : self.until], self.since):
            if index != self.without:
                yield change
            elif self.instead is not None:
                yield self.instead

    def files(self) -> dict[str, bytes]:
        """Content by name."""
        contents, names = list(map(bytearray, self.durable)), dict(self.names)
        for change in self.arrived():
            _apply(change, contents, names)
        return {name: bytes(contents[file]) for name, file in names.items()}

    def restore(self, directory: Path) -> None:
        """Make a directory with this state."""
        directory.mkdir()
        for name, data in self.files().items():
            (directory / name).write_bytes(data)


def _apply(change: Change, contents: list[bytearray], names: dict[str, int]) -> None:
    match change:
        case Write():
            of = contents[change.file]
            of.extend(bytes(max(0, change.offset - len(of))))
            of[change.offset : change.offset + len(change.data)] = change.data
        case Resize():
            of = contents[change.file]
            del of[change.size :]
            of.extend(bytes(change.size - len(of)))
        case Named(name, None):
            names.pop(name, None)
        case Named():
            assert change.file is not None
            names[change.name] = change.file


class _Waiting(msgspec.Struct, frozen=True):
    change: Change
    returned: int


class Disk:
    """The files of one directory whose names begin so, with what is durable of them apart from the rest."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory = directory.resolve()
        self._prefix = prefix
        self._durable: tuple[bytes, ...] = ()
        self._durable_names: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._waiting: list[_Waiting] = []
        self.flushes = 0
        """Flushes that made something durable."""

    def begin(self, call: Call) -> None:
        """A call has begun: from now on, what it writes may be on the disk."""
        match call.name:
            case "pwrite64" if (file := self._file(call)) is not None:
                data = content(call)
                size, offset = _numbers(call)
                assert call.result == len(data) == size, f"not the whole write is in the record: {call}"
                self._wait(call, Write(file, offset, data))
            case "ftruncate" if (file := self._file(call)) is not None:
                self._wait(call, Resize(file, _numbers(call)[0]))
            case "unlink" | "unlinkat" if call.result == 0:
                name = self._own(content(call).decode())
                if name is not None and self._names.pop(name, None) is not None:
                    self._wait(call, Named(name, None))
            case "mmap":
                harmless = any(kind in call.arguments for kind in HARMLESS_MAPPINGS)
                assert harmless or self._file(call) is None, f"is written through memory: {call}"
            case "openat" | "fdatasync" | "fsync":
                pass
            case "rename" | "renameat" | "renameat2" | "link" | "linkat":
                paths = [_unquoted(found).decode() for found in QUOTED.findall(call.arguments)]
                assert not any(map(self._own, paths)), f"not understood: {call}"
            case _:
                assert self._file(call) is None, f"not understood: {call}"

    def end(self, call: Call) -> None:
        """A call has returned: what it flushed is durable, what it opened is there."""
        if call.name == "openat" and (found := OPENED.search(call.arguments)):
            self._opened(call, _path(found[1]))
        elif call.name in {"fdatasync", "fsync"} and call.result == 0:
            self._flushed(call)

    def _opened(self, call: Call, path: str) -> None:
        name = self._own(path)
        if name is None:
            return
        if "O_CREAT" in call.arguments and name not in self._names:
            self._names[name] = len(self._durable)
            self._durable += (b"",)
            self._wait(call, Named(name, self._names[name]))
        assert "O_TRUNC" not in call.arguments, f"not understood: {call}"

    def _flushed(self, call: Call) -> None:
        path, file = descriptor(call), self._file(call)
        whole_directory = path == str(self._directory)
        left: list[_Waiting] = []
        contents, names = list(map(bytearray, self._durable)), dict(self._durable_names)
        for each in self._waiting:
            named = isinstance(each.change, Named)
            concerned = whole_directory if named else file is not None and each.change.file == file
            if concerned and each.returned < call.began:
                _apply(each.change, contents, names)
            else:
                left.append(each)
        if len(left) < len(self._waiting):
            self.flushes += 1
            self._durable, self._durable_names = tuple(map(bytes, contents)), names
            # What was written to a file that has no name any more is nowhere.
            named_files = {
                *names.values(),
                *(each.change.file for each in left if isinstance(each.change, Named)),
            }
            self._waiting = [
                each for each in left if isinstance(each.change, Named) or each.change.file in named_files
            ]

    def _wait(self, call: Call, change: Change) -> None:
        self._waiting.append(_Waiting(change, call.returned))

    def _own(self, path: str) -> str | None:
        """The name of a file of this directory that is looked at, or None."""
        parent, name = os.path.split(path)
        return name if self.own(name) and os.path.realpath(parent) == str(self._directory) else None

    def own(self, name: str) -> bool:
        """Whether a file of the directory is one of those that are looked at."""
        return name.startswith(self._prefix) and not name.endswith(REBUILT)

    def _file(self, call: Call) -> int | None:
        name = self._own(descriptor(call))
        return None if name is None else self._names[name]

    # What may be there if the power goes now

    def images(self, line: int, told: int) -> Iterator[tuple[object, Image]]:
        """Each state with a key: equal keys mean the same state. Changes are only added until a flush."""
        changes = tuple(each.change for each in self._waiting)
        count, last = len(changes), len(changes) - 1
        whose = {file: name for name, file in self._names.items()}
        waiting = frozenset(
            "." if isinstance(change, Named) else whose.get(change.file, "removed") for change in changes
        )

        def state(kind: str, key: object, **chosen: Any) -> tuple[object, Image]:
            image = Image(kind, line, waiting, told, self._durable, self._durable_names, changes, **chosen)
            return (self.flushes, key), image

        yield state("none", 0, until=0)
        if count:
            yield state("all", count)
            # Without the last one it is what it was before that one began.
            yield state("one dropped", last, until=last)
        if count > 1:
            yield state("last only", (count, "last"), since=last)
        for index in range(last):
            yield state("one dropped", (count, index), without=index)
        for index in self._last_writes(changes):
            for arrived in _torn(changes[index]):
                key = (count, index, arrived.offset, len(arrived.data))
                yield state("torn", key, without=index, instead=arrived)

    @staticmethod
    def _last_writes(changes: Sequence[Change]) -> list[int]:
        last = {change.file: index for index, change in enumerate(changes) if isinstance(change, Write)}
        return sorted(last.values())

    def files(self) -> dict[str, bytes]:
        """What programs see that read the files now."""
        changes = tuple(each.change for each in self._waiting)
        return Image("all", 0, frozenset(), 0, self._durable, self._durable_names, changes).files()


def _torn(change: Change) -> Iterator[Write]:
    """The sectors of a write up to each boundary, and those from it on."""
    assert isinstance(change, Write)
    first = (change.offset // SECTOR_BYTES + 1) * SECTOR_BYTES
    for boundary in range(first, change.offset + len(change.data), SECTOR_BYTES):
        cut = boundary - change.offset
        yield Write(change.file, change.offset, change.data[:cut])
        yield Write(change.file, boundary, change.data[cut:])


def descriptor(call: Call) -> str:
    """What the descriptor is of that a call is given: a path, a socket, or nothing."""
    found = DESCRIPTOR.search(call.arguments.partition('"')[0])
    return _path(found[1]) if found else ""


def _path(text: str) -> str:
    """The file of a descriptor; sockets and the like are not in hexadecimal."""
    return _unquoted(text).decode() if text.startswith("\\x") else text


def _numbers(call: Call) -> list[int]:
    """The numbers at the end of the arguments."""
    inside = call.arguments.rpartition(")")[0].rpartition(">" if call.name == "ftruncate" else '"')[2]
    return [int(number) for number in re.findall(r"-?\d+", inside)]


def content(call: Call) -> bytes:
    """The bytes, or the path, that a call is given; all of them if they are in several pieces."""
    return b"".join(map(_unquoted, QUOTED.findall(call.arguments)))


def _unquoted(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


Told = Callable[[Sequence[Call]], Mapping[int, bytes]]
"""Of all calls those that acknowledge something: the line where each began, and the lines that it tells."""


class Recording(msgspec.Struct, frozen=True):
    """The calls of one program on a ledger, and how its acknowledgements are recognised among them."""

    record: Path
    directory: Path
    told: Told
    prefix: str = LEDGER_FILE
    ignored: Callable[[Call], bool] = lambda call: False
    """Calls that are taken as not made: for controls."""

    def moments(self, disk: Disk) -> Iterator[tuple[int, bytes]]:
        """Play all calls on ``disk``; give, after each step, its line and everything told until then."""
        calls = [call for call in calls_in(self.record) if not self.ignored(call)]
        acknowledged, told = self.told(calls), b""
        steps = [step for call in calls for step in ((call.began, True, call), (call.returned, False, call))]
        for line, began, call in sorted(steps, key=lambda step: (step[0], not step[1])):
            if not began:
                disk.end(call)
            elif line in acknowledged:
                told += acknowledged[line]
            else:
                disk.begin(call)
            yield line, told

    def images(self) -> tuple[list[Image], bytes]:
        """Every state of the disk, and all that was told. The last one must be that of the files."""
        disk, found, told = Disk(self.directory, self.prefix), dict[object, Image](), b""
        for line, everything in self.moments(disk):
            told = everything
            for key, image in disk.images(line, told.count(b"\n")):
                known = found.setdefault(key, image)
                known.told = max(known.told, image.told)
        files = [path for path in self.directory.iterdir() if disk.own(path.name)]
        really = {path.name: path.read_bytes() for path in files}
        assert disk.files() == really, "the recording does not lead to the files that are there"
        return list(found.values()), told


def told_by_202(calls: Sequence[Call]) -> dict[int, bytes]:
    """Acknowledgements are the answers of a server that accept an operation, each as a line.

    An answer may leave in several calls; it counts from its first byte on.
    """
    told: dict[int, bytes] = {}
    answers: dict[str, tuple[int, bytes]] = {}
    for call in calls:
        connection = descriptor(call)
        if call.name not in ANSWERS or not connection.startswith(SOCKETS) or call.result < 0:
            continue
        began, answer = answers.pop(connection, (call.began, b""))
        answer += content(call)[: call.result]
        if not ACCEPTED.startswith(answer[: len(ACCEPTED)]):
            continue  # Another answer, or the rest of one.
        head, found, body = answer.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not found or length is None or len(body) < int(length[1]):
            answers[connection] = began, answer
            continue
        assert len(body) == int(length[1]), f"more than one answer: {call}"
        receipt = msgspec.json.decode(body)
        fact = Accepted(receipt["operation_id"], receipt["payload_hash"])
        told[began] = msgspec.json.encode(fact) + b"\n"
    assert not answers, f"not the whole answer: {answers}"
    return told


def told_to(path: Path) -> Told:
    """Acknowledgements are the lines that are written to a file."""
    name = str(path.resolve())

    def told(calls: Sequence[Call]) -> dict[int, bytes]:
        return {
            call.began: content(call) for call in calls if call.name == "write" and descriptor(call) == name
        }

    return told
