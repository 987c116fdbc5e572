"""Which evaluation is the best one."""

import math

from pagoda.train.evaluate import best_step, since_best


def test_a_loss_that_is_not_finite_is_never_the_best_and_patience_counts_from_the_best() -> None:
    losses = [(0, math.nan), (2, math.nan), (4, 5.0), (6, 4.0), (8, math.inf), (10, math.nan)]
    assert (best_step(losses), since_best(losses)) == (6, 2)
    assert (best_step(losses[:2]), since_best(losses[:2])) == (None, 1)
    assert (best_step([(0, 1.0), (2, 3.0), (4, 3.0)]), since_best([])) == (2, 0)
