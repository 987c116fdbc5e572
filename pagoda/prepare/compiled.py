"""Support for `torch.compile(module)`: original modules take the places of compiled ones, and run the compiled code."""

import sys
from typing import Any

from torch import nn


def compiled_in_place(model: nn.Module) -> nn.Module:
    """Turn each `torch.compile(module)` in a model into the module as after `module.compile()`: it runs the same
    compiled code, and parameters have their original names, also in state dicts and checkpoints.

    The model is changed in place. If the whole model is compiled, the original model is returned, and the compiled one
    calls it.
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
