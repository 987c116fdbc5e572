"""What an evaluation measures, and which is the best one."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.mesh.mesh import open_mesh
from pagoda.train.data import Batches, Rows
from pagoda.train.evaluate import Evaluator
from pagoda.train.tokenizer import ByteTokenizer
from tests.train.test_data import tokens_of


@pytest.mark.parametrize(("count", "ranks", "sizes"), [(3, 1, [[3]]), (5, 2, [[3], [2]]), (6, 4, [[2], [2], [1], [1]])])
def test_an_evaluation_reads_every_sequence_once_and_pads_no_batch(
    count: int, ranks: int, sizes: list[list[int]]
) -> None:
    rows = Rows.of(tokens_of(np.arange(4 * count)), 4)
    seen: list[list[int]] = []
    found: list[int] = []

    def loss(batch: dict[str, torch.Tensor]) -> float:
        seen[-1].append(len(batch["input_ids"]))
        found.extend(batch["input_ids"][:, 0].tolist())
        return 1.0

    passes: Any = SimpleNamespace(loss=loss)
    for rank in range(ranks):
        seen.append([])
        batches = Batches(rows=rows, batch_size=64, rank=rank, ranks=ranks)
        Evaluator(batches, ByteTokenizer(), open_mesh()).measure(passes, 1)
    assert seen == sizes
    assert sorted(found) == rows.tokens.ids[::4].tolist()


def test_a_rank_without_a_sequence_calls_the_model_as_often_as_others() -> None:
    batches = Batches(rows=Rows.of(tokens_of(np.arange(4)), 4), batch_size=2, rank=1, ranks=2)
    one = Evaluator(batches, ByteTokenizer(), open_mesh())
    shapes: list[int] = []
    passes: Any = SimpleNamespace(loss=lambda batch: shapes.append(len(batch["labels"])) or math.nan)
    with pytest.raises(ZeroDivisionError):  # this rank alone has counted nothing
        one.measure(passes, 1)
    assert shapes == [1]


def test_bits_per_byte_are_of_the_text_that_is_evaluated_and_other_sequences_have_another_name() -> None:
    ids = np.arange(32)
    ids[:24] = ~ids[:24]  # the loss counts half of the second document
    rows = Rows.of(tokens_of(ids, [16, 32], chats=True), 16)
    passes: Any = SimpleNamespace(loss=lambda _: 2 * math.log(2))
    found = [
        Evaluator(Batches(rows=part, batch_size=1), ByteTokenizer(), open_mesh()).measure(passes, 1)
        for part in (rows, *Rows.of(tokens_of(np.arange(32)), 16).held_out(1, 0))
    ]
    assert [(line["bits_per_byte"], line["tokens"]) for line in found] == [(2.0, 8), (2.0, 15), (2.0, 15)]
    assert found[1]["data"] != found[2]["data"]
