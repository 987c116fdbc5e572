"""Which features work together: `wrap` refuses the pairs in the table, and the page has the table.

That all other pairs work is what `test_matrix.py` and `ranks/test_matrix_on_ranks.py` show.
`python tests/test_combinations.py` writes the page.
"""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import pagoda
from pagoda.plan.combinations import REFUSED, Feature

PAGE = Path(__file__).parent.parent / "docs" / "limits.md"
BEGIN, END = "<!-- tests/test_combinations.py writes from here -->", "<!-- to here -->"
SETTINGS: dict[Feature, dict[str, Any]] = {
    Feature.WHOLE: {"optimizer": pagoda.Muon(lr=1e-2)},
    Feature.TILES: {"tiles": pagoda.Tiles(tile_limit="4KiB")},
}


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: " and ".join(sorted(feature.name for feature in pair)))
def test_wrap_refuses_what_does_not_work_together_with_the_reason(pair: frozenset[Feature]) -> None:
    settings = {name: value for feature in pair for name, value in SETTINGS[feature].items()}
    with pytest.raises(pagoda.ConfigError) as refused:
        pagoda.wrap(nn.Linear(4, 4), **{"optimizer": pagoda.AdamW(), **settings})
    assert f"does not work with {max(pair, key=[*Feature].index)}: {REFUSED[pair]}." in str(refused.value)


def written() -> str:
    """The table."""
    rows = [(*sorted(pair, key=[*Feature].index), why) for pair, why in REFUSED.items()]
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [("feature", "refused with", "reason"), ("---",) * 3, *rows]
    )


def page() -> str:
    """The page, with the table as it is."""
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n{written()}\n{END}{after}"


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text() == page(), f"python {Path(__file__).name} writes it"


if __name__ == "__main__":
    PAGE.write_text(page())
