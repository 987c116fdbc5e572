import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pagoda.errors import ConfigError
from pagoda.train.data import Batches, ByteText


def text_of(length: int) -> ByteText:
    return ByteText("a text", np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8), 1)


def batches_of(windows: int, seq_len: int = 4, **settings: int) -> Batches:
    return Batches(text=text_of(windows * seq_len + seq_len - 1), seq_len=seq_len, **{"batch_size": 2, **settings})


@given(
    windows=st.integers(1, 300),
    batch_size=st.integers(1, 7),
    accumulation=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_visits_every_window_once(
    windows: int, batch_size: int, accumulation: int, seed: int, epoch: int
) -> None:
    batches = batches_of(windows, batch_size=batch_size, accumulation_steps=accumulation, seed=seed)
    steps = -(-(epoch + 1) * windows // (batch_size * accumulation))
    drawn = [batches.window_indices(s, i) for s in range(steps) for i in range(accumulation)]
    assert sorted(np.concatenate(drawn)[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


@given(seed=st.integers(0, 1000), step=st.integers(0, 10_000), index=st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_a_batch_depends_on_seed_and_step_alone(seed: int, step: int, index: int) -> None:
    used = batches_of(97, seed=seed, accumulation_steps=3)
    for earlier in range(3):
        used.batch(earlier)
    fresh = batches_of(97, seed=seed, accumulation_steps=3)
    for mine, theirs in zip(used.batch(step, index), fresh.batch(step, index), strict=True):
        assert torch.equal(mine, theirs)


def test_accumulated_batches_are_the_rows_of_one_large_batch() -> None:
    whole = batches_of(50, batch_size=6)
    parts = batches_of(50, batch_size=2, accumulation_steps=3)
    for step in range(20):
        rows = torch.cat([parts.batch(step, index)[0] for index in range(3)])
        assert torch.equal(rows, whole.batch(step)[0])
    assert whole.tokens_per_step == parts.tokens_per_step == 24


def test_a_text_is_continued_by_the_other_half_of_its_window() -> None:
    plain, continued = batches_of(40, seq_len=8), batches_of(40, seq_len=4, continued=True)
    assert continued.windows == (40 * 4 + 3) // 8
    assert continued.tokens_per_step == 16
    for step in range(5):
        ids, labels = continued.batch(step)
        assert ids.shape == labels.shape == (2, 4)
        starts = continued.window_indices(step) * 8
        for row, start in enumerate(starts):
            window = continued.text.tokens[start : start + 8]
            assert [*ids[row].tolist(), *labels[row].tolist()] == window.tolist()
    assert plain.tokens_per_step == 16


def test_the_order_never_changes_between_versions() -> None:
    order = [int(w) for s in range(4) for w in batches_of(8, seed=1).window_indices(s)]
    assert order == [4, 3, 2, 7, 5, 6, 1, 0]


def test_epochs_and_seeds_have_different_orders() -> None:
    def epoch_of(seed: int, epoch: int) -> list[int]:
        batches = batches_of(64, batch_size=64, seed=seed)
        return [int(w) for w in batches.window_indices(epoch)]

    orders = [epoch_of(0, 0), epoch_of(0, 1), epoch_of(1, 0), list(range(64))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[i + 1 :])


def test_a_batch_holds_the_bytes_of_its_windows() -> None:
    batches = batches_of(10, seq_len=5)
    ids, labels = batches.batch(3)
    assert ids.dtype == labels.dtype == torch.int64
    assert ids.shape == labels.shape == (2, 5)
    assert torch.equal(ids, labels)
    for row, window in zip(ids, batches.window_indices(3), strict=True):
        assert row.tolist() == batches.text.tokens[window * 5 : window * 5 + 5].tolist()


def test_the_standard_library_is_text_of_this_python_without_its_tests() -> None:
    text = ByteText.open("stdlib")
    assert text.files > 100
    assert len(text) > 1_000_000
    assert b"class OrderedDict" in text.tokens.tobytes()
    assert text.fingerprint == ByteText.open("stdlib").fingerprint


def test_a_folder_is_read_in_order_without_binaries(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("zwei ä drei", encoding="utf-8")
    (tmp_path / "a.txt").write_text("eins")
    (tmp_path / "c.bin").write_bytes(b"a\0b")
    (tmp_path / "d.txt").write_bytes(b"caf\xe9")
    (tmp_path / ".hidden").write_text("secret")
    text = ByteText.open(str(tmp_path))
    assert text.tokens.tobytes().decode() == "eins\nzwei ä drei"
    assert text.files == 2
    assert [(s.path.name, s.reason) for s in text.skipped] == [
        ("c.bin", "binary (holds NUL bytes)"),
        ("d.txt", "not UTF-8"),
    ]


def test_a_single_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("hello")
    assert ByteText.open(str(file)).tokens.tobytes() == b"hello"


def test_a_changed_byte_changes_the_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "text"
    prints = []
    for content in ("hello", "hellO"):
        file.write_text(content)
        prints.append(ByteText.open(str(file)).fingerprint)
    assert prints[0] != prints[1]


def test_bad_text_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ByteText.open(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="holds no text"):
        ByteText.open(str(tmp_path))
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ConfigError, match="holds no text"):
        ByteText.open(str(empty))
    with pytest.raises(ConfigError, match="binary"):
        ByteText.open(sys.executable)


def test_a_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="9 bytes, less than one sequence of 10"):
        Batches(text=text_of(9), batch_size=1, seq_len=10)
    assert Batches(text=text_of(10), batch_size=1, seq_len=10).windows == 1


@pytest.mark.parametrize("compressed", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.arrow", "Arrow"), ("a.parquet", "Parquet"), ("a.jsonl", "JSON Lines"), ("sub/A.NDJSON", "JSON Lines")],
)
def test_a_folder_of_records_is_refused_by_what_they_are(name: str, kind: str, compressed: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "README.md").write_text("a long text beside them " * 100)
    (tmp_path / "state.json").write_text('{"_format_type": null}')
    (tmp_path / (name + compressed)).write_bytes(b"\0binary")
    for source in (tmp_path, tmp_path / (name + compressed)):
        with pytest.raises(ConfigError, match=f"is {kind}.*reads plain text.*--data"):
            ByteText.open(str(source))


@pytest.mark.parametrize(("name", "kind"), [("a.json", "JSON"), ("a.csv", "CSV"), ("a.tsv", "CSV")])
def test_tables_are_refused_where_most_of_the_text_is_of_them(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n' * 10)
    (tmp_path / "short.txt").write_text("short")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(ConfigError, match=f"is {kind}"):
            ByteText.open(str(source))
    (tmp_path / "source.py").write_text("print('a program with a table beside it')\n" * 10)
    assert ByteText.open(str(tmp_path)).files == 3
