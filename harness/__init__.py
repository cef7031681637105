"""Runs tuners on systems and scores them."""

__version__ = "0.1.0"
