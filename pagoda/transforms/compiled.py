"""Models that `torch.compile` was called on, with the original modules in their places and the compiled code in use."""

import sys
from typing import Any

from torch import nn


def compiled_in_place(model: nn.Module) -> nn.Module:
    """The model in which each `torch.compile(module)` is as after `module.compile()`: the same code, and names of
    parameters, in state dicts and checkpoints, as without it.

    It is changed in place; where all of it is compiled, the original is returned, and what was given calls it.
    """
    root = _original(model)
    for module in root.modules():
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _original(child)
    return root


def _original(module: nn.Module) -> nn.Module:
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and its import takes seconds
        return module
    from torch._dynamo import OptimizedModule

    if not isinstance(module, OptimizedModule):
        return module
    original: Any = module._orig_mod
    original._compiled_call_impl = module.dynamo_ctx(original._call_impl)
    module.forward = original.__call__
    return _original(original)
