"""Frames that are large enough to be lent, and what lending takes of this process."""

from pathlib import Path

import numpy as np

__all__ = ["FLOATS", "floats_of", "frame", "in_use"]

FLOATS = 2**15  # in a frame


def frame(value, floats=FLOATS):
    return np.full(floats, value, np.float32).data


def floats_of(view):
    return np.frombuffer(view, np.float32)


def in_use():
    """How many descriptors of this process are of slots, two of each of its own and one of each that it borrows; and how
    often it maps one."""
    files = sum("harness-slot" in str(f.readlink()) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())
    return np.array([files, Path("/proc/self/maps").read_text().count("harness-slot")])
