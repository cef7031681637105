"""Complete exchange logs against recorded ones, to notice every change in what a tuner asks and when.

The toys are plain NumPy, so the logs do not depend on a compiler. After an intended change
``python tests/tuners/test_golden.py`` writes them again, and the diff is part of the commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.drive import play
from traces.exchanges import Exchange, action_text
from tuners import embedded, resolve
from tuners.actions import Cost, Rejected, Window
from tuners.testing.toys import toys

GOLDEN = Path(__file__).parent / "golden"
TOY = "every knob"
TUNERS = (*embedded(), "mltuner[as_printed=true]", "rlp[as_printed=true]")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")


def lines(tuner: str) -> Iterator[str]:
    """A line per exchange: the time of the answer, the action, and a summary of the answer."""
    played = play(resolve(tuner).factory, toys()[TOY](0))
    for exchange in played.exchanges:
        yield f"{exchange.seconds:.9f}  {action_text(exchange.action)}  ->  {gist(exchange)}"
    yield f"{played.outcome.seconds:.9f}  {played.outcome.status}"


def gist(exchange: Exchange) -> str:
    answer = exchange.answer
    if isinstance(answer, Rejected):
        return f"Rejected: {answer}"
    if isinstance(answer, Window):
        return f"{answer.clocks} clocks, losses {np.sum(answer.pushes.loss):.9f} in all, {answer.status}"
    if isinstance(answer, Cost):
        return f"{answer.stall_seconds:.9f} s of stall, {answer.bytes_moved:.3f} bytes, {', '.join(answer.steps)}"
    return repr(answer)


def path(tuner: str) -> Path:
    return GOLDEN / f"{re.sub('[^a-z_]+', '_', tuner.removesuffix('=true]'))}.txt"


@pytest.mark.parametrize("tuner", TUNERS)
def test_the_log_is_the_one_on_record(tuner: str) -> None:
    made, kept = list(lines(tuner)), path(tuner).read_text("utf-8").splitlines()
    for number, (new, old) in enumerate(zip(made, kept, strict=False)):
        # Words exactly; numbers with a tolerance, because libraries may round the last digit differently.
        assert NUMBER.sub("#", new) == NUMBER.sub("#", old), f"exchange {number}"
        got, expected = ([float(x) for x in NUMBER.findall(line)] for line in (new, old))
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8, err_msg=f"exchange {number}: {new}")
    assert len(made) == len(kept)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in TUNERS:
        path(name).write_text("\n".join(lines(name)) + "\n", "utf-8")
