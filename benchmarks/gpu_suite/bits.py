"""Bits: the same update by the CPU's kernel and by the device's."""

import torch

from gpu_suite.common import Figures, Machine
from pagoda.config.training import Precision
from pagoda.optim import SGD, Adam, AdamW, Lion, flat
from pagoda.optim.codecs import Key
from pagoda.optim.kernels import update_kernel
from pagoda.optim.rule import ElementwiseRule
from pagoda.runtime.device import Device, open_device

_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
_RULES = {
    "AdamW": AdamW(weight_decay=0.1),
    "AdamW, bf16 moments": AdamW(weight_decay=0.1, moments="bf16"),
    "AdamW, 8-bit moments": AdamW(weight_decay=0.1, moments="8bit"),
    "Adam": Adam(weight_decay=0.1),
    "SGD": SGD(momentum=0.9, weight_decay=0.1),
    "Lion": Lion(weight_decay=0.1),
}


def bits(machine: Machine) -> Figures:
    """Elements in which the CPU's states and the device's differ after an update of random vectors, by kernel."""
    device = open_device(machine.device)
    return {
        f"{name}, {precision}": _different(machine, device, rule, precision)
        for name, rule in _RULES.items()
        for precision in _PRECISIONS
    }


def _different(machine: Machine, device: Device, rule: ElementwiseRule, precision: Precision) -> int:
    n = machine.sizes.compared_elements
    generator = torch.Generator().manual_seed(0)
    ours = _states(rule, precision, n, generator)
    gradient = torch.randn(n, generator=generator).to(ours[0].dtype)
    theirs = [state.to(machine.device, copy=True) for state in ours]
    noise = () if rule.noise("", 3) is None else (0, *Key.of(0, "weight", 3))
    arguments = (*noise, *rule.scalars(3, 0.37))
    update_kernel(rule, precision)(*(s.data_ptr() for s in ours), gradient.data_ptr(), n, *arguments)
    device.update_kernel(rule, precision)(theirs, gradient.to(machine.device), arguments)
    machine.now()
    return sum(int((a != b.cpu()).sum()) for a, b in zip(ours, theirs, strict=True))


def _states(rule: ElementwiseRule, precision: Precision, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Of the size that training has them in."""
    weight = torch.randn(n, generator=generator) * 0.02
    states = {"weight": weight}
    if precision == "bf16":
        states = {"weight": torch.empty(n, dtype=torch.bfloat16), "weight_low": torch.empty(n, dtype=torch.int16)}
        flat.split(weight, states["weight"], states["weight_low"])
    if isinstance(rule, AdamW):
        for moment, scale in (("exp_avg", 1e-3), ("exp_avg_sq", 1e-6)):
            values = torch.randn(n, generator=generator) * scale
            values = values.abs() if moment == "exp_avg_sq" else values
            kept = flat.encode_moment(moment, values, rule.moments)
            states |= zip((state.name for state in rule.states_of(moment)), kept, strict=True)
    else:
        states |= {s.name: (torch.randn(n, generator=generator) * 1e-3).abs() for s in rule.own_states()}
    return [states[state.name] for state in rule.states(precision)]
