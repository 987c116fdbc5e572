"""Writes and reads safetensors files in pieces, so that RAM does not grow with the tensors.

A piece is a million elements of one tensor; the last piece may be shorter. A checkpoint stores a hash of each piece. If
ranks have slices of a tensor, pieces also end at the ends of slices.

The format is that of https://github.com/huggingface/safetensors: 8 bytes of header length (little endian), a JSON
header (name -> dtype, shape, data_offsets), then the data. The safetensors library's own writer needs every tensor in
RAM.
"""

import json
import os
import re
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import xxhash

from pagoda.checkpoint.direct import DirectFile
from pagoda.errors import CheckpointError
from pagoda.memory.arena import tensor_bytes
from pagoda.memory.files import open_regular
from pagoda.memory.json_forms import check
from pagoda.memory.page import PAGE_ALIGN
from pagoda.plan.buffers import PIECE_ELEMENTS

DTYPE_NAMES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes. F4, which packs two elements into a byte, is not supported."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_ENTRY = {"dtype": re.compile("|".join(DTYPES)), "shape": [int], "data_offsets": (int, int)}
"""A header's entry for a tensor."""
_MAX_HEADER_BYTES = 100 << 20
_first = itemgetter(0)
_DIRECT_ALIGN = 512
"""Alignment in memory that direct I/O needs. With few exceptions, every parameter's state in a unit has it."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor in a file. Raises CheckpointError if the format lacks the dtype."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{self.name!r} is {self.dtype}, which a safetensors file cannot hold. Convert it, or register it with "
                "persistent=False."
            )

    def __str__(self) -> str:
        return f"{self.dtype} of shape {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def chunks(numel: int) -> Iterator[tuple[int, int]]:
    """(start, count) of pieces that cover `numel` elements."""
    for start in range(0, numel, PIECE_ELEMENTS):
        yield start, min(PIECE_ELEMENTS, numel - start)


Pieces = dict[str, dict[int, tuple[int, str]]]
"""Name of a tensor -> first element of each piece -> number of elements and hash of the piece."""
HashTable = Mapping[str, Sequence[Sequence[Any]]]
"""Name of a tensor -> (first element, hash) of each piece in order, as in a manifest."""


class TensorWriter(DirectFile):
    """A safetensors file that any thread fills in any order. Pieces are hashed as they are written.

    Opening the file reserves its space, so it fails at once if the disk has no room. Data bypasses the page cache. It
    starts at a block boundary of the file. Tensors whose length would misalign the next ones come last.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], shared: bool = False) -> None:
        """`shared`: open a file that another process has created for the same tensors, to write a part of it.

        Raises OSError if the file cannot be created or the disk has no room for it.
        """
        specs = sorted(specs, key=lambda spec: spec.nbytes % _DIRECT_ALIGN != 0)
        starts = [*accumulate((spec.nbytes for spec in specs), initial=0)]
        header = _header(specs, starts)
        self._itemsize = {spec.name: spec.dtype.itemsize for spec in specs}
        self._start = {spec.name: len(header) + start for spec, start in zip(specs, starts, strict=False)}
        self.pieces: Pieces = {spec.name: {} for spec in specs}
        """The pieces that have been written."""
        super().__init__(path, create=not shared)
        try:
            if not shared:
                self.reserve(len(header) + starts[-1])
                self.pwrite(memoryview(header), 0)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, start: int, data: memoryview) -> None:
        """Write the bytes of a piece of a tensor that starts at element `start`. Raises OSError if the disk does."""
        itemsize = self._itemsize[name]
        self.pieces[name][start] = data.nbytes // itemsize, piece_hash(data)
        self.pwrite(data, self._start[name] + start * itemsize)


def hash_table(specs: Sequence[TensorSpec], written: Sequence[Pieces]) -> dict[str, list[list[Any]]]:
    """The `HashTable` of a file with several writers. Raises ValueError if a tensor was not written completely."""
    table = {}
    for spec in specs:
        pieces = sorted({start: piece for each in written for start, piece in each[spec.name].items()}.items())
        end = 0
        for start, (count, _) in pieces:
            if start != end:
                break
            end += count
        if end != prod(spec.shape):
            raise ValueError(f"the checkpoint lacks data of {spec.name!r} from element {end} on")
        table[spec.name] = [[start, digest] for start, (_, digest) in pieces]
    return table


def piece_hash(data: memoryview) -> str:
    """The 64-bit xxh3 of a piece's bytes, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def _header(specs: Sequence[TensorSpec], starts: Sequence[int]) -> bytes:
    """The start of a file, padded to whole blocks. `starts`: the first byte of each tensor, and the end."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for spec, offsets in zip(specs, pairwise(starts), strict=True):
        header[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_ALIGN)
    return len(text).to_bytes(8, "little") + text


class TensorFile:
    """A safetensors file that is read piece by piece. Raises CheckpointError if it is missing, truncated or in another
    format.

    With `hashes`, each piece is checked against its hash when it is read. The file is closed by `close`, or when the
    last reference to this object is gone.
    """

    def __init__(self, path: Path, hashes: HashTable | None = None) -> None:
        self.path = path
        try:
            self._file = os.fdopen(open_regular(path), "rb")
        except OSError as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, self._file.close)
        self.specs: dict[str, TensorSpec] = {}
        self._start: dict[str, int] = {}
        """Offset in the file of each tensor's bytes."""
        self._latest = "", -1, torch.empty(0)
        """Name, first element and values of the last piece that was checked."""
        try:
            self._read_header()
            self._pieces = None if hashes is None else {name: self._cut(name, hashes[name]) for name in hashes}
            """Name of a tensor -> first element, end and hash of each piece."""
        except OSError as error:
            self.close()
            raise self._unreadable(error) from error
        except BaseException:
            self.close()
            raise

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """A flat copy of elements [start, start + count) of a tensor. Raises CheckpointError if they are damaged."""
        if self._pieces is None or count == 0:
            return self._read(name, start, count)
        pieces = self._pieces.get(name, [])
        wanted = slice(bisect_right(pieces, start, key=_first) - 1, bisect_left(pieces, start + count, key=_first))
        if not pieces:
            raise CheckpointError(f"{self.path} is damaged: its {name!r} has no hashes")
        return torch.cat(
            [
                self._checked(name, *piece)[max(start - piece[0], 0) : start + count - piece[0]]
                for piece in pieces[wanted]
            ]
        )

    def _checked(self, name: str, start: int, end: int, digest: str) -> torch.Tensor:
        """Read a whole piece and check its hash. The last piece is kept, because export reads many parts of a piece."""
        if self._latest[:2] != (name, start):
            values = self._read(name, start, end - start)
            if piece_hash(tensor_bytes(values)) != digest:
                raise CheckpointError(
                    f"{self.path} is damaged: elements {start} to {end} of {name!r} do not have the hash they were "
                    "written with. Use an earlier checkpoint."
                )
            self._latest = name, start, values
        return self._latest[2]

    def _read(self, name: str, start: int, count: int) -> torch.Tensor:
        spec = self.specs[name]
        out = torch.empty(count, dtype=spec.dtype)
        try:
            self._file.seek(self._start[name] + start * spec.dtype.itemsize)
            read = self._file.readinto(out.view(torch.uint8).numpy().data)
        except OSError as error:
            raise self._unreadable(error) from error
        if read != out.nbytes:
            raise CheckpointError(f"{self.path} was truncated while {name!r} was read")
        return out

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be read: {error.strerror or error}")

    def close(self) -> None:
        self._file.close()

    def _read_header(self) -> None:
        """Fill `specs` and `_start`. The format requires the tensors' bytes to cover the data exactly."""
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{self.path} is not a safetensors file, or is truncated")
        try:
            header = json.loads(self._file.read(length))
            check(header, dict, "the header")
            header.pop("__metadata__", None)
            check(header, {str: _ENTRY}, "the header")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path} has a damaged header: {error}") from error
        end, data = 0, 8 + length
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            spec = TensorSpec(name, DTYPES[entry["dtype"]], tuple(entry["shape"]))
            start, stop = entry["data_offsets"]
            if start != end or stop - start != spec.nbytes:
                raise CheckpointError(
                    f"{self.path} is truncated or damaged: its header puts {name!r}, {spec}, at bytes {start} to "
                    f"{stop} of the data, but the tensor before it ends at {end}"
                )
            self.specs[name], self._start[name] = spec, data + start
            end = stop
        if data + end != size:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: it has {size} bytes, but its header says {data + end}"
            )

    def _cut(self, name: str, hashes: Sequence[Sequence[Any]]) -> list[tuple[int, int, str]]:
        """The pieces that have hashes. They must start at the first element and follow each other."""
        starts = [start for start, _ in hashes]
        ends = [*starts[1:], prod(self.specs[name].shape) if name in self.specs else 0]
        if starts and (starts[0] != 0 or any(start >= end for start, end in zip(starts, ends, strict=True))):
            raise CheckpointError(f"{self.path} is damaged: the pieces of its {name!r} cannot start at {starts!r:.80}")
        return [(start, end, digest) for (start, digest), end in zip(hashes, ends, strict=False)]
