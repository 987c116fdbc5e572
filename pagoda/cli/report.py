"""`pagoda report`: a run or a plan as a page."""

import html
import os
import sys
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Console

from pagoda.config.commands import ReportConfig
from pagoda.errors import ConfigError, PagodaError, StorageError
from pagoda.memory.files import read_regular, write_durably
from pagoda.train.progress import say

_REFRESH_S = 10
_OWN_NAMES = ("127.0.0.1", "localhost")


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
        if os.path.lexists(out) and not read_regular(out).startswith(BEGINNING.encode()):
            raise ConfigError(f"{out} is not a report of Pagoda, and is not overwritten: name another file with --out")
        write_durably(out, page.encode())
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}. Name another file with --out") from error
    say(console, f"Report: {out}")
    return 0


def server_of(source: Path, port: int) -> ThreadingHTTPServer:
    """A server that only this machine can reach. It answers requests with the current page, which reloads itself. The
    page is drawn again when a file of the run or plan has changed.

    It answers only requests to its own name. Otherwise a web site whose name resolves to this machine could read it.

    Raises ConfigError if the port is in use or out of range.
    """
    page = _Page(source)

    class Handler(BaseHTTPRequestHandler):
        """Answers every request with the page."""

        def do_GET(self) -> None:
            if self.headers.get("Host", "").partition(":")[0].lower() not in _OWN_NAMES:
                status, content = HTTPStatus.FORBIDDEN, "This server answers only as 127.0.0.1 and localhost."
            elif self.path.partition("?")[0] != "/":
                status, content = HTTPStatus.NOT_FOUND, "There is one page, at /."
            else:
                status, content = page.current()
            body = content.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Refresh", str(_REFRESH_S))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

    class Server(ThreadingHTTPServer):
        """Prints nothing when a browser hangs up."""

        def handle_error(self, request: object, client_address: object) -> None:
            if not isinstance(sys.exception(), OSError):
                super().handle_error(request, client_address)  # type: ignore[arg-type]

    try:
        return Server(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", "a port is from 0 to 65535")
        raise ConfigError(f"--port {port} cannot be used: {why}. Give another") from error


class _Page:
    """The page of a run or plan, drawn again when its files have changed. Thread-safe."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._drawn: tuple[object, HTTPStatus, str] | None = None
        """The state of the files that it was drawn from, and the answer."""

    def current(self) -> tuple[HTTPStatus, str]:
        """Status and content of the answer."""
        from pagoda.train.report import report

        with self._lock:
            now = self._files()
            if self._drawn is None or self._drawn[0] != now:
                try:
                    status, content = HTTPStatus.OK, report(self._source)
                except PagodaError as error:
                    status = HTTPStatus.SERVICE_UNAVAILABLE
                    content = f"<!DOCTYPE html><title>No report yet</title><p>{html.escape(str(error))}</p>"
                self._drawn = now, status, content
            return self._drawn[1:]

    def _files(self) -> list[object]:
        """What changes when a run writes: names, sizes and times of its files and checkpoints."""
        found: list[object] = []
        for path in [self._source, *self._source.glob("*"), *self._source.glob("checkpoints/*")]:
            with suppress(OSError):  # it is deleted meanwhile
                status = path.stat()
                found.append((path, status.st_size, status.st_mtime_ns))
        return found
