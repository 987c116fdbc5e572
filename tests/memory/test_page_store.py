"""What a page store leaves on disk: all of a commit or nothing of it, and nothing that nobody needs."""

import gc
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from files import flip

from pagoda.checkpoint import directory as module
from pagoda.errors import BudgetError, StorageError
from pagoda.memory.identity import MANIFEST, checkpoint_id_of, new_checkpoint_id
from pagoda.memory.page import PageRun
from pagoda.memory.ssd.committed import open_commit
from pagoda.memory.ssd.tier import forget_commit
from tests.memory.ssd_parts import (
    PAGE,
    RUN,
    Reference,
    Tier,
    committed,
    kept,
    loaded,
    make_checkpoint,
    make_directory,
    names,
    pattern,
    run_gc,
)


def open_tier(directory: Path, pages: int = 4, spare: int = 8) -> Tier:
    return Tier({directory: None}, pages, PAGE, spare)


def forget(reference: Reference, checkpoint: Path, *directories: Path) -> None:
    """Delete a checkpoint, then its pages."""
    checkpoint_id = checkpoint_id_of(checkpoint)
    (checkpoint / MANIFEST).unlink()
    forget_commit(reference, checkpoint_id, directories)
    forget_commit(reference, checkpoint_id, directories)


def test_before_the_first_commit_nothing_has_a_name(ssd: Path) -> None:
    with open_tier(ssd) as tier:
        run = tier.alloc(4)
        tier.store(run, 0, pattern(4, 1))
        with closing(tier.freeze_all()):
            tier.store(run, 0, pattern(4, 2))
        assert names(ssd) == []
    assert names(ssd) == []


def test_where_files_cannot_be_named_later_they_are_named_at_once_and_deleted_at_the_end(
    ssd: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def without_tmpfile(path: str | Path, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", without_tmpfile)
    with open_tier(ssd) as tier:
        assert [name.rpartition("/")[2] for name in names(ssd)][1:] == ["commits", "pages", "store.json"]
        run = tier.alloc(4)
        tier.store(run, 0, pattern(4, 1))
        reference = tier.commit(checkpoint)
        assert committed(reference, run) == pattern(4, 1)
        forget(reference, checkpoint)
    assert names(ssd) == []


def test_a_resumed_store_adopts_pages_without_io_and_takes_no_more_space(
    ssd: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (reference,) = kept([ssd], checkpoint, spare=4)
    sizes = {path: path.stat().st_size for path in ssd.rglob("pages")}
    with open_tier(ssd, spare=4) as tier:
        run = tier.alloc(4)
        tier.store(run, 0, pattern(4, 2))  # as construction does, before there is anything to adopt
        with closing(open_commit(reference)) as pages, monkeypatch.context() as patch:
            patch.delattr(os, "preadv")
            patch.delattr(os, "pwritev")
            assert tier.adopt(run, pages, RUN)
        assert loaded(tier, run) == pattern(4, 1)
        tier.store(run, 0, pattern(4, 3))
        assert loaded(tier, run) == pattern(4, 3)
        assert committed(reference, run) == pattern(4, 1)
    assert {path: path.stat().st_size for path in ssd.rglob("pages")} == sizes


def test_a_store_with_too_few_free_slots_beside_its_commits_grows(ssd: Path, checkpoint: Path) -> None:
    (reference,) = kept([ssd], checkpoint, spare=0)
    for _ in range(2):
        with open_tier(ssd, spare=0) as tier:
            run = tier.alloc(4)
            tier.store(run, 0, pattern(4, 2))
            assert committed(reference, run) == pattern(4, 1)
        assert [path.stat().st_size for path in ssd.rglob("pages")] == [8 * PAGE]
    with pytest.raises(BudgetError, match=r"checkpoints there keep 16\.00 KiB: delete"):
        Tier({ssd: 9 * PAGE}, 6, PAGE, 0)


def test_another_page_size_or_other_stripes_make_a_store_beside(ssd: Path, checkpoint: Path, tmp_path: Path) -> None:
    (reference,) = kept([ssd], checkpoint)
    second = make_directory(tmp_path / "second")
    with Tier({ssd: None, second: None}, 4, PAGE, 4) as tier, closing(open_commit(reference)) as pages:
        assert not tier.adopt(tier.alloc(4), pages, RUN)
        striped = tier.commit(tmp_path / "run" / "step-2")
        assert {path.name for path in (ssd, second) if list(path.glob(f"*{striped['store']}*"))} == {"ssd", "second"}
    with Tier({ssd: None}, 4, 2 * PAGE, 4) as tier, closing(open_commit(reference)) as pages:
        assert not tier.adopt(tier.alloc(4), pages, RUN)
    assert committed(reference, RUN) == pattern(4, 1)


def test_what_stores_of_another_geometry_take_counts_against_the_limit(ssd: Path, checkpoint: Path) -> None:
    with Tier({ssd: 16 * PAGE}, 4, PAGE, 4) as tier:
        tier.store(tier.alloc(4), 0, pattern(4, 1))
        tier.commit(checkpoint)
    with pytest.raises(BudgetError, match=r"32\.00 KiB are allowed; stores of another page size .* take 32\.00 KiB"):
        Tier({ssd: 16 * PAGE}, 3, 4 * PAGE, 0)
    Tier({ssd: 16 * PAGE}, 2, 4 * PAGE, 0).close()
    Tier({ssd: 16 * PAGE}, 4, PAGE, 12).close()  # its own pages it may have again


def test_too_little_room_names_the_command_that_frees_what_looks_orphaned(ssd: Path, checkpoint: Path) -> None:
    """Killed, then the run removed: not a refusal for ever that nothing explains."""
    with Tier({ssd: 12 * PAGE}, 4, PAGE, 4) as tier:
        run = tier.alloc(4)
        tier.store(run, 0, pattern(4, 1))
        tier.commit(checkpoint)
        tier.store(run, 0, pattern(4, 2))
        shutil.rmtree(checkpoint.parent)
        frozen = tier.freeze_all()
        frozen.commit(*make_checkpoint(checkpoint.with_name("step-2")))
        frozen.close()
        with pytest.raises(BudgetError, match=rf"no slot .* 16\.00 KiB are kept for .*: pagoda gc {ssd} lists them"):
            tier.store(run, 0, pattern(4, 3))
    with pytest.raises(BudgetError, match=rf"16\.00 KiB are kept for .*: pagoda gc {ssd} lists them"):
        Tier({ssd: 12 * PAGE}, 6, PAGE, 4)
    assert run_gc(ssd) == 0
    with Tier({ssd: 12 * PAGE}, 6, PAGE, 4) as tier:
        tier.store(tier.alloc(6), 0, pattern(6, 4))


@pytest.mark.parametrize("live", [True, False])
def test_the_last_commit_forgotten_deletes_the_store(ssd: Path, checkpoint: Path, live: bool) -> None:
    with open_tier(ssd) as tier:
        tier.store(tier.alloc(4), 0, pattern(4, 1))
        reference = tier.commit(checkpoint)
        if live:
            forget(reference, checkpoint)
            tier.store(RUN, 0, pattern(4, 2))
    if not live:
        forget(reference, checkpoint, ssd)
    assert names(ssd) == []
    with pytest.raises(StorageError, match=f"pagoda-{reference['store']}"):
        open_commit(reference)


def test_a_commit_is_forgotten_only_for_its_own_checkpoint_in_a_directory_that_was_named(
    ssd: Path, checkpoint: Path, tmp_path: Path
) -> None:
    (reference,) = kept([ssd], checkpoint)
    other = make_checkpoint(tmp_path / "other")[1]
    forget_commit(reference, other, [ssd])
    own = checkpoint_id_of(checkpoint)
    forget_commit(reference, own, [ssd])  # a copy was deleted: the checkpoint is still where it was saved
    (checkpoint / MANIFEST).unlink()
    forget_commit(reference, own)  # the manifest names the directory, the user has not
    with open_tier(ssd):
        forget_commit(reference, other)
    assert committed(reference, RUN) == pattern(4, 1)


def striped(tmp_path: Path, checkpoint: Path) -> tuple[list[Path], Reference]:
    """Two drives, and pages 1 on them that a checkpoint keeps."""
    drives = [make_directory(tmp_path / name) for name in ("a", "b")]
    return drives, *kept(drives, checkpoint, pages=6, spare=6)


def test_a_stripe_stays_whatever_is_with_the_first_one(tmp_path: Path, checkpoint: Path) -> None:
    drives, reference = striped(tmp_path, checkpoint)
    (folder,) = drives[0].iterdir()
    before = names(drives[1])
    for exchanged in (None, "an empty mount point", "one without page tables"):
        if exchanged == "an empty mount point":
            drives[0].rename(tmp_path / "unmounted")
            drives[0].mkdir()
        elif exchanged:
            shutil.copytree(tmp_path / "unmounted" / folder.name, folder)
            shutil.rmtree(folder / "commits")
        open_tier(drives[1]).close()
        open_tier(drives[0]).close()
        Tier(dict.fromkeys(drives), 6, PAGE, 0).close() if exchanged != "one without page tables" else None
        assert names(drives[1]) == before
    assert committed(reference, PageRun(0, 6), (tmp_path / "unmounted", drives[1])) == pattern(6, 1)


def test_a_copy_of_one_drive_of_two_is_not_written_to_with_the_other(tmp_path: Path, checkpoint: Path) -> None:
    """Else what is stored with the copy overwrites what the original still refers to."""
    drives, reference = striped(tmp_path, checkpoint)
    copy = tmp_path / "copy"
    shutil.copytree(drives[0], copy)
    with Tier({copy: None, drives[1]: None}, 6, PAGE, 6) as tier:
        tier.store(tier.alloc(6), 0, pattern(6, 2))
        forget(reference, checkpoint, copy, drives[1])
        tier.store(PageRun(0, 6), 0, pattern(6, 3))
    assert committed(reference, PageRun(0, 6), tuple(drives)) == pattern(6, 1)


def test_stripes_used_with_a_copy_are_not_written_to_with_the_original(tmp_path: Path, checkpoint: Path) -> None:
    drives, _ = striped(tmp_path, checkpoint)
    drives[0].rename(tmp_path / "away")
    shutil.copytree(tmp_path / "away", tmp_path / "copy")
    with Tier({tmp_path / "copy": None, drives[1]: None}, 6, PAGE, 6) as tier:
        tier.store(tier.alloc(6), 0, pattern(6, 2))
        reference = tier.commit(checkpoint.with_name("step-2"))
    (tmp_path / "away").rename(drives[0])
    with Tier(dict.fromkeys(drives), 6, PAGE, 6) as tier:
        tier.store(tier.alloc(6), 0, pattern(6, 3))
        tier.store(PageRun(0, 6), 0, pattern(6, 4))
    assert committed(reference, PageRun(0, 6), (tmp_path / "copy", drives[1])) == pattern(6, 2)


@pytest.mark.parametrize(
    "damage", [lambda path: os.truncate(path, 40), lambda path: flip(path, 250), lambda path: os.truncate(path, 0)]
)
def test_a_damaged_page_table_is_an_error_and_its_pages_are_left_alone(
    ssd: Path, checkpoint: Path, damage: Callable[[Path], None]
) -> None:
    with open_tier(ssd) as tier:
        run = tier.alloc(4)
        for seed in (1, 2):
            tier.store(run, 0, pattern(4, seed))
            references = [tier.commit(checkpoint.with_name(f"step-{step}")) for step in range(2)]
    damage(next(ssd.glob(f"*/commits/{references[0]['commit']}")))
    with pytest.raises(StorageError, match=r"page table .* is truncated or damaged"):
        open_commit(references[0])
    with open_tier(ssd) as tier:  # in a store of its own: nobody knows which slots the damaged table keeps
        tier.store(tier.alloc(4), 0, pattern(4, 7))
        assert names(ssd) != []
    assert committed(references[1], run) == pattern(4, 2)


def test_a_truncated_page_file_is_an_error_and_not_used_on(ssd: Path, checkpoint: Path) -> None:
    (reference,) = kept([ssd], checkpoint)
    os.truncate(next(ssd.glob("*/pages")), 2 * PAGE)
    with pytest.raises(StorageError, match=rf"is truncated: it has {2 * PAGE} bytes, but .* {12 * PAGE}"):
        open_commit(reference)
    with open_tier(ssd) as tier:
        run = tier.alloc(4)
        tier.store(run, 0, pattern(4, 2))
        assert loaded(tier, run) == pattern(4, 2)


def test_a_full_disk_fails_the_commit_and_leaves_the_one_before(
    ssd: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tier(ssd) as tier:
        run = tier.alloc(4)
        tier.store(run, 0, pattern(4, 1))
        first = tier.commit(checkpoint)
        tier.store(run, 0, pattern(4, 2))
        real = os.fsync

        def full(descriptor: int) -> None:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".tmp"):
                raise OSError(28, "No space left on device")
            real(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(StorageError, match="No space left on device"):
                tier.commit(checkpoint.with_name("step-2"))
        assert len(list(ssd.glob("*/commits/*"))) == 1
        for seed in range(3):  # no slot is lost
            tier.store(run, 0, pattern(4, seed))
            with closing(tier.freeze_all()):
                tier.store(run, 0, pattern(4, 9))
        assert committed(first, run) == pattern(4, 1)
        assert committed(tier.commit(checkpoint.with_name("step-3")), run) == pattern(4, 9)


def test_a_directory_is_one_tiers_until_that_is_closed_or_dropped(ssd: Path) -> None:
    for drop in (False, True):
        tier = open_tier(ssd)
        with pytest.raises(StorageError, match=r"this process \(pid.*another directory"):
            open_tier(ssd)
        if not drop:
            tier.close()
        del tier
        gc.collect()
    open_tier(ssd).close()


def test_two_processes_on_one_directory_are_refused_until_the_first_ends(ssd: Path) -> None:
    ready, go = os.pipe(), os.pipe()
    other = os.fork()
    if other == 0:
        try:
            tier = open_tier(ssd)
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            tier.close()
        finally:
            os._exit(1)
    os.read(ready[0], 1)
    with pytest.raises(StorageError, match=rf"in use by another process \(pid {other}\)"):
        open_tier(ssd)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    for end in (*ready, *go):
        os.close(end)
    open_tier(ssd).close()
    assert names(ssd) == []


_STEPS = ("mkdir", "link", "fdatasync", "fsync", "replace", "rename", "unlink", "rmdir", "pwritev")
"""What a commit does to the disk."""


def killed_after(last: int, ssd: Path, run_dir: Path) -> bool:
    """Two checkpoints in a process that is killed before its step `last`; whether it came to the end."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    count = 0

    def armed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count > last:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **named)

        return call

    try:
        tier = open_tier(ssd)
        run = tier.alloc(4)
        for name in _STEPS:
            setattr(os, name, armed(getattr(os, name)))
        old = None
        for seed in (1, 2):
            tier.store(run, 0, pattern(4, seed))
            new, checkpoint_id = tier.freeze_all(), new_checkpoint_id()
            with module.committed(run_dir / f"step-{seed}", checkpoint_id) as folder:
                reference = new.commit(run_dir / f"step-{seed}", checkpoint_id)
                paged = {"paged": {"ranks": [{"reference": reference}]}}
                module.write_manifest(folder, {"id": checkpoint_id, "hashes": {}, **paged})
            if old is not None:
                module.remove(run_dir / "step-1")
            new.close()
            old = new
        tier.store(run, 0, pattern(4, 3))
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_between_any_two_steps_leaves_old_or_new_and_no_space_is_lost(every: int, tmp_path: Path) -> None:
    outcomes = set()
    for last in range(0, 100, every):
        ssd, run_dir = make_directory(tmp_path / f"ssd{last}"), make_directory(tmp_path / f"run{last}")
        done = killed_after(last, ssd, run_dir)
        # A checkpoint is there once its directory is; what it refers to must be, too.
        checkpoints = sorted(run_dir.glob("step-*"))
        for path in checkpoints:
            (rank,) = module.read_manifest(path)["paged"]["ranks"]
            outcomes.add(path.name)
            assert committed(rank["reference"], RUN) == pattern(4, int(path.name[-1]))
        with open_tier(ssd, spare=8) as tier:
            run = tier.alloc(4)
            tier.store(run, 0, pattern(4, 4))
            assert len(list(ssd.glob("*/commits/*"))) == len(checkpoints)
            sizes = [path.stat().st_size for path in ssd.rglob("pages")]
            assert sizes in ([], [12 * PAGE])
        shutil.rmtree(run_dir)
        assert run_gc(ssd) == 0
        assert not [name for name in names(ssd) if name.endswith(("pages", "store.json"))]
        if done:
            break
    assert done
    assert outcomes == {"step-1", "step-2"}


def test_the_pages_that_other_runs_keep_take_no_spare_slot_of_a_run(ssd: Path, checkpoint: Path) -> None:
    """A run that is not resumed has room for its pages and spare ones, and so has one that is resumed."""
    first, second = (make_directory(checkpoint.parent / name) / "step-1" for name in ("first", "second"))
    (reference,) = kept([ssd], first, spare=4)
    with open_tier(ssd, spare=4) as fresh:
        run = fresh.alloc(4)
        fresh.store(run, 0, pattern(4, 2))
        assert fresh.room_beside(()) == 4, "for a checkpoint that keeps its pages"
        assert committed(fresh.commit(second), run) == pattern(4, 2)
        fresh.store(run, 0, pattern(4, 3))
        with pytest.raises(BudgetError, match="--save-total-limit"):
            (
                fresh.store(run, 0, pattern(4, 3)),
                fresh.commit(second.with_name("step-2")),
                fresh.store(run, 0, pattern(4, 4)),
            )
    with open_tier(ssd, spare=4) as resumed, closing(open_commit(reference)) as pages:
        assert resumed.adopt(resumed.alloc(4), pages, RUN)
        resumed.store(RUN, 0, pattern(4, 5))
        assert resumed.room_beside({reference["commit"]}) >= 4
    assert committed(reference, RUN) == pattern(4, 1)


def test_pages_that_a_resumed_run_adds_leave_its_states_their_slots(ssd: Path, checkpoint: Path) -> None:
    """Its checkpoints keep more slots than it has spare ones."""
    *_, reference = kept([ssd], checkpoint, checkpoint.with_name("newer"))
    with open_tier(ssd, spare=0) as resumed, closing(open_commit(reference)) as pages:
        assert resumed.adopt(resumed.alloc(4), pages, RUN)
        more = resumed.alloc(4)
        resumed.store(more, 0, pattern(4, 3))
        resumed.store(RUN, 0, pattern(4, 4))
        assert loaded(resumed, more) == pattern(4, 3)
    assert committed(reference, RUN) == pattern(4, 2)


def test_a_run_that_other_runs_leave_no_spare_slots_is_refused_saying_so(ssd: Path, checkpoint: Path) -> None:
    kept([ssd], checkpoint, spare=4)
    with Tier({ssd: 8 * PAGE}, 4, PAGE, 4) as tier:  # it may be the one that is resumed
        tier.rearrange(4, 4, {}, numbers=8)
        tier.store(RUN, 0, pattern(4, 2))
        tier.share(RUN, PageRun(4, 4))
        with pytest.raises(BudgetError, match=r"checkpoints there keep 16\.00"):
            tier.store(RUN, 0, pattern(4, 3))
