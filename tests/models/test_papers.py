"""The papers' shapes have the sizes their names promise."""

import itertools
from dataclasses import replace

import pytest

from pagoda.errors import ConfigError
from pagoda.models.papers import PAPER_SHAPES, PaperShape
from paper_tables.largest import gpt_shape

ROUNDED_BY_THE_PAPER = {
    "gpt-15b": 0.05,  # 78 layers of 4,096 are 15.7B
    "t5-moe-1.2t": 0.035,  # the paper writes two digits
}


def without_embedding(shape: PaperShape) -> int:
    return shape.params - shape.vocab * shape.hidden


@pytest.mark.parametrize("name", PAPER_SHAPES)
def test_a_shape_has_the_size_its_name_promises(name: str) -> None:
    shape = PAPER_SHAPES[name]
    digits, unit = name.rpartition("-")[2][:-1], name[-1]
    assert shape.nominal == pytest.approx(float(digits) * {"b": 1e9, "t": 1e12}[unit])
    # The papers count small models without their embedding.
    errors = [abs(count / shape.nominal - 1) for count in (shape.params, without_embedding(shape))]
    assert min(errors) <= ROUNDED_BY_THE_PAPER.get(name, 0.03)
    assert errors[0] <= 0.03 or shape.nominal <= 15e9 or name in ROUNDED_BY_THE_PAPER


def test_the_count_is_that_of_models_built_elsewhere() -> None:
    gpt = replace(PAPER_SHAPES["gpt-1b"], layers=12, hidden=768, heads=12, ffn=3_072, vocab=50_257)
    assert gpt.params == 124_439_808  # gpt2
    t5 = replace(PAPER_SHAPES["t5-27b"], layers=6, decoder_layers=6, hidden=512, heads=8, ffn=2_048)
    assert t5.params == 60_506_624  # t5-small


def test_the_family_grows_with_the_size_asked_for_and_stays_below_it() -> None:
    sizes = [1.1e7 * 1.02**power for power in range(760)]
    shapes = [gpt_shape(size) for size in sizes]
    assert sizes[-1] > 32e12
    for size, shape in zip(sizes, shapes, strict=True):
        assert shape.params <= size
        assert shape.nominal == shape.params
    for smaller, larger in itertools.pairwise(shapes):
        assert (smaller.layers, smaller.hidden) == (larger.layers, larger.hidden) or smaller.params < larger.params
        assert smaller.layers <= larger.layers
        assert smaller.hidden <= larger.hidden


def test_a_size_below_the_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="smallest has 10,"):
        gpt_shape(1e6)
