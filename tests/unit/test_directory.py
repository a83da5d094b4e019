"""A data directory has one owner, says who it is, forgets dead ones, replaces files whole or not at all."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from muniment.adapters.files import directory
from muniment.adapters.files.directory import DataDirectory, Owner, owner, write_whole
from muniment.errors import ConfigError, DirectoryOwned, LedgerUnavailable

ME: Final = Owner("http://127.0.0.1:23001", 4711, "first")
HOLDER: Final = """
import sys, time
from pathlib import Path
from muniment.adapters.files.directory import DataDirectory, Owner
taken = DataDirectory(Path(sys.argv[1]))
taken.announce(Owner("http://127.0.0.1:5", 1, "other"))
print("taken", flush=True)
time.sleep(60)
"""


def holder(path: Path) -> "subprocess.Popen[bytes]":
    """Another process that owns the directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"taken\n"
    return process


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_directory_has_one_owner_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    first = DataDirectory(path)
    assert owner(path) is None, "it has not said who it is"
    with pytest.raises(DirectoryOwned) as unnamed:
        DataDirectory(path)
    assert unnamed.value.url is None
    first.announce(ME)
    assert owner(path) == ME
    with pytest.raises(DirectoryOwned) as named:
        DataDirectory(path)
    assert named.value.url == ME.url
    assert ME.url in str(named.value)
    first.release()
    assert owner(path) is None
    DataDirectory(path).release()


def test_the_lock_and_the_name_of_a_killed_process_do_not_count(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(DirectoryOwned) as refused:
            DataDirectory(tmp_path)
        assert refused.value.url == "http://127.0.0.1:5"
        process.kill()
    assert (tmp_path / directory.OWNER_FILE).exists(), "it had no time to take its name away"
    assert owner(tmp_path) is None
    taken = DataDirectory(tmp_path)
    assert not (tmp_path / directory.OWNER_FILE).exists()
    taken.release()


def test_asking_for_the_owner_does_not_keep_anyone_out(tmp_path: Path) -> None:
    DataDirectory(tmp_path).release()
    descriptor = os.open(tmp_path / directory.LOCK_FILE, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    pause, waited = time.sleep, 0

    def end_asking(seconds: float) -> None:
        nonlocal waited, descriptor
        waited += 1
        if descriptor >= 0:
            os.close(descriptor)
            descriptor = -1
        pause(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", end_asking)
        DataDirectory(tmp_path).release()
    assert waited == 1


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"url": 1}'])
def test_an_unreadable_name_is_no_name(tmp_path: Path, data: bytes) -> None:
    taken = DataDirectory(tmp_path)
    (tmp_path / directory.OWNER_FILE).write_bytes(data)
    assert owner(tmp_path) is None
    taken.release()


def test_asking_makes_nothing(tmp_path: Path) -> None:
    assert owner(tmp_path / "missing") is None
    assert list(tmp_path.iterdir()) == []


def test_what_it_makes_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        taken = DataDirectory(tmp_path / "new")
        taken.announce(ME)
        taken.probe(0)
        taken_modes = {each.name: mode(each) for each in (tmp_path / "new").iterdir()}
    finally:
        os.umask(before)
    assert mode(tmp_path / "new") == 0o700
    assert taken_modes == {"lock": 0o600, "server.json": 0o600, "probe": 0o600}
    taken.release()


def test_a_path_that_is_no_directory_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError) as refused:
            DataDirectory(path)
        assert refused.value.setting == "data_dir"


def test_the_probe_keeps_the_reserve_and_writes(tmp_path: Path) -> None:
    taken = DataDirectory(tmp_path / "data")
    taken.probe(0)
    with pytest.raises(LedgerUnavailable, match=f"{2**62} are kept in reserve"):
        taken.probe(2**62)
    (tmp_path / "data" / directory.PROBE_FILE).unlink()
    (tmp_path / "data" / directory.PROBE_FILE).mkdir()
    with pytest.raises(LedgerUnavailable, match="cannot be written"):
        taken.probe(0)
    (tmp_path / "data" / directory.PROBE_FILE).rmdir()
    taken.probe(0)
    taken.release()


# Whole or not at all

Write = Callable[[Path, bytes], None]
STEPS: Final = ("mkstemp", "fsync", "replace", "fsync of the directory")
NEW: Final = b"new" * 1000


def killed_before(step: str, write: Write, path: Path) -> int:
    """Let a forked child write and kill itself before a step; return the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            kill_before(step)
            write(path, NEW)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def kill_before(step: str) -> None:
    def end(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if step == "mkstemp":
        tempfile.mkstemp = end  # type: ignore[assignment]
    elif step == "fsync":
        os.fsync = end
    elif step == "replace":
        os.replace = end
    elif step == "fsync of the directory":
        directory._sync_directory = end


def in_place(path: Path, data: bytes) -> None:
    """What ``write_whole`` must not be."""
    with path.open("wb", buffering=0) as file:
        file.write(data[:10])
        os.fsync(file.fileno())
        file.write(data[10:])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_kill_leaves_the_old_or_the_new_file(tmp_path: Path, step: str) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    assert killed_before(step, write_whole, path) == signal.SIGKILL
    assert path.read_bytes() == (NEW if step == STEPS[-1] else b"old")
    write_whole(path, b"after")
    assert path.read_bytes() == b"after"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_write_in_place_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    assert killed_before("fsync", in_place, path) == signal.SIGKILL
    assert path.read_bytes() not in (b"old", NEW)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, NEW)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_the_file_is_durable_before_its_name_and_its_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def watched(name: str) -> Callable[..., None]:
        real = getattr(os, name)

        def call(*args: object) -> None:
            calls.append(name)
            real(*args)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, watched(name))
    write_whole(tmp_path / "file", NEW)
    assert calls == ["fsync", "replace", "fsync"]
