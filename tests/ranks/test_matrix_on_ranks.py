"""On several ranks too, where state lives and how it moves never changes a bit: every two settings together.

Each case trains a tiny mixture of experts with the settings of a row, and again, on the same ranks divided alike, with
all state in RAM, every activation kept, and updates at the step.
"""

from math import prod
from typing import Any

import pytest
from pairwise import Case, covering
from test_matrix import LATE, WHOLE
from zoo import assert_equal

from tests.tiny import write_mixture

pytestmark = pytest.mark.slow
AXES = {
    "stage": (1, 2, 3),
    "replicas": (1, 2),
    "tensor": (1, 2),
    "experts": (1, 2),
    "rule": ("adamw", "adamw-8bit", "adafactor"),
    "place": ("ram", "arena", "ssd", "arena-ssd", "updated-on-device", "home-on-device", "both-on-device"),
    "numbers": ("bf16", "fp32", "bf16+fp32"),
    "update": ("at step", "announced", "speculate", *LATE),
    "activations": ("keep", "recompute", "offload", "auto"),
    "partition": (False, True),
    "tiles": (None, "batch", "layers"),
    "clip": (None, 0.5),
}
DIVISION = ("stage", "replicas", "tensor", "experts")
PLAIN = {"place": "ram", "update": "at step", "activations": "keep", "partition": False}
"""What changes no bit."""
MOST_RANKS = 4


def ranks_of(case: Case) -> int:
    return max(2, prod(case.get(name, 1) for name in DIVISION[1:]))


def possible(case: Case) -> bool:
    """Whether `wrap` takes these settings together; those left out do not matter."""
    place, activations, update = case.get("place"), case.get("activations"), case.get("update")
    return not (
        ranks_of(case) > MOST_RANKS
        or (case.get("rule") in WHOLE and case.get("tiles") == "layers")
        or (place == "ram" and activations == "offload")  # nowhere to go
        or (case.get("rule") == "adafactor" and case.get("experts") == 2)  # a stack would be cut
        or (case.get("rule") == "adafactor" and update == "async" and place in ("ssd", "arena-ssd"))  # weights in RAM
        or (case.get("rule") == "adafactor" and update == "async, predicted")
        or (case.get("partition") and (case.get("tensor") == 1 or activations in ("keep", "offload")))
        or (update == "announced" and case.get("clip", None) is not None)
        or (update == "speculate" and "clip" in case and case["clip"] is None)
    )


CASES = [*covering(AXES, possible)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_mixture("mixtral-15m", tmp_path_factory.mktemp("mixture"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(map(str, case.values())))
def test_no_two_settings_change_a_bit_on_ranks(case: Case, model: str, once: Any) -> None:
    late = {"update": case["update"]} if case["update"] in LATE else {}  # which weights are read changes bits
    plain = PLAIN | late
    expected, found = (once("train_case", ranks_of(case), name=model, case=each) for each in (case | plain, case))
    for before, after in zip(expected, found, strict=True):
        for of in "losses", "norms", "parts":
            assert_equal(after[of], before[of])
        assert all(peak <= after["plan_peak"][tier] for tier, peak in after["peak"].items())
        on_ssd = {*after["lines"].get("ssd", {})} - {"activations"}
        assert bool(on_ssd) == ("ssd" in case["place"])
        assert after["on_device"] or not case["place"].endswith("on-device")
