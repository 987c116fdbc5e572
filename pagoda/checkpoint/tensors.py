"""safetensors files written and read in pieces, so that RAM does not grow with the tensors.

A piece is a million elements of one tensor, the last one what is left; a checkpoint keeps a hash of each. Where ranks
have slices of a tensor, pieces end where slices do.

The format is that of https://github.com/huggingface/safetensors: 8 bytes of header length (little endian), a JSON
header (name -> dtype, shape, data_offsets), then the data. The library's own writer wants every tensor in RAM.
"""

import json
import os
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash

from pagoda.checkpoint.direct import DirectFile
from pagoda.errors import CheckpointError
from pagoda.memory.arena import tensor_bytes
from pagoda.memory.files import open_regular
from pagoda.memory.page import PAGE_ALIGN
from pagoda.plan.layout import PIECE_ELEMENTS

_NAMES = {
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
"""The format's names, as the library has them; F4, which packs two elements into a byte, is not supported."""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_HEADER_BYTES = 100 << 20
_DIRECT_ALIGN = 512
"""What direct I/O needs of an address in memory; every parameter's state in a unit lies on a multiple of it, with few
exceptions."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor in a file. Raises CheckpointError for a dtype that the format lacks."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in _NAMES:
            raise CheckpointError(
                f"{self.name!r} is {self.dtype}, which a safetensors file cannot hold. Convert it, or register it with "
                "persistent=False."
            )

    def __str__(self) -> str:
        return f"{self.dtype} of shape {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a dtype."""
    return _NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name. Raises KeyError when there is none."""
    return _DTYPES[name]


def chunks(numel: int) -> Iterator[tuple[int, int]]:
    """(start, count) of pieces that cover `numel` elements."""
    for start in range(0, numel, PIECE_ELEMENTS):
        yield start, min(PIECE_ELEMENTS, numel - start)


Pieces = dict[str, dict[int, tuple[int, str]]]
"""Name of a tensor -> first element of each piece of it -> the piece's elements, and hash."""
HashTable = Mapping[str, Sequence[Sequence[Any]]]
"""Name of a tensor -> (first element, hash) of each of its pieces, in order, as a manifest has them."""


class TensorWriter:
    """A safetensors file that is filled in any order, by any thread, and hashed as it is.

    Its space is reserved when it is opened, so a disk without room refuses it at once. Data goes past the page cache:
    it begins at a whole block of the file, and tensors whose length would shift what follows them come last.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], shared: bool = False) -> None:
        """`shared` opens a file that another process has made for the same tensors, of which this one writes a part.

        Raises OSError where the file cannot be made or the disk has no room for it.
        """
        self.path = path
        specs = sorted(specs, key=lambda spec: spec.nbytes % _DIRECT_ALIGN != 0)
        header, data = _header(specs, PAGE_ALIGN)
        self._itemsize = {spec.name: spec.dtype.itemsize for spec in specs}
        self._start: dict[str, int] = {}
        end = len(header)
        for spec in specs:
            self._start[spec.name] = end
            end += spec.nbytes
        assert end == len(header) + data
        self.pieces: Pieces = {spec.name: {} for spec in specs}
        """What has been written."""
        self._file = DirectFile(path, create=not shared)
        try:
            if not shared:
                self._file.reserve(end)
                self._file.pwrite(memoryview(header), 0)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, start: int, data: memoryview) -> None:
        """Write a piece of a tensor, as bytes, from its element `start` on. Raises OSError as the disk does."""
        itemsize = self._itemsize[name]
        self.pieces[name][start] = data.nbytes // itemsize, piece_hash(data)
        self._file.pwrite(data, self._start[name] + start * itemsize)

    def finish(self) -> None:
        """Sync and close the file."""
        self._file.sync()
        self.close()

    def close(self) -> None:
        """Close the file as it is. Idempotent."""
        self._file.close()


def hash_table(specs: Sequence[TensorSpec], written: Iterable[Pieces]) -> dict[str, list[list[Any]]]:
    """The `HashTable` of a file that several have written. Raises ValueError when a tensor was not written whole."""
    merged: dict[str, dict[int, tuple[int, str]]] = {spec.name: {} for spec in specs}
    for pieces in written:
        for name, found in pieces.items():
            merged[name].update(found)
    table = {}
    for spec in specs:
        end = 0
        for start, (count, _) in sorted(merged[spec.name].items()):
            if start != end:
                break
            end += count
        if end != prod(spec.shape):
            raise ValueError(f"the checkpoint lacks data of {spec.name!r} from element {end} on")
        table[spec.name] = [[start, digest] for start, (_, digest) in sorted(merged[spec.name].items())]
    return table


def piece_hash(data: memoryview) -> str:
    """The 64-bit xxh3 of a piece's bytes, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def write_tensors(path: Path, specs: Sequence[TensorSpec], data: Iterable[torch.Tensor]) -> None:
    """Write a safetensors file whose bytes come as flat tensors, in the order of `specs`, and sync it to disk.

    Raises ValueError when the data is not as long as the specs say.
    """
    header, end = _header(specs)
    with path.open("wb") as file:
        file.write(header)
        written = 0
        for piece in data:
            written += file.write(tensor_bytes(piece))
        if written != end:
            raise ValueError(f"{path} got {written} bytes of data; its header says {end}")
        file.flush()
        os.fsync(file.fileno())


def _header(specs: Sequence[TensorSpec], align: int = 8) -> tuple[bytes, int]:
    """What a file starts with, a multiple of `align` bytes, and the bytes of data that follow it."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text, end


class TensorFile:
    """A safetensors file, read piece by piece. Raises CheckpointError when it is missing, truncated or not one.

    With `hashes` whatever is read is checked against them, piece by piece. It is closed by `close`, or
    with the last reference to it.
    """

    def __init__(self, path: Path, hashes: HashTable | None = None) -> None:
        self.path = path
        self._hashes = hashes
        try:
            self._file = os.fdopen(open_regular(path), "rb")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        weakref.finalize(self, self._file.close)
        self.specs: dict[str, TensorSpec] = {}
        self._start: dict[str, int] = {}
        """Where a tensor's bytes begin in the file."""
        self._latest = "", -1, torch.empty(0)
        """Name, first element and values of the piece that was checked last."""
        try:
            self._read_header()
            self._check_hashes()
        except BaseException:
            self.close()
            raise

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements [start, start + count) of a tensor, a flat copy. Raises CheckpointError where they are damaged."""
        if self._hashes is None or count == 0:
            return self._read(name, start, count)
        starts = self._starts(name, start, start + count)
        return torch.cat([self._checked(name, at)[max(start - at, 0) : start + count - at] for at in starts])

    def _starts(self, name: str, start: int, stop: int) -> list[int]:
        """First elements of the pieces that cover [start, stop) of a tensor."""
        assert self._hashes is not None
        starts = [at for at, _ in self._hashes.get(name, ())] or [0]
        return starts[bisect_right(starts, start) - 1 : bisect_left(starts, stop)]

    def _checked(self, name: str, start: int) -> torch.Tensor:
        """A whole piece whose bytes have their hash. The last one is kept: export reads many small parts of a piece."""
        assert self._hashes is not None
        if self._latest[:2] == (name, start):
            return self._latest[2]
        known = self._hashes.get(name, ())
        starts = [at for at, _ in known]
        number = bisect_right(starts, start) - 1
        end = starts[number + 1] if number + 1 < len(starts) else prod(self.specs[name].shape)
        values = self._read(name, start, end - start)
        if number < 0 or piece_hash(tensor_bytes(values)) != known[number][1]:
            raise CheckpointError(
                f"{self.path} is damaged: elements {start} to {end} of {name!r} do not have the hash they were written "
                "with. Use an earlier checkpoint."
            )
        self._latest = name, start, values
        return values

    def _read(self, name: str, start: int, count: int) -> torch.Tensor:
        spec = self.specs[name]
        out = torch.empty(count, dtype=spec.dtype)
        self._file.seek(self._start[name] + start * spec.dtype.itemsize)
        if self._file.readinto(out.view(torch.uint8).numpy().data) != out.nbytes:
            raise CheckpointError(f"{self.path} was truncated while {name!r} was read")
        return out

    def close(self) -> None:
        self._file.close()

    def _read_header(self) -> None:
        """Fill `specs` and `_start`. The tensors' bytes must cover the data exactly, as the format wants it."""
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{self.path} is not a safetensors file, or is truncated")
        try:
            header = json.loads(self._file.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path} has a damaged header: {error}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path} has a damaged header: it is not a JSON object")
        header.pop("__metadata__", None)
        found = sorted((self._entry(name, entry) for name, entry in header.items()), key=lambda item: item[1:])
        end, data = 0, 8 + length
        for spec, start, stop in found:
            if start != end or data + stop > size:
                raise CheckpointError(
                    f"{self.path} is truncated or damaged: its header puts {spec.name!r} at bytes {start} to {stop} of "
                    f"the data, which has {size - data} bytes, and what comes before it ends at {end}"
                )
            self.specs[spec.name] = spec
            self._start[spec.name] = data + start
            end = stop
        if data + end != size:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: it has {size} bytes where its header says {data + end}"
            )

    def _check_hashes(self) -> None:
        """The pieces that hashes are given for begin at the first element, and follow each other."""
        for name, pieces in (self._hashes or {}).items():
            starts = [start for start, _ in pieces]
            end = prod(self.specs[name].shape) if name in self.specs else 0
            if starts and (starts[0] != 0 or starts[-1] >= end or any(a >= b for a, b in pairwise(starts))):
                raise CheckpointError(f"{self.path} is damaged: its {name!r} does not have the pieces {starts!r:.80}")

    def _entry(self, name: str, entry: Any) -> tuple[TensorSpec, int, int]:
        """What the header says of one tensor, and where in the data its bytes begin and end."""
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop], **others} if not others:
                if dtype not in _DTYPES:
                    raise CheckpointError(f"{self.path}: {name!r} has the unknown dtype {dtype!r}")
                if any(type(n) is not int or n < 0 for n in (*shape, start, stop)):
                    raise CheckpointError(f"{self.path}: {name!r} has the shape {shape} at bytes {start} to {stop}")
                spec = TensorSpec(name, _DTYPES[dtype], tuple(shape))
                if stop - start != spec.nbytes:
                    raise CheckpointError(
                        f"{self.path}: {name!r} needs {spec.nbytes} bytes, and its header gives it {stop - start}"
                    )
                return spec, start, stop
        raise CheckpointError(f"{self.path}: the header's entry for {name!r} is not dtype, shape and data_offsets")
