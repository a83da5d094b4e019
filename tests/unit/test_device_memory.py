"""A device that grows gives back the arrays that it has outgrown."""

import subprocess
import sys
from typing import Final

import msgspec

MEMORIES: Final = 300_000
SPREAD_BYTES_MAX: Final = 2_000_000
"""Less than the columns that are outgrown last take."""

GROW: Final = """
import json, pathlib, sys
import numpy as np
from muniment.adapters.devices import numpy_device
from muniment.ports.device import MemoryDelta

numpy_device.MAPPED_BYTES_MIN = int(sys.argv[1]) or numpy_device.MAPPED_BYTES_MIN
device, vector = numpy_device.NumpyDevice(), np.eye(1, 16, dtype="<f4").tobytes()
ROW = 16 * 4 + 8 + 6 * 8 + 1 + numpy_device.KEY_BYTES

def resident():
    [line] = [each for each in pathlib.Path("/proc/self/status").read_text().splitlines() if "VmRSS" in each]
    return int(line.split()[1]) * 1024

rest = []
for first in range(1, {memories} + 1, 500):
    device.apply([
        MemoryDelta(
            object=n, key=f"memory:{{n:026d}}", owner=None, agent=None, session=None, categories=(),
            expires_us=None, dimensions=16, vectors=vector,
        )
        for n in range(first, first + 500)
    ], first)
    rest.append(resident() - ROW * device.count()[0])
print(json.dumps(rest))
"""


def spread(mapped_bytes_min: int) -> int:
    """Between the least and the most of what is resident beside the rows, after a quarter."""
    command = [sys.executable, "-c", GROW.format(memories=MEMORIES), str(mapped_bytes_min)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rest = msgspec.json.decode(done.stdout, type=list[int])
    warm = rest[len(rest) // 4 :]
    print(f"{min(warm) / 1e6:.1f} to {max(warm) / 1e6:.1f} MB beside the rows; {warm[::60]}")
    return max(warm) - min(warm)


def test_what_is_outgrown_is_given_back() -> None:
    assert spread(0) <= SPREAD_BYTES_MAX


def test_control_arrays_on_the_heap_are_noticed() -> None:
    assert spread(sys.maxsize) > SPREAD_BYTES_MAX
