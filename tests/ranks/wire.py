"""A transport between threads, for tests."""

import threading
from typing import Any

from pagoda.mesh.world import World


class Table:
    """Where the announcements of ranks that are threads meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.rows: list[Any] = [None] * size


class FakeWire:
    """One rank's transport; counts what is said."""

    broken = False
    world = World()

    def __init__(self, table: Table, rank: int = 0) -> None:
        self.table, self.rank, self.size = table, rank, len(table.rows)
        self.said = 0

    def announce(self, value: Any) -> list[Any]:
        self.said += 1
        self.table.rows[self.rank] = value
        self.table.barrier.wait()
        rows = [*self.table.rows]
        self.table.barrier.wait()
        return rows
