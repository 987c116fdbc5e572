"""`pagoda report`: a run as a page."""

from rich.console import Console

from pagoda.config.commands import ReportConfig
from pagoda.errors import ConfigError, StorageError
from pagoda.memory.files import write_durably


def run(config: ReportConfig, console: Console) -> int:
    """Writes the page, or serves it until Ctrl-C; returns the exit code."""
    from pagoda.train.report import BEGINNING, report

    if config.live:
        from pagoda.train.report_server import serve

        serve(config.run, config.port, console)
        return 0
    out = config.out or config.run / "report.html"
    page = report(config.run)
    try:
        if out.exists() and not out.read_bytes().startswith(BEGINNING.encode()):
            raise ConfigError(f"{out} is not a report of Pagoda, and is not overwritten: name another file with --out")
        write_durably(out, page.encode())
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}. Name another file with --out") from error
    console.print(f"Report: {out}", soft_wrap=True, highlight=False)
    return 0
