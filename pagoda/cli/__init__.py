"""The `pagoda` command: thin doors to the library, one module per subcommand."""

from pagoda.cli.main import main

__all__ = ["main"]
