"""The shares of a live job's nodes in the last seconds."""

import numpy as np
import pytest

from harness.live.driver.view.recent_pushes import RECENT_SECONDS, RecentPushes
from simulators.engine.job_state import Records
from tests.live.driver.test_losses import SPEC


def test_a_node_that_is_held_back_for_good_waits_all_the_time():
    """It makes no push that would tell of it."""
    job, end = SPEC.job, 100.0
    recent, name = RecentPushes(job), job.start.workers[0]
    row = Records(*np.zeros(len(Records._fields)))._replace(seconds=end - 60, compute_seconds=1.0)
    recent.add(np.array([row]))
    recent.drop_old(end)
    shares = {held: {n.name: n.wait_share for n in recent.nodes(job.start, (), {name: held})} for held in (0.0, 1.5, 60.0)}
    assert [shares[held][name] for held in shares] == pytest.approx([0.0, 1.5 / RECENT_SECONDS, 1.0])
    assert all(share == 0 for held in shares for other, share in shares[held].items() if other != name)
