"""Between backward and `step()`, gradients are read and written like tensors, with the bits of plain PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_uses import ADD_ANOTHER, LIMIT, RULE, USES, Net, Training, assert_alike, plainly, train
from runtime.conftest import Wrap

import pagoda

SMALL = {"page_size": 4096, "unit_limit": "3KiB"}


def places(path: Path) -> dict[str, pagoda.Memory]:
    return {
        "ram": pagoda.Memory(host="4MiB", **SMALL),
        "ssd": pagoda.Memory(host="32KiB", ssd=f"{path}:4MiB", **SMALL),
        "device": pagoda.Memory(device="cpu:48KiB", host="4MiB", **SMALL),
    }


def rule() -> Any:
    return pagoda.Optim(torch.optim.SGD, **RULE)


SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 1),
    "clipped": ({"clip_grad_norm": LIMIT}, 1),
    "announced": ({"clip_grad_norm": 1e3, "accumulation_steps": 1}, 1),  # with SSD, units are updated speculatively
    "accumulated": ({}, 2),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("place", ["ram", "ssd", "device"])
def test_every_use_of_a_gradient_has_the_bits_of_torch_alone(
    place: str, setting: str, use: str, wrap: Wrap, tmp_path: Path
) -> None:
    options, passes = SETTINGS[setting]
    if use in {"announced": ADD_ANOTHER, "clipped": {"number", "clip by hand"}}.get(setting, ()):
        pytest.skip("more backwards than announced, or two factors: the last bits are those of their product")
    model, optimizer = wrap(Net(), places(tmp_path)[place], rule=rule(), precision="fp32", **options)
    found = train(Training(model, optimizer), use, passes=passes)
    assert_alike(found, plainly(use, setting == "clipped", passes), use)
