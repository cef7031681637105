"""`python -m harness` is the command `harness`."""

import sys

from harness import own_packages

# Python has put the working folder first on the path; before anything else is imported, it goes to the end.
own_packages.working_folder_last()

from harness.cli.main import main  # noqa: E402 (see above)

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
