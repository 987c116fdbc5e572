"""`pagoda calibrate`: measures this machine."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Measure this machine, in under a minute, for `pagoda plan --hardware auto`. Under torchrun, collectives too."""

    ssd: Path | None = None
    """Existing directory on the SSD to measure, which takes 4 GiB for a while; nothing stays in it."""
    out: Path | None = None
    """File to write. By default hardware.json in the user's cache directory, where `--hardware auto` looks."""


def run_calibrate(config: CalibrateConfig, console: Console) -> int:
    """Measures, shows the figures, writes them, and returns the exit code."""
    from pagoda.calibrate import calibrate
    from pagoda.calibrate.table import figure_table
    from pagoda.parallel.world import launched
    from pagoda.plan.hardware import hardware_file, write_hardware

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    writes = launched().rank == 0
    with console.status("Measuring this machine") as status:
        hardware = calibrate(config.ssd, device, lambda what: status.update(f"Measuring {what}"))
    if writes:
        path = config.out or hardware_file()
        write_hardware(hardware, path)
        console.print(figure_table(hardware))
        console.print(f"Written to {path}", soft_wrap=True, highlight=False)
    return 0
