"""The factors of Adafactor's second moments, from sums of squares that the kernels of the CPU or the GPU have made."""

from collections.abc import Mapping

import torch

ROWS, COLUMNS, LANES = 64, 1024, 128
"""Rows and columns of a block, and sums per row."""


def update_factors(
    states: Mapping[str, torch.Tensor],
    by_column: torch.Tensor,
    by_row: torch.Tensor,
    shape: tuple[int, int, int],
    share: float,
    eps: float,
) -> torch.Tensor:
    """Update the factors of a parameter in place. Returns `r` of each row of all matrices.

    by_column, by_row: sums of squares of gradients in fp64, of columns [groups of rows, matrices, columns] and of rows
    [blocks of columns, rows of all matrices]. share, eps: the second and third of `Adafactor.scalars`.
    """
    matrices, rows, columns = shape
    row_var = states.get("row_var")
    _update_factor(states["variance" if row_var is None else "col_var"], by_column, rows, share)
    if row_var is None:
        return torch.ones(rows, device=by_row.device)
    _update_factor(row_var, by_row, columns, share)
    of_rows = row_var.view(matrices, rows)
    means = _mean(of_rows.T.double(), rows)
    return (of_rows / means.where(~(means < eps), eps)[:, None]).view(-1)


def _update_factor(factor: torch.Tensor, squares: torch.Tensor, count: int, share: float) -> None:
    flat = factor.view(-1)
    flat += (_mean(squares, count).view(-1) - flat) * share


def _mean(sums: torch.Tensor, count: int) -> torch.Tensor:
    """The mean in fp32 of `count` values with these sums."""
    # The divisor is a tensor: with a number, torch multiplies by its inverse on CUDA.
    return folded(sums).float() / torch.full((1,), float(count), device=sums.device)


def folded(sums: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, folded in place. torch's additions round once."""
    n = len(sums)
    while n > 1:
        half = 1 << (n - 1).bit_length() - 1
        sums[: n - half] += sums[half:n]
        n = half
    return sums[0]
