"""Lookups on the CPU for a GPU: rows and gradients as torch computes them, with sums in fp32."""

import pytest
import torch
from torch.nn import functional

from pagoda.autograd.in_ram import look_up
from pagoda.errors import UsageError

ROWS, WIDTH = 40, 8


def gradients(look: object, dtype: torch.dtype, **settings: object) -> list[torch.Tensor]:
    """The rows, their gradient, and the gradient of its squares."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, WIDTH, generator=draw).to(dtype).requires_grad_()
    ids = torch.randint(0, ROWS // 2, (4, 25), generator=draw)
    rows = look(ids, weight, **settings)
    given = torch.randn(*rows.shape, generator=draw).to(dtype).requires_grad_()
    (gradient,) = torch.autograd.grad(rows, weight, given, create_graph=True)
    gradient.to_dense().square().sum().backward()
    return [rows, gradient.to_dense(), given.grad]


@pytest.mark.parametrize(
    "settings", [{}, {"padding_idx": 3}, {"padding_idx": -30}, {"scale_grad_by_freq": True}, {"padding_idx": 39}]
)
def test_in_fp32_the_bits_are_those_of_torchs_kernel(settings: dict[str, object]) -> None:
    ours, theirs = (gradients(look, torch.float32, **settings) for look in (look_up, functional.embedding))
    assert all(map(torch.equal, ours, theirs))


def test_ids_may_have_32_bits_and_a_norm_is_refused() -> None:
    weight = torch.zeros(ROWS, WIDTH, requires_grad=True)
    look_up(torch.tensor([3, 3, 5], dtype=torch.int32), weight).sum().backward()
    assert weight.grad[:, 0].nonzero().flatten().tolist() == [3, 5]
    with pytest.raises(UsageError, match="max_norm"):
        look_up(torch.tensor([3]), weight, max_norm=1.0)


def test_in_bf16_the_gradients_of_a_frequent_token_add_up() -> None:
    sums = []
    for look in (look_up, functional.embedding):
        weight = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        look(torch.zeros(4096, dtype=torch.long), weight).sum().backward()
        sums.append(weight.grad[0, 0].item())
    assert sums == [4096, 256]  # 256 + 1 rounds to 256
