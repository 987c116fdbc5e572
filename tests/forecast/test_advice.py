"""Advice can be followed: its flags are accepted, and planning with them gives what it says."""

import re
from dataclasses import replace

import pytest

from pagoda.cli.main import parse
from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.advice import advise
from pagoda.forecast.forecast import Forecast, forecast
from pagoda.forecast.machine import Machine
from pagoda.memory.sizes import format_rate
from pagoda.plan.lanes import LaneName
from pagoda.plan.ranks import Ranks
from pagoda.simulate.machines import find_machine

from .machines import GIB, MIB, SMALL, figure

CARD = find_machine("rtx4090").with_gpus(1)
MACHINES = {
    "cpu": Machine(SMALL, here=False),
    "no drive": Machine(replace(SMALL, ssd=None), here=False),
    "gpu": Machine(
        replace(
            CARD,
            cpu=replace(CARD.cpu, memory_bytes=figure(0.5 * GIB)),
            device=replace(CARD.device, memory_bytes=figure(GIB + 256 * MIB)),
        ),
        here=False,
    ),
    "ranks": Machine(find_machine("a100-40gx8"), False, Ranks(8, 8)),
}
ASKED = [
    (machine, f"--max-length 128 {flags}")
    for machine, flags in [
        ("cpu", "--model gpt-4x256 --memory.host 150MiB"),
        ("cpu", "--model gpt-4x256 --memory.host 150MiB --update async"),
        ("cpu", "--model llama-15m --memory.host 60MiB --lora-r 4"),
        ("cpu", "--model gpt-4x256 --memory.host 60MiB --memory.ssd 10MiB"),
        ("cpu", "--model gpt-4x256 --memory.host 1MiB"),
        ("cpu", "--model gpt-4x256 --memory.host 1MiB --optim muon"),
        ("no drive", "--model gpt-4x256 --memory.host 100MiB"),
        ("gpu", "--model gpt-4x256 --optim lion --gradient-accumulation-steps 2"),
        ("gpu", "--model gpt-4x256 --memory.device 8MiB"),
        ("ranks", "--model gpt-4x256 --memory.host 1MiB"),
    ]
]
MORE = [
    (machine, f"--max-length 128 --model gpt-4x256 {flags}")
    for machine, flags in [
        ("cpu", "--memory.host 150MiB --precision fp16"),
        ("cpu", "--memory.host 150MiB --max-grad-norm 0 --per-device-train-batch-size 4"),
        ("gpu", ""),
        ("ranks", ""),
    ]
]
FLAG = re.compile(r"\((--[\w.-]+)(?: (\w+))?\)")


def made(machine: str, flags: str) -> Forecast:
    _, config = parse(["plan", "--plan", "usual", *flags.split()])
    return forecast(config, MACHINES[machine], measure=False)


@pytest.mark.parametrize(
    ("machine", "flags"), [*ASKED, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
)
def test_advice_that_is_followed_is_accepted_and_gives_what_it_says(machine: str, flags: str) -> None:
    one = made(machine, flags)
    lines = advise(one)
    assert 0 < len(lines) <= 3
    for line in lines:
        if (found := FLAG.search(line)) is None:
            continue
        name, value = found.groups()
        if value in (None, "SIZE", "DIR"):
            size = re.search(r"(?:of|for) ([\d.]+ \w+) ", line.replace("for pages", ""))
            assert size is not None, line
            value = size[1].replace(" ", "")
        other = made(machine, re.sub(rf"{re.escape(name)} \S+", "", flags) + f" {name} {value}")
        assert other.fits, line
        if (rate := re.search(r"([\d.,]+) tokens/s", line)) is not None:
            assert rate[1] == format_rate(other.tokens_per_s), line
        if "updates run during backward" in line:
            assert other.plan.options.update_during_backward
    if "Compute binds" in lines[0]:
        assert one.timeline.binding_lane == LaneName.COMPUTE


@pytest.mark.parametrize(("machine", "flags"), [
    ("cpu", "--per-device-train-batch-size 64 --activations keep"),
    ("no drive", "--per-device-train-batch-size 64 --activations keep"),
    ("gpu", "--activations keep --per-device-train-batch-size 32"),
    ("gpu", "--per-device-train-batch-size 512 --sequence-tiles auto"),
])  # fmt: skip
def test_what_activations_without_room_are_advised_is_accepted(machine: str, flags: str) -> None:
    flags = f"--model gpt-4x256 --max-length 1024 {flags}"
    refused = made(machine, flags)
    assert isinstance(refused.refusal, BudgetError)
    advice = str(refused.refusal).partition("pages. Use ")[2]
    before = refused.activations.total
    tried = {
        "--max-length": "128",
        "--per-device-train-batch-size": "1",
        "--activations": "recompute+offload",
        "--sequence-tiles": "auto",
    }
    named = [name for name in tried if f"{name} " in f"{advice} ".replace(",", " ").replace(".", " ")]
    assert "--max-length" in named
    for name in named:
        other = made(machine, f"{flags} {name} {tried[name]}")
        assert other.activations.total <= before
        assert not isinstance(other.refusal, ConfigError) or isinstance(other.refusal, BudgetError)


@pytest.mark.parametrize("flags", ["--lora-r 4", "--optim adafactor"])
def test_tiles_are_advised_only_where_they_are_accepted(flags: str) -> None:
    """A large layer on a small device."""
    asked = "--model llama-15m --max-length 128 --memory.device 8MiB"
    assert "--tile-limit" not in str(made("gpu", f"{asked} {flags}").refusal)
    assert "tile_limit" in str(made("gpu", asked).refusal)
    made("gpu", f"{asked} --tile-limit 1MiB")
