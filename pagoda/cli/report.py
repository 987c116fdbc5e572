"""`pagoda report`: a run or a plan as a page."""

import html
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Console

from pagoda.config.commands import ReportConfig
from pagoda.errors import ConfigError, PagodaError, StorageError
from pagoda.memory.files import write_durably
from pagoda.train.progress import say

_REFRESH_S = 10


def run(config: ReportConfig, console: Console) -> int:
    """Write the page, or serve it until Ctrl-C. Returns the exit code."""
    from pagoda.train.page import BEGINNING
    from pagoda.train.report import report

    source = config.source
    page = report(source)
    if config.live:
        with server_of(source, config.port) as server:
            say(console, f"http://127.0.0.1:{server.server_port} (Ctrl-C ends it)")
            with suppress(KeyboardInterrupt):
                server.serve_forever()
        return 0
    out = config.out or (source.with_suffix(".html") if source.is_file() else source / "report.html")
    try:
        if out.exists() and not out.read_bytes().startswith(BEGINNING.encode()):
            raise ConfigError(f"{out} is not a report of Pagoda, and is not overwritten: name another file with --out")
        write_durably(out, page.encode())
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}. Name another file with --out") from error
    say(console, f"Report: {out}")
    return 0


def server_of(directory: Path, port: int) -> ThreadingHTTPServer:
    """A server that only this machine can reach. It answers every request with the current page, which reloads itself.

    Raises ConfigError if the port is in use or out of range.
    """
    from pagoda.train.report import report

    class Handler(BaseHTTPRequestHandler):
        """Answers every request with the page."""

        def do_GET(self) -> None:
            try:
                status, page = 200, report(directory)
            except PagodaError as error:
                status, page = 503, f"<!DOCTYPE html><title>No report yet</title><p>{html.escape(str(error))}</p>"
            content = page.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Refresh", str(_REFRESH_S))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", "a port is from 0 to 65535")
        raise ConfigError(f"--port {port} cannot be used: {why}. Give another") from error
