"""Whether every 202 came after a flush that covers it, told from a record of system calls. Pure.

In the record of a server, each operation has a read that brought its request, a write of the log that holds
its ID, an fdatasync of the log, and the write of its answer. They must come in this order.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from tests.support.strace import Call

LOG: Final = "ledger.db-wal"
RECORDED: Final = ("fdatasync", "pwrite64", "read", "recvfrom", "write", "writev", "sendto", "sendmsg")
READS: Final = frozenset({"read", "recvfrom"})
ANSWERS: Final = frozenset({"write", "writev", "sendto", "sendmsg"})
ACCEPTED: Final = "HTTP/1.1 202"


class Record:
    """A record, ordered by what it shows."""

    def __init__(self, calls: Iterable[Call], prefix: str) -> None:
        name = re.compile(rf"{re.escape(prefix)}-\d+")
        self.requests: dict[str, Call] = {}
        self.logged: dict[str, list[Call]] = defaultdict(list)
        self.flushes: list[Call] = []
        self.answers: dict[str, list[Call]] = defaultdict(list)
        """By connection."""
        for call in sorted(calls, key=lambda each: each.began):
            if call.name == "fdatasync" and call.concerns(LOG):
                if call.result == 0:
                    self.flushes.append(call)
            elif call.name == "pwrite64" and call.concerns(LOG):
                for found in set(name.findall(call.arguments)):
                    self.logged[found].append(call)
            elif call.name in READS and "POST /api/v2/operations" in call.arguments:
                for found in name.findall(call.arguments):
                    self.requests.setdefault(found, call)
            elif call.name in ANSWERS and ACCEPTED in call.arguments:
                self.answers[connection(call)].append(call)


def connection(call: Call) -> str:
    """The descriptor of a call, as a number."""
    return call.arguments.partition("<")[0]


def complaints(calls: Iterable[Call], names: Sequence[str], prefix: str) -> list[str]:
    """What is wrong with the answers to these operations, all of which were told 202."""
    record = Record(calls, prefix)
    found = []
    for name in names:
        request = record.requests.get(name)
        if request is None:
            found.append(f"{name}: no request in the record")
            continue
        answers = record.answers[connection(request)]
        answer = next((each for each in answers if each.began > request.returned), None)
        if answer is None:
            found.append(f"{name}: no 202 in the record")
        elif not _flushed(record, name, request, answer):
            found.append(f"{name}: no flush of the log between its write and its 202")
    return found


def _flushed(record: Record, name: str, request: Call, answer: Call) -> bool:
    written = [each for each in record.logged[name] if request.returned < each.began < answer.began]
    return bool(written) and any(
        written[0].returned < flush.began and flush.returned < answer.began for flush in record.flushes
    )


def bearing(calls: Iterable[Call], prefix: str) -> int:
    """How many flushes of the log followed a first write of at least one operation's ID."""
    record = Record(calls, prefix)
    first = sorted(writes[0].returned for writes in record.logged.values())
    found, place = 0, 0
    for flush in record.flushes:
        before = place
        while place < len(first) and first[place] < flush.began:
            place += 1
        found += place > before
    return found
