"""The files that `--data` names, as a stream of documents that needs little RAM."""

import glob
import io
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.train.records import RECORDS, TABLES, Document, opened, read_records, suffix
from pagoda.train.seen import Seen

STDLIB = "stdlib"
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_OTHER_SPLITS = re.compile(
    "(test|val|valid|validation|eval|evaluation|dev)(s|set|ing|data|split|test)?(?![a-z])", re.IGNORECASE
)
"""How names of files and folders begin that hold another split."""
_NO_RECORDS, _OTHER_SPLIT = "not a file of records", "another split, by its name"
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
    set: only those files are read, except those whose names say that they are another split (test, validation). No link
    to a folder is followed.

    Raises ConfigError if nothing is there, if no file can be read, or if a folder in it cannot be listed.
    """
    if name == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        library = (p for p in root.rglob("*.py") if _STDLIB_SKIPPED.isdisjoint(p.relative_to(root).parts))
        return Source(name, _sorted(root, library), records=False)
    if not name:
        raise ConfigError("the name of the data is empty: give a file, a folder, a glob in quotes, or 'stdlib'")
    path = Path(name)
    found: Iterable[Path]
    if path.is_file():
        return Source(name, (path,), suffix(path) in (RECORDS | TABLES), (), column, skip_bad)
    if path.is_dir():
        root, found = path, _below(path)
    elif path.exists():
        raise ConfigError(f"data {name!r} is a pipe or a device, which cannot be read twice: write it to a file first")
    elif matches := glob.glob(name, recursive=True):  # wildcards match no hidden entries
        # "**" follows links to folders, which may lead to the same ones again.
        paths = map(Path, sorted(matches, key=lambda match: (len(match), match), reverse=True))
        root, found = Path(path.anchor), {(os.path.realpath(p.parent), p.name): p for p in paths}.values()
    else:
        raise ConfigError(
            f"data {name!r} does not exist: give a file, a folder, a glob in quotes, or 'stdlib'{_nearby(path)}"
        )
    found = [*found]
    files = _sorted(root, found)
    used = {*files, *(folder for file in files for folder in file.parents)}
    skipped = [(str(path), _why_not_read(path)) for path in sorted(found) if path not in used]
    if not files:
        why = "; ".join(Seen(skipped=skipped).lines())
        raise ConfigError(f"data {name!r} holds no text: there is no file in it{f' ({why})' if why else ''}")
    return _of_many(Source(name, files, False, tuple(skipped), column, skip_bad), root)


def _below(folder: Path) -> Iterator[Path]:
    """What is in a folder and its folders, without folders and hidden entries."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"the folder {error.filename} cannot be read: {error.strerror}") from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        linked = [name for name in folders if Path(place, name).is_symlink()]
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in (*files, *linked) if not name.startswith("."))


def _why_not_read(path: Path) -> str:
    """Why something that is not a file is not read."""
    if path.is_dir():
        return "a folder, or a link to one: name it"
    return "a link to nothing" if path.is_symlink() else "a pipe or a device"


def _of_many(found: Source, root: Path) -> Source:
    """The files of a folder or a glob, as texts or as records."""
    kinds = RECORDS
    if not any(suffix(path) in RECORDS for path in found.files):
        kinds = RECORDS | TABLES
        if 2 * _size(path for path in found.files if suffix(path) in TABLES) <= _size(found.files):
            return replace(found, column=None, skip_bad=False)
    kept, skipped = [], [*found.skipped]
    for path in found.files:
        if suffix(path) not in kinds:
            table = suffix(path) in TABLES
            skipped.append((str(path), "beside files of records, read only if it is named" if table else _NO_RECORDS))
        elif Path(found.name) == root and any(map(_OTHER_SPLITS.match, path.relative_to(root).parts)):
            skipped.append((str(path), _OTHER_SPLIT))
        else:
            kept.append(path)
    if not kept:
        other = next(path for path, reason in skipped if reason == _OTHER_SPLIT)
        raise ConfigError(
            f"data {found.name!r} holds only files of other splits, such as {Path(other).name}: name one of them"
        )
    return replace(found, files=tuple(kept), records=True, skipped=tuple(skipped))


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
