"""`pagoda plan`: forecasts a run without running it."""

import gc
import shlex
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING

from rich.console import Console

from pagoda.config.run import Run
from pagoda.config.settings import flag
from pagoda.forecast.config import PlanConfig
from pagoda.train.config import flat
from pagoda.train.progress import say

if TYPE_CHECKING:
    from pagoda.forecast.forecast import Forecast

DOES_NOT_FIT = 1
_SAID_OTHERWISE = {"model", "batch_size", "seq_len", "trace", "plan", "memory.host", "memory.device", "memory.ssd"}
"""Settings whose flags are written in another way than a changed default."""


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
    from pagoda.forecast.machine import find_machine_for
    from pagoda.forecast.pipeline import forecast_pipeline
    from pagoda.forecast.record import as_lines
    from pagoda.forecast.report import as_json, pipeline_table, show

    gc.freeze()  # the garbage collector need not look at what imports made, which takes a third of a search

    if config.plot is not None:
        check_plotting()
    resolved: tuple[str, ...] = ()
    if config.search_degrees:
        config, resolved = search_degrees(config)
    machine = find_machine_for(config)
    searched = config.max_model
    if searched:
        config = replace(config, model=largest_model(config, machine), max_model=False)
    pipeline = forecast_pipeline(config, machine) if config.pipeline_parallel > 1 else None
    made = forecast(config, machine) if pipeline is None else pipeline.slowest
    made = replace(made, resolved=(*resolved, *made.resolved))
    advice = advise(made)
    if config.json:
        print(as_lines({**as_json(made, advice), "pipeline": pipeline and pipeline.as_json()}), end="")
    else:
        if pipeline is not None:
            console.print(pipeline_table(pipeline), highlight=False)
        show(made, advice, console)
        if searched and made.fits and made.machine.ranks.count == 1:
            say(console, f"Train it: {_train_command(made, config)}")
    if not made.fits:
        return DOES_NOT_FIT
    title = f"{made.described.name} on {machine.hardware.name}, predicted"
    if config.trace is not None:
        write_trace(made.timeline, title, config.trace)
    if config.plot is not None:
        limits = {tier: limit for tier, limit in asdict(made.plan.budgets).items() if limit is not None}
        draw(made.timeline, limits, title, config.plot)
    return 0


def _train_command(made: "Forecast", config: PlanConfig) -> str:
    """The command that trains the model within the budgets of the forecast for `config`."""
    budgets = made.plan.budgets
    flags = [f"--model {made.described.name} --batch-size {config.batch_size} --seq-len {config.seq_len}"]
    flags.append(f"--memory.host {budgets.host}")
    if made.machine.hardware.device is not None:
        flags.append(f"--memory.device {budgets.device}")
    elif config.memory.device is not None:
        flags.append(f"--memory.device {config.memory.device}")
    if "ssd" in made.plan.bytes:
        ssd = str(config.memory.ssd or "DIR")
        flags.append(f"--memory.ssd {f'DIR:{ssd}' if ssd[:1].isdigit() else ssd}")
    settings = {field.name for field in fields(Run)}
    plain = dict(flat(asdict(PlanConfig(model=config.model, accumulation_steps=1))))
    for name, value in flat(asdict(config)):
        if name.partition(".")[0] in settings and name not in _SAID_OTHERWISE and value != plain[name]:
            flags.append(f"{flag(name)} {shlex.join(value) if isinstance(value, tuple) else value}")
    return f"pagoda train {' '.join(flags)} --steps 100 --out runs/{made.described.name}"
