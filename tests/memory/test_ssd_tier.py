"""Pages on SSD are what was stored, whatever is frozen, restored, adopted or broken meanwhile."""

import errno
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from files import flip

from pagoda.errors import BudgetError, CorruptPageError, StorageError
from pagoda.memory.page import PageRun
from tests.memory.ssd_parts import PAGE, Tier, committed, loaded, make_checkpoint, pattern


@pytest.fixture(params=[1, 3], ids=["one-drive", "three-drives"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    """Eight pages and eight spare slots."""
    directories = [tmp_path / f"drive{index}" for index in range(request.param)]
    for directory in directories:
        directory.mkdir()
    with Tier(dict.fromkeys(directories), 8, PAGE, 8) as tier:
        yield tier


def test_pages_never_stored_read_as_zeros_frozen_or_not(tier: Tier, tmp_path: Path) -> None:
    run = tier.alloc(3)
    tier.store(run, PAGE, pattern(1, 1))
    into = committed(tier.commit(tmp_path / "checkpoint"), run)
    assert into == loaded(tier, run) == bytes(PAGE) + bytes(pattern(1, 1)) + bytes(PAGE)


def test_pages_are_allocated_once_and_bytes_outside_a_run_and_parts_of_pages_are_refused(tier: Tier) -> None:
    assert [tier.alloc(count) for count in (1, 2)] == [PageRun(0, 1), PageRun(1, 2)]
    outside = [(-PAGE, PAGE), (PAGE, 2 * PAGE), (2 * PAGE, PAGE), (512, PAGE), (0, 512)]
    for move in (tier.load, tier.store):
        with pytest.raises(ValueError, match="3 pages are allocated"):
            move(PageRun(2, 2), 0, pattern(2, 1))
        for offset, nbytes in outside:
            with pytest.raises(ValueError, match=r"Run\(start=1, count=2\): only whole pages of 4096 bytes in it"):
                move(PageRun(1, 2), offset, pattern(2, 1)[:nbytes])


def test_pages_beyond_those_of_the_beginning_take_no_spare_slots(tier: Tier, tmp_path: Path) -> None:
    """They are in no commit, and stay as they are when the others are arranged anew."""
    states = tier.alloc(8)
    tier.store(states, 0, pattern(8, 1))
    more = [tier.alloc(5), tier.alloc(20)]
    for seed, run in enumerate(more):
        tier.store(run, 0, pattern(run.count, seed))
    with closing(tier.snapshot()) as frozen:
        frozen.add(states)
        tier.store(states, 0, pattern(8, 2))
        tier.store(more[1], 0, pattern(20, 3))
        reference = frozen.commit(*make_checkpoint(tmp_path / "checkpoint"))
    assert committed(reference, states) == pattern(8, 1)
    assert loaded(tier, states) == pattern(8, 2)
    assert tier.added == PageRun(8, 25)
    tier.make_room(3, 8)
    tier.rearrange(3, 8, {PageRun(1, 2): PageRun(4, 2)})
    assert loaded(tier, PageRun(0, 3)) == bytes(PAGE) + bytes(pattern(8, 2))[4 * PAGE : 6 * PAGE]
    assert tier.added == PageRun(3, 25)
    assert loaded(tier, PageRun(3, 5)) == pattern(5, 0)
    assert loaded(tier, PageRun(8, 20)) == pattern(20, 3)


def test_pages_for_which_there_is_no_room_are_not_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because of a limit, or because one of several drives is full."""
    directories = {tmp_path / name: 10 * PAGE for name in "ab"}
    for directory in directories:
        directory.mkdir()
    reserve, calls = os.posix_fallocate, 0

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, nbytes)

    with Tier(directories, 4, PAGE, 4) as tier:
        first = tier.alloc(4)
        tier.store(first, 0, pattern(4, 1))
        with pytest.raises(BudgetError, match="are allowed"):
            tier.alloc(13)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(StorageError, match="is too full"):
                tier.alloc(6)
        second = tier.alloc(12)
        assert second == PageRun(4, 12)
        tier.store(second, 0, pattern(12, 2))
        assert loaded(tier, first) == pattern(4, 1)
        assert loaded(tier, second) == pattern(12, 2)


def test_what_is_stored_of_a_part_of_a_page_is_read_as_far(tmp_path: Path) -> None:
    with Tier({tmp_path: None}, 4, 4 * PAGE) as tier:
        run = tier.alloc(3)
        into = pattern(7, 0)
        for seed in (1, 2):
            tier.store(run, 4 * PAGE, pattern(7, seed))
            tier.load(run, 4 * PAGE, into)
            assert into == pattern(7, seed)
        for nbytes in (6 * PAGE, 8 * PAGE):
            with pytest.raises(CorruptPageError):
                tier.load(run, 4 * PAGE, memoryview(pattern(8, 0))[:nbytes])
        for nbytes in (512, 7 * PAGE + 512):
            with pytest.raises(ValueError, match="multiples of 4096 bytes"):
                tier.store(run, 4 * PAGE, pattern(8, 1)[:nbytes])


def test_pages_that_are_arranged_anew_keep_their_content_and_commits_keep_theirs(tier: Tier, tmp_path: Path) -> None:
    """More pages, in another order; one run is there twice, until it is written."""
    first, second, dropped = (tier.alloc(count) for count in (2, 3, 1))
    for seed, stored in enumerate((first, second, dropped)):
        tier.store(stored, 0, pattern(stored.count, seed))
    commit = tier.commit(tmp_path / "checkpoint")
    tier.store(first, 0, pattern(2, 7))
    moved, again, copied, new = PageRun(0, 3), PageRun(3, 2), PageRun(5, 2), PageRun(7, 4)
    tier.make_room(11, 8)
    tier.rearrange(11, 8, {moved: second, again: first, copied: first})
    tier.store(copied, 0, pattern(2, 8))
    tier.store(new, 0, pattern(4, 9))
    assert loaded(tier, moved) == bytes(pattern(3, 1))
    assert loaded(tier, again) == bytes(pattern(2, 7))
    assert loaded(tier, copied) == bytes(pattern(2, 8))
    assert loaded(tier, new) == bytes(pattern(4, 9))
    assert committed(commit, first) == bytes(pattern(2, 0))
    assert committed(commit, dropped) == bytes(pattern(1, 2))
    for seed in range(10, 14):  # what was dropped is free again
        tier.store(new, 0, pattern(4, seed))
        tier.store(moved, 0, pattern(3, seed))


def test_pages_that_are_not_added_are_in_no_freeze_and_need_no_spare_slots(tmp_path: Path) -> None:
    with Tier({tmp_path: None}, 4, PAGE, 2) as tier:
        state, spill = tier.alloc(2), tier.alloc(2)
        for run in (state, spill):
            tier.store(run, 0, pattern(2, 1))
        with closing(tier.snapshot()) as frozen:
            frozen.add(state)
            for seed in range(2, 5):
                tier.store(state, 0, pattern(2, seed))
                tier.store(spill, 0, pattern(2, seed))
            reference = frozen.commit(*make_checkpoint(tmp_path / "checkpoint"))
            assert committed(reference, spill) == bytes(2 * PAGE)


def test_a_closed_freeze_gives_its_slots_back(tier: Tier) -> None:
    run = tier.alloc(4)
    for seed in range(5):
        with closing(tier.freeze_all()):
            tier.store(run, 0, pattern(4, seed))
            tier.store(run, PAGE, pattern(2, seed + 1))
    assert loaded(tier, run)[PAGE : 3 * PAGE] == pattern(2, 5)
    frozen = tier.snapshot()
    frozen.close()
    with pytest.raises(ValueError, match="was released"):
        frozen.add(run)


def test_a_run_has_what_another_shares_until_either_is_stored_and_neither_moves_a_byte(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an update before `step()` does, whose result stands or is dropped: six times, and no slot is lost."""
    run, other = tier.alloc(4), tier.alloc(4)
    tier.store(run, 0, pattern(4, 1))
    for seed in range(6):
        with monkeypatch.context() as patch:
            patch.delattr(os, "preadv")
            patch.delattr(os, "pwritev")
            tier.share(run, other)
        expected = loaded(tier, run)
        assert loaded(tier, other) == expected
        tier.store(other, PAGE, pattern(2, seed))
        assert loaded(tier, run) == expected
        expected[PAGE : 3 * PAGE] = pattern(2, seed)
        assert loaded(tier, other) == expected
        if seed % 2:
            run, other = other, run
        tier.drop(other)
        assert bytes(loaded(tier, other)) == bytes(4 * PAGE)


def committed_files(tier: Tier, checkpoint: Path) -> list[Path]:
    """The page files of a tier, named by a commit."""
    reference = tier.commit(checkpoint)
    return [Path(d) / f"pagoda-{reference['store']}" / "pages" for d in reference["directories"]]


def test_a_flipped_bit_in_any_page_is_an_error_that_names_file_and_offset(tier: Tier, tmp_path: Path) -> None:
    run = tier.alloc(8)
    tier.store(run, 0, pattern(8, 1))
    files = committed_files(tier, tmp_path / "checkpoint")
    found = []
    for path in files:
        for page in range(path.stat().st_size // PAGE):
            flip(path, page * PAGE + 1000)
            try:
                loaded(tier, run)
            except CorruptPageError as error:
                found.append(f"{path} at offset {page * PAGE} does not hold what was written" in str(error))
            flip(path, page * PAGE + 1000)
    assert found == [True] * 8
    content = files[0].read_bytes()
    files[0].write_bytes(content[PAGE : 2 * PAGE] + content[:PAGE] + content[2 * PAGE :])  # two pages exchanged
    with pytest.raises(CorruptPageError):
        loaded(tier, run)
    files[0].write_bytes(content)
    assert loaded(tier, run) == pattern(8, 1)
    os.truncate(files[0], PAGE)
    with pytest.raises(StorageError, match="end of file"):
        loaded(tier, run)


@pytest.mark.parametrize("verb", ["preadv", "pwritev"])
def test_a_failing_disk_is_an_error_and_old_content_is_never_taken_for_new(
    tier: Tier, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tier.alloc(4)
    tier.store(run, 0, pattern(4, 1))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, verb, fail)
        with pytest.raises(StorageError, match="Input/output error"):
            tier.load(run, 0, pattern(4, 0)) if verb == "preadv" else tier.store(run, 0, pattern(4, 2))
    assert loaded(tier, run) == pattern(4, 1)  # nothing was written
    tier.store(run, 0, pattern(4, 2))
    assert loaded(tier, run) == pattern(4, 2)


def test_a_write_that_ended_half_way_is_an_error_when_read(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tier.alloc(1)
    tier.store(run, 0, pattern(1, 1))

    def tear(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        os.pwrite(fd, pattern(1, 77), offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", tear)
        with pytest.raises(StorageError):
            tier.store(run, 0, pattern(1, 2))
    with pytest.raises(CorruptPageError):
        loaded(tier, run)


def test_without_a_free_slot_a_store_is_refused_saying_what_to_change(tmp_path: Path) -> None:
    with Tier({tmp_path: None}, 4, PAGE, 4) as tier:
        run = tier.alloc(4)
        for seed in range(2):
            tier.store(run, 0, pattern(4, seed))
            tier.commit(tmp_path / f"checkpoint{seed}")
        with pytest.raises(BudgetError, match=r"2 checkpoints keep .*4 spare .*memory\.ssd_checkpoints.*memory\.ssd"):
            tier.store(run, 0, pattern(1, 5))
        assert loaded(tier, run) == pattern(4, 1)


def test_a_store_waits_for_a_freeze_that_is_about_to_make_room(tmp_path: Path) -> None:
    with Tier({tmp_path: None}, 4, PAGE, 4) as tier:
        run = tier.alloc(4)
        tier.store(run, 0, pattern(4, 0))
        with closing(tier.freeze_all()) as old:
            old.commit(*make_checkpoint(tmp_path / "old"))
        tier.store(run, 0, pattern(4, 1))
        stored = threading.Event()

        def store() -> None:
            tier.store(run, 0, pattern(4, 2))
            stored.set()

        with closing(tier.freeze_all()) as new:
            thread = threading.Thread(target=store)
            thread.start()
            reference = new.commit(*make_checkpoint(tmp_path / "new"))
            assert not stored.wait(0.2)
            old.release()
            assert stored.wait(60)
        thread.join()
        assert loaded(tier, run) == pattern(4, 2)
        assert committed(reference, run) == pattern(4, 1)


def test_a_freeze_dropped_without_a_word_keeps_no_slots(tmp_path: Path) -> None:
    with Tier({tmp_path: None}, 2, PAGE, 1) as tier:
        run = tier.alloc(2)
        for seed in range(4):
            tier.store(run, 0, pattern(1, seed))
            tier.freeze_all()
        tier.store(run, 0, pattern(1, 9))
        assert loaded(tier, run)[:PAGE] == pattern(1, 9)


def test_striping_and_drives_of_unequal_size_give_the_same_bytes(tmp_path: Path) -> None:
    limits = {"a": None, "b": 2 * PAGE, "c": 7 * PAGE, "d": 5 * PAGE}
    for name in limits:
        (tmp_path / name).mkdir()
    directories = {tmp_path / name: limit for name, limit in limits.items() if limit}
    with Tier({tmp_path / "a": None}, 9, PAGE, 5) as one, Tier(directories, 9, PAGE, 5) as several:
        rng = random.Random(0)
        runs = [(one.alloc(n), several.alloc(n)) for n in (4, 2, 3)]
        for step in range(100):
            pair = rng.choice(runs)
            first = rng.randrange(pair[0].count)
            data = pattern(rng.randint(1, pair[0].count - first), step)
            for tier, run in zip((one, several), pair, strict=True):
                tier.store(run, first * PAGE, data)
            if step % 50 == 10:
                frozen = one.freeze_all(), several.freeze_all()
            if step % 50 == 12:
                for each in frozen:
                    each.release()
            for a, b in runs:
                assert loaded(one, a) == loaded(several, b)


def test_adjoining_pages_move_in_one_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Tier({tmp_path: None}, 64, PAGE, 64) as tier:
        run = tier.alloc(64)
        calls: list[str] = []
        for verb in ("preadv", "pwritev"):
            real = getattr(os, verb)
            monkeypatch.setattr(os, verb, lambda *a, real=real, verb=verb: (calls.append(verb), real(*a))[1])
        tier.store(run, 0, pattern(64, 1))
        with closing(tier.freeze_all()):
            for at in range(0, 64, 16):
                tier.store(run, at * PAGE, pattern(16, 2))
            loaded(tier, run)
        assert calls.count("pwritev") == 1 + 4
        assert calls.count("preadv") == 1
