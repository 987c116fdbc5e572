"""A checkpoint's files, written by one process or by all ranks: whole once every rank is done."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from pagoda.checkpoint.directory import committed, partial
from pagoda.checkpoint.tensors import Pieces, TensorSpec, TensorWriter, hash_table
from pagoda.errors import RankError
from pagoda.parallel.wire import Wire


class Files:
    """The tensor files of one checkpoint, to be filled with what this process has of each tensor.

    With ranks, the first makes the directory and reserves the files, all write their parts of them and sync, and only
    when every rank has said so does the first commit: a crash of any rank at any instant leaves no checkpoint.
    """

    def __init__(self, directory: Path, specs: dict[str, Sequence[TensorSpec]], wire: Wire | None) -> None:
        """`specs` are the tensors of each file. `wire` is for this thread alone; None where one process writes."""
        self._specs = specs
        self._wire = wire
        self._directory = directory
        self.folder = partial(directory)
        """The directory, before it has its name."""
        self._writers: dict[str, TensorWriter] = {}

    @property
    def first(self) -> bool:
        """Whether this process commits."""
        return self._wire is None or self._wire.rank == 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """For as long as files are written; when it ends well, the directory has its name, on every rank."""
        with ExitStack() as stack:
            with self._together():
                if self.first:
                    stack.enter_context(committed(self._directory))
                    self._create(stack, shared=False)
            if not self.first:
                self._create(stack, shared=True)
            with self._together():
                yield
            with self._together():
                stack.close()

    def write(self, file: str, name: str, start: int, data: memoryview) -> None:
        """Write a piece of a tensor, from its element `start` on."""
        self._writers[file].write(name, start, data)

    def finish(self) -> dict[str, dict[str, list[list[object]]]]:
        """Sync what was written; the hashes of all that every rank has written, by file, which the first one gets."""
        for writer in self._writers.values():
            writer.finish()
        mine = {file: writer.pieces for file, writer in self._writers.items()}
        everyone: list[dict[str, Pieces]] = [mine]
        if self._wire is not None:
            text = json.dumps({f: {n: list(p.items()) for n, p in pieces.items() if p} for f, pieces in mine.items()})
            by_rank = self._wire.announce_bytes(text.encode())
            everyone = [
                {f: {n: {at: tuple(piece) for at, piece in p} for n, p in pieces.items()} for f, pieces in said.items()}
                for said in map(json.loads, by_rank)
            ]
        if not self.first:
            return {}
        return {file: hash_table(specs, [pieces[file] for pieces in everyone]) for file, specs in self._specs.items()}

    def _create(self, stack: ExitStack, shared: bool) -> None:
        for file, specs in self._specs.items():
            writer = TensorWriter(self.folder / f"{file}.safetensors", specs, shared)
            self._writers[file] = stack.enter_context(closing(writer))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What every rank does before any goes on; raises on all of them where it fails on one."""
        failed = 1
        try:
            yield
            failed = 0
        finally:
            others = [] if self._wire is None else self._wire.announce([failed])
        for rank, (bad,) in enumerate(others):
            if bad:
                raise RankError(f"Rank {rank} could not write its part of {self._directory}: see its own error.")
