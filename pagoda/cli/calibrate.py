"""`pagoda calibrate`: measures this machine."""

import os
from pathlib import Path

from rich.console import Console

from pagoda.config.commands import CalibrateConfig
from pagoda.console import say
from pagoda.errors import ConfigError
from pagoda.simulate.hardware import Hardware, hardware_file, write_hardware


def run(config: CalibrateConfig, console: Console) -> int:
    """Measure, print the figures and write them. Returns the exit code."""
    from pagoda.calibrate.table import figure_table

    hardware, path = measure(config, console)
    if path is not None:
        console.print(figure_table(hardware))
        say(console, f"Written to {path}")
    return 0


def measure(config: CalibrateConfig, console: Console) -> tuple[Hardware, Path | None]:
    """Measure this machine. Shows on the console what is measured. Returns the figures, and the file that they were
    written to, which is None except on the first rank."""
    import torch

    from pagoda.calibrate.machine import calibrate
    from pagoda.mesh.world import launched

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = (config.out or hardware_file()) if launched().rank == 0 else None
    if path is not None:
        _check_writable(path)
    with console.status("Measuring this machine") as status:
        hardware = calibrate(config.ssd, device, lambda what: status.update(f"Measuring {what}"))
    if path is not None:
        write_hardware(hardware, path)
    return hardware, path


def _check_writable(path: Path) -> None:
    """Raises ConfigError if the file cannot be written. Checked first, because measuring takes a minute."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out {path} cannot be written: name a file in a directory that can be")
