"""A data directory: one owner by lock, with its URL in a file so that others attach (ruling 11)."""

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from muniment.errors import ConfigError, DirectoryOwned, LedgerUnavailable

LOCK_FILE: Final = "lock"
OWNER_FILE: Final = "server.json"
PROBE_FILE: Final = "probe"
DIRECTORY_MODE: Final = 0o700
LOCK_ATTEMPTS: Final = 10
LOCK_PAUSE_SECONDS: Final = 0.05


class Owner(msgspec.Struct, frozen=True):
    """Who serves a directory."""

    url: str
    pid: int
    incarnation: str


class DataDirectory:
    """An owned data directory. The kernel frees the lock when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Create the directory if it is missing, and take it.

        Raises ``DirectoryOwned`` where another process has it and ``ConfigError`` where it cannot be made.
        """
        self.path = path
        try:
            _make(path)
            self._lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError("data_dir", f"{path} cannot be used: {error.strerror}") from error
        if not self._take():
            os.close(self._lock)
            known = _read_owner(path)
            raise DirectoryOwned(str(path), known.url if known else None)
        # What the last owner left: its address, and files that it was killed over.
        for left in (path / OWNER_FILE, *path.glob(f".{OWNER_FILE}.*")):
            left.unlink(missing_ok=True)

    def _take(self) -> bool:
        """Lock; try for a while, since someone who only asks for the owner holds the lock for a moment."""
        for attempt in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if attempt + 1 < LOCK_ATTEMPTS:
                    time.sleep(LOCK_PAUSE_SECONDS)
            else:
                return True
        return False

    def announce(self, owner: Owner) -> None:
        """Write who serves this directory, whole or not at all."""
        write_whole(self.path / OWNER_FILE, msgspec.json.encode(owner) + b"\n")

    def probe(self, reserve_bytes: int) -> None:
        """Write a file and make it durable, and look at the room that is left.

        Raises ``LedgerUnavailable`` with the reason where either fails.
        """
        try:
            state = os.statvfs(self.path)
            free = state.f_bavail * state.f_frsize
            if free < reserve_bytes:
                raise LedgerUnavailable(f"{free} bytes are free, {reserve_bytes} are kept in reserve")
            file = os.open(
                self.path / PROBE_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
            )
            try:
                os.write(file, b"probe\n")
                os.fdatasync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise LedgerUnavailable(f"the data directory cannot be written: {error.strerror}") from error

    def release(self) -> None:
        """Give the directory back."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / OWNER_FILE).unlink()
        os.close(self._lock)


def _make(path: Path) -> None:
    """Make a directory and its parents so that a power loss cannot take their names away again."""
    if path.is_dir():
        return
    if not path.parent.is_dir():
        _make(path.parent)
    path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user may still write where a directory is, or would be made."""
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def owner(path: Path) -> Owner | None:
    """The process that owns a directory now, or None; a dead owner's file does not count."""
    try:
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _read_owner(path)
    finally:
        os.close(lock)
    return None


def _read_owner(path: Path) -> Owner | None:
    try:
        return msgspec.json.decode((path / OWNER_FILE).read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):  # Not written yet: the owner is about to open its port.
        return None


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file durably (write, fsync, rename, fsync directory): readers see old or new bytes."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _sync_directory(path.parent)
