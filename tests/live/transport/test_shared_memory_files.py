"""The limit of file descriptors of a process: each slot that it maps takes one."""

import os
import resource
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from harness.live.protocol.wire import Unreadable
from harness.live.transport import shared_memory
from tests.live.support.frames import FLOATS, floats_of, frame, in_use, passed, slots_of

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous files")


@contextmanager
def no_files_left():
    """No file descriptor is left, and none can be opened."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 1000), limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_unread_slots_give_their_descriptors_to_new_frames(ends):
    one, other = ends(), ends()
    passed(one, "1", other, frame(1), frame(2), frame(3))
    sent = one.lend("1", [b"first", frame(4, 2 * FLOATS)])  # in a slot that the reader has not mapped
    with no_files_left():
        assert floats_of(other.borrow(sent)[1])[-1] == 4


def test_a_reader_without_descriptors_gives_back_frames_it_could_not_read(ends):
    one, other = ends(), ends()
    array = np.ones(FLOATS, np.float32)
    sent = [one.lend("1", [b"first", array.data, frame(2)]) for _ in range(3)]
    with no_files_left():
        for each in sent:
            with pytest.raises(Unreadable, match="no file descriptor is left"):
                other.borrow(each)
    assert floats_of(passed(one, "1", other, frame(5))[0])[-1] == 5
    assert one.slots.busy == 0


def test_a_limited_number_of_slots_stays_mapped(ends, nothing_is_left, monkeypatch):
    monkeypatch.setattr(shared_memory, "BORROWED", 4)
    other, lenders = ends(), [ends() for _ in range(3)]
    before = in_use()
    held = []
    for value in range(9):
        one = lenders[value % 3]
        held += [(passed(one, "0", other, frame(value), frame(value + 1))[0], value)]
        assert in_use()[0] - before[0] <= 2 * sum(map(slots_of, lenders)) + 4 + len(held)
    assert [floats_of(view)[0] for view, _ in held] == [value for _, value in held]
    held.clear()
    assert in_use()[0] - before[0] <= 2 * sum(map(slots_of, lenders)) + 4
