"""The program: `pagoda`, or `python -m pagoda`."""

import io
import sys

import pagoda
from pagoda.process import spin_briefly


def main() -> int:
    """Runs the process's command line and returns its exit code."""
    if sys.argv[1:] == ["--version"]:
        print(f"pagoda {pagoda.__version__}")
        return 0
    spin_briefly()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a run does not end for a sample that cannot be shown
    from pagoda.cli import main as run  # may import torch, which reads how long its threads spin

    return run()


if __name__ == "__main__":
    sys.exit(main())
