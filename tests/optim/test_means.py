"""Means of several ranks' gradients: the order and the rounding that `optim.means` states."""

import pytest
import torch

from pagoda.optim.means import mean_into, sum_into

SIZES = [1, 255, 40_000]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("size", SIZES)
def test_a_mean_is_the_fp32_sum_in_the_order_of_ranks_rounded_once(dtype: torch.dtype, ranks: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size + ranks)
    parts = [torch.randn(size, generator=generator).mul(3.0**rank).to(dtype) for rank in range(ranks)]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    total, mean = torch.empty(size), torch.empty(size, dtype=dtype)
    sum_into(total, parts)
    assert torch.equal(total, expected)
    mean_into(mean, total, ranks)
    assert torch.equal(mean, (expected / ranks).to(dtype))


def test_no_parts_are_zeros() -> None:
    total = torch.full((5,), torch.nan)
    sum_into(total, [])
    assert torch.equal(total, torch.zeros(5))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_finite_stays_so(dtype: torch.dtype, value: float) -> None:
    parts = [torch.zeros(300, dtype=dtype), torch.full((300,), value, dtype=dtype)]
    total, mean = torch.empty(300), torch.empty(300, dtype=dtype)
    sum_into(total, parts)
    mean_into(mean, total, 2)
    assert not mean.isfinite().any()
