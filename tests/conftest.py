"""What every test stands on: the Hypothesis profile, no settings from outside, no child process left behind.

``MUNIMENT_EXAMPLES`` is the number of examples a property (Hypothesis's own 100 where it is not set). A
failing property prints a blob that repeats it. A run prints, at its end, the ``--randomly-seed`` that gives
its order and its seeded randomness again.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from muniment.config import ENVIRONMENT_PREFIX, field_names

EXAMPLES = int(os.environ.get("MUNIMENT_EXAMPLES", "100"))
# A child that has been told to end may take this long to be gone.
CHILD_GRACE_SECONDS = 5.0
# Started by multiprocessing for itself, and ended by it with this process.
LIBRARY_CHILDREN = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")

hypothesis.settings.register_profile(
    "muniment",
    database=None,  # Nothing is written outside tmp_path, and no run depends on the one before.
    deadline=None,  # A shared machine stalls at times; pytest-timeout catches what hangs.
    derandomize=False,
    max_examples=EXAMPLES,
    print_blob=True,
)
hypothesis.settings.load_profile("muniment")

# A developer's own settings must not reach a server under test, nor change what a default is.
for setting in ("config", "url", *field_names()):
    os.environ.pop(ENVIRONMENT_PREFIX + setting.upper(), None)


# A shell starts what runs in its background with SIGINT ignored, and every program started from here would
# inherit that; some tests are about what Ctrl-C does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# onnxruntime keeps a device ID in the home directory otherwise, also when a test imports it.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what repeats this run, also where -q hid the header."""
    seed = config.getoption("randomly_seed", default=None)
    if isinstance(seed, int):
        terminalreporter.write_line(f"this order and these seeds again: scripts/test --randomly-seed={seed}")


def children() -> dict[int, bytes]:
    """Return the command line of each direct child of this process; empty for one that was not waited for."""
    found = {}
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, listing.read_bytes().split()):
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
            except FileNotFoundError:
                continue  # Gone between the two reads.
    return found


@pytest.fixture(scope="session", autouse=True)
def no_child_process_is_left() -> Iterator[None]:
    """Fail the last test of a process whose tests left children that still run or were never waited for."""
    before = children().keys()
    yield
    give_up = time.monotonic() + CHILD_GRACE_SECONDS
    while True:
        left = {
            pid: command
            for pid, command in children().items()
            if pid not in before and not any(name in command for name in LIBRARY_CHILDREN)
        }
        if not left or time.monotonic() > give_up:
            break
        time.sleep(0.05)
    assert not left, f"tests of this process left children behind: {left}"
