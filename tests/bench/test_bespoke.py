"""The CPU seconds that the bespoke optimiser takes for one proposal on ten machines.

CPU time, because other processes on the machine affect it little; with two cores the wall time is no longer. The work is
asserted: the tenth proposal, after nine evaluations, over all 34,731 placements of setting C. Run:

    pytest tests/bench -m benchmark --benchmark-enable -n 0
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.bench.rounds import finding, settled
from tests.support.bespoke_truth import Truth, TruthSystem
from tuners.actions import Action, Reconfigure, Run
from tuners.bespoke_bo import bespoke_bo
from tuners.bespoke_bo.grouped_cluster import GroupedCluster
from tuners.bespoke_bo.numeric import placements

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

COUNTS = {"g2.2xlarge": 2, "c4.2xlarge": 2, "c4.4xlarge": 2, "c4.8xlarge": 4}
TRUTH = Truth(COUNTS, 65536, saturation=300.0, jitter=0.02, overlap=True)


def test_a_proposal_on_ten_machines(benchmark: Any) -> None:
    """The tuner's own time between the answer to its ninth evaluation and the tenth schedule that it asks for."""
    assert len(placements(GroupedCluster.of(TRUTH.job), np.random.default_rng(0))) == 34_731
    system, tuner = TruthSystem(TRUTH), bespoke_bo(TRUTH.job, stop_early=False)
    action, answer, windows = next(tuner), None, 0
    while windows < 18:  # two for each evaluation
        if answer is not None:
            action = tuner.send(answer)
        answer = system.perform(action)
        windows += isinstance(action, Run)

    def proposal() -> tuple[Action[Any], float]:
        began = time.process_time()
        return tuner.send(answer), time.process_time() - began

    action, seconds = benchmark.pedantic(proposal, rounds=1)
    assert isinstance(action, Reconfigure)
    assert sum(map(sum, action.setting.loads)) == 65536
    settled(benchmark, finding("bespoke proposal", seconds))
