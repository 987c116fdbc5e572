"""The formats of the files that a page store leaves on disk: one record of its geometry, and a page table for every
commit.

    DIR/pagoda-ID/store.json      id, page size, directories, slots on each; one in every directory of the store
    DIR/pagoda-ID/pages           the slots of that directory
    DIR/pagoda-ID/commits/COMMIT  one page table; only in the store's first directory

A record is accepted only if every field has its form and its id matches the folder's name. The directories in it are
hints for reading. Nothing is ever written or deleted by following them.

A commit exists completely or not at all: its table is written to a temporary file, synced and renamed. It identifies
its checkpoint by the checkpoint's id. The path is a hint for messages.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pagoda.errors import StorageError
from pagoda.memory.identity import CHECKPOINT_ID
from pagoda.memory.json_forms import FormError, check
from pagoda.memory.page import PAGE_ALIGN
from pagoda.memory.ssd.slots import UNWRITTEN, PageTable

STORE_ID = re.compile(r"[0-9a-f]{16}")
COMMIT_ID = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}")
_HASH = re.compile(r"[0-9a-f]{32}")
FORMAT, VERSION = "pagoda-pages", 2


def _page_size(value: object) -> bool:
    """a multiple of 4096 bytes"""
    return type(value) is int and 0 < value < 1 << 40 and value % PAGE_ALIGN == 0


def _place(value: object) -> bool:
    """an absolute path"""
    return isinstance(value, str) and "\0" not in value and os.path.isabs(value)


def _named_place(value: object) -> bool:
    """an absolute path with a name"""
    return _place(value) and bool(Path(str(value)).name)


RECORD_FORM = {"id": STORE_ID, "page_bytes": _page_size, "directories": [_place], "stripe": int, "portions": [[int]]}
_PAGES_FORM = {"store": STORE_ID, "commit": COMMIT_ID, "page_bytes": _page_size, "pages": int}
_COMMIT_FORM = {**_PAGES_FORM, "checkpoint_id": CHECKPOINT_ID, "checkpoint": _named_place}
_REFERENCE_FORM = {**_PAGES_FORM, "table": _HASH, "directories": [_place]}


@dataclass(frozen=True)
class Commit:
    """A page table on disk, and the checkpoint to which it belongs."""

    store: str
    commit: str
    page_bytes: int
    checkpoint_id: str
    checkpoint: str
    """Absolute path at which the checkpoint was saved. It may have been moved since."""
    table: PageTable

    @property
    def run(self) -> str:
        """Where the checkpoints of its run are: the directory of the checkpoint."""
        return os.path.dirname(self.checkpoint)

    def to_bytes(self) -> bytes:
        """A line of JSON, the slots, the hashes, and the xxh3_64 of all these bytes."""
        fields = {"format": FORMAT, "version": VERSION, "pages": len(self.table.slots), **vars(self)}
        del fields["table"]
        body = json.dumps(fields).encode() + b"\n"
        body += self.table.slots.astype("<i8").tobytes() + self.table.hashes.astype("<u8").tobytes()
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    @staticmethod
    def from_bytes(content: bytes, path: Path) -> "Commit":
        """Parse the content of `path`. Raises StorageError if it is truncated or damaged."""
        body, checksum = content[:-8], content[-8:]
        if xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") != checksum:
            raise StorageError(f"the page table {path} is truncated or damaged; use another checkpoint")
        line, _, arrays = body.partition(b"\n")
        try:
            fields = fields_of(line, _COMMIT_FORM)
            pages = fields.pop("pages")
            if len(arrays) != 16 * pages:
                raise FormError(f"it has {len(arrays)} bytes for {pages} pages")
        except ValueError as error:
            raise StorageError(f"the page table {path} cannot be used: {error}") from error
        slots = np.frombuffer(arrays, "<i8", pages).astype(np.int64)
        hashes = np.frombuffer(arrays, "<u8", pages, 8 * pages).astype(np.uint64)
        if pages and slots.min() < UNWRITTEN:
            raise StorageError(f"the page table {path} is damaged: it names negative slots")
        return Commit(**fields, table=PageTable(slots, hashes))


@dataclass(frozen=True)
class Reference:
    """How a checkpoint's manifest refers to its pages."""

    store: str
    commit: str
    page_bytes: int
    pages: int
    table: str
    """xxh3_128 of the page table's file. A different table in its place is refused."""
    directories: list[str]
    """Where the store was when the checkpoint was saved."""

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "Reference":
        """Raises StorageError if a commit cannot have returned these fields."""
        try:
            check(fields, _REFERENCE_FORM, "reference")
        except FormError as error:
            raise StorageError(f"{fields!r:.200} is not a reference to committed pages: {error}") from error
        return Reference(**fields)


def table_hash(content: bytes) -> str:
    """The hash that binds a reference to the file of a page table."""
    return xxhash.xxh3_128_hexdigest(content)


def fields_of(content: bytes, form: dict[str, Any]) -> dict[str, Any]:
    """The fields of a JSON object of this format and version. Raises ValueError."""
    try:
        fields = json.loads(content)
    except RecursionError as error:
        raise FormError("it is nested too deeply") from error
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise FormError(f"its format is not {FORMAT!r}")
    version = fields.pop("version", None)
    if version != VERSION or type(version) is not int:
        raise FormError(
            f"it has version {version!r:.80}, and this Pagoda uses version {VERSION}. Use the Pagoda that wrote it, "
            "or delete it by hand when no checkpoint needs it"
        )
    check(fields, form)
    return fields
