"""The stages of a pipeline: which layers each stage has, and how a model is reduced to one stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pagoda.errors import ConfigError


def layers_of_stages(sizes: Sequence[int], before: int, after: int, stages: int) -> list[range]:
    """The layers of each stage. They are consecutive, and the largest stage is as small as possible.

    `sizes`: parameters of each layer, to which its bytes and time are proportional. `before` and `after`: parameters
    that the first and the last stage have in addition. The last stages are filled first, because the first ones keep
    the activations of more micro-batches. There must be at least as many layers as stages.
    """
    weights = [*sizes]
    weights[0] += before
    weights[-1] += after
    least, most = max(weights), sum(weights)
    while least < most:
        middle = (least + most) // 2
        if len(_filled(weights, middle, stages)) <= stages:
            most = middle
        else:
            least = middle + 1
    return _filled(weights, least, stages)


def _filled(weights: Sequence[int], most: int, stages: int) -> list[range]:
    """The layers of stages that are filled from the last stage to the first, each with at least one layer and, except
    for a single layer, at most `most` parameters. If `most` is too small, there are more than `stages`."""
    found: list[range] = []
    stop, held = len(weights), 0
    for layer in reversed(range(len(weights))):
        lacking = stages - len(found) - 1
        if held and (held + weights[layer] > most or layer + 1 <= lacking):
            found.append(range(layer + 1, stop))
            stop, held = layer + 1, 0
        held += weights[layer]
    return [range(stop), *reversed(found)]


class PassThrough(nn.Module):
    """Takes the place of a part of the model that another stage has."""

    def forward(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return hidden_states


def to_stage(model: Any, stage: int, stages: int) -> list[range]:
    """Reduce a causal language model of transformers to one stage of a pipeline, in place. Returns the layers of every
    stage.

    The first stage also has the parts before the layers, and the last one those after them. All parts of a stage keep
    their names, and a `PassThrough` takes the place of every other part. So each stage is called like the whole model:
    the first one with `input_ids`, the others with the hidden states of the stage before as `inputs_embeds`. The base
    model returns the hidden states for the next stage. The last stage's model computes the loss.

    Raises ConfigError for a model that is not an embedding, a row of layers and a head, and if stages would have to
    share a parameter or a loss.
    """
    row, before, after = _parts(model, stages)
    layers = [f"{row}.{number}" for number in range(len(model.get_submodule(row)))]
    sizes = {name: sum(param.numel() for param in model.get_submodule(name).parameters()) for name in before + after}
    of_stages = layers_of_stages(
        [sum(param.numel() for param in layer.parameters()) for layer in model.get_submodule(row)],
        sum(sizes[name] for name in before),
        sum(sizes[name] for name in after),
        stages,
    )
    others = {*layers} - {layers[number] for number in of_stages[stage]}
    others |= {*(before if stage else ()), *(after if stage < stages - 1 else ())}
    for name in others:
        model.set_submodule(name, PassThrough())
    return of_stages


def _parts(model: Any, stages: int) -> tuple[str, list[str], list[str]]:
    """The name of the row of layers, and those of the parts before and after it.

    A forward in which every part is a `PassThrough` shows the order of the parts, and that nothing outside them changes
    hidden states.
    """
    asked = f"--pipeline-parallel is {stages}, but {type(model).__name__}"
    base, prefix = model.base_model, model.base_model_prefix
    if model.config.is_encoder_decoder or base is model:
        raise ConfigError(f"{asked} is not a decoder with a head: leave it out")
    if getattr(model.config, "output_router_logits", False):
        raise ConfigError(
            f"{asked} has a load-balancing loss of all layers: set output_router_logits to false in its config.json"
        )
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if (other := first.setdefault(id(param), name)) != name:
            raise ConfigError(f"{asked} has one parameter for {other} and {name}, which stages cannot share")
    own = {f"{prefix}.{name}": child for name, child in base.named_children() if any(True for _ in child.parameters())}
    rows = [name for name, child in own.items() if isinstance(child, nn.ModuleList)]
    ends = [name for name, child in model.named_children() if child is not base]
    held = {id(param) for child in (*own.values(), *map(model.get_submodule, ends)) for param in child.parameters()}
    outside = [name for name, param in model.named_parameters() if id(param) not in held]
    if len(rows) != 1 or outside:
        raise ConfigError(f"{asked} is not one row of layers with parts before and after it: leave it out")
    (row,) = rows
    layers = [f"{row}.{number}" for number in range(len(own.pop(row)))]
    if len(layers) < stages:
        raise ConfigError(f"{asked} has {len(layers)} layers: choose fewer stages")
    try:
        seen = _order(model, [*own, *layers])
    except Exception as error:  # the model reads something of a part, such as an attribute or a tuple
        raise ConfigError(
            f"{asked} does not run without parts that other stages have ({type(error).__name__}: {error}): leave it out"
        ) from error
    if seen is None or [name for name in seen if name in layers] != layers:
        raise ConfigError(
            f"{asked} changes hidden states outside its layers, which each stage would repeat: leave it out"
        )
    embedding = next(name for name, child in model.named_modules() if child is model.get_input_embeddings())
    start = seen.index(layers[0])
    before, after = [embedding, *seen[:start]], seen[start + len(layers) :]
    if unknown := own.keys() - {*before, *after}:
        raise ConfigError(f"{asked} does not always use {min(unknown)}: leave it out")
    return row, before, [*after, *ends]


def _order(model: Any, names: Sequence[str]) -> list[str] | None:
    """The order in which the base model calls its parts, or None if it changes hidden states outside them."""
    seen: list[str] = []
    parts = [(name, model.get_submodule(name)) for name in names]
    hidden = torch.linspace(-1, 1, 2 * 3 * model.config.get_text_config().hidden_size).reshape(2, 3, -1)
    try:
        for name, _ in parts:
            stand_in = PassThrough()
            stand_in.register_forward_hook(partial(lambda name, *_: seen.append(name), name))
            model.set_submodule(name, stand_in)
        with torch.no_grad(), torch.random.fork_rng([]):
            found = model.base_model(inputs_embeds=hidden).last_hidden_state
    finally:
        for name, part in parts:
            model.set_submodule(name, part)
    return seen if torch.equal(found, hidden) else None
