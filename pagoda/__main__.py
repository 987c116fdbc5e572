"""`python -m pagoda`: the same as the `pagoda` command."""

import sys

from pagoda.cli import main

if __name__ == "__main__":
    sys.exit(main())
