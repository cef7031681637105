"""What tests of comparisons share."""

from tests.support.processes import kept_processes, lender

__all__ = ["kept_processes", "lender"]
