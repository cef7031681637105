"""Frames that are large enough for shared memory, processes' ends that lend them, and counts of descriptors and mappings."""

import gc
from pathlib import Path

import numpy as np
import pytest

from harness.live.transport.shared_memory import SharedMemory

__all__ = ["FLOATS", "ends", "few_objects", "floats_of", "frame", "in_use", "nothing_is_left", "passed", "slots_of"]

FLOATS = 2**15  # in a frame


def frame(value, floats=FLOATS):
    return np.full(floats, value, np.float32).data


def floats_of(view):
    return np.frombuffer(view, np.float32)


def in_use():
    """How many file descriptors of this process belong to slots (two of each own slot, one of each borrowed one), and how
    many of its mappings."""
    files = sum("harness-slot" in str(f.readlink()) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())
    return np.array([files, Path("/proc/self/maps").read_text().count("harness-slot")])


def slots_of(end):
    return end.slots.made


def passed(lender, peer, borrower, *frames):
    """The frames that arrive of a message."""
    return borrower.borrow(lender.lend(peer, [b"first", *frames]))[1:]


@pytest.fixture(scope="module")
def few_objects():
    """Free what tests of other modules left. No collection looks at the rest again: with it, each takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_is_left(few_objects):
    """Free what earlier tests left, which `in_use` would count."""
    gc.collect()


@pytest.fixture
def ends():
    """Makes `SharedMemory` objects that are connected to one another, as peers "0", "1", ..."""
    made = []

    def end():
        made.append(SharedMemory())
        for i, each in enumerate(made):
            each.connect(str(len(made) - 1), made[-1].identity)
            made[-1].connect(str(i), each.identity)
        return made[-1]

    yield end
    for each in made:
        each.close()
