"""Bits: the same update by the CPU's kernel and by the device's, and the same training with states elsewhere; and how
fast the device's kernel is."""

import hashlib
import time
from dataclasses import replace
from itertools import islice

import torch

from gpu_suite.common import Machine, Named, deterministic, drawn_quickly, release
from pagoda import Split
from pagoda.config.training import Precision
from pagoda.optim import SGD, Adam, AdamW, Lion, flat
from pagoda.optim.kernels import update_kernel
from pagoda.optim.rule import ElementwiseRule, Key
from pagoda.runtime.device import Device, open_device
from training import Paged

_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
_RULES = {
    "AdamW": AdamW(weight_decay=0.1),
    "AdamW, bf16 moments": AdamW(weight_decay=0.1, moments="bf16"),
    "AdamW, 8-bit moments": AdamW(weight_decay=0.1, moments="8bit"),
    "Adam": Adam(weight_decay=0.1),
    "SGD": SGD(momentum=0.9, weight_decay=0.1),
    "Lion": Lion(weight_decay=0.1),
}


_STEPS = 3
_UPDATES = 20


def bits(machine: Machine) -> Named:
    """Elements in which the CPU's states and the device's differ after an update of random vectors, by kernel."""
    device = open_device(machine.device)
    for name, rule in _RULES.items():
        for precision in _PRECISIONS:
            yield f"{name}, {precision}", _different(machine, device, rule, precision)


def kernels(machine: Machine) -> Named:
    """Parameters per second of the device's update, and the time in which Python launches one."""
    rule = AdamW()
    update = open_device(machine.device).update_kernel(rule, "bf16")
    for count in machine.sizes.updated_elements:
        states = [torch.ones(count, dtype=state.dtype, device=machine.device) for state in rule.states("bf16")]
        gradient = torch.ones(count, dtype=torch.bfloat16, device=machine.device)
        update(states, gradient, rule.scalars(1))
        start = machine.now()
        for _ in range(_UPDATES):
            update(states, gradient, rule.scalars(1))
        launched_s = (time.perf_counter() - start) / _UPDATES
        params_per_s = count * _UPDATES / (machine.now() - start)
        yield f"{count} parameters", {"params_per_s": params_per_s, "launch_s": launched_s}


def same(machine: Machine) -> Named:
    """A hash of the weights after a few steps, with torch's deterministic kernels, by where states live and are
    updated; and whether all are the same."""
    sizes, hashes = machine.sizes, set()
    load = replace(machine.workload, batch_size=2, layers=2)
    memories = {
        "all weights on the device": machine.memory(sizes.ample),
        "few of them": machine.memory(sizes.same_few),
        "half of the updates there": machine.memory(sizes.same_few, split=Split(device_update_share=0.5)),
        "some at home there": machine.memory(sizes.same_homes, split=Split(device_home_share=1.0)),
    }
    with deterministic():
        for name, memory in memories.items():
            with drawn_quickly():
                paged = Paged(load, memory)
            for ids in islice(load.batches(machine.device), _STEPS):
                paged.step(ids)
            paged.drain()
            digest = hashlib.sha256()
            for value in paged.model.state_dict().values():
                digest.update(value.contiguous().view(torch.uint8).cpu().numpy().data)
            paged.close()
            del paged
            release(machine)
            hashes.add(digest.hexdigest())
            yield name, digest.hexdigest()
    yield "same", len(hashes) == 1


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
