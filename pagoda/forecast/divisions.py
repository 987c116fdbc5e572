"""How tensor-parallel ranks divide the layers of a model."""

from collections.abc import Mapping
from math import gcd
from typing import Any, Literal

Division = Literal["column", "row"]
COLUMN: Division = "column"
"""Each rank computes a part of the output."""
ROW: Division = "row"
"""Each rank has a part of the input, and the outputs are added up."""
OF_PAPERS: Mapping[str, Division] = {"*.qkv": COLUMN, "*.out": ROW, "*.up": COLUMN, "*.down": ROW}
"""How the matrices of the papers' shapes are divided."""
_STYLES: Mapping[str, Division] = {"colwise": COLUMN, "rowwise": ROW}
"""The words that transformers uses."""


def divisions_of(config: Any) -> Mapping[str, Division]:
    """How transformers divides a model's layers over tensor-parallel ranks, by name pattern. Empty if the model has no
    such plan, or if the plan uses other divisions."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    styles = {name: style for name, style in plan.items() if not style.startswith("replicated")}
    if not set(styles.values()) <= _STYLES.keys():
        return {}
    return {f"*{name}": _STYLES[style] for name, style in styles.items()}


def heads_of(config: Any) -> int:
    """Number of equal parts into which the attention of a transformers model can be divided. Each part has equally many
    query heads and equally many key heads."""
    heads: int = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None) or 1
    return gcd(heads, getattr(config, "num_key_value_heads", None) or heads)
