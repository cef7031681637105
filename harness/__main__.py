"""`python -m harness` is the command `harness`."""

import sys

from harness.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
