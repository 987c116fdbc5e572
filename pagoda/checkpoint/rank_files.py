"""A checkpoint's files, written by one process or by all ranks: whole once every rank is done."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from pagoda.checkpoint.directory import committed
from pagoda.checkpoint.tensors import TensorSpec, TensorWriter, hash_table
from pagoda.distributed.transport import Transport
from pagoda.errors import RankError
from pagoda.memory.identity import partial


class Files:
    """The tensor files of one checkpoint, to be filled with what this process has of each tensor.

    With ranks, the first makes the directory and reserves the files, all write their parts of them and sync, and only
    when every rank has said so does the first commit: a crash of any rank at any instant leaves no checkpoint, or all
    of it.
    """

    def __init__(
        self,
        directory: Path,
        checkpoint_id: str,
        specs: Mapping[str, Sequence[TensorSpec]],
        transport: Transport | None,
    ) -> None:
        """`specs` are the tensors of each file. `transport` is for this thread alone; None where one process writes."""
        self._checkpoint_id = checkpoint_id
        self._specs = specs
        self._transport = transport
        self._directory = directory
        self.folder = partial(directory)
        """The directory, before it has its name."""
        self._undecided = False
        self._failed = False
        """Whether all ranks know that one has failed, so that nothing more is said."""
        self._writers: dict[str, TensorWriter] = {}

    @property
    def first(self) -> bool:
        """Whether this process commits."""
        return self._transport is None or self._transport.rank == 0

    @property
    def may_exist(self) -> bool:
        """Whether the directory may have its name, although `open` has ended badly: what it keeps must stay then.

        Once a rank has said that its part is done, the first may name the directory without another word from it.
        When the SSD directories are next opened, what was to be part of a directory that never got its name is dropped.
        """
        return self._undecided or self._directory.exists()

    @contextmanager
    def open(self) -> Iterator[None]:
        """For as long as files are written; when it ends well, the directory has its name, on every rank."""
        with ExitStack() as stack:
            with self.failing_on_all():
                if self.first:
                    stack.enter_context(committed(self._directory, self._checkpoint_id, self._some_are_gone))
                    self._create(stack, shared=False)
            with self.failing_on_all():
                if not self.first:
                    self._create(stack, shared=True)
                yield
                self._undecided = not self.first
            with self.failing_on_all():
                stack.close()

    def write(self, file: str, name: str, start: int, data: memoryview) -> None:
        """Write a piece of a tensor, from its element `start` on."""
        self._writers[file].write(name, start, data)

    def finish(self) -> dict[str, dict[str, list[list[object]]]]:
        """Sync what was written; the hashes of all that every rank has written, by file, which the first one gets."""
        for writer in self._writers.values():
            writer.finish()
        everyone = self.of_all({file: writer.pieces for file, writer in self._writers.items()})
        if not self.first:
            return {}
        return {file: hash_table(specs, [pieces[file] for pieces in everyone]) for file, specs in self._specs.items()}

    def of_all(self, mine: Any) -> list[Any]:
        """What every rank says; all say it at the same point."""
        self._agree()
        if self._transport is None:
            return [mine]
        return self._transport.announce(mine)

    @contextmanager
    def failing_on_all(self) -> Iterator[None]:
        """For what every rank does before any goes on; raises on all of them where it fails on one."""
        try:
            yield
        except BaseException:
            if not self._failed:
                with suppress(RankError):
                    self._agree(failed=True)
            raise
        self._agree()

    def _some_are_gone(self) -> bool:
        """Of a save that has failed: whether there may be ranks that do not know, and keep their pages."""
        return self._transport is not None and not self._failed

    def _create(self, stack: ExitStack, shared: bool) -> None:
        for file, specs in self._specs.items():
            writer = TensorWriter(self.folder / f"{file}.safetensors", specs, shared)
            self._writers[file] = stack.enter_context(closing(writer))

    def _agree(self, failed: bool = False) -> None:
        """Wait for every rank. Where one has failed, which it says wherever the others are, this raises RankError."""
        votes = [] if self._transport is None else self._transport.announce([failed])
        for rank, (bad,) in enumerate(votes):
            if bad:
                self._failed, self._undecided = True, False
                raise RankError(f"Rank {rank} could not write its part of {self._directory}: see its own error.")
