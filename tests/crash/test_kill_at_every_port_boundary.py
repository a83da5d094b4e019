"""A process killed before, inside and after each ledger transaction: what it acknowledged is there (R1).

Each workload runs in children of a program of its own, that are killed by SIGKILL at one point each. Then the
store is opened, recovered and driven to its end, and *truth* (``tests.support.truth``) is asked twice.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.crash.kill_points import Verdict
from tests.crash.mutants import MUTANTS
from tests.crash.workloads import WORKLOADS
from tests.support.crashpoints import all_cases, seed
from tests.support.server import SOURCE

ROOT: Final = Path(__file__).resolve().parents[2]
KILLS_MIN: Final = 600
POINTS: Final = -(-KILLS_MIN // len(WORKLOADS))
CONTROL_POINTS: Final = 25
CONTROL_SEED: Final = 1
LIMIT_SECONDS: Final = 3000 if all_cases() else 280

# Mutant -> the workload in which it does harm, and the complaint that proves that it was understood.
CONTROLS: Final = {
    "acknowledge before commit": ("exits", "acknowledged and gone: "),
    "two memories": ("short", "is committed and has {'memory': ['memory:"),
    "two events": ("short", "events [1, 2, 3, 4, 5, 6, 7], progress_seq 6"),
    "commit without effect": ("short", "which does not exist"),
    "skip rule removed": ("long", "embedded again: ['1:0'"),
    "journal apart from tables": ("tasks", "differs from the fold of the journal"),
    "event apart from state": ("cascade", "progress_seq"),
    "rolled back and acknowledged": (
        "short",
        "acknowledged and gone: Stood(id='short-1', state='committed')",
    ),
}


def judged(directory: Path, workload: str, chosen_by: int, count: int, *mutant: str) -> Verdict:
    program = [sys.executable, "-m", "tests.crash.kill_points", workload, str(directory)]
    done = subprocess.run(
        [*program, str(chosen_by), str(count), *mutant],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=Verdict)


@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_nothing_acknowledged_is_lost_wherever_the_process_is_killed(tmp_path: Path, workload: str) -> None:
    chosen_by = seed()

    verdict = judged(tmp_path, workload, chosen_by, 0 if all_cases() else POINTS)

    kills = sum(verdict.kills.values())
    print(
        f"{workload}: {kills} kills at {verdict.points} points of {verdict.transactions} transactions "
        f"({dict(verdict.kills)}), {verdict.facts} acknowledged facts, {verdict.saved_parts} saved parts, "
        f"{verdict.faults} executor faults in recovery, seed {chosen_by}"
    )
    assert verdict.violations == [], f"scripts/crash --seed {chosen_by}"
    assert kills == verdict.points >= POINTS
    assert min(verdict.kills.values()) > 0
    assert verdict.facts > kills
    assert verdict.saved_parts
    assert bool(verdict.faults) == (workload == "exits")


def test_there_are_as_many_kills_as_are_claimed() -> None:
    assert POINTS * len(WORKLOADS) >= KILLS_MIN == 600


def test_every_mutant_has_its_control() -> None:
    assert CONTROLS.keys() == MUTANTS.keys()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_control_a_broken_promise_is_noticed(tmp_path: Path, mutant: str) -> None:
    workload, complaint = CONTROLS[mutant]

    verdict = judged(tmp_path, workload, CONTROL_SEED, CONTROL_POINTS, mutant)

    assert sum(verdict.kills.values()) > 0
    assert any(complaint in line for line in verdict.violations), verdict.violations
