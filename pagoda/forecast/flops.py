"""Counts the FLOPs of each module of a transformers model, on a forward pass without values."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pagoda.plan.units import around_of

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def weightless() -> Iterator[None]:
    """Inside, tensors have shapes but no memory, and operators compute nothing. `forward_flops` needs this.

    It uses fake tensors on the meta device. Real meta tensors would not do, because transformers reads the values of a
    mask unless it detects fake tensors.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    # transformers scales the embeddings of Gemma 3 by a tensor that is created outside the mode.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
        yield


def forward_flops(model: "nn.Module", batch_size: int, seq_len: int) -> dict[str, float]:
    """FLOPs of one forward pass per module that computes anything. Build the model and call this inside `weightless`.

    A matrix product costs 2 FLOPs per multiplication. Norms, activations and look-ups cost nothing. Attention counts as
    the full square even if it is causal, as in `forecast.describe.forward_flops`. The module that computes attention
    has submodules; its FLOPs are counted at the last submodule with parameters, which takes the result. So every module
    in the result holds parameters or has no children. Experts do not run; tokens are assumed to be spread evenly over
    them.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.zeros((batch_size, seq_len), dtype=torch.long)
    training = model.training
    others: dict[str, Any] = {}
    if getattr(model.config, "is_encoder_decoder", False):
        others["decoder_input_ids"] = ids
    if getattr(model.config, "output_router_logits", False):
        others["output_router_logits"] = False  # the losses of routing need values
    with FlopCounterMode(display=False) as counter, torch.no_grad(), _even_experts(model) as of_experts:
        model.eval()(input_ids=ids, use_cache=False, **others)
    model.train(training)
    counts: dict[str, dict[Any, int]] = counter.get_flop_counts()
    root = type(model).__name__
    modules = dict(model.named_modules())
    within = {name.removeprefix(root).removeprefix("."): sum(ops.values()) for name, ops in counts.items()}
    own = {name: total for name, total in within.items() if name in modules}  # the counter has a "Global" too
    for name in filter(None, list(own)):
        own[next(around for around in around_of(name) if around in own)] -= within[name]
    booked: dict[str, float] = {}
    takers = _last_holders(modules)
    for name, flops in own.items():
        if flops > 0:
            taker = takers[name]
            booked[taker] = booked.get(taker, 0.0) + flops
    booked |= of_experts
    return {name: booked[name] for name in modules if name in booked}


@contextmanager
def _even_experts(model: "nn.Module") -> Iterator[dict[str, float]]:
    """Inside, experts return zeros. The yielded dictionary has the FLOPs that they would take, by module. If ranks
    divide the experts, each rank computes for the tokens of all ranks."""
    from pagoda.prepare.experts import RoutedExperts, is_expert_stack

    flops: dict[str, float] = {}

    def stand_in(name: str, experts: Any, hidden: Any, chosen: Any, _weights: Any) -> Any:
        ranks = 1 if getattr(experts, "exchange", None) is None else experts.exchange.ranks
        met = chosen.shape[0] * chosen.shape[1] * ranks / experts.num_experts
        for inside, module in experts.named_modules(prefix=name):
            elements = sum(param.numel() for param in module.parameters(recurse=False))
            if elements:
                flops[inside] = 2.0 * met * elements
        return hidden.new_zeros(hidden.shape)

    rows = [(name, module) for name, module in model.named_modules() if isinstance(module, RoutedExperts)]
    inside = {module for _, row in rows for module in row.modules()}
    whole = [(name, m) for name, m in model.named_modules() if is_expert_stack(m) and m not in inside]
    found = rows + whole
    for name, module in found:
        module.__dict__["forward"] = partial(stand_in, name, module)
    try:
        yield flops
    finally:
        for _, module in found:
            del module.__dict__["forward"]


def _last_holders(modules: dict[str, Any]) -> dict[str, str]:
    """Module -> the last leaf module with parameters inside it, or itself if there is none."""
    last = {name: name for name in modules}
    for name, module in modules.items():
        if module._parameters and not any(True for _ in module.children()):
            last.update((around, name) for around in (name, *around_of(name)) if around in last)
    return last
