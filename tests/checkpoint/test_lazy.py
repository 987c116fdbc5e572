"""Lazy tensors give what torch's functions give on the tensors themselves, and read no more than they are asked for."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pagoda.checkpoint.lazy import LazyTensor
from pagoda.errors import CheckpointError

Apply = Callable[[list[Any]], Any]
"""An operation on three tensors of shape [4, 6, 5], lazy or not."""

JOINS_AND_CUTS: dict[str, Apply] = {
    "cat-0": lambda t: torch.cat(t, dim=0),
    "cat-1": lambda t: torch.cat(t, 1),
    "cat-last": lambda t: torch.cat(t, dim=-1),
    "stack-0": lambda t: torch.stack(t, dim=0),
    "stack-last": lambda t: torch.stack(t, dim=3),
    "chunk": lambda t: torch.chunk(t[0], 4, dim=1),
    "chunk-last": lambda t: torch.chunk(t[0], 2, dim=-1)[1],
    "split": lambda t: torch.split(t[1], [1, 3, 2], dim=1)[1],
    "squeezed": lambda t: [c.squeeze(0) for c in torch.chunk(t[2], 4, dim=0)][3],
    "squeezed everywhere": lambda t: [c.unsqueeze(-1).squeeze() for c in torch.chunk(t[2], 4, dim=0)][3],
    "squeezed in two places": lambda t: torch.squeeze(t[2].unsqueeze(-1).unsqueeze(0), (0, -1)),
    "experts": lambda t: torch.cat([torch.stack(t), torch.stack(t[::-1])], dim=1),
    "experts-back": lambda t: torch.chunk(torch.chunk(torch.cat([torch.stack(t), torch.stack(t)], 1), 2, 1)[1], 3, 0)[
        2
    ],
    "cut-of-joined": lambda t: torch.cat([t[0].narrow(1, 2, 3), torch.cat(t[1:], 1)], 1).narrow(1, 1, 9),
}
OTHERS: dict[str, Apply] = {
    "transpose": lambda t: t[0].transpose(0, 1),
    "reshape": lambda t: t[0].reshape(4, 2, 3, 5).transpose(1, 2).reshape(4, 6, 5).contiguous(),
    "sum": lambda t: torch.cat([torch.add(t[0], t[1]), t[2]], dim=1),
    "index": lambda t: torch.chunk(t[0][1:3, ::2], 2, dim=0)[1],
    "unbind": lambda t: torch.unbind(t[0], 0)[2],
}


def originals() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(-99, 99, (4, 6, 5), generator=generator, dtype=torch.int16) for _ in range(3)]


def as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def lazy_of(tensors: Sequence[torch.Tensor], counts: list[int] | None = None) -> list[LazyTensor]:
    def read_from(tensor: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
        def read(start: int, count: int) -> torch.Tensor:
            assert start >= 0
            assert start + count <= tensor.numel()
            if counts is not None:
                counts.append(count)
            return tensor.reshape(-1)[start : start + count]

        return read

    return [LazyTensor(tensor.dtype, tensor.shape, read_from(tensor)) for tensor in tensors]


@pytest.mark.parametrize("name", JOINS_AND_CUTS | OTHERS)
@settings(max_examples=8)
@given(where=st.floats(0, 1), share=st.floats(0, 1))
def test_any_piece_is_what_torch_has_there(name: str, where: float, share: float) -> None:
    apply = (JOINS_AND_CUTS | OTHERS)[name]
    tensors = originals()
    for lazy, real in zip(as_list(apply(lazy_of(tensors))), as_list(apply(tensors)), strict=True):
        assert lazy.shape == real.shape
        start = int(where * real.numel())
        count = int(share * (real.numel() - start))
        assert torch.equal(lazy.read(start, count), real.reshape(-1)[start : start + count])
        assert torch.equal(lazy.whole(), real)


def test_parts_of_rows_are_read_at_once_unless_little_of_each_is_wanted() -> None:
    counts: list[int] = []
    (lazy,) = lazy_of([torch.arange(640).view(20, 32)], counts)
    assert torch.equal(lazy.narrow(1, 8, 16).read(20, 24), torch.arange(640).view(20, 32)[:, 8:24].reshape(-1)[20:44])
    assert counts == [16 + 12 + 12]
    counts.clear()
    assert lazy.narrow(1, 5, 1).whole().view(-1).tolist() == list(range(5, 640, 32))
    assert counts == [1] * 20


def test_neighbours_are_read_at_once() -> None:
    counts: list[int] = []
    lazy = lazy_of(originals(), counts)
    torch.cat([torch.stack(lazy), torch.stack(lazy)], dim=1).whole()
    assert counts == [120] * 6


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    one, other = lazy_of([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(CheckpointError, match=r"\[1, 2, 3\].*\[1, 2, 4\]"):
        torch.stack([one, other])
    assert torch.cat([one, other], dim=1).shape == (2, 7)
