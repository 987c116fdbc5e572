"""The program: `pagoda`, or `python -m pagoda`."""

import sys

from pagoda.process import spin_briefly


def main() -> int:
    """Runs the process's command line and returns its exit code."""
    spin_briefly()
    from pagoda.cli import main as run  # imports torch

    return run()


if __name__ == "__main__":
    sys.exit(main())
