"""The threads of an engine, and how they end."""

import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass

from pagoda.errors import UsageError
from pagoda.process import forks, start_thread
from pagoda.ranks.one_rank import OneRank
from pagoda.ranks.rank_group import RankGroup
from pagoda.runtime.capture import Saver
from pagoda.runtime.executor import Executor
from pagoda.runtime.lanes import THREAD_NAMES, Lane
from pagoda.runtime.store import Store
from pagoda.runtime.updates import UpdateStream

_log = logging.getLogger("pagoda")

_CLOSE_S = 600.0
"""Most seconds that the garbage collector waits for an engine's threads. They could be waiting for a lock of the thread
in which the collector runs."""


@dataclass(frozen=True)
class Threads:
    """All threads of an engine. Neither they nor the objects that they use keep the engine alive."""

    lanes: dict[str, Lane]
    updates: UpdateStream
    saver: Saver
    rank_group: RankGroup | OneRank

    def end(self, stack: ExitStack) -> None:
        """Register calls with `stack` that finish the work of all threads and join them."""
        for lane in self.lanes.values():
            stack.callback(lane.clear)
        # The stack calls these last to first: a lane is closed before the lanes that it feeds.
        for lane in reversed(self.lanes.values()):
            stack.callback(lane.close)
        stack.callback(self.updates.close)
        stack.callback(self.rank_group.close)
        stack.callback(self.saver.close)


def give_back(executor: Executor, store: Store) -> None:
    """Release memory and SSD space. If someone still holds weights, the device's memory is not released, because
    tensors on the device do not keep it alive."""
    held = executor.close()
    store.close(device=not held)


def end_dropped(threads: Threads, executor: Executor, store: Store, since: int) -> None:
    """End the threads of an engine that was dropped without `close`, and release its memory and SSD space.

    Updates that have not begun are not carried out. `since` is what `forks()` returned in the engine's process. In
    processes forked from it, this does nothing.
    """
    if since != forks():
        return
    closer = start_thread(_end, f"{THREAD_NAMES}closer", threads, executor, store)
    # The threads of a rank end only when all ranks have dropped their engines, so this does not wait for them. A thread
    # of an engine must not wait for itself.
    if threads.rank_group.mesh.size == 1 and not threading.current_thread().name.startswith(THREAD_NAMES):
        closer.join(_CLOSE_S)


def _end(threads: Threads, executor: Executor, store: Store) -> None:
    refusal = UsageError("The optimizer was dropped without close().")
    try:
        with ExitStack() as stack:
            stack.callback(give_back, executor, store)
            if executor.driver.stopped:
                executor.abandon(refusal)
            threads.end(stack)
            threads.updates.refuse(refusal)
    except Exception as error:
        _log.warning("An optimizer was dropped without close(), and its end failed: %s", error)
    refusal.__traceback__ = None  # the frames in it would keep memory until the next collection
