"""Which features work together: `wrap` refuses the pairs in the table, and the page has the table.

That all other pairs work is what `test_matrix.py` and `distributed/test_matrix_on_ranks.py` show.
`python tests/test_combinations.py` writes the page.
"""

from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from torch import nn

import pagoda
from pagoda.distributed.world import World
from pagoda.plan.combinations import REFUSED, Feature
from pagoda.plan.ranks import Ranks

PAGE = Path(__file__).parent.parent / "docs" / "combinations.md"
BEGIN, END = "<!-- tests/test_combinations.py writes from here -->", "<!-- to here -->"
ALWAYS: dict[str, frozenset[Feature]] = {
    "weights and moments on SSD": frozenset(),
    "activations recomputed or offloaded": frozenset(),
    "`batch_tiles`": frozenset(),
    "ZeRO stages 1 and 2": frozenset({Feature.RANKS}),
    "replicas": frozenset({Feature.RANKS}),
    "`partition_activations`": frozenset({Feature.TENSOR, Feature.RANKS}),
}
"""Features that nothing refuses, apart from what goes with them."""


def mesh(count: int, **divided: int) -> pagoda.Mesh:
    return pagoda.Mesh(World(0, 2, 0, 2), Ranks(count, 2, **divided))


SETTINGS: dict[Feature, dict[str, Any]] = {
    Feature.WHOLE: {"optimizer": pagoda.Muon(lr=1e-2)},
    Feature.EIGHT_BIT: {"optimizer": pagoda.AdamW(moments="8bit")},
    Feature.GRADIENTS: {"precision": pagoda.MixedPrecision("bf16", "fp32")},
    Feature.ASYNC: {"update": pagoda.Updates("async")},
    Feature.SPECULATE: {"update": pagoda.Updates(speculate=True), "clip_grad_norm": 1.0, "accumulation_steps": 1},
    Feature.AUTO: {"activations": "auto"},
    Feature.TILES: {"tiles": pagoda.Tiles(tile_limit="4KiB")},
    Feature.DEVICE_UPDATES: {"memory": pagoda.Memory(device="cpu:1MiB", split=pagoda.Split(device_update_share=0.5))},
    Feature.DEVICE_HOMES: {"memory": pagoda.Memory(device="cpu:1MiB", split=pagoda.Split(device_home_share=0.5))},
    Feature.RANKS: {"mesh": mesh(2)},
    Feature.TENSOR: {"mesh": mesh(1, tensor_parallel=2)},
    Feature.EXPERTS: {"mesh": mesh(2, expert_parallel=2)},
    Feature.PIPELINE: {"mesh": mesh(1, pipeline_parallel=2)},
}


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: " and ".join(sorted(feature.name for feature in pair)))
def test_wrap_refuses_what_does_not_work_together_with_the_reason(pair: frozenset[Feature]) -> None:
    settings = {name: value for feature in pair for name, value in SETTINGS[feature].items()}
    if pair == {Feature.ASYNC, Feature.SPECULATE}:
        settings["update"] = pagoda.Updates("async", speculate=True)
    with pytest.raises(pagoda.ConfigError) as refused:
        pagoda.wrap(nn.Linear(4, 4), **{"optimizer": pagoda.AdamW(), **settings})
    assert f"does not work with {max(pair, key=[*Feature].index)}: {REFUSED[pair]}." in str(refused.value)


def written() -> str:
    """The table and its reasons."""
    on_ranks = {Feature.TENSOR, Feature.EXPERTS}
    used = {str(each): {each, *([Feature.RANKS] if each in on_ranks else [])} for each in Feature} | ALWAYS
    reasons = [*dict.fromkeys(REFUSED.values())]

    def cell(one: str, other: str) -> str:
        """A tick, or the letter of the reason."""
        of_both = (pair for pair in REFUSED if pair <= used[one] | used[other] and not pair <= used[one])
        pair = next((pair for pair in of_both if not pair <= used[other]), None)
        return "✓" if pair is None else f"**{ascii_lowercase[reasons.index(REFUSED[pair])]}**"

    names = [*used]
    lines = [["", *map(str, range(1, len(names)))], ["---"] * len(names)]
    for row, name in enumerate(names, 1):
        cells = [cell(name, other) for other in names[: row - 1]]
        lines.append([f"{row}. {name}", *cells, *[""] * (len(names) - row)])
    table = ["".join(f"| {text} " for text in line) + "|" for line in lines]
    said = [f"- **{letter}**: {why}." for letter, why in zip(ascii_lowercase, reasons, strict=False)]
    return "\n".join([*table, "", *said])


def page() -> str:
    """The page, with the table as it is."""
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n{written()}\n{END}{after}"


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text() == page(), f"python {Path(__file__).name} writes it"


if __name__ == "__main__":
    PAGE.write_text(page())
