"""Reads `--data` as a stream of documents that needs little RAM.

Files of texts and of JSON are read line by line: a broken line is then one bad record, and records need not all have
the same keys. Hugging Face's datasets reads tables and the Hub, and tells the splits of a folder apart. Files are read
one by one, so that an error names the file.
"""

import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pagoda.config.reading import DataSettings, check_split
from pagoda.errors import ConfigError, check_installed, needed, reading
from pagoda.models.hub import is_hub_name
from pagoda.train.records import Document, are_messages, read_row
from pagoda.train.seen import Seen

STDLIB = "stdlib"
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_RECORDS = {".arrow": "arrow", ".feather": "arrow", ".parquet": "parquet", ".tar": "webdataset"}
_RECORDS |= dict.fromkeys((".jsonl", ".ndjson"), "json")
"""Formats that hold records -> the builder of datasets. A folder that contains any of them is a data set."""
_TABLES = {".json": "json", ".csv": "csv", ".tsv": "csv"}
"""Formats that also occur among source code. They hold records if they are named, or are most files of a folder."""
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".lz4": "lz4"}
_NEEDS_DATASETS = "data are read with datasets: pip install 'pagoda-train[train]'"
_BATCH_ROWS = 1024
"""Rows of Parquet, or lines of a text, that are read at a time."""
_SMALL_BYTES, _MOST_WHOLE_BYTES = 128 << 10, 64 << 20
"""Texts up to the first size are one piece. Of several files, those up to the second one are read whole before they are
used, so that one that is not text can be left out."""


@dataclass(frozen=True)
class Source:
    """What a name of `--data` stands for: files on this machine, or a data set of the Hub."""

    name: str
    settings: DataSettings
    split: str
    files: tuple[Path, ...] = ()
    """Sorted by name."""
    records: bool = True
    """Whether the files hold records. Otherwise each file is a text."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Files of a folder that are left out, and why."""
    on_hub: Any = None
    """The builder of a data set of the Hub, or None."""

    def key(self) -> list[Any]:
        """Differs between sources with other documents, and once a file has changed."""
        if self.on_hub is not None:
            return [self.name, self.on_hub.config_id, self.on_hub.hash, self.split]
        stamps = []
        for path in self.files:
            with reading(path):
                at = path.stat()
            stamps.append((os.path.realpath(path), at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns))
        return [self.records, stamps]


def check_exists(name: str) -> None:
    """Raises ConfigError if there is nothing of this name, or if datasets is not installed."""
    check_installed("datasets", _NEEDS_DATASETS)
    if not name or not (name == STDLIB or Path(name).exists() or _is_on_hub(name) or glob.glob(name, recursive=True)):
        raise ConfigError(
            f"data {name!r} does not exist: give a file, a folder, a glob in quotes, ORG/NAME of the Hugging Face Hub, "
            "or 'stdlib'"
        )


def find(name: str, settings: DataSettings, split: str) -> Source:
    """Find what a name stands for: a file, a folder, a glob, ORG/NAME on the Hub, or `"stdlib"` (this Python's standard
    library, without its tests). In a folder with files of records, datasets tells its splits apart.

    Raises ConfigError if nothing is there, or if it cannot be read.
    """
    check_exists(name)
    path = Path(name)
    if name == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        library = (p for p in root.rglob("*.py") if _STDLIB_SKIPPED.isdisjoint(p.relative_to(root).parts))
        return Source(name, settings, split, tuple(sorted(library)), records=False)
    if _is_on_hub(name):
        return Source(name, settings, split, on_hub=_builder(name, settings))
    if path.is_file():
        return Source(name, settings, split, (path,), _suffix(path) in _RECORDS | _TABLES)
    found = _below(path) if path.is_dir() else (Path(match) for match in glob.glob(name, recursive=True))
    files = sorted({os.path.realpath(each): each for each in found if each.is_file()}.values())
    if not files:
        raise ConfigError(f"data {name!r} holds no text: there is no file in it")
    kinds = [_suffix(file) for file in files]
    if _RECORDS.keys().isdisjoint(kinds) and 2 * sum(kind in _TABLES for kind in kinds) <= len(kinds):
        return Source(name, settings, split, tuple(files), records=False)
    kept, why = [file for file in files if _suffix(file) in _RECORDS | _TABLES], "not a file of records"
    if path.is_dir():
        kept, why = _of_split(path, kept, settings, split), f"not in the split {split!r}"
    skipped = tuple((str(file), why) for file in files if file not in {*kept})
    return Source(name, settings, split, tuple(kept), skipped=skipped)


def documents(source: Source, seen: Seen) -> Iterator[Document]:
    """Every document, in order. `seen` gets the counts of what was read, and the files that turn out not to be text.

    Raises ConfigError for a file, line or row that cannot be read, with the reason.
    """
    if not source.records:
        for path in source.files:
            yield from _text(path, seen, alone=len(source.files) == 1)
        return
    for where, row in _rows(source):
        try:
            if isinstance(row, ConfigError):
                raise row
            document = read_row(row, where, source.settings.dataset_text_field, seen)
        except ConfigError as error:
            if not source.settings.skip_bad:
                raise ConfigError(f"{where}: {error}. Or leave out what cannot be read, with --skip-bad") from error
            seen.leave_out(error, where)
        else:
            if document is not None:
                yield document


def _rows(source: Source) -> Iterator[tuple[str, Any]]:
    """Each row, or why it cannot be read, with its place."""
    if (builder := source.on_hub) is not None:
        with reading(f"the split {source.split!r} of {source.name}"):
            if source.settings.dataset_streaming:
                rows = builder.as_streaming_dataset(source.split)
            else:
                builder.download_and_prepare()
                rows = builder.as_dataset(source.split)
            yield from ((f"{source.name}, row {number}", row) for number, row in enumerate(rows, 1))
    for path in source.files:
        with reading(path):
            kind = (_RECORDS | _TABLES)[_suffix(path)]
            yield from _json_rows(path) if kind == "json" else _table_rows(path, kind)


def _table_rows(path: Path, kind: str) -> Iterator[tuple[str, Any]]:
    datasets = needed("datasets", _NEEDS_DATASETS)

    def loaded(**how: Any) -> Any:
        files = [glob.escape(str(path.absolute()))]
        return datasets.load_dataset(kind, data_files=files, split="train", streaming=True, **how)

    how: dict[str, Any] = {"batch_size": _BATCH_ROWS} if kind == "parquet" else {}
    if kind == "csv":  # all columns are text: as a number, 007 would be 7
        how = {"sep": "\t" if _suffix(path) == ".tsv" else ",", "keep_default_na": False}
        names: dict[str, Any] = next(iter(loaded(nrows=1, **how)), {})
        how["features"] = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
    yield from ((f"{path}, row {number}", row) for number, row in enumerate(loaded(**how), 1))


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Lines of JSON, or why they cannot be read. A .json file may be one list, of rows or of messages."""
    with _opened(path) as file:
        first = file.readline()
        file.seek(0)
        if _suffix(path) == ".json" and first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            rows = json.load(file)
            entries = enumerate([rows] if are_messages(rows) else rows, 1)
            yield from ((f"{path}, entry {number}", row) for number, row in entries)
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except UnicodeDecodeError:
                row = ConfigError("not UTF-8 text: convert the file, as with iconv")
            except (ValueError, RecursionError) as error:
                row = ConfigError(
                    f"not JSON: {error}. Each line must be one record, or a .json file one list of records"
                )
            yield f"{path}, line {number}", row


class _NotTextError(ConfigError):
    """A file is not UTF-8 text."""


def _text(path: Path, seen: Seen, alone: bool) -> Iterator[Document]:
    """A file as a text, in pieces that end with a line. One that is not UTF-8 is refused if it is `alone` or very
    large, otherwise left out."""
    with reading(path):
        pieces = _pieces(path)
        if not alone and path.stat().st_size <= _MOST_WHOLE_BYTES:
            try:
                pieces = iter([*pieces])
            except _NotTextError:
                seen.skipped.append((str(path), "not UTF-8 text"))
                return
        begins, before = True, ""
        for piece in pieces:
            if before:
                yield Document(str(path), before, begins=begins, ends=False)
                begins = False
            before = piece
        yield Document(str(path), before, begins=begins)


def _pieces(path: Path) -> Iterator[str]:
    """The text of a file, in pieces of some lines, or whole if it is small. Raises _NotTextError."""
    line, count = 1, None if path.stat().st_size <= _SMALL_BYTES else _BATCH_ROWS
    with _opened(path) as file:
        while lines := b"".join(islice(file, count)):
            try:
                text = lines.decode("utf-8-sig" if line == 1 else "utf-8")
                bad = lines.find(b"\0")
            except UnicodeDecodeError as error:
                bad = error.start
            if bad >= 0:
                line += lines[:bad].count(b"\n")
                raise _NotTextError(f"{path}, line {line}: not UTF-8 text: convert it, as with iconv, or leave it out")
            yield text.replace("\r\n", "\n").replace("\r", "\n")
            line += lines.count(b"\n")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file in bytes, without its compression."""
    fsspec = needed("fsspec", _NEEDS_DATASETS)
    with fsspec.open(str(path), "rb", compression=_COMPRESSED.get(path.suffix.lower())) as file:
        yield file


def _builder(name: str, settings: DataSettings) -> Any:
    """The builder of a folder or of a data set of the Hub."""
    with reading(f"data {name!r}"):
        datasets = needed("datasets", _NEEDS_DATASETS)
        return datasets.load_dataset_builder(name, settings.dataset_config, revision=settings.dataset_revision)


def _of_split(folder: Path, files: list[Path], settings: DataSettings, split: str) -> list[Path]:
    """The files of a folder that datasets takes for those of a split."""
    root = folder.resolve()
    splits = {str(split): {*paths} for split, paths in _builder(str(root), settings).config.data_files.items()}
    check_split(str(folder), split, splits)
    return [file for file in files if str(root / file.relative_to(folder)) in splits[split]]


def _below(folder: Path) -> Iterator[Path]:
    """The files in a folder and its folders, without hidden entries. No link to a folder is followed."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"the folder {error.filename} cannot be read: {error.strerror}") from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in files if not name.startswith("."))


def _is_on_hub(name: str) -> bool:
    return is_hub_name(name) and _suffix(Path(name)) not in {*_RECORDS, *_TABLES, ".txt"}


def _suffix(path: Path) -> str:
    """The suffix that names a file's format, without the suffix of its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((suffix for suffix in suffixes[::-1] if suffix not in _COMPRESSED), "")
