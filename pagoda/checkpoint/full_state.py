"""The full state dict: a wrapped model's weights, also those of experts that other ranks have."""

import json
from collections.abc import Sequence

import torch
from torch import nn

from pagoda.checkpoint.gathered import home_of
from pagoda.checkpoint.stateful import unpaged
from pagoda.errors import UsageError
from pagoda.plan.layout import WEIGHT
from pagoda.plan.units import Part
from pagoda.runtime.engine import Engine
from pagoda.runtime.unit import LiveUnit


def full_state_dict(model: nn.Module, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
    """What `model.state_dict()` of one rank with the whole model gives: weights in their compute dtype, and buffers.

    Of several ranks the first one gets it, the others nothing, unless `all_ranks`; as torch's
    `get_model_state_dict(full_state_dict=True, cpu_offload=True)`. Weights come parameter by parameter, so the other
    ranks hold one at a time, whole also where tensor-parallel ranks divide it. Where ranks divide experts, those of all
    are in it, by their numbers in the whole model:
    `model.load_state_dict(full, strict=False)` takes a rank's own from it.

    Every rank calls it at the same point of its program. Raises UsageError for a model that is not wrapped.
    """
    homes = [home for p in model.parameters() if (home := home_of(p)) is not None]
    if not homes:
        raise UsageError("This model is not wrapped: call pagoda.wrap(model, ...) first.")
    engine = homes[0][0]
    engine.settle()
    together = engine.together
    receivers = range(together.ranks if together is not None else 1)[: None if all_ranks else 1]
    keeps = together is None or together.rank in receivers
    found: dict[str, torch.Tensor] = {}
    by_part = _names_by_part(model, engine)
    for unit in engine.units:
        divided = together is not None and len(by_part) > 1 and unit.index in engine.plan.layout.expert_units
        for slot, placed in enumerate(unit.spec.slots):
            mine = engine.store.read(unit.index, WEIGHT, placed.offset, placed.param.numel).view(placed.param.shape)
            form = unit.forms[slot]
            if form is not None:
                mine = form.around(mine).full_tensor().cpu()
            values: Sequence[torch.Tensor] = (mine,)
            if divided:
                assert together is not None
                values = together.of_every_part(f"the full state of {unit.index}, {slot}", mine, receivers)
            if not keeps:
                continue
            if placed.param.part is not None:
                _put(found, placed.param.part, mine)
                continue
            for names, value in zip(by_part, values, strict=False):
                found.update(dict.fromkeys(names[unit.index][slot], value))
    return found | {name: value.detach().clone() for name, value in unpaged(model)} if keeps else {}


def _names_by_part(model: nn.Module, engine: Engine) -> list[list[list[list[str]]]]:
    """Of each part of the experts, this rank's first where they are not divided: the names of every parameter, tied
    ones have several, by unit and slot."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)

    def of(unit: LiveUnit) -> list[list[str]]:
        return [names[id(param)] for param in unit.params]

    mine = [of(unit) for unit in engine.units]
    together = engine.together
    if together is None or together.parts == 1:
        return [mine]
    said = together.announce("the full state dict", json.dumps(mine).encode())
    return [json.loads(each) for each in said[: together.parts]]


def _put(found: dict[str, torch.Tensor], part: Part, value: torch.Tensor) -> None:
    """Put a tile where it belongs in its parameter."""
    whole = found.setdefault(part.whole, torch.empty(part.shape, dtype=value.dtype))
    whole.view(-1)[part.start : part.start + value.numel()] = value.reshape(-1)
