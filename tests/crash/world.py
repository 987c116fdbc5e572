"""A model, a text, drives, and files that are none of Pagoda's business; and command lines of `pagoda` run there."""

import json
import re
import shutil
import signal
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks.ranks import RankServer

from pagoda.integrations.seals import SEAL
from tests.crash.disk import LOSSES, Disk, Event, Image, image_of, put, read_log
from tests.tiny import write_model, write_text

STEPS = 3
SETTINGS = [
    *(
        "train",
        "--max-steps",
        str(STEPS),
        "--per-device-train-batch-size",
        "1",
        "--max-length",
        "8",
        "--seed",
        "3",
        "--max-grad-norm",
        "1.0",
    ),
    *("--precision", "bf16"),
    *("--save-steps", "1", "--save-total-limit", "2", "--plan", "usual"),
]
PAGED = ["--memory.host", "150KiB", "--memory.unit-limit", "16KiB", "--memory.page-size", "4KiB"]
CHECKPOINT = re.compile(r"run/checkpoint-(\d+)")
LIMIT_S = 240
"""A command that takes longer hangs."""
_OURS = re.compile(r"(run|exported|\.exported\.partial)(/|$)|(.*/)?pagoda-[0-9a-f]{16}(/|$)")
"""What `pagoda` may change: what the command line names, and stores, wherever a configuration has them made."""
_NOT_OURS = {
    "home/alice/thesis.txt": "years of work",
    "home/alice/pages": "not those of a store",
    "ssd0/notes.txt": "kept on the fast drive",
    "ssd0/pagoda-train/.git/HEAD": "ref: refs/heads/main",
    "ssd0/pagoda-train/pagoda/api.py": "a clone, with changes that nobody has pushed",
    "ssd0/pagoda-x/pages": "a name like a store's",
    "ssd1/pagoda-0123456789abcdef.bak/pages": "a name like a store's",
    "ssd1/pagoda-data/commits/one": "a name like a store's",
    "other/run/config.json": "{}",
}


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    args: tuple[str, ...]
    status: int | None
    """None: it hung, and was killed."""
    out: str
    err: str
    digest: dict[str, Any] | None
    restored: list[str] | None
    """Hashes of the checkpoint that it went on from and of the state that it then had, if that was asked for."""

    def __str__(self) -> str:
        return f"pagoda {' '.join(self.args)}: status {self.status}\n{self.out[-600:]}\n{self.err[-2500:]}"

    def check(self, *allowed: int) -> "Done":
        """It ended as it may, and if it refused, then with one message."""
        assert self.status in allowed, str(self)
        assert "Traceback" not in self.err, str(self)
        if self.status == 2:
            assert sum(line.startswith("pagoda: ") for line in self.err.splitlines()) == 1, str(self)
        return self

    @property
    def resumed_after(self) -> int | None:
        """The step that the run continued from."""
        found = re.search(r"Resuming .* after step (\d+)", self.out)
        return int(found[1]) if found else None


def start_in(folder: Path) -> list[str]:
    """A command that starts a run, but for its directory, of a model and a text that this writes."""
    write_model(folder / "model", hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return [*SETTINGS, "--model", str(folder / "model"), "--data", write_text(folder / "text")]


class Commands:
    """Runs command lines of `pagoda`, each in a process of its own."""

    def __init__(self, ranks: RankServer, folder: Path) -> None:
        self.start = start_in(folder)
        self._ranks, self._out = ranks, folder / "out"
        self.run(["--help"], None, None, None, False)  # from now on no time is taken to import anything

    def run(
        self, args: list[str], run: Path | None, record: list[Any] | None, kill_after: float | None, restored: bool
    ) -> Done:
        """With arguments as `command.run_line`; the process is killed after so many seconds."""
        shutil.rmtree(self._out, ignore_errors=True)
        arguments = {"args": args, "run": run and str(run), "record": record, "restored": restored}
        settings = {"arguments": arguments, "environment": {"COLUMNS": "1000"}, "timeout_s": kill_after or LIMIT_S}
        (status,) = self._ranks.ask("tests.crash.command:run_line", 1, self._out, **settings)
        if status is None and kill_after is not None:
            status = -signal.SIGKILL
        found = torch.load(self._out / "rank-0.pt") if status == 0 else {"status": status, "digest": None}
        out, err = ((self._out / name).read_text(errors="replace") for name in ("out", "err"))
        said = self._out / "restored"
        hashes = json.loads(said.read_text()) if said.exists() else None
        return Done(tuple(args), found["status"], out, err, found["digest"], hashes)


@dataclass(frozen=True)
class Recording:
    """A command that was watched: the disk before, what it changed, and the bits that it ended with."""

    disk: Disk
    events: list[Event]
    digest: dict[str, Any] | None

    def images(self, points: set[tuple[int, str]]) -> Iterator[tuple[str, Image]]:
        """What the disk holds where power is lost after so many events; each different one once, with a name."""
        disk, seen = deepcopy(self.disk), set()
        for count in range(max(point[0] for point in points) + 1):
            for loss in [loss for loss in LOSSES if (count, loss) in points]:
                image = disk.image(LOSSES[loss])
                key = hash(frozenset(image.items()))
                if key not in seen:
                    yield f"after {count} events, before {[*map(str, self.events[count : count + 1])]}, {loss}", image
                seen.add(key)
            for event in self.events[count : count + 1]:
                disk.apply(event)

    def end(self, loss: str = "all is kept") -> Image:
        """What the disk holds at the end."""
        return next(self.images({(len(self.events), loss)}))[1]


@dataclass(frozen=True)
class World:
    """Everything below one directory, which each case fills anew."""

    commands: Commands
    root: Path
    drives: int = 0
    extra: tuple[str, ...] = ()

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    @property
    def start(self) -> list[str]:
        """The command that starts the run."""
        memory = [*PAGED, *self._ssd] if self.drives else []
        return [*self.commands.start, *memory, *self.extra, "--output-dir", str(self.run_dir)]

    @property
    def resume(self) -> list[str]:
        return ["train", "--resume-from-checkpoint", "last", "--output-dir", str(self.run_dir), *self._ssd]

    @property
    def _ssd(self) -> list[str]:
        drives = ",".join(str(self.root / f"ssd{drive}") for drive in range(self.drives))
        return ["--memory.ssd", drives] if drives else []

    def fresh(self) -> Image:
        """The world before any run."""
        shutil.rmtree(self.root, ignore_errors=True)
        for path, text in _NOT_OURS.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text)
        for drive in range(2):
            (self.root / f"ssd{drive}").mkdir(exist_ok=True)
        (self.root / "ssd0" / "pagoda-link").symlink_to("../home")
        return image_of(self.root)

    def pagoda(
        self,
        args: list[str],
        fault: tuple[int, int, int] | None = None,
        run: Path | None = None,
        kill_after: float | None = None,
        restored: bool = False,
    ) -> Done:
        """Run a command line; calls [first, last) that change anything fail with an error, 0 for short writes."""
        record = None if fault is None else [str(self.root), str(self._log), *fault]
        trains_in = (run or self.run_dir) if args[0] == "train" else None
        return self.commands.run(args, trains_in, record, kill_after, restored)

    def watch(self, args: list[str], before: Image, fault: tuple[int, int, int] = (0, 0, 0)) -> tuple[Done, Recording]:
        """Record a command line on an image."""
        put(before, self.root)
        disk = Disk(self.root)
        done = self.pagoda(args, fault)
        return done, Recording(disk, read_log(self._log), done.digest)

    def record(self, args: list[str], before: Image) -> Recording:
        """Record a command that succeeds."""
        done, recording = self.watch(args, before)
        done.check(0)
        assert recording.end() == image_of(self.root), "something was written that was not recorded"
        self.check_not_ours(before)
        return recording

    def check_not_ours(self, before: Image, grown: bool = False) -> None:
        """What Pagoda has no business with is as it was; but where somebody else was at work, more may be there."""
        was, now = ({p: c for p, c in image.items() if not _OURS.match(p)} for image in (before, image_of(self.root)))
        paths = was.keys() if grown else was.keys() | now.keys()
        changed = sorted(path for path in paths if path not in now or path not in was or was[path] != now[path])
        assert not changed, f"changed, though it was none of Pagoda's: {changed}"

    def check_ends_well(self, image: Image, expected: dict[str, Any], all_done: bool = False) -> None:
        """On this image, the run goes on from its last checkpoint, or starts where there is none, to the same bits."""
        put(image, self.root)
        steps = [int(found[1]) for path in image if (found := CHECKPOINT.fullmatch(path))]
        assert STEPS in steps or not all_done, "a run that ended well has lost its last checkpoint"
        done = self.pagoda(self.resume).check(0, 2)
        if done.status == 2 and not steps:  # there is no run yet
            done = self.pagoda(self.start)
        done.check(0)
        if steps and max(steps) < STEPS and "has finished" not in done.out:
            # It may also go on from one that was sealed and had not got its name yet.
            assert done.resumed_after is not None, str(done)
            assert done.resumed_after >= max(steps), str(done)
        assert done.digest == expected, f"OTHER BITS: {done.digest} {expected}\n{done}"
        self.check_not_ours(image)

    @property
    def _log(self) -> Path:
        return self.root.with_name(f"{self.root.name}.log")


def half_way(recording: Recording, world: World) -> Image:
    """A run with two checkpoints, killed just before the third was complete."""
    seal = f".checkpoint-{STEPS}.partial/checkpoint-{STEPS}/{SEAL}"
    count = max(i for i, event in enumerate(recording.events) if event.kind == "m" and event.other.endswith(seal))
    return next(recording.images({(count, "all is kept")}))[1]
