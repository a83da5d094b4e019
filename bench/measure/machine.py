"""The machine and the versions that a run was measured with."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Final

import apsw

from bench.measure.figures import Machine

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("apsw", "httptools", "msgspec", "numpy", "onnxruntime", "orjson", "uvicorn", "uvloop")


def machine(directory: Path) -> Machine:
    """Describe this machine, and the file system of ``directory``."""
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        file_system=_file_system(directory),
        python=platform.python_version(),
        versions={"SQLite": apsw.sqlite_lib_version()} | {name: metadata.version(name) for name in PACKAGES},
        commit=_commit(),
    )


def load() -> float:
    """Load average of the last minute."""
    return os.getloadavg()[0]


def load_line(before: float) -> str:
    """What stands beside every timing: how busy the machine was ``before`` it and is after it."""
    cores = len(os.sched_getaffinity(0))
    return f"load average: {before:.1f} before, {load():.1f} after, {cores} cores"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    """The type of the innermost mount that holds the directory."""
    path = directory.resolve()
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text("utf-8").splitlines():
        _, place, kind = line.split()[:3]
        if path.is_relative_to(place) and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    done = subprocess.run(
        [git, "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
