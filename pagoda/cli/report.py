"""`pagoda report`: a run as a page."""

import os

from rich.console import Console

from pagoda.config.commands import ReportConfig
from pagoda.console import say
from pagoda.errors import ConfigError, StorageError
from pagoda.memory.files import read_regular, write_durably


def run(config: ReportConfig, console: Console) -> int:
    """Write the page, and print where it is. Returns the exit code."""
    from pagoda.train.report import BEGINNING, report

    page = report(config.source)
    out = config.out or config.source / "report.html"
    try:
        if os.path.lexists(out) and not read_regular(out).startswith(BEGINNING.encode()):
            raise ConfigError(f"{out} is not a report of Pagoda, and is not overwritten: name another file with --out")
        write_durably(out, page.encode())
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}. Name another file with --out") from error
    say(console, f"Report: {out}")
    return 0
