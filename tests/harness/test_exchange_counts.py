"""A guard of speed that no clock is needed for: what one fixed run asks, and what it is answered, in numbers."""

import harness
from tuners.actions import Window


def test_a_fixed_run_takes_as_many_exchanges_pushes_and_bytes_as_before():
    """More exchanges are more crossings between tuner and simulator; more bytes are more to copy, log and score. The job is
    timing-only, so that no last digit of a gradient decides. Where more is meant, store the new numbers."""
    run = harness.play("cruise-nmf-32", "cruise")
    windows = [exchange.answer for exchange in run.exchanges if isinstance(exchange.answer, Window)]
    assert (len(run.exchanges), len(windows)) == (10, 9)
    assert sum(window.clocks for window in windows) == 1916
    assert sum(column.nbytes for window in windows for column in window.pushes) == 60 * 1916
