"""Predict: the simulated step of a machine that is calibrated now, beside the measured one, in eight configurations."""

import statistics
from dataclasses import replace

import pagoda
from gpu_suite.common import Figures, Machine, drawn_quickly, meta, release, timed
from pagoda.budgets import budgets_of
from pagoda.calibrate import ComputeProfiler, calibrate
from pagoda.construction.construct import describe
from pagoda.forecast.compute import Compute
from pagoda.plan.options import Options
from pagoda.plan.planner import make_plan
from pagoda.simulate.simulation import simulate
from training import Paged


def predict(machine: Machine) -> Figures:
    """(predicted - measured) / measured of the step, by configuration."""
    sizes = machine.sizes
    hardware = calibrate(machine.ssd, machine.device, effort=sizes.effort)
    results: dict[str, dict[str, float]] = {}
    for batch_size in (sizes.batch_size, max(1, sizes.batch_size // 2)):
        load = replace(machine.workload, batch_size=batch_size, layers=sizes.predicted_layers)
        profiler = ComputeProfiler(load.model, batch_size=batch_size, seq_len=load.seq_len, device=machine.device)
        profile = profiler.measure()
        del profiler
        release(machine)
        root = describe(meta(load))
        for device in (sizes.few, sizes.limited):
            for share in (0.0, 0.5):
                memory = machine.memory(device, split=pagoda.Split(device_update_share=share))
                options = Options(accumulation_steps=1, clipping=True, split=memory.split)
                plan = make_plan(root, pagoda.AdamW().states("bf16"), budgets_of(memory), options)
                compute = Compute.from_profile(profile, root)
                predicted = simulate(plan, hardware, compute.of_step(root, plan)).step_s
                with drawn_quickly():
                    paged = Paged(load, memory)
                try:
                    measured = statistics.median(timed(machine, paged.step, load))
                finally:
                    paged.close()
                    del paged
                    release(machine)
                name = f"{load.tokens} tokens, {device}, {share:.0%} of updates on the device"
                while name in results:
                    name += " again"
                results[name] = {
                    "predicted_s": predicted,
                    "measured_s": measured,
                    "error": predicted / measured - 1,
                }
    return {**results, "worst": max(abs(result["error"]) for result in results.values())}
