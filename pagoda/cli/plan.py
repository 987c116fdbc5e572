"""`pagoda plan`: forecasts a run without running it."""

import gc
from dataclasses import asdict, replace

from rich.console import Console

from pagoda.cli.flags import with_flags
from pagoda.errors import BudgetError
from pagoda.forecast.config import PlanConfig

DOES_NOT_FIT = 1


def run(config: PlanConfig, console: Console) -> int:
    """Make the forecast and print it. If it fits, write the files that the user asked for. Returns the exit code.

    Raises ConfigError for an unknown model or hardware, and for a setting or a file that cannot be used.
    """
    from pagoda.forecast.advice import advise
    from pagoda.forecast.chrome_trace import write_trace
    from pagoda.forecast.degrees import search_degrees
    from pagoda.forecast.draw import check_plotting, draw
    from pagoda.forecast.forecast import forecast
    from pagoda.forecast.largest import largest_model
    from pagoda.forecast.machine import find_machine_for, hardware_of, with_precision
    from pagoda.forecast.model_description import describe_model
    from pagoda.forecast.pipeline import forecast_pipeline
    from pagoda.forecast.record import as_lines
    from pagoda.forecast.report import as_json, pipeline_table, show
    from pagoda.models.build import planned_name

    if config.plot is not None:
        check_plotting()
    config, chosen = with_precision(config, hardware_of(config))
    if config.model is not None:
        config = replace(config, model=planned_name(config.model))
    if config.search_degrees:
        config, why = search_degrees(config)
        chosen += why
    machine = find_machine_for(config)
    if config.max_model:
        config = replace(config, model=largest_model(config, machine), max_model=False)
    described = describe_model(config)
    gc.freeze()  # the garbage collector need not look at imports and the model, which takes a third of a search
    pipeline = forecast_pipeline(config, machine) if config.pipeline_parallel > 1 else None
    made = forecast(config, machine, described=described) if pipeline is None else pipeline.slowest
    made = replace(made, resolved=(*chosen, *made.resolved))
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
    title = f"{made.described.name} on {machine.hardware.name}, predicted"
    if config.trace is not None:
        write_trace(made.timeline, title, config.trace)
    if config.plot is not None:
        limits = {tier: limit for tier, limit in asdict(made.plan.budgets).items() if limit is not None}
        draw(made.timeline, limits, title, config.plot)
    return 0
