"""The run directory: configuration, metrics and checkpoints of one run, and which checkpoint is the last."""

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from pagoda.errors import CheckpointError, ConfigError
from pagoda.memory.files import copy_durably, inside, make_directories, sync_directory, write_durably
from pagoda.memory.identity import MANIFEST, STATE
from pagoda.memory.lock import Lock
from pagoda.train.config import TrainConfig
from pagoda.train.metrics import read_evaluations
from pagoda.train.settings_file import read_settings, settings_as_yaml

LOCK = ".pagoda-lock"
PREFIX = "checkpoint-"
_CHECKPOINT = re.compile(rf"{PREFIX}(\d+)")
LAST = "last"
"""Stands for the last checkpoint in place of a name."""
GONE_BACK = ".later"
"""Suffix of checkpoints that are kept but no longer belong to the run, because it went back to an earlier one."""


@dataclass(frozen=True)
class RunCheckpoint:
    """A complete checkpoint: the state after `step` steps."""

    step: int
    path: Path

    @property
    def state(self) -> Path:
        """Pagoda's own checkpoint in it, from which a run resumes. The trainer's own files are beside it."""
        return self.path / STATE


class RunDir:
    """The paths of a run, and their contents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "run.yaml"
        """The settings, which a user may also give to another run with --config."""
        self.plan = path / "plan.json"
        """The plan and the machine, for a report."""
        self.timeline = path / "timeline.json"
        """What compute and every lane did in one step, for a report."""
        self.metrics = path / "metrics.jsonl"
        self.evals = path / "evals.jsonl"
        self.output = path / "output.txt"
        """What the run could not print, because its terminal was closed, its reader went away or a disk was full."""
        self.tokenizer = path / "tokenizer"
        """Copies of the tokenizer's files, for exports. Missing if text is read as bytes."""

    def checkpoint(self, step: int) -> Path:
        """Directory of the checkpoint after `step` steps."""
        return self.path / f"{PREFIX}{step}"

    def check_place(self) -> None:
        """Check that the directory can be written or created. Writes nothing.

        Raises ConfigError if the path is a file or cannot be written, or if a directory in it is a link.
        """
        existing = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise ConfigError(f"--output-dir {self.path}: {existing} is a file, not a directory")
        inner = (*(checkpoint.path for checkpoint in self.all_checkpoints()), self.tokenizer)
        if links := [path for path in inner if path.is_symlink()]:
            raise ConfigError(
                f"--output-dir {self.path}: {links[0].name} in it is a symbolic link, and a run writes only to its "
                "directory: "
                "put the directory itself in its place, or move the whole run"
            )
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"--output-dir {self.path} cannot be created: {existing} is not writable")

    def check_free(self) -> None:
        """Check that a new run can start here. Writes nothing.

        Raises ConfigError like `check_place`, and if there is a run already, or a file that it would replace.
        """
        self.check_place()
        run = [self.config, self.metrics, self.evals, *self.path.glob(f"{PREFIX}*")]
        others = [self.plan, self.timeline, self.tokenizer]
        if taken := [path.name for path in run + others if os.path.lexists(path)]:
            what = "a run" if self.config.exists() else "files that a run would replace"
            raise ConfigError(
                f"--output-dir {self.path} already holds {what} ({', '.join(taken)}): give another directory"
                + ", or continue the run with --resume-from-checkpoint last" * self.config.exists()
            )

    def started_config(self) -> TrainConfig:
        """The configuration with which the run was started, without its directory.

        Raises ConfigError if there is no run here, or if its configuration cannot be read.
        """
        if not self.config.exists():
            raise ConfigError(f"there is no run in {self.path}: it has no run.yaml. Name the directory of a run")
        return read_settings(self.config)

    def all_checkpoints(self) -> list[RunCheckpoint]:
        """All complete checkpoints, in the order of their steps. Only a complete checkpoint has its final name."""
        names: list[str] = []
        with suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(self.path)
        steps = sorted(int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name)))
        found = [RunCheckpoint(step, self.checkpoint(step)) for step in steps]
        return [checkpoint for checkpoint in found if checkpoint.path.is_dir()]

    def latest(self) -> RunCheckpoint:
        """The complete checkpoint with the most steps. Raises CheckpointError if there is none."""
        complete = self.all_checkpoints()
        if not complete:
            raise CheckpointError(f"no complete checkpoint in {self.path}: the run stopped before its first")
        return complete[-1]

    def named(self, name: str) -> RunCheckpoint:
        """The checkpoint with this name. `last` and `best` (by evaluation) stand for a name. In a run without
        evaluations, the last one is the best.

        Raises CheckpointError if there is no such checkpoint.
        """
        if name == LAST:
            return self.latest()
        found = self.all_checkpoints()
        if name == "best":
            losses = {line["step"]: line["loss"] for line in read_evaluations(self.evals)}
            known = [c for c in found if losses.get(c.step) is not None]
            if not losses:
                return self.latest()
            if not known:
                raise CheckpointError(f"{self.path} has no checkpoint with an evaluation: name another than best")
            return min(known, key=lambda checkpoint: losses[checkpoint.step])
        for checkpoint in found:
            if checkpoint.path.name == name:
                return checkpoint
        raise CheckpointError(f"{self.path} has no checkpoint {name!r}: it has {names_of(found)}")

    def named_or_itself(self, name: str) -> Path:
        """Pagoda's own checkpoint with this name in the run. If the directory is no run: the one in it, or else the
        directory itself.

        Raises CheckpointError like `named`, and ConfigError if a checkpoint of no run is named.
        """
        if self.all_checkpoints() or self.metrics.exists():
            return self.named(name).state
        if name != LAST:
            raise ConfigError(f"--checkpoint {name} names a checkpoint of a run, and {self.path} is not a run")
        inner = self.path / STATE
        return inner if (inner / MANIFEST).is_file() else self.path

    def tokenizer_files(self) -> list[Path]:
        """The copies of the tokenizer's files, and folders of them. Raises ConfigError if there is a link, which could
        lead to a file that is not the run's."""
        if links := [path for path in (self.tokenizer, *self.tokenizer.rglob("*")) if path.is_symlink()]:
            raise ConfigError(f"{links[0]} is a symbolic link: put the file itself in its place")
        return sorted(self.tokenizer.iterdir()) if self.tokenizer.is_dir() else []

    def put_aside(self, checkpoint: RunCheckpoint, name: Path) -> None:
        """Rename a checkpoint, so that it is kept but no longer belongs to the run.

        Raises ConfigError if the directory cannot be written.
        """
        with self._writing():
            checkpoint.path.rename(name)
            sync_directory(self.path)

    def create(self, config: TrainConfig, tokenizer: Sequence[Path] = ()) -> None:
        """Create the directory, and write the configuration and the tokenizer's files, atomically and durably.

        Raises ConfigError if the directory cannot be written.
        """
        with self._writing():
            make_directories(self.path)
            # First, because without it there is no run to resume, and with the others none can start.
            write_durably(self.config, settings_as_yaml(config).encode())
            if tokenizer:
                self.tokenizer.mkdir(exist_ok=True)
                with inside(self.path, self.tokenizer.name) as folder:
                    for file in tokenizer:  # a run that is resumed keeps those with which it began
                        if file.is_dir() or not (self.tokenizer / file.name).exists():
                            copy_durably(file, folder)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"--output-dir {self.path} cannot be written: {error.strerror}") from error


def known_as(checkpoint: Path) -> Path:
    """The directory of a checkpoint, from that of Pagoda's own checkpoint in it."""
    return checkpoint.parent if checkpoint.name == STATE else checkpoint


def unused(path: Path, separator: str = "") -> Path:
    """The path if it does not exist, otherwise the first free one with a number after it."""
    numbered = (path.with_name(f"{path.name}{separator}{number}") for number in count(2))
    return next(each for each in chain([path], numbered) if not each.exists())


def check_not_in_use(directory: Path) -> None:
    """Raises ConfigError if another run holds the directory. Changes nothing."""
    if (directory / LOCK).exists():
        with locked(directory):
            pass


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a run directory for this process. Creates the directory if it is missing.

    The lock is on a file, because the directory itself may contain page stores, which lock it too, and because network
    file systems exclude other nodes only from files. Afterwards the file is removed, and so are directories that were
    created here and are still empty. Reading needs no lock.

    Raises ConfigError if another run holds the directory, or if it cannot be created or locked.
    """
    path = directory / LOCK
    made: list[Path] = []
    try:
        try:
            made = make_directories(directory)
            lock = Lock(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except BlockingIOError as error:
            holder = error.strerror
            with suppress(OSError):
                holder = path.read_text(errors="replace").strip() or holder
            raise ConfigError(
                f"--output-dir {directory} is in use by another run ({holder}): wait for its end, or give another "
                "directory"
            ) from error
        except OSError as error:
            raise ConfigError(f"--output-dir {directory} cannot be used: {error.strerror}: {error.filename}") from error
        try:
            with suppress(OSError):  # it only tells others who holds the directory
                os.ftruncate(lock.descriptor, 0)
                os.write(lock.descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield
        finally:
            with suppress(OSError), closing(lock):
                if lock.is_in_place():
                    path.unlink()
    finally:
        with suppress(OSError):  # something is in them by now
            for created in reversed(made):
                created.rmdir()


def names_of(checkpoints: Sequence[RunCheckpoint]) -> str:
    """Names, with commas between."""
    return ", ".join(checkpoint.path.name for checkpoint in checkpoints) or "none"
