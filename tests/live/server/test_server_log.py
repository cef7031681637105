"""What a server keeps of the log: entries that some block needs, and branches until all blocks have passed their end."""

from harness.live.protocol.log import ForkEntry, FreeEntry
from harness.live.server.server_log import ServerLog


def of(*entries):
    log = ServerLog()
    for entry in entries:
        log.append(entry)
    return log


def test_a_freed_branch_lives_on_for_blocks_before_the_entry_that_frees_it():
    log = of(ForkEntry(1, 0), ForkEntry(2, 0), FreeEntry(1))
    assert log.live([0, 1, 2], 2) == [0, 1, 2]
    assert log.live([0, 1, 2], 3) == [0, 2]


def test_what_all_blocks_have_passed_is_forgotten_and_its_freed_branches_are_told_once():
    log = of(ForkEntry(1, 0), FreeEntry(1), ForkEntry(2, 0))
    assert (log.forget(1), len(log)) == ([], 2)
    assert (log.forget(2), len(log)) == ([1], 1)
    assert log.forget(2) == []
    assert log[3] == ForkEntry(2, 0)


def test_after_a_view_entries_come_again_with_the_same_numbers():
    log = of(ForkEntry(1, 0), FreeEntry(1))
    log.begin_again(1)
    log.append(ForkEntry(2, 0))
    assert (log.end, len(log)) == (2, 1)
    assert log.live([1, 2], 2) == [1, 2]
