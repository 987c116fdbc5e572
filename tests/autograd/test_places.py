"""Places for offloaded activations: never more than there is room for, and what was written comes back."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import pagoda
from pagoda.autograd.activations import places
from pagoda.autograd.activations.places import Piece, RamPlace, SsdPlace
from pagoda.runtime.device import PAST, Device, Event
from pagoda.runtime.moving import move_states

PAGE = 4096


@given(st.integers(0, 40), st.lists(st.integers(1, 12 * PAGE), max_size=40), st.randoms())
def test_no_more_is_taken_than_there_is_room_for(room: int, sizes: list[int], random: object) -> None:
    place = RamPlace(room * PAGE, PAGE, Device())
    held: list[tuple[Piece, ...]] = []
    in_use = peak = 0
    for nbytes in sizes:
        pages = -(-nbytes // PAGE)
        pieces = place.alloc(nbytes)
        assert (pieces is None) == (in_use + pages > room), "what is free is found, however it is scattered"
        if pieces is not None:
            assert sum(piece.run.count for piece in pieces) == pages
            held.append(pieces)
            in_use += pages
        elif held:
            freed = held.pop(random.randrange(len(held)))  # type: ignore[attr-defined]
            place.free(freed)
            in_use -= sum(piece.run.count for piece in freed)
        peak = max(peak, in_use)
        assert place.in_use_bytes == in_use * PAGE
        assert place.peak_bytes == peak * PAGE
        assert place.in_use_bytes <= place.capacity_bytes <= room * PAGE
    place.close()


def test_pieces_of_ram_do_not_overlap_and_are_poisoned_when_nobody_has_them() -> None:
    place = RamPlace(8 * PAGE, PAGE, Device(), poison=True)
    first, second = place.alloc(3 * PAGE), place.alloc(5 * PAGE)
    for value, pieces, pages in ((1, first, 3), (2, second, 5)):
        place.write(pieces, torch.full((pages * PAGE,), value, dtype=torch.uint8), PAST)

    def content(pieces: tuple[Piece, ...], pages: int) -> list[int]:
        into = torch.empty(pages * PAGE, dtype=torch.uint8)
        place.read(pieces, into, PAST)
        return into.unique().tolist()

    assert content(first, 3) == [1]
    place.free(first)
    assert content(first, 3) == [255]
    assert content(second, 5) == [2]


def test_the_time_that_compute_still_works_does_not_count_as_a_copy() -> None:
    """Copies are queued behind compute, which may have much to do between two micro-batches."""

    class Busy(Device):
        """Compute takes 0.2 s more, from the first time that somebody waits for it."""

        idle = False

        def synchronize(self) -> None:
            time.sleep(0 if self.idle else 0.2)
            self.idle = True

        def fence(self) -> Event:
            return self

        def copy_out(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
            after.synchronize()
            return super().copy_out(target, source, after)

    place = RamPlace(PAGE, PAGE, Busy())
    assert min(place.rates()) > PAGE / 0.1
    place.close()


@pytest.mark.parametrize("drives", [1, 2])
def test_what_was_written_to_ssd_comes_back(drives: int, tmp_path: Path) -> None:
    """Also of a bank that was added, and after states have moved."""
    directories = [tmp_path / str(n) for n in range(drives)]
    for directory in directories:
        directory.mkdir()
    ssd = ",".join(f"{directory}:1GiB" for directory in directories)
    memory = pagoda.Memory(host="64MiB", ssd=ssd, page_size=4 * PAGE)
    model: Any = nn.Linear(64, 64)
    _, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=memory, precision="fp32", activations="offload")
    (place,), store = optimizer._engine.graphs.offloader.places, optimizer._engine.store
    assert isinstance(place, SsdPlace)
    written = []
    for nbytes in (70 * PAGE - 100, places._GROWTH_BYTES, PAGE):
        data, pieces = torch.randint(256, (nbytes,), dtype=torch.uint8), place.alloc(nbytes)
        assert pieces is not None
        place.write(pieces, data, PAST)
        written.append((data, pieces))
    assert store.ssd.added.count * place.page_bytes == place.capacity_bytes > places._GROWTH_BYTES
    move_states(store, store.plan, Device())
    place.take_buffers()
    for data, pieces in written:
        into = torch.empty_like(data)
        place.read(pieces, into, PAST)
        assert torch.equal(into, data)
    assert not any(list(directory.iterdir()) for directory in directories), "the files have no names"
    optimizer.close()
