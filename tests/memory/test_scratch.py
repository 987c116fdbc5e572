"""Scratch pages: never more than there is room for, wherever they lie, and what was written comes back."""

import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pagoda.errors import CorruptPageError
from pagoda.memory.arena import Arena
from pagoda.memory.scratch import MemoryScratch, Piece, SSDScratch

PAGE = 4096


@given(st.integers(0, 40), st.lists(st.integers(1, 12 * PAGE), max_size=40), st.randoms())
def test_no_more_is_taken_than_there_is_room_for(room: int, sizes: list[int], random: object) -> None:
    scratch = MemoryScratch(room * PAGE, PAGE, Arena)
    held: list[tuple[Piece, ...]] = []
    in_use = peak = 0
    for nbytes in sizes:
        pages = -(-nbytes // PAGE)
        pieces = scratch.alloc(nbytes)
        assert (pieces is None) == (in_use + pages > room), "what is free is found, however it is scattered"
        if pieces is not None:
            assert sum(piece.run.count for piece in pieces) == pages
            held.append(pieces)
            in_use += pages
        elif held:
            freed = held.pop(random.randrange(len(held)))
            scratch.free(freed)
            in_use -= sum(piece.run.count for piece in freed)
        peak = max(peak, in_use)
        assert scratch.in_use_bytes == in_use * PAGE
        assert scratch.peak_bytes == peak * PAGE
        assert scratch.in_use_bytes <= scratch.capacity_bytes <= room * PAGE
    scratch.close()


def test_pieces_of_ram_do_not_overlap_and_are_poisoned_when_nobody_has_them() -> None:
    scratch = MemoryScratch(8 * PAGE, PAGE, Arena, poison=True)
    first, second = scratch.alloc(3 * PAGE), scratch.alloc(5 * PAGE)
    for value, pieces in ((1, first), (2, second)):
        for piece in pieces:
            scratch.tensor(piece).fill_(value)
    kept = [scratch.tensor(piece) for piece in first]
    assert all((tensor == 1).all() for tensor in kept)
    scratch.free(first)
    assert all((tensor == 255).all() for tensor in kept)
    assert all((scratch.tensor(piece) == 2).all() for piece in second)


@pytest.mark.parametrize("drives", [1, 2])
def test_what_was_written_to_ssd_comes_back(drives: int, tmp_path: Path) -> None:
    directories = {tmp_path / str(n): None for n in range(drives)}
    for directory in directories:
        directory.mkdir()
    scratch = SSDScratch(64 * PAGE, PAGE, directories)
    pieces = scratch.alloc(10 * PAGE)
    arena = Arena(10 * PAGE)
    view = arena.view(0, 10 * PAGE)
    view[:] = data = os.urandom(10 * PAGE)
    hashes = [scratch.write(piece, 0, view[: piece.run.count * PAGE]) for piece in pieces]
    view[:] = bytes(10 * PAGE)
    for piece, expected in zip(pieces, hashes, strict=True):
        scratch.read(piece, 0, expected, view[: piece.run.count * PAGE])
    assert bytes(view) == data
    hashes[0][3] += 1
    with pytest.raises(CorruptPageError):
        scratch.read(pieces[0], 0, hashes[0], view)
    assert not any(list(directory.iterdir()) for directory in directories), "the files have no names"
    scratch.close()


def test_a_limit_of_each_drive_holds(tmp_path: Path) -> None:
    left, right = tmp_path / "a", tmp_path / "b"
    left.mkdir()
    right.mkdir()
    scratch = SSDScratch(64 * PAGE, PAGE, {left: 2 * PAGE, right: 7 * PAGE})
    assert scratch.alloc(10 * PAGE) is None
    assert scratch.alloc(9 * PAGE) is not None
    assert scratch.alloc(1) is None
    scratch.close()
