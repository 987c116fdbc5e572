"""Giving: gives other ranks this rank's slices of the weights that they want."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from pagoda.errors import NonFiniteGradientError, RankError
from pagoda.memory.page import pages_for
from pagoda.mesh.world import rank_timeout_s
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.layout import WEIGHT, WEIGHT_BACK
from pagoda.plan.placement import SERVING
from pagoda.plan.tiers import HOST
from pagoda.ranks.gathering import Gathering
from pagoda.ranks.order import CollectiveKind
from pagoda.ranks.service import Service
from pagoda.runtime.executor import Executor
from pagoda.runtime.lanes import Handle
from pagoda.runtime.store import Store


@dataclass(eq=False, repr=False)
class Giving:
    """Takes part in what other ranks gather, and answers those that ask this rank alone."""

    _gathering: Gathering
    _store: Store
    _units: Sequence[LiveUnit]
    _executor: Executor
    _landing: torch.Tensor | None
    """Weights that only other ranks want arrive here, uint8."""

    def __post_init__(self) -> None:
        self._collectives = collectives = self._gathering.collectives
        self._shards, self._edition = collectives.shards, collectives.edition
        self._reading = threading.Lock()
        """Held while the window is in use."""
        self.take_memory(self._landing)
        collectives.take_part |= {CollectiveKind.GATHER: self._give, CollectiveKind.SHARE: self._share_unasked}
        requests = self._gathering.requests
        self._service = None if requests is None else Service(requests, self._answer)

    def take_memory(self, landing: torch.Tensor | None) -> None:
        """Take the memory that the plan has for giving weights."""
        self._landing = landing
        pages = self._store.plan.placement.pages(HOST, SERVING)
        serves = pages and self._collectives.mesh.ranks.shards_weights
        self._window = self._store.host.take(pages).view() if serves else None
        """RAM through which a slice on SSD is sent: each message is sent before the next is read."""

    def close(self) -> None:
        """Stop answering other ranks."""
        if self._service is not None:
            self._service.close()

    def _give(self, unit: LiveUnit, version: int | None) -> None:
        """Give the others this rank's slice of a unit whose weights this rank does not want."""
        assert self._landing is not None
        assert version is not None
        page = self._store.plan.page_bytes
        pages = pages_for(self._store.plan.layout.weight_bytes(unit.spec), page)
        whole = self._landing[: pages * page].view(self._gathering.dtype(unit))  # as long as a lease
        if self._collectives.order.failed:
            whole.fill_(math.nan)
        else:
            for start, message in self._messages(unit, version):
                whole[start : start + message.numel()].copy_(message)
        self._gathering.complete(unit.spec, whole)

    def _share_unasked(self, unit: LiveUnit, version: int | None) -> None:
        """Share a unit that other ranks have updated, and that this one may be about to update."""
        if version is None:
            return
        if not self._collectives.order.failed:
            # This rank's compute is about to queue the same update, unless it waits for what comes after this.
            self._await_version(unit, version, lambda: self._collectives.awaited)
            _end(self._executor.updated(unit))
            self._check_version(unit, version)
        self._gathering.share_slices(unit, self._executor.newest(unit))

    def _answer(self, index: int, version: int) -> Iterator[torch.Tensor]:
        """This rank's slice of a unit after `version` updates, for a rank that asks: messages in RAM."""
        unit = self._units[index]
        self._await_version(unit, version, lambda: False)
        for _, message in self._messages(unit, version):
            yield message.cpu()

    def _messages(self, unit: LiveUnit, version: int) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's slice of a unit after `version` updates, in messages: (first element, values)."""
        self._check_version(unit, version)
        if self._edition(unit) == version:
            _end(self._executor.updated(unit))
        driver, others_read = self._executor.driver, self._executor.driver.scheduler.others_read
        driver.tell(others_read, unit.index, True)
        try:
            yield from self._pieces(unit)
        finally:
            driver.tell(others_read, unit.index, False)
        self._check_version(unit, version)

    def _pieces(self, unit: LiveUnit) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's slice of a unit, as it is now, in messages."""
        run, dtype = self._store.newest(unit.index, WEIGHT_BACK), self._gathering.dtype(unit)
        home = self._store.tensor(unit.index, WEIGHT, run)
        most = self._gathering.message_elements(unit)
        for span in self._shards.spans(unit.spec, WEIGHT):
            for start in range(0, len(span), most):
                count, at = min(most, len(span) - start), span.at + start
                if home is not None:
                    yield span.start + start, home[at : at + count]
                    continue
                assert self._window is not None, "a plan with weights on SSD has room to serve them"
                with self._reading:
                    data = self._store.read_into(self._window, dtype, run, at, count)
                    yield span.start + start, torch.frombuffer(data, dtype=dtype)

    def _await_version(self, unit: LiveUnit, version: int, hopeless: Callable[[], bool]) -> None:
        """Wait until compute has asked for an update that another rank has asked for already."""
        deadline = time.monotonic() + rank_timeout_s()  # when the others give this rank up
        while self._edition(unit) < version and not hopeless() and time.monotonic() < deadline:
            time.sleep(0.001)

    def _check_version(self, unit: LiveUnit, version: int) -> None:
        """Raises RankError if this rank does not have the weights after `version` updates. It also has them if one more
        update is queued and has not begun: that needs the gradients of all ranks, so it waits for the rank that asks.
        """
        if self._edition(unit) == version or (self._edition(unit) == version + 1 and self._executor.is_to_come(unit)):
            return
        raise RankError(
            f"Another rank asks for the weights of {unit.spec.name!r} after {version} updates, and rank "
            f"{self._shards.rank} has made {self._edition(unit)}: "
            "run the same steps on every rank, and where graphs "
            "differ, leave out wrap(gradient_accumulation_steps=...), so that updates wait for optimizer.step()."
        )


def _end(update: Handle | None) -> None:
    """Wait until an update has ended. An update that is refused for a gradient that is not finite changes nothing."""
    with suppress(NonFiniteGradientError):
        if update is not None:
            update.wait()
