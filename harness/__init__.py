"""Carries tuners out against systems and keeps the score."""

__version__ = "0.1.0"
