"""The files that `--data` names, as a stream of documents that needs little RAM."""

import glob
import io
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.train.records import RECORDS, TABLES, Document, opened, read_records, suffix
from pagoda.train.seen import Seen

STDLIB = "stdlib"
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_OTHER_SPLITS = ("test", "valid", "eval", "dev")
_PIECE = 1 << 17
"""Longer texts are read in pieces of this many characters, plus the rest of the last line."""
_NO_TEXT = re.compile("[\0\udc80-\udcff]")
_MOST_WHOLE_BYTES = 64 << 20
"""Files of a folder up to this size are read whole before they are used, so that a file that is not text can be left
out."""


@dataclass(frozen=True)
class Source:
    """The files of `--data`, sorted by name."""

    name: str
    files: tuple[Path, ...]
    records: bool
    """Whether the files hold records. Otherwise each file is a text."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Files of a folder that are left out, and why."""
    column: str | None = None
    skip_bad: bool = False
    """Whether records that cannot be read are left out."""

    @property
    def nbytes(self) -> int:
        return _size(self.files)


def find(name: str, column: str | None = None, skip_bad: bool = False) -> Source:
    """Find the files of a path, a folder, a glob, or `"stdlib"` (this Python's standard library, without its tests).

    Hidden entries of a folder are ignored, unless the path or glob names them. A folder with files of records is a data
    set: only those files are read, except those whose names say that they are another split (test, validation).

    Raises ConfigError if nothing is there, or no file can be read.
    """
    if name == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        library = (p for p in root.rglob("*.py") if _STDLIB_SKIPPED.isdisjoint(p.relative_to(root).parts))
        return Source(name, _sorted(root, library), records=False)
    path = Path(name)
    found: Iterable[Path]
    if path.is_file():
        return Source(name, (path,), suffix(path) in (RECORDS | TABLES), (), column, skip_bad)
    if path.is_dir():
        root, found = path, (p for p in path.rglob("*") if not _is_hidden(p.relative_to(path)))
    elif matches := glob.glob(name, recursive=True):  # wildcards match no hidden entries
        root, found = Path(Path(name).anchor), map(Path, matches)
    else:
        raise ConfigError(
            f"data {name!r} does not exist: give a file, a folder, a glob in quotes, or 'stdlib'{_nearby(path)}"
        )
    files = _sorted(root, found)
    if not files:
        raise ConfigError(f"data {name!r} holds no text: there is no file in it")
    return _of_many(name, root, files, column, skip_bad)


def _of_many(name: str, root: Path, files: tuple[Path, ...], column: str | None, skip_bad: bool) -> Source:
    """The files of a folder or a glob, as texts or as records."""
    kinds = RECORDS
    if not any(suffix(path) in RECORDS for path in files):
        kinds = RECORDS | TABLES
        if 2 * _size(path for path in files if suffix(path) in TABLES) <= _size(files):
            return Source(name, files, records=False)
    kept, skipped = [], []
    for path in files:
        if suffix(path) not in kinds:
            skipped.append((str(path), "not a file of records"))
        elif Path(name) == root and any(p.lower().startswith(_OTHER_SPLITS) for p in path.relative_to(root).parts):
            skipped.append((str(path), "another split, by its name"))
        else:
            kept.append(path)
    if not kept:
        raise ConfigError(
            f"data {name!r} holds only files of other splits, such as {Path(skipped[0][0]).name}: name one of them"
        )
    return Source(name, tuple(kept), True, tuple(skipped), column, skip_bad)


def documents(source: Source, seen: Seen, read: Callable[[int], None]) -> Iterator[Document]:
    """Every document, in order. `read` is called with the number of bytes read since its last call. `seen` gets the
    counts of what was read, and the files of a folder that turn out not to be text.

    Raises ConfigError for a file, line or row that cannot be read, with the reason.
    """
    for path in source.files:
        try:
            if source.records:
                yield from read_records(path, seen, read, source.column, source.skip_bad)
            else:
                yield from _texts(path, len(source.files) == 1, seen, read)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _texts(path: Path, alone: bool, seen: Seen, read: Callable[[int], None]) -> Iterator[Document]:
    """A text file in pieces. A file that is not UTF-8 text is refused if it is `alone`, and left out otherwise."""
    size = path.stat().st_size
    if alone or size > _MOST_WHOLE_BYTES:
        for piece in _pieces(path):
            yield piece
            read(len(piece.text))
        return
    try:
        yield from list(_pieces(path))
    except _NotTextError as error:
        seen.skipped.append((str(path), error.reason))
    except OSError as error:
        seen.skipped.append((str(path), error.strerror or type(error).__name__))
    read(size)


def _pieces(path: Path) -> Iterator[Document]:
    """A text file in pieces that end at the end of a line, unless a line is longer than a piece."""
    line, begins = 1, True
    with opened(path) as file:
        # Bytes that are not UTF-8 become surrogates, which valid UTF-8 text cannot contain.
        reader = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        after = reader.read(_PIECE) + reader.readline(_PIECE)
        while piece := after:
            if bad := _NO_TEXT.search(piece):
                reason = "binary (holds NUL bytes)" if bad[0] == "\0" else "not UTF-8"
                raise _NotTextError(path, line + piece.count("\n", 0, bad.start()), reason)
            line += piece.count("\n")
            piece = piece.removeprefix("\ufeff" * begins)
            after = reader.read(_PIECE) + reader.readline(_PIECE)
            yield Document(str(path), piece, begins=begins, ends=not after)
            begins = False


class _NotTextError(ConfigError):
    """A file that is not UTF-8 text."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}: give a file or folder with UTF-8 text")
        self.reason = reason


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _sorted(root: Path, paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(sorted((p for p in paths if p.is_file()), key=lambda p: p.relative_to(root).as_posix()))


def _size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _nearby(path: Path) -> str:
    """The names of entries in the directory from which a path is missing, for error messages."""
    parent = path.absolute().parent
    if not parent.is_dir():
        return f" (there is no directory {parent})"
    names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    return f" ({parent} has {', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""
