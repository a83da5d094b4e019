"""SQLite's own system calls that change a file, counted in this process, which may be killed before one.

They are replaced where SQLite lets them be replaced, so that a place lies also in the middle of a COMMIT and
of a checkpoint, without a tracer. A flush cannot be replaced, and need not be: what was written is there
after a kill whether it was flushed or not, so a kill at a flush leaves what a kill at the next write leaves.
"""

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any, Final

import apsw

# ssize_t pwrite64(int, const void *, size_t, off64_t), int ftruncate(int, off_t), int unlink(const char *)
SIGNATURES: Final = {
    "pwrite64": (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64),
    "ftruncate": (ctypes.c_int, ctypes.c_int, ctypes.c_int64),
    "unlink": (ctypes.c_int, ctypes.c_char_p),
}


class WriteCalls:
    """Counts the calls of this process and of its children from ``counted`` on. One a process, for ever."""

    def __init__(self) -> None:
        self.count = 0
        self._kill_at: int | None = None
        self._vfs = apsw.VFS("counted", base="unix")
        self._kept = [self._replace(name) for name in SIGNATURES]

    def counted(self, kill_at: int | None = None) -> None:
        """Begin to count from 0; kill this process before the call that is number ``kill_at``, from 1 on."""
        self.count, self._kill_at = 0, kill_at

    def _replace(self, name: str) -> object:
        kind = ctypes.CFUNCTYPE(*SIGNATURES[name], use_errno=True)
        address = self._vfs.xGetSystemCall(name)
        assert address is not None, f"SQLite makes no {name}"
        real: Callable[..., Any] = kind(address)

        def counting(*given: Any) -> Any:
            self.count += 1
            if self.count == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given)

        function = kind(counting)
        assert self._vfs.xSetSystemCall(name, ctypes.cast(function, ctypes.c_void_p).value or 0)
        return function
