"""`optimizer.state` is read and written like that of plain PyTorch, with the same bits."""

from pathlib import Path
from typing import Any

import pytest
from gradient_uses import Net, Training, assert_alike
from runtime.conftest import Wrap
from state_uses import RULES, USES, plainly, train

import pagoda

SMALL = {"page_size": 4096, "unit_limit": "3KiB"}


def places(path: Path) -> dict[str, pagoda.Memory]:
    return {
        "ram": pagoda.Memory(host="4MiB", **SMALL),
        "ssd": pagoda.Memory(host="160KiB", ssd=f"{path}:4MiB", **SMALL),
        "device": pagoda.Memory(device="cpu:48KiB", host="4MiB", **SMALL),
    }


def cases() -> list[Any]:
    """Every use with every rule in every place. Each use once is not slow."""
    combinations = [(place, rule) for rule in RULES for place in ("ssd", "ram", "device")]
    found = []
    for index, use in enumerate(USES):
        for number, (place, rule) in enumerate(combinations):
            marks = () if number == 7 * index % len(combinations) else pytest.mark.slow
            found.append(pytest.param(place, rule, use, marks=marks, id=f"{use}-{place}-{rule}"))
    return found


@pytest.mark.parametrize(("place", "rule", "use"), cases())
def test_every_use_of_a_state_has_the_bits_of_torch_alone(
    place: str, rule: str, use: str, wrap: Wrap, tmp_path: Path
) -> None:
    model, optimizer = wrap(Net(), places(tmp_path)[place], rule=RULES[rule](), precision="fp32")
    found = train(Training(model, optimizer), use)
    assert_alike(found, plainly(use, rule), use)
