"""`pagoda plan`: forecasts a run without running it."""

import gc
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pagoda.cli.calibrate import measure
from pagoda.cli.flags import with_flags
from pagoda.config.commands import CalibrateConfig
from pagoda.errors import BudgetError
from pagoda.forecast.config import PlanConfig
from pagoda.process import without_garbage_collection
from pagoda.simulate.hardware import hardware_file
from pagoda.simulate.machines import AUTO, hardware_named

DOES_NOT_FIT = 1


def run(config: PlanConfig, console: Console) -> int:
    """Make the forecast and print it. If it fits, write the files that the user asked for. Returns the exit code.

    Raises ConfigError for an unknown model or hardware, and for a setting or a file that cannot be used.
    """
    measured = config.hardware != AUTO or hardware_file().exists()
    if measured:
        hardware_named(config.hardware)  # refused before torch is imported, which takes seconds

    with without_garbage_collection():
        from pagoda.forecast.advice import advise
        from pagoda.forecast.chrome_trace import write_trace
        from pagoda.forecast.degrees import search_degrees
        from pagoda.forecast.forecast import forecast
        from pagoda.forecast.largest import largest_model
        from pagoda.forecast.machine import find_machine_for, with_precision
        from pagoda.forecast.model_description import check_named, describe_model
        from pagoda.forecast.pipeline import forecast_pipeline
        from pagoda.forecast.record import as_lines
        from pagoda.forecast.report import as_json, pipeline_table, show
        from pagoda.forecast.step_size import with_length, with_step_size
        from pagoda.models.build import planned_name

    if config.model is not None:
        name = planned_name(config.model)
        check_named(name)
        config = replace(config, model=name)
    config, length = with_length(config)
    if not measured:
        _measure_here(config)
    config, chosen = with_precision(config, hardware_named(config.hardware))
    chosen = (*length, *chosen)
    if config.max_model:
        machine, config = (
            find_machine_for(config),
            replace(config, per_device_train_batch_size=max(1, config.per_device_train_batch_size)),
        )
        config = replace(config, model=largest_model(config, machine), max_model=False)
    if config.search_degrees:
        config, why = search_degrees(config)
        chosen += why
    machine = find_machine_for(config)
    config, sized = with_step_size(config, machine)
    described = describe_model(config)
    gc.freeze()  # the garbage collector need not look at imports and the model
    pipeline = forecast_pipeline(config, machine) if config.pipeline_parallel > 1 else None
    made = forecast(config, machine, described=described) if pipeline is None else pipeline.slowest
    made = replace(made, resolved=(*chosen, *sized, *made.resolved))
    advice = advise(made)
    if made.refusal is not None:
        made = replace(made, refusal=BudgetError(with_flags(str(made.refusal), PlanConfig)))
    if config.json:
        print(as_lines({**as_json(made, advice), "pipeline": pipeline and pipeline.as_json()}), end="")
    else:
        if pipeline is not None:
            console.print(pipeline_table(pipeline), highlight=False)
        show(made, advice, console)
    if not made.fits:
        return DOES_NOT_FIT
    if config.trace is not None:
        write_trace(made.timeline, f"{made.described.name} on {machine.hardware.name}, predicted", config.trace)
    return 0


def _measure_here(config: PlanConfig) -> None:
    """Measure this machine, and the drive that --memory.ssd names. It is told on stderr, as stdout may be JSON."""
    console, ssd = Console(stderr=True), next(filter(Path.is_dir, config.memory.ssd_directories), None)
    drive = "without a drive, as --memory.ssd names no directory" if ssd is None else f"with the drive of {ssd}"
    console.print(f"This machine has not been measured. `pagoda calibrate` does it now, in a minute, {drive}.")
    _, path = measure(CalibrateConfig(ssd=ssd), console)
    console.print(f"Written to {path}", soft_wrap=True)
