"""Killed, signalled or without power at random instants, a run of Trainer goes on to the same bits. No complete
checkpoint is lost.

`pytest -m slow tests/crash/test_trainer.py -s` does so more often.
"""

import random
import shutil
import signal
import time
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.ranks import RankServer, compiler

from pagoda.integrations.staging import STATE
from pagoda.memory.ssd.orphans import orphans_in
from tests.crash.command import state_of
from tests.crash.disk import LOSSES, Disk, Image, image_of, put, read_log

pytestmark = pytest.mark.timeout(3600)
STEPS = 6


class Run:
    """A directory with a run and its drive."""

    def __init__(self, ranks: RankServer, root: Path, ssd: bool) -> None:
        self.root, self._ranks, self._out, self._ssd = root, ranks, root.with_name(f"{root.name}-out"), ssd
        root.mkdir()
        self._once: tuple[Image, dict[str, Any]] | None = None

    def train(self, **settings: Any) -> tuple[int | None, dict[str, Any]]:
        """How a process ended that trains, and what it returned."""
        shutil.rmtree(self._out, ignore_errors=True)
        arguments = {"root": str(self.root), "ssd": self._ssd, **settings}
        (status,) = self._ranks.ask("tests.crash.trainer:train", 1, self._out, arguments=arguments)
        errors = "".join(path.read_text() for path in sorted(self._out.glob("e*")))
        found = torch.load(self._out / "rank-0.pt") if status == 0 else {"errors": errors}
        return status, found

    def whole(self) -> dict[str, Any]:
        """The bits of a run that nothing happens to. The directory is then empty."""
        status, found = self.train()
        assert status == 0, found
        self.clear()
        return found

    def clear(self) -> None:
        shutil.rmtree(self.root)
        self.root.mkdir()

    def complete(self) -> list[int]:
        """The steps of the checkpoints that have their names."""
        return sorted(int(path.name.split("-")[1]) for path in (self.root / "run").glob("checkpoint-*"))

    def check_ends_well(self, expected: dict[str, Any], copied: bool = False) -> int:
        """The run goes on from its last checkpoint to the same bits. Returns the step of that. `copied`: the files are
        copies, so that marks of directories, which have their inode numbers, do not count."""
        before = self.complete()
        if before and before[-1] == STEPS:  # a trainer that resumes what has ended takes one more step
            assert state_of(self.root / "run" / f"checkpoint-{STEPS}" / STATE) == expected["state"]
            return STEPS
        status, found = self.train()
        assert status == 0, found
        # It may also go on from one that was sealed and had not got its name yet.
        assert found["from"] >= max(before, default=0), f"{found}: a complete checkpoint was lost"
        if found["from"] == STEPS:
            found["losses"] = found["losses"][: len(expected["losses"])]
        assert {**found, "from": 0} == expected, f"OTHER BITS: {found}, {expected}"
        assert not [path.name for path in (self.root / "run").iterdir() if not path.name.startswith("checkpoint-")]
        assert copied or not [*orphans_in(self.root / "ssd")], "pages of lost checkpoints are kept"
        return int(found["from"])


@pytest.fixture
def run(request: pytest.FixtureRequest, ranks: RankServer, tmp_path: Path) -> Run:
    if compiler() is None:
        pytest.skip("recording what a process writes needs Linux and a C compiler")
    return Run(ranks, tmp_path.resolve() / "root", request.param)


few_or_many = pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "many"])
on_ssd = pytest.mark.parametrize("run", [True], ids=["on a drive"], indirect=True)
anywhere = pytest.mark.parametrize("run", [True, False], ids=["on a drive", "in RAM"], indirect=True)


@few_or_many
@on_ssd
@pytest.mark.parametrize("kind", ["kills", "signals"])
def test_a_run_that_is_killed_or_signalled_goes_on(kind: str, many: bool, run: Run) -> None:
    expected = run.whole()  # what imports and compiles
    began = time.monotonic()
    assert run.whole() == expected
    length, draw = time.monotonic() - began, random.Random(kind)
    went_on: Counter[int] = Counter()
    for _ in range(40 if many else 2):
        after = draw.uniform(0.2 * length, length)
        before, number = run.complete(), signal.SIGKILL if kind == "kills" else signal.SIGTERM
        status, found = run.train(signalled=(after, number))
        assert status in (0, -number), found
        if "Continue with" in found.get("errors", ""):
            assert run.complete()[-1] > max(before, default=0), "what a signal ended was not saved"
        went_on[run.check_ends_well(expected)] += 1
        run.clear()
    print(f"{kind}: runs went on from {dict(went_on)}")


@few_or_many
@anywhere
def test_a_run_that_lost_power_goes_on(many: bool, run: Run) -> None:
    expected = run.whole()
    (run.root / "ssd").mkdir()
    disk, log = Disk(run.root), run.root.with_name("log")
    status, found = run.train(record=[str(run.root), str(log), 0, 0, 0])
    assert status == 0, found
    events = read_log(log)
    assert deepcopy_applied(disk, events) == image_of(run.root), "something was written that was not recorded"
    turns = [i + after for i, event in enumerate(events) if event.kind in "fmuld" for after in (0, 1)]
    everywhere = [(i, loss) for i in [*turns, *range(0, len(events), 5)] for loss in LOSSES]
    chosen = set(random.Random(f"{many}").sample(everywhere, 60 if many else 3))
    failed = []
    for count in range(max(point[0] for point in chosen) + 1):
        for loss in [loss for loss in LOSSES if (count, loss) in chosen]:
            put(disk.image(LOSSES[loss]), run.root)
            try:
                run.check_ends_well(expected, copied=True)
            except AssertionError as error:
                failed.append(f"after {count} events, before {[*map(str, events[count : count + 1])]}, {loss}: {error}")
        for event in events[count : count + 1]:
            disk.apply(event)
    assert not failed, "\n".join(failed)


def deepcopy_applied(disk: Disk, events: list[Any]) -> Image:
    """What a disk holds after all events."""
    other = deepcopy(disk)
    for event in events:
        other.apply(event)
    return other.image(LOSSES["all is kept"])
