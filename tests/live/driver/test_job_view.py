"""What is known of a job, and when it saves it: each by itself, without processes."""

from types import SimpleNamespace

import numpy as np
import pytest

from harness.live.driver.checkpoints.driver_state import KnownNodes
from harness.live.driver.checkpoints.job_saver import CHECKPOINT_SECONDS, JobSaver
from harness.live.driver.view.branch_view import DriverBranch
from harness.live.driver.view.job_view import JobView
from harness.live.protocol.driver_reports import Poll, Report
from tests.live.support.ones import ONES, Ones
from tuners import policies
from tuners.actions import Evaluation

JOB = Ones("ones", "ones.toml", ONES, 0).job
ZERO = 100.0  # of the job, on the coordinator's clock


def branch():
    return DriverBranch(JOB.start, policies.asp(), 0.0)


@pytest.fixture
def runtime():
    """At 8 seconds of the job."""
    return SimpleNamespace(now=8.0, job_seconds=lambda seconds: seconds - ZERO, latest=SimpleNamespace(held_seconds={}))


@pytest.fixture
def view(runtime):
    """Branch 0, which trains, and branch 3."""
    return JobView(JOB, runtime, {0: branch(), 3: branch()}, 0)


def report(rows=(), evaluations=(), *, number=0, lost=0, **statuses):
    """What the coordinator says of one branch."""
    table = np.zeros((len(rows), 11))
    table[:, 0] = rows
    return Poll(
        now=0.0,
        reports={number: Report(0, table, tuple(evaluations))},
        statuses={int(name[1:]): status for name, status in statuses.items()},
        moving=0,
        durable=0,
        recovering=False,
        members={},
        held_seconds={},
        lost_pushes=lost,
        cancelled_requests=0,
    )


def test_pushes_are_added_to_their_branch_in_seconds_of_the_job(view):
    assert view.take(report([101.0, 102.25])).tolist() == [1.0, 2.25]
    assert view.take(report([103.0], number=3)).tolist() == [3.0]
    assert view.take(report([104.0], number=9)).tolist() == []  # the branch was freed
    assert (view.branches[0].clocks, view.branches[3].clocks) == (2, 1)
    assert view.branches[0].unseen_rows[:, 0].tolist() == [1.0, 2.25]


def test_requested_evaluations_are_told_apart_and_count_lost_pushes(view):
    view.branches[0].lost_pushes = 5
    made = Evaluation(103.0, 7, 0.5, 0.75)
    view.take(report(evaluations=[(4, made), (0, made)]))
    assert view.measured == {4: Evaluation(3.0, 12, 0.5, 0.75)}
    assert view.branches[0].evaluations == [Evaluation(3.0, 12, 0.5, 0.75)]


def test_a_job_ends_with_its_last_branch_or_when_one_reaches_the_target(view, runtime):
    assert view.status == "running"
    view.take(report(_3="diverged"))
    assert view.status == "running"
    view.take(report(_0="target"))
    assert view.status == "target"
    runtime.now = 11.0
    assert view.now == 8.0  # the time of the end stays


def test_lost_pushes_are_said_once(view):
    for lost in (0, 2, 2, 3):
        view.take(report(lost=lost))
    assert [what.split(" ", 1)[0] for _, what in view.events] == ["2", "1"]


def test_without_a_running_branch_the_first_one_stands_for_the_job(view):
    view.running = 3
    assert view.number == 3
    view.running = None
    assert view.number == 0
    assert view.job_status({JOB.nodes[0].name}).nodes[0].role == "lost"


class RestorePoints:
    """Gives the next of the outcomes at each `save`."""

    seconds = 0.0

    def __init__(self, *outcomes):
        self.outcomes, self.saved = list(outcomes), []

    def save(self, branches, running, told, state):
        yield
        if (outcome := self.outcomes.pop(0)) is not None:
            raise outcome
        self.saved.append(dict(state))


def test_a_checkpoint_is_due_only_while_the_job_is_idle_and_trains(view, runtime):
    points = RestorePoints()
    saver = JobSaver(runtime, view, points, KnownNodes)
    assert saver.regular(idle=True) is None
    runtime.now = CHECKPOINT_SECONDS + 1
    assert saver.regular(idle=False) is None
    assert saver.regular(idle=True) is not None
    view.take(report(_0="target"))
    assert saver.regular(idle=True) is None


def test_a_checkpoint_is_tried_again_with_the_coordinators_successor(view, runtime):
    points = RestorePoints(KeyError(17), None)
    saver = JobSaver(runtime, view, points, KnownNodes)
    view.performed = 6
    list(saver.save())
    assert points.saved == [{"seconds": 8.0, "exchanges": 6, "branch": 0}]


def test_a_full_disk_is_said_and_the_next_checkpoint_is_made(view, runtime):
    points = RestorePoints(OSError(28, "Cannot write here: the disk is full. Give the same command with --resume."), None)
    saver = JobSaver(runtime, view, points, KnownNodes)
    list(saver.save())
    assert saver.unsaved is not None
    why = "the checkpoint is not written: No space left on device; the job goes on, and the next one is due in 30 s"
    assert view.events == [(8.0, why)]
    list(saver.save())
    assert (saver.unsaved, len(points.saved)) == (None, 1)
