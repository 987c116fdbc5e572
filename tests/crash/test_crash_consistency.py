"""Whatever a disk, a user or an attacker does to files, a run ends with its bits, or says why it cannot.

Black box: command lines of `pagoda` on a run, its SSD directories, and files around them that are none of its business.
Each test looks at a few of its cases; `-m slow` looks at hundreds.
"""

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.crash.disk import LOSSES, Image, image_of, put
from tests.crash.world import CHECKPOINT, STEPS, Recording, Server, World, half_way, recorder

Case = tuple[str, Callable[[], None]]
few_or_many = pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "many"])
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        recorder()
    except LookupError as error:
        pytest.skip(str(error))
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


class Scenarios:
    """Recordings of commands, made when they are first asked for."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._made: dict[str, tuple[World, Recording]] = {}
        self.worlds = {
            "in RAM": World(server, folder / "ram"),
            "on a drive": World(server, folder / "drive", drives=1),
            "on two drives": World(server, folder / "drives", drives=2),
            "on a drive, copied": World(server, folder / "copied", 1, ("--keep-checkpoints", "0")),
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
        args = [*world.resume, "--keep-checkpoints", "4"] if command == "growing" else world.resume
        recording = world.record(args, half_way(started, world))
        assert recording.digest == started.digest
        return world, recording

    def half_way(self, name: str) -> tuple[World, Image, dict[str, Any]]:
        """A world, a run in it that has two of its three checkpoints, and the bits that it is to end with."""
        world, recording = self[name]
        assert recording.digest is not None
        return world, half_way(recording, world), recording.digest


@pytest.fixture(scope="module")
def scenarios(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    return Scenarios(server, tmp_path_factory.mktemp("worlds").resolve())


def check_all(cases: Sequence[Case]) -> None:
    """Every case, and then those that failed."""
    failed = []
    for name, case in cases:
        try:
            case()
        except AssertionError as error:
            failed.append(f"{name}:\n{error}\n")
    if failed:
        pytest.fail(f"{len(failed)} of {len(cases)} cases failed:\n\n" + "\n".join(failed), pytrace=False)


def some(cases: Sequence[Any], count: int, seed: str) -> list[Any]:
    """So many cases, from everywhere among them."""
    return random.Random(seed).sample(cases, min(count, len(cases)))


# --- a loss of power ----------------------------------------------------------------------------------------------


def points_of(recording: Recording, count: int, seed: str) -> set[tuple[int, str]]:
    """Where power is lost, mostly just before and after syncs and changes of names; and the very end."""
    turns = [i + after for i, event in enumerate(recording.events) if event.kind in "fmuld" for after in (0, 1)]
    everywhere = [(i, loss) for i in [*turns, *range(0, len(recording.events), 5)] for loss in LOSSES]
    end = [(len(recording.events), loss) for loss in LOSSES]
    return {*some(everywhere, count, seed), *some(end, 1 + count // 20, seed)}


@few_or_many
@pytest.mark.parametrize(
    "name",
    [
        *("in RAM", "on a drive", "on two drives", "on a drive, copied"),
        *("resuming in RAM", "resuming on two drives", "growing on a drive"),
    ],
)
def test_a_run_that_lost_power_ends_with_the_same_bits(name: str, many: bool, scenarios: Scenarios) -> None:
    world, recording = scenarios[name]
    assert recording.digest is not None
    cases: list[Case] = []
    for what, image in recording.images(points_of(recording, 60 if many else 3, name)):
        all_done = what.startswith(f"after {len(recording.events)} events")
        cases.append((what, lambda i=image, a=all_done: world.check_ends_well(i, recording.digest, a)))  # type: ignore
    check_all(cases)


@few_or_many
def test_an_export_that_lost_power_is_whole_or_can_be_made_anew(many: bool, scenarios: Scenarios) -> None:
    world, recording = scenarios["exporting on two drives"]
    out = world.root / "exported"

    def model(image: Image) -> Image:
        marks = ".pagoda-partial"  # what says that a directory is being written may outlive that, and does not matter
        return {path: image[path] for path in image if path.startswith("exported") and not path.endswith(marks)}

    def check(image: Image) -> None:
        put(image, world.root)
        if out.exists():
            shutil.rmtree(out) if not many else None
            assert model(image) == whole, "a part of a model has the name of all of it"
        if not out.exists():
            world.pagoda(recording_args).check(0)
            assert model(image_of(world.root)) == whole
        world.check_not_ours(image)

    recording_args = ["export", str(world.run_dir), str(out)]
    whole = model(recording.end())
    assert len(whole) > 2
    points = points_of(recording, 30 if many else 2, "export")
    check_all([(what, lambda i=image: check(i)) for what, image in recording.images(points)])  # type: ignore


# --- calls that fail ------------------------------------------------------------------------------------------------


@few_or_many
@pytest.mark.parametrize("name", ["in RAM", "on two drives", "resuming on a drive", "growing on a drive"])
def test_a_run_whose_disk_failed_ends_with_the_same_bits_on_a_healthy_one(
    name: str, many: bool, scenarios: Scenarios
) -> None:
    """A call fails, or all do from one on; and then, perhaps, power is lost too."""
    world, recording = scenarios[name]
    args = world.start if name in scenarios.worlds else world.resume
    args = [*args, "--keep-checkpoints", "4"] if name.startswith("growing") else args
    before = next(recording.images({(0, "all is kept")}))[1]
    expected = recording.digest
    assert expected is not None

    def check(first: int, length: int, error: int, loss: str) -> None:
        done, failed = world.watch(args, before, (first, first + length, error))
        assert any(event.error for event in failed.events) or error == 0 or done.status == 0
        done.check(0, 2)
        assert done.status != 0 or done.digest == expected, f"OTHER BITS\n{done}"
        world.check_not_ours(before)
        world.check_ends_well(failed.end(loss), expected, all_done=done.status == 0)

    turns = [i for i, event in enumerate(recording.events) if event.kind != "w"]
    faults = [
        (first, length, error, loss)
        for first in [*turns, *turns, *range(len(recording.events))]
        for length in (1, 1 << 30)
        for error in (errno.ENOSPC, errno.EIO, 0)
        for loss in ("all is kept", "all is lost", "torn")
    ]
    cases = some(faults, 40 if many else 3, name)
    check_all([(f"calls {c[0]} to {c[0] + c[1]}: {c[2]}, {c[3]}", lambda c=c: check(*c)) for c in cases])  # type: ignore


# --- damaged and forged files -----------------------------------------------------------------------------------------


def files_of(image: Image) -> list[str]:
    """The files of a run and of its stores."""
    return [p for p, content in image.items() if re.match(r"run/|ssd\d/pagoda-[0-9a-f]{16}/", p) and content is not None]


def check_damaged(world: World, image: Image, expected: dict[str, Any], harm: Callable[[], None]) -> None:
    """A run that somebody has harmed is refused, or goes on from an earlier checkpoint and says so, or does not care."""
    put(image, world.root)
    harm()
    harmed = image_of(world.root)
    paged = any(re.match(r"run/checkpoints/|ssd", p) for p in harmed.keys() | image.keys() if harmed.get(p) != image.get(p))
    verified = world.pagoda(["inspect", str(world.run_dir), "--verify"]).check(0, 1, 2)
    done = world.pagoda(world.resume).check(0, 2)
    assert done.status == 2 or done.digest["state"] == expected["state"], f"OTHER BITS\n{done}"  # type: ignore[index]
    if done.status == 0 and done.resumed_after != STEPS - 1:
        assert f"step-{STEPS - 1:06d}" in done.out + done.err, f"it does not say why it falls back\n{done}"
    if paged and (done.status == 2 or done.resumed_after != STEPS - 1):
        assert verified.status != 0, f"what is refused passes --verify:\n{verified}\n{done}"
    world.check_not_ours(harmed)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        bit = file.read(1)[0] ^ (1 << at % 8)
        file.seek(at)
        file.write(bytes([bit]))


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path, to: str) -> None:
    """A link to what the file was, somewhere else."""
    elsewhere = Path(to) / path.name
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def exchange(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def exchange_pages(path: Path, one: int, other: int) -> None:
    content = bytearray(path.read_bytes())
    a, b = slice(one * 4096, (one + 1) * 4096), slice(other * 4096, (other + 1) * 4096)
    content[a], content[b] = content[b], content[a]
    path.write_bytes(content)


def harms(world: World, image: Image) -> dict[str, list[tuple[str, Callable[[], None]]]]:
    """Ways to harm every file, by kind."""
    files = {world.root / path: image[path] for path in files_of(image)}
    sizes = {path: len(content) for path, content in files.items() if isinstance(content, bytes)}
    found: dict[str, list[tuple[str, Callable[[], None]]]] = {"flips": [], "losses": [], "swaps": [], "kinds": []}
    for path, size in sizes.items():
        for at in sorted({0, size // 3, size // 2, size - 1, *random.Random(str(size)).sample(range(size), min(4, size))}):
            if 0 <= at < size:
                found["flips"].append((f"{path}: bit flipped in byte {at}", lambda p=path, a=at: flip(p, a)))  # type: ignore
        for left in {0, size // 2, max(0, size - 1), size + 4096}:
            found["losses"].append((f"{path}: {left} of {size} bytes", lambda p=path, n=left: os.truncate(p, n)))  # type: ignore
        found["losses"].append((f"{path}: gone", path.unlink))
        found["kinds"].append((f"{path}: a FIFO", lambda p=path: replace_by_fifo(p)))  # type: ignore
        found["kinds"].append((f"{path}: a directory", lambda p=path: (p.unlink(), p.mkdir())))  # type: ignore
        found["kinds"].append((f"{path}: linked", lambda p=path: replace_by_link(p, f"{world.root}/home")))  # type: ignore
        for other in sizes:
            alike = other.suffix == path.suffix and (other.name == path.name) != (other.parent == path.parent)
            if other > path and alike and image[str(path.relative_to(world.root))] != image[str(other.relative_to(world.root))]:
                found["swaps"].append((f"{path} and {other} exchanged", lambda a=path, b=other: exchange(a, b)))  # type: ignore
        if path.name == "pages":
            for one in range(0, size // 4096 - 1, 3):
                found["swaps"].append((f"{path}: page {one} exchanged", lambda p=path, n=one: exchange_pages(p, n, n + 1)))  # type: ignore
    return found


@few_or_many
@pytest.mark.parametrize("kind", ["flips", "losses", "swaps", "kinds"])
@pytest.mark.parametrize("name", ["in RAM", "on two drives"])
def test_a_harmed_run_is_refused_or_ends_with_its_bits(
    name: str, kind: str, many: bool, scenarios: Scenarios
) -> None:
    world, image, expected = scenarios.half_way(name)
    ways = some(harms(world, image)[kind], 40 if many else 2, name + kind)
    check_all([(what, lambda h=harm: check_damaged(world, image, expected, h)) for what, harm in ways])  # type: ignore


FORGED = [None, True, -1, 0, 2**40, 2**63, 1e308, "", "x", "../../home/alice", "/HOME/alice", [], {}, [[]], [-1], {"a": 1}]


def forgeries(document: Any) -> Iterator[tuple[str, Any]]:
    """The document with one of its values replaced, or one left out."""

    def walk(value: Any, put: Callable[[Any], Any], where: str) -> Iterator[tuple[str, Any]]:
        for forged in FORGED:
            if type(forged) is not type(value) or forged != value:
                yield f"{where} = {forged!r}", put(forged)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, entry in list(items)[:12]:
            def put_below(new: Any, key: Any = key) -> Any:
                copy = value.copy()
                copy[key] = new
                return put(copy)

            yield from walk(entry, put_below, f"{where}[{key!r}]")
            if isinstance(value, dict):
                yield f"{where} without {key!r}", put({k: v for k, v in value.items() if k != key})

    yield from walk(document, lambda new: new, "")


def signed(fields: Any) -> bytes:
    """A manifest with the hash of what it says, as far as it can be made."""
    if isinstance(fields, dict):
        said = {key: value for key, value in fields.items() if key not in ("format", "version", "hash")}
        fields = {**fields, "hash": xxhash.xxh3_64_hexdigest(json.dumps(said, sort_keys=True).encode())}
    return json.dumps(fields).encode()


def forged_files(world: World, image: Image, kind: str) -> Iterator[tuple[str, Path, bytes]]:
    """(what, file, its forged content), with hashes that fit."""
    home = str(world.root / "home")
    for path in files_of(image):
        content = image[path]
        if kind == "table" and "/commits/" in path and isinstance(content, bytes):
            line, _, rest = content[:-8].partition(b"\n")
            for what, forged in forgeries(json.loads(line)):
                body = json.dumps(forged).replace("/HOME", home).encode() + b"\n" + rest
                yield f"{path}: {what}", world.root / path, body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
        elif Path(path).name == kind and isinstance(content, bytes):
            document = json.loads(content)
            sign = signed if kind == "manifest.json" else lambda fields: json.dumps(fields).encode()
            assert json.loads(sign(document)) == document, "the format of hashes has changed: change `signed` too"
            for what, forged in forgeries(document):
                yield f"{path}: {what}", world.root / path, sign(json.loads(json.dumps(forged).replace("/HOME", home)))
            yield f"{path}: deep", world.root / path, b"[" * 100_000
            yield f"{path}: no UTF-8", world.root / path, b'{"\xff\xfe": 1}'
            yield f"{path}: a long number", world.root / path, b'{"steps": ' + b"9" * 5000 + b"}"


@few_or_many
@pytest.mark.parametrize("kind", ["config.json", "manifest.json", "store.json", "table"])
def test_a_forged_file_is_refused_or_does_not_matter(kind: str, many: bool, scenarios: Scenarios) -> None:
    world, image, expected = scenarios.half_way("on two drives")
    forged = some(list(forged_files(world, image, kind)), 60 if many else 3, kind)
    cases = [(what, lambda p=path, c=content: p.write_bytes(c)) for what, path, content in forged]  # type: ignore
    check_all([(what, lambda h=harm: check_damaged(world, image, expected, h)) for what, harm in cases])  # type: ignore


# --- files that are none of Pagoda's business ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "identity"),
    [
        ("pagoda-x", "x/../../home/alice"),
        ("pagoda-x", "{home}"),
        ("pagoda-0123456789abcdef", "x/../../home/alice"),
        ("pagoda-0123456789abcdef", "."),
    ],
)
def test_a_forged_store_leads_to_no_other_file(folder: str, identity: str, scenarios: Scenarios) -> None:
    world = scenarios.worlds["on a drive"]
    before = world.fresh()
    store = world.root / "ssd0" / folder
    store.mkdir(exist_ok=True)
    fields = {"format": "pagoda-pages", "version": 1, "id": identity.format(home=world.root / "home"), "page_bytes": 4096}
    (store / "store.json").write_text(json.dumps({**fields, "directories": ["-"], "stripe": 0, "portions": [[1]]}))
    before = image_of(world.root)
    world.pagoda([*world.start, "--steps", "1"]).check(0, 2)
    world.check_not_ours(before)


def reference_elsewhere(world: World, field: str, value: str) -> None:
    """Let the oldest checkpoint's manifest, which rotation reads last, name another commit."""
    path = world.run_dir / "checkpoints" / "step-000001" / "manifest.json"
    manifest = json.loads(path.read_text())
    for rank in manifest["paged"]["ranks"]:
        rank["reference"][field] = value
    path.write_bytes(signed(manifest))


def commits_elsewhere(world: World) -> None:
    commits = next(world.root.glob("ssd0/pagoda-*/commits"))
    elsewhere = world.root / "home" / "alice" / "commits"
    shutil.move(commits, elsewhere)
    commits.symlink_to(elsewhere)


ATTACKS: dict[str, Callable[[World], None]] = {
    "a commit with ..": lambda w: reference_elsewhere(w, "commit", "../../../home/alice/thesis.txt"),
    "an absolute commit": lambda w: reference_elsewhere(w, "commit", f"{w.root}/home/alice/thesis.txt"),
    "a store with ..": lambda w: reference_elsewhere(w, "store", "x/../../home/alice"),
    "commits linked to elsewhere": commits_elsewhere,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_rotation_deletes_nothing_elsewhere(attack: str, scenarios: Scenarios) -> None:
    world, image, expected = scenarios.half_way("on a drive")
    check_damaged(world, image, expected, lambda: ATTACKS[attack](world))


# --- runs and drives that are moved --------------------------------------------------------------------------------------


def other_run(world: World, out: str, drives: str) -> None:
    """Another run, which has the drives to itself for a while."""
    memory = ",".join(str(world.root / drive) for drive in drives.split(","))
    args = [*world.start, "--seed", "5", "--steps", "1", "--out", str(world.root / out), "--memory.ssd", memory]
    world.pagoda(args, run=world.root / out).check(0)


def move(world: World, one: str, other: str) -> None:
    (world.root / one).rename(world.root / other)


def drive_away(world: World) -> None:
    move(world, "ssd0", "away")
    (world.root / "ssd0").mkdir()
    other_run(world, "run2", "ssd1")
    shutil.rmtree(world.root / "ssd0")
    move(world, "away", "ssd0")


def copied_drive(world: World) -> None:
    shutil.copytree(world.root / "ssd0", world.root / "copy", symlinks=True)
    move(world, "run", "away")
    other_run(world, "run", "ssd0,ssd1")
    other_run(world, "run2", "copy")
    move(world, "run", "run3")
    move(world, "away", "run")


def volume_away(world: World) -> None:
    move(world, "run/checkpoints", "away")
    (world.root / "run/checkpoints").mkdir()
    other_run(world, "run2", "ssd0,ssd1")
    (world.root / "run/checkpoints").rmdir()
    move(world, "away", "run/checkpoints")


def replaced_run(world: World) -> list[str]:
    move(world, "run", "old")
    other_run(world, "run", "ssd0,ssd1")
    other_run(world, "run2", "ssd0,ssd1")
    return ["--out", str(world.root / "old")]


def moved_drives(world: World) -> list[str]:
    move(world, "ssd0", "fast0")
    move(world, "ssd1", "fast1")
    return ["--memory.ssd", f"{world.root}/fast0,{world.root}/fast1"]


def moved_run(world: World) -> list[str]:
    move(world, "run", "old")
    return ["--out", str(world.root / "old")]


MOVES: dict[str, Callable[[World], list[str] | None]] = {
    "another run where the first drive was": drive_away,
    "another run on a copy of the first drive": copied_drive,
    "another run while the volume of its checkpoints is away": volume_away,
    "another run of its name, in its old place": replaced_run,
    "its drives have moved": moved_drives,
    "it has moved": moved_run,
}


@pytest.mark.parametrize("name", MOVES)
def test_a_run_outlives_moves_and_other_runs(name: str, scenarios: Scenarios) -> None:
    world, image, expected = scenarios.half_way("on two drives")
    put(image, world.root)
    where = MOVES[name](world) or []
    run = Path(where[1]) if where[:1] == ["--out"] else world.run_dir
    done = world.pagoda(["train", "--resume", "--out", str(run), *(where if run == world.run_dir else ())], run=run)
    done.check(0)
    assert done.resumed_after == STEPS - 1, str(done)
    assert done.digest == expected, f"OTHER BITS\n{done}"


def test_the_scenarios_rotate_grow_and_share_stripes(scenarios: Scenarios) -> None:
    world, recording = scenarios["on two drives"]
    assert sum(bool(CHECKPOINT.fullmatch(path)) for path in recording.end()) == 2
    assert {path[:4] for path in recording.end() if path.endswith("/pages") and "/pagoda-" in path} >= {"ssd0", "ssd1"}
    grown = scenarios["growing on a drive"][1]
    assert any(event.kind == "r" and event.error == 0 and event.offset > 1 << 18 for event in grown.events)
