"""Predict: the simulated step of a machine that is calibrated now, beside the measured one."""

import json
import statistics
from dataclasses import asdict, replace

import pagoda
from gpu_suite.common import Machine, Named, drawn_quickly, meta, release, timed
from pagoda.budgets import budgets_of
from pagoda.calibrate.machine import calibrate
from pagoda.calibrate.model import ComputeProfile, ComputeProfiler
from pagoda.forecast.compute import Compute
from pagoda.plan.options import Options
from pagoda.plan.planner import make_plan
from pagoda.prepare.construct import describe
from pagoda.simulate.hardware import Hardware
from pagoda.simulate.simulation import simulate
from training import Paged, Workload

_MICRO_BATCHES = 4


def predict(machine: Machine) -> Named:
    """(predicted - measured) / measured of the step, by configuration; and what other predictions need: the machine's
    figures, and the times of a layer."""
    sizes, errors = machine.sizes, []
    hardware = calibrate(machine.ssd, machine.device, effort=sizes.effort)
    yield "hardware", json.loads(hardware.to_json())
    memories = {
        "few units on the device": machine.memory(sizes.few),
        "half of the updates there": machine.memory(sizes.few, split=pagoda.Split(device_update_share=0.5)),
        "at home there": machine.memory(sizes.limited, split=pagoda.Split(device_home_share=1.0)),
    }
    for batch_size in (sizes.batch_size, max(1, sizes.batch_size // 2)):
        load = replace(machine.workload, batch_size=batch_size, layers=sizes.few_layers)
        profiler = ComputeProfiler(load.model, batch_size=batch_size, seq_len=load.seq_len, device=machine.device)
        profile = profiler.measure()
        del profiler
        release(machine)
        yield f"profile, {load.tokens} tokens", asdict(profile)
        for micro_batches in (1, _MICRO_BATCHES) if batch_size == sizes.batch_size else (1,):
            several = replace(load, batch_size=micro_batches * batch_size, micro_batches=micro_batches)
            for name, memory in memories.items() if micro_batches == 1 else [*memories.items()][:1]:
                figures = _compared(machine, several, memory, hardware, profile)
                errors.append(abs(figures["error"]))
                yield f"{several.tokens} tokens in {micro_batches}, {name}", figures
                yield "worst", max(errors)


def _compared(
    machine: Machine, load: Workload, memory: pagoda.Memory, hardware: Hardware, profile: ComputeProfile
) -> dict[str, float]:
    root = describe(meta(load))
    options = Options(gradient_accumulation_steps=load.micro_batches, clipping=True, split=memory.split)
    plan = make_plan(root, pagoda.AdamW().states("bf16"), budgets_of(memory), options)
    predicted = simulate(plan, hardware, Compute.from_profile(profile, root).of_step(root, plan)).step_s
    with drawn_quickly():
        paged = Paged(load, memory)
    try:
        measured = statistics.median(timed(machine, paged.step, load))
    finally:
        paged.close()
        del paged
        release(machine)
    return {"predicted_s": predicted, "measured_s": measured, "error": predicted / measured - 1}
