"""Rows that are held out."""

from __future__ import annotations

import numpy as np
import pytest

from simulators.calibration.fit import Constants, predicted
from simulators.calibration.predictions import HELD_OUT, LARGER
from simulators.calibration.recorded.recordings import Recording
from simulators.calibration.validation import check
from tests.simulators.calibration.made_up import ORIGIN, TRUE, row, timed

pytestmark = pytest.mark.usefixtures("short")


def test_every_row_is_held_out_once_and_combinations_stay_together():
    rows = [row(w, 10 - w, b) for w in (2, 4, 6, 9) for b in (8, 32)]
    rows = tuple(timed([*rows, rows[0]], noise=0.01))
    recording = Recording(rows, None, (100.0, 110.0), (), (), ())
    known = {"toy": Constants(cores=8, model_bytes=1.0)}
    with pytest.raises(ValueError, match="give at least 2, which are halves"):
        check(recording, known, ORIGIN, 1)
    made = check(recording, known, ORIGIN, 3)
    assert made.undivided == ()
    held = [p for p in made.predictions if (p.group, p.split) == ("toy, asp", HELD_OUT)]
    off = [abs(p.held_out / p.recorded - 1) for p in held]
    assert len(off) == 9
    assert len({p.held_out for p in held}) == 8  # two runs of one setting, one fold
    assert np.median(off) < 0.05
    assert all(p.low < p.held_out < p.high for p in held)
    assert all(0 < p.error < 0.1 for p in held)
    larger = [p.label for p in made.predictions if p.split == LARGER]
    assert [label.partition(",")[0] for label in larger] == ["6 workers"] * 2 + ["9 workers"] * 2
    switch = [p for p in made.predictions if p.group == "switch of policy"]
    assert [p.held_out for p in switch] == [110.0, 100.0]
    assert predicted(TRUE, rows) == pytest.approx([r.cycle_seconds for r in rows], rel=0.06)
    assert len(made.predictions) == 9 + 4 + 2
