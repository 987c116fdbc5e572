"""The files of a checkpoint, written by one process or by all ranks. They are complete once every rank is done."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from pagoda.checkpoint.directory import committed
from pagoda.checkpoint.tensors import TensorSpec, TensorWriter, hash_table
from pagoda.errors import RankError
from pagoda.memory.files import may_exist
from pagoda.memory.identity import finished, partial
from pagoda.ranks.transport import Transport


class Files:
    """The tensor files of one checkpoint. This process fills in its part of each tensor.

    With several ranks, the first rank creates the directory and reserves the files. All ranks write and sync their
    parts. The first rank commits only after every rank has reported that it is done. So a crash of any rank at any time
    leaves either no checkpoint or a complete one.
    """

    def __init__(
        self,
        directory: Path,
        checkpoint_id: str,
        specs: Mapping[str, Sequence[TensorSpec]],
        transport: Transport | None,
    ) -> None:
        """`specs`: the tensors of each file. `transport`: used by this thread only. None if one process writes."""
        self._checkpoint_id = checkpoint_id
        self._specs = specs
        self._transport = transport
        self._directory = directory
        self.folder = partial(directory)
        """The directory under its temporary name."""
        self._undecided = False
        self._failed = False
        """Whether all ranks know that one has failed, so that no more messages are sent."""
        self._writers: dict[str, TensorWriter] = {}

    @property
    def first(self) -> bool:
        """Whether this process commits."""
        return self._transport is None or self._transport.rank == 0

    @property
    def may_exist(self) -> bool:
        """Whether the directory may have its final name although `open` has failed. Its pages must then be kept.

        Once a rank has reported that its part is done, the first rank may rename the directory without another message.
        Pages for a directory that was never renamed are dropped when the SSD directories are next opened.
        """
        if self._undecided:
            return True
        return may_exist(self._directory) or may_exist(finished(self._directory))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Write files inside this block. If it succeeds, the directory has its final name, on every rank."""

        def some_are_gone() -> bool:  # so they may not know of a failure, and keep their pages
            return self._transport is not None and not self._failed

        with ExitStack() as stack:
            with self.failing_on_all():
                if self.first:
                    stack.enter_context(committed(self._directory, self._checkpoint_id, some_are_gone))
                    self._create(stack, shared=False)
            with self.failing_on_all():
                if not self.first:
                    self._create(stack, shared=True)
                yield
                self._undecided = not self.first
            with self.failing_on_all():
                stack.close()

    def write(self, file: str, name: str, start: int, data: memoryview) -> None:
        """Write a piece of a tensor that starts at element `start`."""
        self._writers[file].write(name, start, data)

    def finish(self) -> dict[str, dict[str, list[list[object]]]]:
        """Sync the written data. Returns the hashes of all ranks' pieces, by file, on the first rank only."""
        for writer in self._writers.values():
            writer.sync()
        everyone = self.of_all({file: writer.pieces for file, writer in self._writers.items()})
        if not self.first:
            return {}
        return {file: hash_table(specs, [pieces[file] for pieces in everyone]) for file, specs in self._specs.items()}

    def of_all(self, mine: Any) -> list[Any]:
        """Gather a value from every rank. All ranks call this at the same point."""
        self._agree()
        if self._transport is None:
            return [mine]
        return self._transport.announce(mine)

    @contextmanager
    def failing_on_all(self) -> Iterator[None]:
        """Run the block on every rank, and wait for all. If it fails on one rank, all ranks raise."""
        try:
            yield
        except BaseException:
            if not self._failed:
                with suppress(RankError):
                    self._agree(failed=True)
            raise
        self._agree()

    def _create(self, stack: ExitStack, shared: bool) -> None:
        for file, specs in self._specs.items():
            writer = TensorWriter(self.folder / f"{file}.safetensors", specs, shared)
            self._writers[file] = stack.enter_context(closing(writer))

    def _agree(self, failed: bool = False) -> None:
        """Wait for every rank. Raises RankError if one has failed; that rank calls this wherever the others wait."""
        votes = [] if self._transport is None else self._transport.announce([failed])
        for rank, (bad,) in enumerate(votes):
            if bad:
                self._failed, self._undecided = True, False
                raise RankError(f"Rank {rank} could not write its part of {self._directory}: see its own error.")
