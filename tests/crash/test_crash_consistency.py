"""Whatever a disk or a user does to files, a run ends with its bits, or says why it cannot.

Black box: command lines of `pagoda` on a run, its SSD directories, and files around them that are none of its business.
Each test looks at a few of its cases; `-m slow` looks at hundreds. Files are forged in checkpoint/test_forged.py and
memory/test_store_trust.py.
"""

import errno
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.crash.disk import LOSSES, Image, image_of, put
from tests.crash.world import CHECKPOINT, STEPS, Commands, Recording, World, half_way

Case = tuple[str, Callable[[], object]]
PAGE = 4096
few_or_many = pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "many"])
pytestmark = pytest.mark.timeout(3600)


class Scenarios:
    """Recordings of commands, made when they are first asked for."""

    def __init__(self, commands: Commands, folder: Path) -> None:
        self._made: dict[str, tuple[World, Recording]] = {}
        self.worlds = {
            "in RAM": World(commands, folder / "ram"),
            "on a drive": World(commands, folder / "drive", drives=1),
            "on two drives": World(commands, folder / "drives", drives=2),
            "on a drive, copied": World(commands, folder / "copied", 1, ("--save-total-limit", "0")),
            "in RAM, unclipped": World(commands, folder / "unclipped", 0, ("--max-grad-norm", "0")),
            "on a drive, unclipped": World(commands, folder / "drive2", 1, ("--max-grad-norm", "0")),
            "beside a device": World(
                commands, folder / "device", 1, ("--memory.device", "cpu:128KiB", "--memory.host", "170KiB")
            ),
        }

    def __getitem__(self, name: str) -> tuple[World, Recording]:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> tuple[World, Recording]:
        if name in self.worlds:
            world = self.worlds[name]
            return world, world.record(world.start, world.fresh())
        command, _, start = name.partition(" ")
        world, started = self[start]
        if command == "exporting":
            return world, world.record(["export", str(world.run_dir), str(world.root / "exported")], started.end())
        args = [*world.resume, "--save-total-limit", "4"] if command == "growing" else world.resume
        recording = world.record(args, half_way(started, world))
        assert recording.digest == started.digest
        return world, recording

    def half_way(self, name: str) -> tuple[World, Image, dict[str, Any]]:
        """A world, a run in it that has two of its three checkpoints, and the bits that it is to end with."""
        world, recording = self[name]
        return world, half_way(recording, world), recording.digest


@pytest.fixture(scope="module")
def scenarios(commands: Commands) -> Iterator[Scenarios]:
    with tempfile.TemporaryDirectory() as folder:  # on a drive, if there is one
        yield Scenarios(commands, Path(folder).resolve())


def check_all(cases: Iterable[Case]) -> None:
    """Every case, and then those that failed."""
    done, failed = 0, []
    for name, case in cases:
        done += 1
        try:
            case()
        except AssertionError as error:
            failed.append(f"{name}:\n{error}\n")
    assert done, "there are no cases"
    if failed:
        pytest.fail(f"{len(failed)} of {done} cases failed:\n\n" + "\n".join(failed), pytrace=False)


def some(cases: Sequence[Any], count: int, seed: str) -> list[Any]:
    """So many cases, from everywhere among them."""
    return random.Random(seed).sample(cases, min(count, len(cases)))


# --- a loss of power ------------------------------------------------------------------------------------------------


def points_of(recording: Recording, count: int, seed: str) -> set[tuple[int, str]]:
    """Where power is lost, mostly just before and after syncs and changes of names; and the very end."""
    turns = [i + after for i, event in enumerate(recording.events) if event.kind in "fmuld" for after in (0, 1)]
    everywhere = [(i, loss) for i in [*turns, *range(0, len(recording.events), 5)] for loss in LOSSES]
    end = [(len(recording.events), loss) for loss in LOSSES]
    return {*some(everywhere, count, seed), *some(end, 1 + count // 20, seed)}


SHOWN = ("in RAM", "growing on a drive")
RARER = (
    "on a drive",
    "on a drive, copied",
    "on two drives",
    "resuming in RAM",
    "resuming on two drives",
    "in RAM, unclipped",
    "on a drive, unclipped",
    "beside a device",
)


@few_or_many
@pytest.mark.parametrize("name", [*SHOWN, *(pytest.param(name, marks=pytest.mark.slow) for name in RARER)])
def test_a_run_that_lost_power_ends_with_the_same_bits(name: str, many: bool, scenarios: Scenarios) -> None:
    world, recording = scenarios[name]
    end = f"after {len(recording.events)} events"
    points = points_of(recording, 60 if many else 3, name)
    check_all(
        (what, partial(world.check_ends_well, image, recording.digest, all_done=what.startswith(end)))
        for what, image in recording.images(points)
    )


@few_or_many
def test_an_export_that_lost_power_is_whole_or_can_be_made_anew(many: bool, scenarios: Scenarios) -> None:
    world, recording = scenarios["exporting on two drives"]
    out = world.root / "exported"

    def model(image: Image) -> Image:
        marks = ".pagoda-partial"  # what says that a directory is being written may outlive that, and does not matter
        return {path: image[path] for path in image if path.startswith("exported") and not path.endswith(marks)}

    def check(image: Image) -> None:
        put(image, world.root)
        if not out.exists():
            world.pagoda(["export", str(world.run_dir), str(out)]).check(0)
        assert model(image_of(world.root)) == whole, "a part of a model has the name of all of it"
        world.check_not_ours(image)

    whole = model(recording.end())
    assert len(whole) > 2
    points = points_of(recording, 30 if many else 2, "export")
    check_all((what, partial(check, image)) for what, image in recording.images(points))


# --- calls that fail ------------------------------------------------------------------------------------------------


@few_or_many
@pytest.mark.parametrize(
    "name",
    [
        "on two drives",
        "growing on a drive",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("in RAM", "resuming on a drive")),
    ],
)
def test_a_run_whose_disk_failed_ends_with_the_same_bits_on_a_healthy_one(
    name: str, many: bool, scenarios: Scenarios
) -> None:
    """A call fails, or all do from one on; and then, perhaps, power is lost too."""
    world, recording = scenarios[name]
    args = world.start if name in scenarios.worlds else world.resume
    args = [*args, "--save-total-limit", "4"] if name.startswith("growing") else args
    before = next(recording.images({(0, "all is kept")}))[1]

    def check(first: int, length: int, error: int, loss: str) -> None:
        done, failed = world.watch(args, before, (first, first + length, error))
        done.check(0, 2)
        assert done.status != 0 or done.digest == recording.digest, f"OTHER BITS\n{done}"
        world.check_not_ours(before)
        world.check_ends_well(failed.end(loss), recording.digest, all_done=done.status == 0)

    turns = [i for i, event in enumerate(recording.events) if event.kind != "w"]
    faults = [
        (first, length, error, loss)
        for first in [*turns, *turns, *range(len(recording.events))]
        for length in (1, 1 << 30)
        for error in (errno.ENOSPC, errno.EIO, 0)
        for loss in ("all is kept", "all is lost", "torn")
    ]
    cases = some(faults, 40 if many else 3, name)
    check_all((f"calls {c[0]} to {c[0] + c[1]}: {c[2]}, {c[3]}", partial(check, *c)) for c in cases)


# --- damaged files ----------------------------------------------------------------------------------------------


def files_of(image: Image) -> list[str]:
    """The files of a run and of its stores."""
    return [path for path in image if image[path] is not None and re.match(r"run/|ssd\d/pagoda-[0-9a-f]{16}/", path)]


def check_harmed(world: World, image: Image, expected: dict[str, Any], harm: Callable[[], object]) -> None:
    """A harmed run is refused, or goes on from an earlier checkpoint and says so, or does not care."""
    put(image, world.root)
    harm()
    harmed = image_of(world.root)
    changed = [path for path in harmed.keys() | image.keys() if harmed.get(path, 0) != image.get(path, 0)]
    state = any(re.match(r"run/checkpoint-|ssd", path) for path in changed)
    verified = world.pagoda(["inspect", str(world.run_dir), "--verify"]).check(0, 1, 2)
    done = world.pagoda(world.resume).check(0, 2)
    world.check_not_ours(harmed)
    if done.status == 0 and done.resumed_after != STEPS - 1:
        assert f"checkpoint-{STEPS - 1}" in done.out + done.err, f"it does not say why it falls back\n{done}"
    assert done.status == 2 or done.digest["state"] == expected["state"], f"OTHER BITS\n{done}"
    if state and (done.status == 2 or done.resumed_after != STEPS - 1):
        assert verified.status != 0, f"what is refused passes --verify:\n{verified}\n{done}"


def overwrite(path: Path, at: int, change: Callable[[bytes], bytes], nbytes: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        changed = change(file.read(nbytes))
        file.seek(at)
        file.write(changed)


def flip(path: Path, at: int) -> None:
    overwrite(path, at, lambda byte: bytes([byte[0] ^ 1 << at % 8]))


def exchange_pages(path: Path, page: int) -> None:
    overwrite(path, page * PAGE, lambda two: two[PAGE:] + two[:PAGE], 2 * PAGE)


def exchange(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def replace_by(path: Path, kind: str) -> None:
    """A FIFO, a directory, or a link to the same content elsewhere."""
    if kind == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
        return
    path.unlink()
    os.mkfifo(path) if kind == "FIFO" else path.mkdir()


def harms(world: World, image: Image) -> dict[str, list[Case]]:
    """Ways to harm every file, by kind."""
    files = {world.root / path: content for path in files_of(image) if isinstance(content := image[path], bytes)}
    found: dict[str, list[Case]] = {"flips": [], "losses": [], "swaps": [], "kinds": []}
    for path, content in files.items():
        size = len(content)
        at = {0, size // 3, size - 1, *random.Random(size).sample(range(size), min(4, size))} if size else set()
        found["flips"] += [(f"{path}: bit flipped in byte {n}", partial(flip, path, n)) for n in sorted(at)]
        lengths = {0, size // 2, size - 1, size + PAGE} - {size, -1}
        found["losses"] += [(f"{path}: {n} of {size} bytes", partial(os.truncate, path, n)) for n in sorted(lengths)]
        found["losses"].append((f"{path}: gone", path.unlink))
        kinds = ("FIFO", "directory", "link")
        found["kinds"] += [(f"{path}: replaced by a {kind}", partial(replace_by, path, kind)) for kind in kinds]
        if path.name == "pages":
            pages = range(size // PAGE - 1)
            found["swaps"] += [(f"{path}: page {n} exchanged", partial(exchange_pages, path, n)) for n in pages]
        for other in files:
            alike = other.suffix == path.suffix and (other.name == path.name or other.parent == path.parent)
            if other > path and alike and content != files[other]:
                found["swaps"].append((f"{path} and {other} exchanged", partial(exchange, path, other)))
    return found


@few_or_many
@pytest.mark.parametrize("kind", ["flips", "losses", "swaps", "kinds"])
@pytest.mark.parametrize("name", ["on two drives", pytest.param("in RAM", marks=pytest.mark.slow)])
def test_a_harmed_run_is_refused_or_ends_with_its_bits(name: str, kind: str, many: bool, scenarios: Scenarios) -> None:
    world, image, expected = scenarios.half_way(name)
    ways = some(harms(world, image)[kind], 40 if many else 2, name + kind)
    check_all((what, partial(check_harmed, world, image, expected, harm)) for what, harm in ways)


# --- runs and drives that are moved ---------------------------------------------------------------------------------


def other_run(world: World, out: str, drives: str) -> None:
    """Another run, which has the drives to itself for a while."""
    memory = ",".join(str(world.root / drive) for drive in drives.split(","))
    args = [
        *world.start,
        "--seed",
        "5",
        "--max-steps",
        "1",
        "--output-dir",
        str(world.root / out),
        "--memory.ssd",
        memory,
    ]
    world.pagoda(args, run=world.root / out).check(0)


def move(world: World, *moves: str) -> None:
    """Each is "FROM TO"."""
    for one, other in map(str.split, moves):
        (world.root / one).rename(world.root / other)


def copied_drive(world: World) -> None:
    shutil.copytree(world.root / "ssd0", world.root / "copy", symlinks=True)
    move(world, "run away")
    other_run(world, "run", "ssd0,ssd1")
    other_run(world, "run2", "copy")
    move(world, "run run3", "away run")


MOVES: dict[str, tuple[Callable[[World], None], str, str]] = {
    "another run on a copy of the first drive": (copied_drive, "run", ""),
    "its drives have moved": (lambda world: move(world, "ssd0 fast0", "ssd1 fast1"), "run", "fast0,fast1"),
    "it has moved": (lambda world: move(world, "run old"), "old", ""),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_run_outlives_moves_and_other_runs(name: str, scenarios: Scenarios) -> None:
    """(what happens, where the run is then, and its drives if they are elsewhere)"""
    world, image, expected = scenarios.half_way("on two drives")
    happens, out, drives = MOVES[name]
    put(image, world.root)
    happens(world)
    ssd = ",".join(str(world.root / drive) for drive in (drives or "ssd0,ssd1").split(","))
    run = world.root / out
    done = world.pagoda(
        ["train", "--resume-from-checkpoint", "last", "--output-dir", str(run), "--memory.ssd", ssd], run=run
    ).check(0)
    assert done.resumed_after == STEPS - 1, str(done)
    assert done.digest == expected, f"OTHER BITS\n{done}"
    if not drives:
        world.check_not_ours(image, grown=True)


def test_the_scenarios_rotate_grow_and_share_stripes(scenarios: Scenarios) -> None:
    recording = scenarios["on two drives"][1]
    assert sum(bool(CHECKPOINT.fullmatch(path)) for path in recording.end()) == 2
    assert {path[:4] for path in recording.end() if path.endswith("/pages") and "/pagoda-" in path} >= {"ssd0", "ssd1"}
    grown = scenarios["growing on a drive"][1]
    assert any(event.kind == "r" and event.error == 0 and event.offset > 1 << 18 for event in grown.events)
