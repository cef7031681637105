"""A test of the contract: `check_tuner(factory)` raises an error where a tuner breaks the rules of `tuners.actions`.

Call it from your own test::

    def test_my_tuner_keeps_the_contract():
        check_tuner(my_tuner)

It runs the tuner on every toy system of `tuners.testing.toys` and raises AssertionError with what it found: a yield that is
no action, too many actions without time passing, a log that differs between two runs of one seed or that does not replay,
a `Rejected` that ends the tuner, the use of a global random generator, an action that is made and not yielded, or a tuner
that says it has nothing to tune and then changes something. It returns what it checked, and
``print(check_tuner(my_tuner))`` says it.
"""

from __future__ import annotations

from tuners.playing.thinking import ThinkingLimitError, thinking_limit
from tuners.testing.conformance import CheckedTuner, check_tuner
from tuners.testing.exchange_log import Exchanged, exchanges
from tuners.testing.source import check_source

__all__ = [
    "CheckedTuner",
    "Exchanged",
    "ThinkingLimitError",
    "check_source",
    "check_tuner",
    "exchanges",
    "thinking_limit",
]
