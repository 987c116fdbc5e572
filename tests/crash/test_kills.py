"""Killed at random instants, a run goes on from its last committed checkpoint and ends with the same bits.

`pytest -m slow tests/crash/test_kills.py -s` kills more often and prints how often, and from which steps runs went on.
"""

import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.world import Commands, World

STEPS = 8
MODES: dict[str, tuple[int, tuple[str, ...]]] = {
    "in RAM": (0, ()),
    "on a drive": (1, ()),
    "on two drives": (2, ()),
    "in RAM, lagging": (0, ("--update", "async")),
    "on a drive, lagging": (1, ("--update", "async", "--memory.host", "300KiB")),
    "on two drives, lagging": (2, ("--update", "async", "--memory.host", "300KiB")),
}
"""Drives that hold the state, and flags. Asynchronous updates need more RAM."""
QUICK = ("on two drives, lagging",)
"""That others go on from any instant, test_crash_consistency shows."""
SLOW = [pytest.param(name, 20, marks=pytest.mark.slow) for name in MODES]


@pytest.mark.parametrize(("name", "kills"), [*((name, 3) for name in QUICK), *SLOW])
def test_a_run_that_is_killed_goes_on_from_its_last_checkpoint(
    name: str, kills: int, commands: Commands, tmp_path: Path
) -> None:
    drives, extra = MODES[name]
    world = World(commands, tmp_path / "world", drives, (*extra, "--max-steps", str(STEPS)))
    draw, killed = random.Random(name), 0
    world.fresh()
    began = time.monotonic()
    whole = world.pagoda(world.start).check(0)
    length = time.monotonic() - began
    shutil.rmtree(world.run_dir)
    went_on: Counter[int | None] = Counter()
    while killed < kills or not went_on or world.run_dir.exists():
        checkpoints = sorted(world.run_dir.glob("checkpoint-*"))
        if not checkpoints:
            shutil.rmtree(world.run_dir, ignore_errors=True)
        after = draw.uniform(0.3 * length, 1.1 * length) if killed < kills or not went_on else None
        done = world.pagoda(world.resume if checkpoints else world.start, kill_after=after, restored=True)
        assert done.status in (0, -signal.SIGKILL), str(done)
        killed += done.status != 0
        if done.restored is not None:
            # It may also go on from one that was sealed and had not got its name yet.
            assert done.resumed_after is not None
            assert done.resumed_after >= int(checkpoints[-1].name.rpartition("-")[2])
            went_on[done.resumed_after] += 1
            checkpoint, state = done.restored
            assert checkpoint == state
        if done.status == 0:
            assert [line[0] for line in done.digest["metrics"]] == list(range(1, STEPS + 1))
            assert done.digest == whole.digest
            shutil.rmtree(world.run_dir)
    print(f"{name}: {killed} kills; runs went on from {dict(went_on)}")
