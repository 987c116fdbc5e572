"""`pagoda report --live`: the page of a run that goes on, on this machine alone."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Console

from pagoda.errors import ConfigError, PagodaError
from pagoda.train.progress import say
from pagoda.train.report import report

_REFRESH_S = 10


def server_of(directory: Path, port: int) -> ThreadingHTTPServer:
    """A server on localhost, whose every answer is the page as it is then. It reloads itself.

    Raises ConfigError: the port is in use.
    """

    class Handler(BaseHTTPRequestHandler):
        """Answers every request with the page."""

        def do_GET(self) -> None:
            try:
                status, page = 200, report(directory)
            except PagodaError as error:
                status, page = 503, f"<!DOCTYPE html><title>No report yet</title><p>{error}</p>"
            content = page.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Refresh", str(_REFRESH_S))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ConfigError(f"--port {port} cannot be used: {error.strerror}. Give another") from error


def serve(directory: Path, port: int, console: Console) -> None:
    """Serves until Ctrl-C. Raises ConfigError as `report` and `server_of`."""
    report(directory)
    with server_of(directory, port) as server:
        say(console, f"http://127.0.0.1:{server.server_port} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
