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
from pagoda.plan.combinations import REFUSED, Feature

PAGE = Path(__file__).parent.parent / "docs" / "combinations.md"
BEGIN, END = "<!-- tests/test_combinations.py writes from here -->", "<!-- to here -->"
ROWS: tuple[str, ...] = (
    Feature.WHOLE,
    "moments='8bit'",
    "gradients in another dtype than weights (MixedPrecision.gradients)",
    Feature.ASYNC,
    Feature.SPECULATE,
    "activations='auto'",
    Feature.TILES,
    "split.device_update_share",
    "split.device_home_share",
    "several ranks",
    "tensor_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "weights and moments on SSD",
    "activations recomputed or offloaded",
    "`batch_tiles`",
    "ZeRO stages 1 and 2",
    "replicas",
    "`partition_activations`",
)
"""The features on the page."""
SETTINGS: dict[Feature, dict[str, Any]] = {
    Feature.WHOLE: {"optimizer": pagoda.Muon(lr=1e-2)},
    Feature.ASYNC: {"update": pagoda.Updates("async")},
    Feature.SPECULATE: {"update": pagoda.Updates(speculate=True), "clip_grad_norm": 1.0, "accumulation_steps": 1},
    Feature.TILES: {"tiles": pagoda.Tiles(tile_limit="4KiB")},
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
    reasons = [*dict.fromkeys(REFUSED.values())]

    def cell(one: str, other: str) -> str:
        """A tick, or the letter of the reason."""
        why = next((why for pair, why in REFUSED.items() if pair == {one, other}), None)
        return "✓" if why is None else f"**{ascii_lowercase[reasons.index(why)]}**"

    lines = [["", *map(str, range(1, len(ROWS)))], ["---"] * len(ROWS)]
    for row, name in enumerate(ROWS, 1):
        cells = [cell(name, other) for other in ROWS[: row - 1]]
        lines.append([f"{row}. {name}", *cells, *[""] * (len(ROWS) - row)])
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
