"""On several ranks, `param.grad` is the mean over ranks. All read and write it at the same point of their programs."""

from pathlib import Path

import pytest
from gradient_uses import ONE_NUMBER, USES, assert_alike, plainly

from .ranks import RankServer

FEW = ["norms", "with weights", "sign", "a row", "numbers", "all zeroed", "no backward"]
UNALIKE = {"text", "differentiated", *ONE_NUMBER}
"""Uses of what one rank alone has, and those whose last bits clipping changes."""


def check(uses: list[str], stage: int, ssd: bool, clips: bool, passes: int, ranks: RankServer, path: Path) -> None:
    results = ranks.run("use_gradients", 2, path, uses=uses, stage=stage, ssd=ssd, clips=clips, passes=passes)
    for use in uses:
        expected = plainly(use, clips, passes, ranks=(0, 1))
        for result in results:
            assert_alike(result[use], expected, use)


def test_gradients_of_ranks_are_read_and_written_as_their_mean(ranks: RankServer, tmp_path: Path) -> None:
    check(FEW, 3, True, False, 2, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("clips", "passes"), [(False, 1), (True, 1), (False, 2)])
@pytest.mark.parametrize(("stage", "ssd"), [(1, False), (2, True), (3, False)])
def test_every_use_of_a_gradient_on_ranks_has_the_bits_of_torch_alone(
    stage: int, ssd: bool, clips: bool, passes: int, ranks: RankServer, tmp_path: Path
) -> None:
    check([use for use in USES if use not in UNALIKE], stage, ssd, clips, passes, ranks, tmp_path)
