"""On several ranks, `optimizer.state` is whole. All read and write it at the same points of their programs."""

from itertools import product
from pathlib import Path

import pytest
from gradient_uses import assert_alike
from state_uses import RULES, USES, plainly

from .ranks import RankServer

FEW = [
    *(("read", "adamw"), ("resampled", "torch-adamw"), ("popped", "adamw"), ("replaced", "torch-sgd")),
    *(("new entries", "adafactor-first"), ("swapped", "lion"), ("count", "adamw"), ("between", "sgd")),
    *(("pruned", "muon"), ("zeroed", "adamw-8bit"), ("files", "adamw")),
]


def check(cases: list[tuple[str, str]], stage: int, ssd: bool, ranks: RankServer, path: Path) -> None:
    results = ranks.run("use_states", 2, path, cases=cases, stage=stage, ssd=ssd)
    for use, rule in cases:
        expected = plainly(use, rule, ranks=(0, 1))
        for result in results:
            assert_alike(result[f"{use} {rule}"], expected, f"{use} {rule}")


def test_states_of_ranks_are_read_and_written_whole(ranks: RankServer, tmp_path: Path) -> None:
    check(FEW, 2, True, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("stage", "ssd"), [(1, False), (2, True), (3, False)])
def test_every_use_of_a_state_on_ranks_has_the_bits_of_torch_alone(
    stage: int, ssd: bool, rule: str, ranks: RankServer, tmp_path: Path
) -> None:
    check([*product(USES, [rule])], stage, ssd, ranks, tmp_path)
