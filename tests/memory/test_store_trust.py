"""An SSD directory is read with care: nothing that is not a store's own is believed, written to or deleted."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from pairwise import each_once

from pagoda.cli.main import main
from pagoda.errors import StorageError
from pagoda.memory.ssd.checked_file import CheckedFile
from pagoda.memory.ssd.commits import Reference
from pagoda.memory.ssd.committed import open_commit
from tests.memory.ssd_parts import (
    PAGE,
    RUN,
    Tier,
    committed,
    kept,
    loaded,
    make_directory,
    names,
    pattern,
    run_gc,
    run_inspect,
)


def open_tier(ssd: Path, pages: int = 4, spare: int = 4) -> Tier:
    return Tier({ssd: None}, pages, PAGE, spare)


def content_of(tree: Path) -> dict[str, bytes | str | None]:
    """Every file, folder and link below a directory, with its content."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(tree.rglob("*")):
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(tree))] = content
    return found


def record_of(store: str, **changes: object) -> str:
    fields = {"format": "pagoda-pages", "version": 2, "id": store, "page_bytes": PAGE, "directories": ["/-"]}
    return json.dumps({**fields, "stripe": 0, "portions": [[8]], **changes})


STORE = "0123456789abcdef"


@pytest.mark.parametrize("name", ["pagoda-train", f"pagoda-{STORE}", "pagoda-"])
def test_a_directory_without_a_record_is_never_deleted(name: str, ssd: Path) -> None:
    (make_directory(ssd / name / "src") / "main.py").write_text("a clone")
    open_tier(ssd).close()
    assert run_gc(ssd) == 0
    assert (ssd / name / "src" / "main.py").exists()


@each_once(
    changes=[
        {"id": "x/../../home/alice"},
        {"id": "../home"},
        {"directories": ["../home/alice", "HOME"], "portions": [[4, 4]]},
        {"directories": ["HOME", "HERE"], "portions": [[4, 4]], "stripe": 1},
    ],
    version=[1, 2, 2, 2],
)
def test_a_forged_record_deletes_nothing_elsewhere(
    changes: dict[str, Any], version: int, ssd: Path, tmp_path: Path
) -> None:
    home = make_directory(tmp_path / "home" / "alice")
    (make_directory(home / f"pagoda-{STORE}") / "thesis.tex").write_text("years of work")
    (make_directory(home / "pagoda-x") / "thesis.tex").write_text("years of work")
    before = content_of(tmp_path / "home")
    for folder in ("pagoda-x", f"pagoda-{STORE}"):
        text = record_of(folder.removeprefix("pagoda-"), **changes, version=version)
        (make_directory(ssd / folder) / "store.json").write_text(
            text.replace("HOME", str(home)).replace("HERE", str(ssd))
        )
    open_tier(ssd).close()
    assert run_gc(ssd) == 0
    assert content_of(tmp_path / "home") == before


@pytest.mark.parametrize("part", ["", "/commits", "/pages", "/store.json"])
def test_a_store_with_a_symbolic_link_in_it_is_neither_written_to_nor_deleted(
    part: str, ssd: Path, checkpoint: Path, tmp_path: Path
) -> None:
    (reference,) = kept([ssd], checkpoint, spare=4)
    linked = Path(f"{ssd / 'pagoda-'}{reference['store']}{part}")
    away = make_directory(tmp_path / "away") / "there"
    linked.rename(away)
    linked.symlink_to(away)
    shutil.rmtree(tmp_path / "run")  # so that everything looks orphaned
    before = content_of(tmp_path / "away")
    with open_tier(ssd) as tier:
        tier.store(tier.alloc(4), 0, pattern(4, 2))
    assert main(["gc", str(ssd), "--yes"]) in (0, 2)
    assert content_of(tmp_path / "away") == before
    assert linked.is_symlink() or part == "/commits"


def test_a_page_file_with_a_second_name_is_not_written_to(ssd: Path, checkpoint: Path, tmp_path: Path) -> None:
    (reference,) = kept([ssd], checkpoint, spare=4)
    os.link(ssd / f"pagoda-{reference['store']}" / "pages", tmp_path / "backup")
    before = (tmp_path / "backup").read_bytes()
    with open_tier(ssd) as tier:
        tier.store(tier.alloc(4), 0, pattern(4, 2))
    assert (tmp_path / "backup").read_bytes() == before
    assert committed(reference, RUN) == pattern(4, 1)


_WRONG: tuple[object, ...] = (None, -1, True, "../x", "a" * 16, [], [[]], 2**70, [1], [["x"]], [[2**40]])


def mended(body: bytes) -> bytes:
    """A page table's file with the right checksum."""
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def test_a_record_with_any_field_forged_is_one_error_and_changes_nothing(ssd: Path, checkpoint: Path) -> None:
    (reference,) = kept([ssd], checkpoint, spare=4)
    path = ssd / f"pagoda-{reference['store']}" / "store.json"
    whole = path.read_bytes()
    cases = [
        json.dumps({**json.loads(whole), field: value}).encode() for field in json.loads(whole) for value in _WRONG
    ] + [b"", b"[]", b"\xff", b"[" * 100_000, whole[:-5], json.dumps({**json.loads(whole), "more": 1}).encode()]
    for forged in cases:
        path.write_bytes(forged)
        with pytest.raises(StorageError):
            committed(reference, RUN)
        assert run_inspect(ssd, verify=True) in (0, 1)
        assert run_gc(ssd) == 0
        assert path.read_bytes() == forged
    open_tier(ssd).close()
    path.write_bytes(whole)
    assert committed(reference, RUN) == pattern(4, 1)


def test_a_page_table_with_any_field_forged_is_one_error_and_is_kept(ssd: Path, checkpoint: Path) -> None:
    (reference,) = kept([ssd], checkpoint, spare=4)
    path = next(ssd.glob("*/commits/*"))
    line, _, arrays = path.read_bytes()[:-8].partition(b"\n")
    fields = json.loads(line)
    cases = [json.dumps({**fields, field: value}).encode() + b"\n" + arrays for field in fields for value in _WRONG]
    far = (2**40).to_bytes(8, "little")
    cases += [line, line + b"\n" + far + arrays[8:], line + b"\n" + b"\xfe" * 8 + arrays[8:], b"{}\n" + arrays]
    for body in cases:
        path.write_bytes(mended(body))
        if path.read_bytes() != mended(line + b"\n" + arrays):
            with pytest.raises(StorageError):
                committed(reference, RUN)
            assert run_inspect(ssd) in (0, 1)
            assert run_gc(ssd) == 0
            assert path.read_bytes() == mended(body)
    open_tier(ssd).close()


@pytest.mark.parametrize("field", ["store", "commit", "page_bytes", "pages", "table", "directories"])
def test_a_reference_with_any_field_forged_is_refused(field: str, ssd: Path, checkpoint: Path) -> None:
    (reference,) = kept([ssd], checkpoint, spare=4)
    for value in (*_WRONG, ["relative"], ["/with\0nul"]):
        if field == "directories" and value == []:
            continue  # fewer hints
        with pytest.raises(StorageError):
            open_commit({**reference, field: value}, [ssd])
    with pytest.raises(StorageError, match="not a reference to committed pages"):
        open_commit({name: value for name, value in reference.items() if name != field}, [ssd])
    Reference.from_json(reference)


@pytest.mark.parametrize("part", ["store.json", "pages", "commits/*"])
def test_a_pipe_in_place_of_a_file_is_an_error_and_does_not_hang(part: str, ssd: Path, checkpoint: Path) -> None:
    (reference,) = kept([ssd], checkpoint, spare=4)
    path = next(ssd.glob(f"*/{part}"))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StorageError, match=r"not a regular file|are not in"):
        committed(reference, RUN)
    with open_tier(ssd) as tier:
        tier.store(tier.alloc(4), 0, pattern(4, 2))
    assert run_inspect(ssd, verify=True) in (0, 1)
    assert run_gc(ssd) == 0
    assert path.is_fifo()


def test_page_tables_that_are_exchanged_or_made_up_for_their_commit_are_refused(ssd: Path, checkpoint: Path) -> None:
    """The names and checksum of one that is made up are right: what binds it is its hash in the manifest."""
    references = kept([ssd], checkpoint, checkpoint.with_name("step-2"), spare=4)
    paths = [next(ssd.glob(f"*/commits/{reference['commit']}")) for reference in references]
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    for reference in references:
        with pytest.raises(StorageError, match="is the page table of commit"):
            committed(reference, RUN)
    paths[0].write_bytes(mended(first.partition(b"\n")[0] + b"\n" + second[:-8].partition(b"\n")[2]))
    with pytest.raises(StorageError, match="not the page table of the checkpoint"):
        committed(references[0], RUN)


@pytest.mark.parametrize(("verb", "of"), [("fdatasync", ""), ("fsync", "/commits")], ids=["pages", "page tables"])
def test_a_failed_sync_is_final_and_leaves_no_table(
    verb: str, of: str, ssd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops what it could not write, and says success the next time."""
    with open_tier(ssd) as tier:
        tier.store(tier.alloc(4), 0, pattern(4, 1))
        real, fails = getattr(os, verb), [True]

        def sync(descriptor: int) -> None:
            if fails and os.readlink(f"/proc/self/fd/{descriptor}").endswith(of):
                fails.clear()
                raise OSError(5, "Input/output error")
            real(descriptor)

        monkeypatch.setattr(os, verb, sync)
        for step in range(3):
            with pytest.raises(StorageError, match="Input/output error"):
                tier.commit(tmp_path / f"step-{step}")
            assert not tier.commits
            assert not list(ssd.glob("*/commits/*"))


def replaced_by_a_copy(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("store.json", Path.unlink),
        ("store.json", emptied),  # one that says the same is as good
        ("pages", Path.unlink),
        ("pages", emptied),
        ("pages", replaced_by_a_copy),
    ],
)
def test_what_is_deleted_or_replaced_in_mid_run_is_noticed_at_the_next_commit(
    part: str, change: Callable[[Path], None], ssd: Path, tmp_path: Path
) -> None:
    with open_tier(ssd) as tier:
        run = tier.alloc(4)
        tier.store(run, 0, pattern(4, 1))
        tier.commit(tmp_path / "step-1")
        change(next(ssd.glob(f"*/{part}")))
        with pytest.raises(StorageError, match=rf"{part} was deleted, moved or replaced"):
            tier.commit(tmp_path / "step-2")
        assert len(tier.commits) == 1


def test_a_store_that_grows_is_synced_before_its_record_says_so(
    ssd: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (reference,) = kept([ssd], checkpoint, spare=4)
    record = ssd / f"pagoda-{reference['store']}" / "store.json"
    before = record.read_bytes()
    at_sync: list[tuple[int, bytes]] = []
    real = CheckedFile.sync

    def sync(file: CheckedFile) -> None:
        at_sync.append((file.slots, record.read_bytes()))
        real(file)

    monkeypatch.setattr(CheckedFile, "sync", sync)
    with open_tier(ssd, pages=8, spare=8) as tier:
        assert at_sync == [(16, before)]
        assert record.read_bytes() != before
        run = tier.alloc(8)
        tier.store(run, 0, pattern(8, 2))
        assert loaded(tier, run) == pattern(8, 2)


def test_the_folders_of_a_store_are_synced_before_it_is_referred_to(
    ssd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, list[str]]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((Path(path).name.replace(str(ssd), ""), names(Path(path)) if os.path.isdir(path) else []))
        real(descriptor)

    with open_tier(ssd) as tier:
        tier.store(tier.alloc(4), 0, pattern(4, 1))
        monkeypatch.setattr(os, "fsync", fsync)
        reference = tier.commit(tmp_path / "step-1")
    folder = f"pagoda-{reference['store']}"
    assert (folder, ["commits", "pages", "store.json"]) in synced[:-2]
    assert any(name == "ssd" and folder in inside for name, inside in synced[:-2])
    assert any(name == tmp_path.name and "ssd" in inside for name, inside in synced[:-2])
    assert synced[-2:] == [(f"{reference['commit']}.tmp", []), ("commits", [reference["commit"]])]
