"""Documents of a long row attend to themselves alone, as under transformers' mask, and no mask of the row exists."""

from pathlib import Path

import pytest
import torch
import zoo
from torch import nn

from pagoda.errors import ConfigError
from pagoda.prepare import documents
from pagoda.prepare.documents import attend_by_document, groups_of

LENGTHS = [3, 5, 9, 2, 2, 11]


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def logits_and_gradient(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, zoo.VOCABULARY, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    rows = torch.stack([positions(LENGTHS), positions(LENGTHS[::-1])])
    logits = model(input_ids=ids, position_ids=rows).logits
    model.zero_grad()
    logits.square().mean().backward()
    return logits, model.model.layers[0].self_attn.k_proj.weight.grad.clone()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [zoo.llama, zoo.qwen3])
def test_attention_is_that_of_the_whole_mask(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = kind(layers=2)
    of_mask = logits_and_gradient(model)
    monkeypatch.setattr(documents, "SHORT_TOKENS", 8)
    attend_by_document(model)
    largest: list[int] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def seen(query: torch.Tensor, *args: object, attn_mask: torch.Tensor | None = None, **more: object) -> torch.Tensor:
        largest.append(0 if attn_mask is None else attn_mask.shape[-1])
        out: torch.Tensor = attention(query, *args, attn_mask=attn_mask, **more)  # type: ignore[arg-type]
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    for mine, other in zip(logits_and_gradient(model), of_mask, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    assert max(largest) == 8


def test_layers_look_for_documents_once_a_forward_and_see_positions_that_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, looked = zoo.llama(layers=2), []
    attend_by_document(model)
    monkeypatch.setattr(documents, "groups_of", lambda *of: looked.append(None) or groups_of(*of))
    ids, rows = torch.zeros(1, 8, dtype=torch.int64), positions([3, 5])[None]
    for changed in (positions([3, 5]), positions([8])):
        rows.copy_(changed)
        looked.clear()
        model(input_ids=ids, position_ids=rows)
        assert len(looked) == 1


def test_short_documents_attend_together() -> None:
    assert groups_of(positions(LENGTHS), 8) == [[3, 5], [9], [2, 2], [11]]
    assert groups_of(torch.arange(20), 8) == [[20]]


def test_a_model_with_attention_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="attention of Plain is None"):
        attend_by_document(zoo.Plain(blocks=2))
