"""Which parameters a module's forward reads: its own, and those of submodules that are not called."""

from collections.abc import Iterator

from torch import nn

_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""torch's modules whose forward passes the parameters of their submodules on to one kernel. With hidden parameters they
would take another way, with other bits."""
_FACTORS = ("lora_A", "lora_B")


def has_forward(module: nn.Module) -> bool:
    """False for modules that only hold parameters or modules, such as torch's lists."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def params_read_in(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that a module's forward reads without calling the module that holds them, with names: its own, and
    those of children without a forward. What else it reads is leased where it does."""
    for short, param in module.named_parameters(recurse=isinstance(module, _FUSED), remove_duplicate=False):
        yield join(name, short), param
    of_adapter = adapts_parameter(module)
    for short, child in module.named_children():
        if of_adapter and short in _FACTORS:
            yield from child.named_parameters(join(name, short), remove_duplicate=False)
        elif not has_forward(child):
            yield from params_read_in(child, join(name, short))


def adapts_parameter(module: nn.Module) -> bool:
    """Whether a module is peft's adapter of a single parameter (`target_parameters`). It multiplies its factors, which
    are in linear layers, without calling these."""
    return hasattr(module, "parameter_name") and hasattr(module, "lora_A")


def join(prefix: str, name: str) -> str:
    """The qualified name of something in the module `prefix`."""
    return f"{prefix}.{name}" if prefix else name
