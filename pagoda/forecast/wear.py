"""What training writes to a drive, as a share of what the drive is rated for."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from pagoda.memory.sizes import format_bytes
from pagoda.simulate.hardware import Figure
from pagoda.simulate.machines import rated_endurance

_TB = 1e12


def endurance_of(directories: Iterable[Path], nodes: int = 1) -> Figure | None:
    """Bytes that the drives of these directories of each node may be assumed to be rated for, by the size of their file
    systems. None without directories."""
    sizes = {path.stat().st_dev: shutil.disk_usage(path).total for path in directories}
    return rated_endurance(float(nodes * sum(sizes.values()))) if sizes else None


def wear(per_step: int, steps: int, endurance: Figure) -> str:
    """What one step and `steps` steps write, and the share of `endurance` that this is. `per_step`: bytes."""
    total = per_step * steps
    return (
        f"{format_bytes(per_step)} written a step, {format_bytes(total)} in {steps:,} steps: "
        f"{100 * total / endurance.value:.3g}% of the {endurance.value / _TB:,.0f} TB that the drives are rated for "
        f"({endurance.source})"
    )
