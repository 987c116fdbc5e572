"""Writes files in the format of `torch.save`, with one tensor in RAM at a time."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from pagoda.errors import StorageError
from pagoda.memory.arena import tensor_bytes

WriteTensor = Callable[[Any, torch.Tensor], None]
"""Writes a CPU tensor as the values of an entry of the file's content, which has the same dtype and shape."""


@contextmanager
def torch_file(path: Path, content: Any) -> Iterator[tuple[Any, WriteTensor]]:
    """A file that `torch.load` reads as `content`. Its tensors are on meta, and get their values inside the block.

    Yields the content with an entry for each tensor, and a function that writes an entry's values. `path` is created or
    replaced if the block succeeds. Tensors that were not written are zeros. Raises StorageError if the file cannot be
    written.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with FakeTensorMode():
            tensors = tree_map_only(torch.Tensor, lambda meta: torch.empty(meta.shape, dtype=meta.dtype), content)
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(tensors, temporary)
            entries = torch.load(temporary)
        with temporary.open("r+b") as file:

            def write(entry: torch.Tensor, tensor: torch.Tensor) -> None:
                offset = entry.untyped_storage()._checkpoint_offset
                assert offset is not None, "torch.load notes it under FakeTensorMode"
                file.seek(offset)
                file.write(tensor_bytes(tensor))

            yield entries, write
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}. Free space there, or name another file.") from error
    finally:
        temporary.unlink(missing_ok=True)
