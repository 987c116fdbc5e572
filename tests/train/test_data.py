"""Which rows a step reads, and what a batch says of them."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pagoda.errors import ConfigError
from pagoda.train.data import IGNORED, Batches, Rows, counted
from pagoda.train.seen import Seen
from pagoda.train.tokens import About, Tokens
from tests.tiny import batch_of


def tokens_of(ids: Any, ends: list[int] | None = None, chats: bool = False) -> Tokens:
    """Tokens as a cache would have them: documents that end where `ends` says, or a text that is read as bytes."""
    kept = np.array(ids, dtype=np.int32)
    about = About(
        source="a text", tokenizer="", itemsize=4, tokens=len(kept), targets=int((kept >= 0).sum()),
        documents=len(ends or [0]), files=1, chats=chats, whole=chats, separates=ends is not None,
        most=256, fingerprint="", seen=Seen(),
    )  # fmt: skip
    return Tokens(about, kept, np.array(ends or [len(kept)], dtype=np.int64))


def text_of(length: int) -> Tokens:
    return tokens_of(np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8))


def batches_of(windows: int, seq_len: int = 4, **settings: Any) -> Batches:
    rows = Rows.of(text_of(windows * seq_len + seq_len - 1), seq_len)
    return Batches(rows=rows, **{"batch_size": 2, **settings})


@given(
    windows=st.integers(1, 300),
    batch_size=st.integers(1, 7),
    accumulation=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 3),
)
@settings(max_examples=15)
def test_an_epoch_visits_every_window_once(
    windows: int, batch_size: int, accumulation: int, seed: int, epoch: int
) -> None:
    batches = batches_of(windows, batch_size=batch_size, gradient_accumulation_steps=accumulation, seed=seed)
    steps = -(-(epoch + 1) * windows // (batch_size * accumulation))
    drawn = [batches.row_indices(s, i) for s in range(steps) for i in range(accumulation)]
    assert sorted(np.concatenate(drawn)[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_the_order_follows_from_seed_and_epoch_alone_and_never_changes_between_versions() -> None:
    assert [int(w) for s in range(4) for w in batches_of(8, seed=1).row_indices(s)] == [4, 3, 2, 7, 5, 6, 1, 0]
    orders = [
        [*batches_of(64, batch_size=64, seed=seed).row_indices(epoch)] for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert all(a != b for i, a in enumerate(orders) for b in (*orders[i + 1 :], [*range(64)]))


def test_a_batch_holds_its_windows_twice_and_accumulated_ones_are_the_rows_of_a_large_one() -> None:
    whole = batches_of(50, batch_size=6)
    parts = batches_of(50, batch_size=2, gradient_accumulation_steps=3)
    assert whole.tokens_per_step == parts.tokens_per_step == 24
    for step in range(20):
        windows = [whole.rows.tokens.ids[start : start + 4].tolist() for start in whole.row_indices(step) * 4]
        for at, each in ((range(1), whole), (range(3), parts)):
            ids, labels = (torch.cat(of) for of in zip(*(batch_of(each, step, i).values() for i in at), strict=True))
            assert ids.dtype == labels.dtype == torch.int64
            assert ids.tolist() == labels.tolist() == windows


def test_a_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="9 tokens, less than one sequence of 10"):
        Rows.of(text_of(9), 10)
    assert len(Rows.of(text_of(10), 10)) == 1


def test_a_sequence_in_which_the_loss_counts_no_token_is_left_out() -> None:
    rows = Rows.of(tokens_of(range(12), ends=[1, 2, 3, 4, 6, 12]), 4)
    assert (rows.starts.tolist(), rows.dropped) == ([4, 8], 1)
    with pytest.raises(ConfigError, match="has texts of a single token each"):
        Rows.of(tokens_of(range(8), ends=[*range(1, 9)]), 4)
    # Of this conversation, the loss counts the first token only, which nothing precedes.
    spoken = tokens_of([1, ~2, 3, ~4, ~4, 5], ends=[2, 3, 6], chats=True)
    rows = Rows.of(spoken, 3)
    assert (rows.starts.tolist(), rows.dropped) == ([3], 2)


def test_attention_and_loss_end_where_a_document_does() -> None:
    rows = Rows.of(tokens_of(range(1, 13), ends=[3, 4, 9, 12]), 6)
    ids, labels = rows.ids_and_labels(np.arange(2))
    assert ids.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    assert labels.tolist() == [[1, 2, 3, IGNORED, IGNORED, 6], [7, 8, 9, IGNORED, 11, 12]]
    assert rows.positions(np.arange(2)).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 0, 1, 2]]


def conversations(lengths: list[int], seq_len: int) -> Rows:
    """Each with its second half of an assistant."""
    ids = [token if at >= n // 2 else ~token for token, n in enumerate(lengths) for at in range(n)]
    return Rows.of(tokens_of(ids, ends=np.cumsum(lengths).tolist(), chats=True), seq_len)


@given(lengths=st.lists(st.integers(2, 20), min_size=1, max_size=30), seq_len=st.integers(20, 40))
@settings(max_examples=15)
def test_conversations_are_in_rows_whole_and_once(lengths: list[int], seq_len: int) -> None:
    rows = conversations(lengths, seq_len)
    ids, labels = rows.ids_and_labels(np.arange(len(rows)))
    counted = ids[labels != IGNORED].tolist()
    assert counted == [token for token, n in enumerate(lengths) for at in range(n) if at >= n // 2]
    positions = rows.positions(np.arange(len(rows)))
    assert sum((row == 0).sum() for row in positions) - sum(rows.stops - rows.starts < seq_len) == len(lengths)
    for row in positions:
        assert all(after in (0, before + 1) for before, after in pairwise(row))


def test_without_packing_every_conversation_has_a_sequence_of_its_own_and_texts_are_refused() -> None:
    tokens = conversations([4, 3, 12, 2], seq_len=10).tokens
    rows = Rows.of(tokens, 10, packs=False)
    assert (rows.stops - rows.starts).tolist() == [4, 3, 10, 2]
    with pytest.raises(ConfigError, match="--no-packing is for conversations"):
        Rows.of(text_of(40), 4, packs=False)


def test_a_conversation_that_is_too_long_is_cut_or_left_out_if_nothing_is_learned_from_the_rest() -> None:
    rows = conversations([4, 12, 30, 6], seq_len=10)
    assert (rows.cut, rows.longest, rows.dropped) == (2, 30, 1)
    assert (rows.stops - rows.starts).tolist() == [4, 10, 6]
    with pytest.raises(ConfigError, match=r"within --max-length 10 tokens.*the longest document has 30"):
        conversations([30], seq_len=10)


def test_every_token_of_a_step_counts_as_much_as_any_other() -> None:
    """However many the loss counts in each forward pass, and on each rank."""
    rows = conversations([3, 9, 5, 8, 2, 10, 7, 4] * 3, seq_len=10)
    settings = {"rows": rows, "batch_size": 2, "gradient_accumulation_steps": 2, "ranks": 2}
    by_rank = [Batches(**settings, rank=rank) for rank in range(2)]  # type: ignore[arg-type]
    for step in range(4):
        counts = [counted(batch_of(one, step, index)["labels"]) for one in by_rank for index in range(2)]
        assert len({*counts}) > 1
        assert all(one.targets_of_step(step) == sum(counts) for one in by_rank)


def test_rows_are_held_out_by_the_seed_alone_and_never_trained_on() -> None:
    rows = Rows.of(text_of(400), 4)
    kept, held_out = rows.held_out(10, seed=3)
    assert (len(kept), len(held_out)) == (90, 10)
    assert sorted([*kept.starts, *held_out.starts]) == rows.starts.tolist()
    assert held_out.starts.tolist() == rows.held_out(10, seed=3)[1].starts.tolist()
    assert held_out.starts.tolist() != rows.held_out(10, seed=4)[1].starts.tolist()
