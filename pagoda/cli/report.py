"""`pagoda report`: a run or a plan as a page."""

from rich.console import Console

from pagoda.config.commands import ReportConfig
from pagoda.errors import ConfigError, StorageError
from pagoda.memory.files import write_durably
from pagoda.train.progress import say


def run(config: ReportConfig, console: Console) -> int:
    """Writes the page, or serves it until Ctrl-C; returns the exit code."""
    from pagoda.train.page import BEGINNING
    from pagoda.train.report import report

    if config.live:
        from pagoda.train.report_server import serve

        serve(config.source, config.port, console)
        return 0
    source = config.source
    out = config.out or (source.with_suffix(".html") if source.is_file() else source / "report.html")
    page = report(source)
    try:
        if out.exists() and not out.read_bytes().startswith(BEGINNING.encode()):
            raise ConfigError(f"{out} is not a report of Pagoda, and is not overwritten: name another file with --out")
        write_durably(out, page.encode())
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}. Name another file with --out") from error
    say(console, f"Report: {out}")
    return 0
