"""The `pagoda` command. It has one module per subcommand, which calls the library."""

from pagoda.cli.main import main

__all__ = ["main"]
