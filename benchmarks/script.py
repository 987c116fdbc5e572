"""How a benchmark begins and ends."""

import json
from pathlib import Path

from pagoda.process import keep_freed_memory, restart_spinning_briefly


def begin() -> None:
    """Do what `pagoda train` does for its process: waiting threads sleep soon, and malloc keeps what is freed. It may
    start the process anew."""
    restart_spinning_briefly()
    keep_freed_memory()


def machine() -> dict[str, str]:
    """Where a benchmark runs."""
    import torch

    from pagoda.calibrate.meter import cpu_name

    return {"machine": f"{cpu_name()}, {torch.get_num_threads()} threads", "torch": torch.__version__}


def write(out: Path | None, figures: object) -> None:
    """Write figures as JSON, if a file is named."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        whole = out.with_name(f"{out.name}.new")
        whole.write_text(json.dumps(figures, indent=1) + "\n")
        whole.replace(out)  # a process that is killed would leave half of it
