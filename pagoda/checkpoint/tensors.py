"""safetensors files written and read in pieces, so that RAM does not grow with the tensors.

The format is that of https://github.com/huggingface/safetensors: 8 bytes of header length (little endian), a JSON
header (name -> dtype, shape, data_offsets), then the data. The library's own writer wants every tensor in RAM.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from pagoda.errors import CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_HEADER_BYTES = 100 << 20
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def chunks(numel: int) -> Iterator[tuple[int, int]]:
    """(start, count) of pieces that cover `numel` elements."""
    for start in range(0, numel, _CHUNK_ELEMENTS):
        yield start, min(_CHUNK_ELEMENTS, numel - start)


def write_tensors(path: Path, specs: Sequence[TensorSpec], data: Iterable[torch.Tensor]) -> None:
    """Write a safetensors file whose bytes come as flat tensors, in the order of `specs`, and sync it to disk.

    Raises ValueError when the data is not as long as the specs say.
    """
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
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = 0
        for piece in data:
            written += file.write(piece.contiguous().view(torch.uint8).numpy().data)
        if written != end:
            raise ValueError(f"{path} got {written} bytes of data; its header says {end}")
        file.flush()
        os.fsync(file.fileno())


class TensorFile:
    """A safetensors file, read piece by piece. Raises CheckpointError when it is missing, truncated or not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} is not a safetensors file, or is truncated")
        try:
            header = json.loads(self._file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} has a damaged header") from error
        header.pop("__metadata__", None)
        self.specs: dict[str, TensorSpec] = {}
        self._start: dict[str, int] = {}
        for name, entry in header.items():
            self.specs[name] = TensorSpec(name, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
            self._start[name] = 8 + length + entry["data_offsets"][0]
        end = max((self._start[n] + s.nbytes for n, s in self.specs.items()), default=8 + length)
        if end != size:
            raise CheckpointError(f"{path} has {size} bytes where its header says {end}: it is truncated or damaged")

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements [start, start + count) of a tensor, flat."""
        spec = self.specs[name]
        self._file.seek(self._start[name] + start * spec.dtype.itemsize)
        data = bytearray(self._file.read(count * spec.dtype.itemsize))
        return torch.frombuffer(data, dtype=spec.dtype)

    def close(self) -> None:
        self._file.close()
