"""Complete exchange logs against recorded ones, to notice every change in what a tuner asks and when.

The toys are plain NumPy, so the logs do not depend on a compiler. After an intended change, or for a new tuner,
``python tests/tuners/test_golden.py`` writes those that differ, and the diff is part of the commit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
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


def path(tuner: str, folder: Path = GOLDEN) -> Path:
    return folder / f"{re.sub('[^a-z_]+', '_', tuner.removesuffix('=true]'))}.txt"


def check(made: Sequence[str], kept: Sequence[str]) -> None:
    for number, (new, old) in enumerate(zip(made, kept, strict=False)):
        # Words exactly; numbers with a tolerance, because libraries may round the last digit differently.
        assert NUMBER.sub("#", new) == NUMBER.sub("#", old), f"exchange {number}"
        got, expected = ([float(x) for x in NUMBER.findall(line)] for line in (new, old))
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8, err_msg=f"exchange {number}: {new}")
    assert len(made) == len(kept)


def write_what_differs(tuners: Sequence[str], folder: Path) -> list[str]:
    """Write the logs that are missing or that `check` refuses; returns their tuners. Other last digits are no change."""
    written = []
    for tuner in tuners:
        made, file = list(lines(tuner)), path(tuner, folder)
        try:
            check(made, file.read_text("utf-8").splitlines())
        except (AssertionError, FileNotFoundError):
            file.write_text("\n".join(made) + "\n", "utf-8")
            written.append(tuner)
    return written


@pytest.mark.parametrize("tuner", TUNERS)
def test_the_log_is_the_one_on_record(tuner: str) -> None:
    assert path(tuner).is_file(), f"{tuner} has no log yet: python tests/tuners/test_golden.py writes it"
    check(list(lines(tuner)), path(tuner).read_text("utf-8").splitlines())


def test_only_logs_that_differ_are_written_again(tmp_path: Path) -> None:
    rounded = NUMBER.sub(lambda found: f"{float(found[0]) * (1 + 1e-9):.15f}", path("bsp").read_text("utf-8"))
    assert rounded != path("bsp").read_text("utf-8")
    path("bsp", tmp_path).write_text(rounded, "utf-8")
    path("asp", tmp_path).write_text("0.0  target\n", "utf-8")
    assert write_what_differs(["bsp", "asp", "fixed"], tmp_path) == ["asp", "fixed"]
    assert path("bsp", tmp_path).read_text("utf-8") == rounded
    assert write_what_differs(["bsp", "asp", "fixed"], tmp_path) == []


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    sys.stdout.write(f"Written: {', '.join(write_what_differs(TUNERS, GOLDEN)) or 'none, since none differs'}.\n")
