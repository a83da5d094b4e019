"""A process that is killed, whose recovery is killed, and the recovery of that too (R4).

Whatever was acknowledged in any of these lives is there in the last one; opening changes nothing however
often it is done or begun; recovering twice is recovering once; and it ends like an undisturbed run.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.crash.recovery_kills import MUTANTS, Verdict
from tests.crash.workloads import WORKLOADS
from tests.support.crashpoints import all_cases, seed
from tests.support.live import ROOT
from tests.support.server import SOURCE

STATES, FIRST, SECOND = (6, 5, 4) if all_cases() else (3, 2, 2)
"""Stores that a kill has left, kills of the recovery of each, kills of the recovery of each of those."""
CASES_MIN: Final = 500 if all_cases() else 60
BEFORE_WRITES_MIN: Final = 4
"""Of the recoveries of a workload that are killed; most places are of this kind, also inside a COMMIT."""
CONTROL_SEED: Final = 1
LIMIT_SECONDS: Final = 3000 if all_cases() else 280

# Mutant -> the workload in which it does harm, how often it is tried, and the complaint that proves that it
# was understood.
CONTROLS: Final = {
    "acknowledge before commit": ("exits", (3, 2, 1), "acknowledged and gone: "),
    "takes out before it puts back": ("long", (4, 3, 1), "killed while opening has changed something"),
    "writes that it was there": ("short", (2, 1, 1), "opening again has changed something"),
}


def judged(directory: Path, workload: str, chosen_by: int, counts: tuple[int, ...], *mutant: str) -> Verdict:
    program = [sys.executable, "-m", "tests.crash.recovery_kills", workload, str(directory)]
    done = subprocess.run(
        [*program, str(chosen_by), *map(str, counts), *mutant],
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
def test_nothing_is_lost_if_recovery_is_killed_twice(tmp_path: Path, workload: str) -> None:
    chosen_by = seed()

    verdict = judged(tmp_path, workload, chosen_by, (STATES, FIRST, SECOND))

    print(
        f"{workload}: {verdict.cases} stores left by two killed recoveries, {sum(verdict.kills.values())} "
        f"recoveries killed ({dict(verdict.kills)}), {verdict.facts} acknowledged facts, "
        f"{verdict.saved_parts} saved parts, seed {chosen_by}"
    )
    assert verdict.violations == [], f"scripts/crash --seed {chosen_by}"
    assert verdict.cases == STATES * FIRST * SECOND
    assert sum(verdict.kills.values()) == STATES * FIRST * (1 + SECOND)
    assert verdict.facts > verdict.cases
    phases = {name.split()[1] for name in verdict.kills}
    assert {"open", "work"} <= phases
    before_writes = sum(count for name, count in verdict.kills.items() if name.endswith("BeforeWrite"))
    assert before_writes >= BEFORE_WRITES_MIN


def test_there_are_as_many_cases_as_are_claimed() -> None:
    assert STATES * FIRST * SECOND * len(WORKLOADS) >= CASES_MIN


def test_every_mutant_has_its_control() -> None:
    assert CONTROLS.keys() == MUTANTS.keys()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_control_a_recovery_that_may_not_be_interrupted_is_noticed(tmp_path: Path, mutant: str) -> None:
    workload, counts, complaint = CONTROLS[mutant]

    verdict = judged(tmp_path, workload, CONTROL_SEED, counts, mutant)

    assert sum(verdict.kills.values()) > 0
    assert any(complaint in line for line in verdict.violations), verdict.violations
