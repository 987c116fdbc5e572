"""What a disk may hold after a loss of power, from a record of every change of a directory tree.

Bytes of a file are safe once it was synced; names in a directory, once the directory was. What was not synced is lost,
torn or kept: a `Loss` says which. A failed sync loses its file's bytes for good, as Linux does: later ones succeed.
"""

import os
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_HEAD = struct.Struct("=IIIIQQQ")
_SECTOR = 512


@dataclass(frozen=True)
class Event:
    """One successful change, or one that was made to fail."""

    kind: str
    """c creates, n creates without a name, t empties, w writes, s sets the size, r reserves, f syncs, m renames, l
    links, u removes, d makes a directory."""
    error: int
    path: str
    other: str
    inode: int
    offset: int
    """Where the bytes go; of s and r, the size."""
    data: bytes

    def __str__(self) -> str:
        where = " -> ".join(filter(None, (self.path, self.other))) or f"inode {self.inode}"
        return f"{self.kind} {where}" + (f" at {self.offset}, {len(self.data)} bytes" if self.data else "")


def read_log(path: Path) -> list[Event]:
    """The events of a log, in order."""
    content, events, at = path.read_bytes(), [], 0
    while at < len(content):
        op, error, first, second, inode, offset, nbytes = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        parts = []
        for length in (first, second, nbytes):
            parts.append(content[at : at + length])
            at += length
        events.append(Event(chr(op), error, os.fsdecode(parts[0]), os.fsdecode(parts[1]), inode, offset, parts[2]))
    return events


@dataclass(frozen=True)
class Loss:
    """What becomes of changes that were not synced: kept, or lost, or, where None, some of them by chance."""

    names: bool | None
    data: bool | None
    seed: int = 0


LOSSES = {
    "all is kept": Loss(True, True),
    "all is lost": Loss(False, False),
    "names are kept": Loss(True, False),
    "data is kept": Loss(False, True),
    "torn": Loss(None, None, 1),
    "torn otherwise": Loss(None, None, 2),
    "names are kept, data torn": Loss(True, None, 3),
}


@dataclass
class _Write:
    offset: int
    data: bytes | None
    """None: the file gets the size `offset`, or at least that if `grows`."""
    grows: bool = False

    def apply(self, content: bytearray) -> None:
        if self.data is None and not self.grows:
            del content[self.offset :]
        content.extend(bytes(max(0, self.offset - len(content))))
        if self.data is not None:
            content[self.offset : self.offset + len(self.data)] = self.data

    def torn(self, draw: random.Random) -> "Iterator[_Write]":
        """Some of its sectors."""
        share = draw.choice((0.0, 0.5, 1.0))
        if self.data is None:
            yield from [self] if share else []
            return
        for start in range(0, len(self.data), _SECTOR):
            if draw.random() < share:
                yield _Write(self.offset + start, self.data[start : start + _SECTOR])


@dataclass
class _File:
    safe: bytearray = field(default_factory=bytearray)
    seen: bytearray = field(default_factory=bytearray)
    """What processes read."""
    pending: list[_Write] = field(default_factory=list)

    def content(self, kept: bool | None, draw: random.Random) -> bytes:
        if kept is not None:
            return bytes(self.seen if kept else self.safe)
        content = bytearray(self.safe)
        for write in self.pending:
            for part in write.torn(draw):
                part.apply(content)
        return bytes(content)

    def write(self, write: _Write) -> None:
        write.apply(self.seen)
        self.pending.append(write)

    def sync(self, error: int) -> None:
        for write in self.pending if not error else ():
            write.apply(self.safe)
        self.pending = []


@dataclass
class _Directory:
    safe: dict[str, "_Node"] = field(default_factory=dict)
    pending: list[dict[str, "_Node | None"]] = field(default_factory=list)
    """Changes of names, each made at once; None: the name is gone."""

    def names(self, kept: bool | None, draw: random.Random) -> dict[str, "_Node"]:
        count = draw.randint(0, len(self.pending)) if kept is None else len(self.pending) if kept else 0
        found: dict[str, _Node | None] = dict(self.safe)
        for change in self.pending[:count]:
            found |= change
        return {name: node for name, node in found.items() if node is not None}

    def sync(self, error: int) -> None:
        if not error:
            self.safe, self.pending = self.names(True, random.Random()), []


_Link = str
"""Where a symbolic link leads."""
_Node = _File | _Directory | _Link
Image = dict[str, bytes | str | None]
"""Path below the tree -> the bytes of a file, where a symbolic link leads, or None for a directory."""


class Disk:
    """A tree that is safe as it is when this is made, and the changes of it that are applied one by one."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._by_inode: dict[int, _Node] = {}
        self._top = self._scan(root)

    def _scan(self, path: Path) -> _Node:
        node: _Node
        if path.is_symlink() or path.is_fifo():
            return os.readlink(path) if path.is_symlink() else "a FIFO"
        if path.is_dir():
            node = _Directory({entry.name: self._scan(entry) for entry in path.iterdir()})
        else:
            content = path.read_bytes()
            node = _File(bytearray(content), bytearray(content))
        self._by_inode[path.stat().st_ino] = node
        return node

    def apply(self, event: Event) -> None:
        """One more change."""
        node = self._by_inode.get(event.inode)
        if event.kind == "f":
            if isinstance(node, _File | _Directory):
                node.sync(event.error)
        elif event.error:
            return
        elif event.kind in "cn":
            self._by_inode[event.inode] = made = _File()
            if event.kind == "c":
                self._rename({event.path: made})
        elif event.kind == "d":
            self._by_inode[event.inode] = directory = _Directory()
            self._rename({event.path: directory})
        elif event.kind == "l":
            self._rename({event.path: node})
        elif event.kind == "u":
            self._rename({event.path: None})
        elif event.kind == "m":
            self._rename({event.path: None, event.other: self._find(event.path)})
        else:
            assert isinstance(node, _File), f"nobody saw the file made of which this is: {event}"
            data, grows = (event.data, False) if event.kind == "w" else (None, event.kind == "r")
            node.write(_Write(event.offset, data, grows))

    def image(self, loss: Loss) -> Image:
        """What the disk holds if power is lost now."""
        draw = random.Random(loss.seed)
        found: Image = {}

        def walk(node: _Node, path: str) -> None:
            if isinstance(node, _Directory):
                found[path] = None
                for name, entry in sorted(node.names(loss.names, draw).items()):
                    walk(entry, f"{path}/{name}" if path else name)
            else:
                found[path] = node.content(loss.data, draw) if isinstance(node, _File) else node

        walk(self._top, "")
        return found

    def _rename(self, change: dict[str, _Node | None]) -> None:
        """Give names to nodes, at once in each directory."""
        folders: dict[str, dict[str, _Node | None]] = {}
        for path, node in change.items():
            folder, name = os.path.split(path)
            folders.setdefault(folder, {})[name] = node
        for path, names in folders.items():
            folder_of = self._find(path)
            assert isinstance(folder_of, _Directory)
            folder_of.pending.append(names)

    def _find(self, path: str) -> _Node:
        node = self._top
        for name in Path(path).relative_to(self._root).parts:
            assert isinstance(node, _Directory)
            node = node.names(True, random.Random())[name]
        return node


def image_of(root: Path) -> Image:
    """What a tree holds now."""
    return Disk(root).image(LOSSES["all is kept"])


def put(image: Image, root: Path) -> None:
    """Make a tree hold an image, and nothing else."""
    shutil.rmtree(root, ignore_errors=True)
    for path, content in image.items():
        where = root / path
        if content is None:
            where.mkdir()
        elif isinstance(content, str):
            where.symlink_to(content)
        else:
            where.write_bytes(content)
