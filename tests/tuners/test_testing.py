"""The conformance suite finds every fault that it checks for."""

import functools
import itertools
import random
import re
import sys

import numpy as np
import pytest

from tests.support.toy import toys
from tuners.actions import Evaluate, Fork, Free, Install, Reconfigure, Rejected, Run
from tuners.policies import bsp
from tuners.testing import check_source, check_tuner, exchanges

PLAIN = {"one knob": toys()["one knob"]}


def halving(job):
    """A correct tuner, as an author would write it."""
    rate = job.start.learning_rate
    while True:
        seen = yield from Run(clocks=50)
        if seen.pushes.loss[-10:].mean() > seen.pushes.loss[:10].mean():
            rate /= 2
            try:
                yield from Reconfigure(job.space.setting({"learning_rate": rate}))
            except (Rejected, ValueError):
                return


def test_a_tuner_that_is_right_passes_and_is_told_what_was_checked():
    found = check_tuner(halving)
    assert found.systems == tuple(toys())
    assert dict(found.asked).keys() == {"Run", "Reconfigure"}
    assert 0 < found.refused < found.exchanges
    assert found.runs > 3 * len(found.systems)  # plain, again, and with refusals
    assert found.source
    assert str(found).startswith(f"halving keeps the contract: {len(toys())} toy systems (")
    assert "Run " in str(found)
    assert "Fork" not in str(found)
    assert "Not tested" not in str(found)


def test_actions_that_no_toy_made_a_tuner_ask_are_named():
    def never(job):
        seen = yield from Run(clocks=10)
        if seen.clocks > 10:
            yield from Reconfigure(job.start)

    found = check_tuner(never)
    assert found.unasked == ("Reconfigure",)
    assert "Not tested, because no system made it ask: Reconfigure." in str(found)


def test_the_toys_carry_out_every_action():
    def everything(job):
        yield from Install(bsp())
        branch = yield from Fork(0)
        before = yield from Evaluate(branch)
        yield from Run(clocks=300, branch=branch)
        after = yield from Evaluate(branch)
        other = yield from Evaluate(0)
        assert after.loss < before.loss == other.loss
        yield from Free(0)
        yield from Run(seconds=1.0, branch=branch)

    log = exchanges(everything, toys()["every knob"](1))
    assert [type(e.action) for e in log] == [Install, Fork, Evaluate, Run, Evaluate, Evaluate, Free, Run]
    assert log[-1].answer.seconds == pytest.approx(1.0)
    # Under an installed BSP no worker is more than a push ahead.
    clocks = np.bincount(log[3].answer.pushes.worker)
    assert clocks.max() - clocks.min() <= 1


def test_a_toy_runs_the_same_however_it_is_cut():
    whole, cut = toys()["every knob"](5), toys()["every knob"](5)
    at_once = whole.perform(Run(clocks=120)).pushes
    pieces = [cut.perform(Run(clocks=1)).pushes for _ in range(120)]
    for name in at_once._fields:
        assert getattr(at_once, name).tolist() == [getattr(p, name)[0] for p in pieces]
    for seconds in (0.01, 0.5, 0.013):
        cut.perform(Run(seconds=seconds))
    whole.perform(Run(seconds=0.523))
    assert cut.perform(Run(clocks=9)).pushes.loss.tolist() == whole.perform(Run(clocks=9)).pushes.loss.tolist()


def test_samples_of_a_toy_count_every_local_step():
    toy = toys()["local steps"](0)
    toy.perform(Reconfigure(toy.job.space.setting({"local_steps": 4})))
    seen = toy.perform(Run(clocks=30))
    assert [w.samples for w in seen.workers] == [w.pushes * 4 * toy.job.start.batch_size for w in seen.workers]


def test_a_diverged_fork_does_not_end_the_job():
    toy = toys()["one knob"](1)
    branch = toy.perform(Fork(0, toy.job.space.setting({"learning_rate": 30.0})))
    assert toy.perform(Run(clocks=5000, branch=branch)).status == "diverged"
    assert toy.status == "running"
    with pytest.raises(Rejected, match="diverged"):
        toy.perform(Run(clocks=1, branch=branch))
    with pytest.raises(Rejected, match="never forked"):
        toy.perform(Free(99))
    toy.perform(Free(0))
    assert toy.status == "diverged"


def test_leaving_nodes_are_reported_and_cannot_be_used():
    toy = toys()["a node leaves"](1)
    seen = toy.perform(Run(seconds=10.0))
    assert [(e.node, e.event) for e in seen.events] == [("n1", "left")]
    assert "n1" not in {n.name for n in seen.nodes} | {w.node for w in seen.workers} | set(seen.setting.workers)
    assert not (seen.pushes.worker[seen.pushes.seconds > 4.5] == 1).any()
    with pytest.raises(Rejected, match="'n1': it is not there"):
        toy.perform(Reconfigure(toy.job.space.setting({"worker_count": 4})))


# -------------------------------------------------------------------------------------------------------------- the slips


def yields_no_action(job):
    yield "train"


def spends_no_time(job):
    while True:
        yield from Evaluate()


def raises(job):
    yield from Run(clocks=5)
    raise KeyError("momentum")


def no_generator(job):
    return [Run(clocks=5)]


def falls_over_a_refusal(job):
    yield from Reconfigure(job.space.setting({"learning_rate": 0.1}))
    yield from Run(clocks=5)


def asks_outside_the_space(job):
    yield from Run(clocks=5)
    yield from Reconfigure(job.start.__class__(workers=("n0",), servers=("n1",)))


CALLS = itertools.count()


def differs_from_run_to_run(job):
    yield from Run(clocks=5 + next(CALLS))


def draws_from_numpys_generator(job):
    yield from Run(clocks=1 + int(np.random.random()))  # noqa: NPY002


def draws_from_pythons_generator(job):
    yield from Run(clocks=1 + int(random.random()))


def goes_on_when_closed(job):
    for _ in range(500):
        try:
            yield from Run(clocks=1)
        except GeneratorExit:
            yield Run(clocks=1)


def raises_when_closed(job):
    try:
        while True:
            yield from Run(clocks=1)
    finally:
        raise KeyError("momentum")


@pytest.mark.parametrize(
    ("factory", "complaint"),
    [
        (yields_no_action, "yields 'train', which is no action"),
        (spends_no_time, "in which no time passed"),
        (raises, "raises KeyError: 'momentum'"),
        (no_generator, "returns list, not a generator"),
        (falls_over_a_refusal, r"with exchange 0 .* refused: It does not survive a refusal"),
        (asks_outside_the_space, "does not survive a refusal"),
        (differs_from_run_to_run, "asks differently in a second run"),
        (draws_from_numpys_generator, "draws from a global random generator"),
        (draws_from_pythons_generator, "draws from a global random generator"),
        (goes_on_when_closed, "goes on when it is closed"),
        (raises_when_closed, "raises KeyError when it is closed: 'momentum'"),
    ],
)
def test_each_slip_is_found(factory, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_tuner(factory, systems=PLAIN)


def ends_the_program(job):
    yield from Run(clocks=5)
    sys.exit(3)


def needs_a_rate(job, rate):
    yield from Run(clocks=5)


@pytest.mark.parametrize(
    ("factory", "complaint"),
    [
        (ends_the_program, "It raises SystemExit: 3"),
        (
            needs_a_rate,
            "missing a required argument: 'rate'.*: it is called with a Job alone. Give other arguments a default",
        ),
        ("asp", "write a function of a Job"),
    ],
)
def test_what_would_end_the_test_run_is_a_fault_of_the_tuner(factory, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_tuner(factory, systems=PLAIN)


def test_a_tuner_with_options_is_called_by_its_name_and_these():
    def picky(job, *, rate, clocks=5):
        raise KeyError(rate)
        yield

    with pytest.raises(AssertionError, match=r"^picky\[rate=0\.1\] on 'one knob', as it is: It raises KeyError: 0\.1$"):
        check_tuner(functools.partial(picky, rate=0.1), systems={"one knob": PLAIN["one knob"]})


def test_a_fault_shows_only_what_an_action_has_of_its_own():
    def fragile(job):
        yield from Run(clocks=5 + next(CALLS))
        yield from Reconfigure(job.space.setting({"learning_rate": 0.1}), method="migrate")

    with pytest.raises(AssertionError) as caught:
        check_tuner(fragile, systems={"a": PLAIN["one knob"]})
    said = str(caught.value)
    assert re.search(r"exchange 0 was Run\(clocks=\d+\), is Run\(clocks=\d+\)\.", said)
    assert "with exchange 1 (Reconfigure(the start with learning_rate=0.1, method='migrate')) refused" in said
    assert "Setting(" not in said


def test_all_kinds_of_slips_are_found_at_once_each_named_once():
    def sloppy(job):
        """Differs between runs, draws global numbers in one of them, and does not survive a refusal."""
        yield from Run(clocks=5 + next(CALLS))
        yield from Reconfigure(job.space.setting({"learning_rate": 0.1}))

    with pytest.raises(AssertionError) as caught:
        check_tuner(sloppy, systems={"a": PLAIN["one knob"], "b": PLAIN["one knob"]})
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("1. sloppy on 'a' asks differently in a second run of the same seed")
    assert any("when its log is replayed" in line for line in lines)
    assert any("does not survive a refusal" in line for line in lines)
    assert len({line.split(". ", 1)[1].replace("'b'", "'a'") for line in lines}) == len(lines)
    assert all("times more" in line for line in lines)


def test_a_tuner_that_peeks_at_the_system_does_not_replay():
    kept = []

    def make(seed):
        kept.append(PLAIN["one knob"](seed))
        return kept[-1]

    def peeks(job):
        while True:
            yield from Run(clocks=5 if kept[-1].now < 1.0 else 7)

    with pytest.raises(AssertionError, match=r"when its log is replayed: exchange \d+ was Run\(clocks=7"):
        check_tuner(peeks, systems={"one knob": make})


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("Run(clocks=5)", "Run(clocks=5)"),
        ("actions.Reconfigure(job.start)", "actions.Reconfigure(job.start)"),
        ("Go(clocks=5)", "Go(clocks=5)"),
        ("trial(job)", "trial(job)"),
    ],
)
def test_an_action_that_is_made_and_dropped_is_found(tmp_path, monkeypatch, line, text):
    (tmp_path / "dropping.py").write_text(
        "from tuners import actions\n"
        "from tuners.actions import Run\n"
        "from tuners.actions import Run as Go\n"
        "def trial(job):\n    yield from Run(clocks=1)\n"
        f"def mine(job):\n    yield from trial(job)\n    {line}\n    print(job)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dropping", raising=False)
    import dropping

    with pytest.raises(AssertionError, match=r"Line 8 of dropping makes .* drops it: write `yield from ") as caught:
        check_source(dropping.mine)
    assert text in str(caught.value)


def test_what_another_function_of_the_file_drops_is_not_the_tuners(tmp_path, monkeypatch):
    (tmp_path / "other.py").write_text(
        "from tuners.actions import Run\n"
        "def helper(job):\n    yield from Run(clocks=1)\n"
        "def mine(job):\n    yield from helper(job)\n"
        "def unfinished(job):\n    Run(clocks=10)\n    yield from helper(job)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other", raising=False)
    import other

    assert check_source(other.mine)
    with pytest.raises(AssertionError, match="Line 7 of other makes"):
        check_source(other.unfinished)


def test_a_tuner_that_thinks_for_ever_is_told_so():
    def forever(job):
        yield from Run(clocks=1)
        while True:
            pass

    started = []

    def counted(job):
        started.append(job.name)
        return forever(job)

    with pytest.raises(AssertionError, match=r"It thinks for more than 0\.1 s without asking anything") as said:
        check_tuner(counted, thinking_limit_seconds=0.1)
    assert len(started) == 1, "the limit is a minute by default, and nobody waits for it on every toy"
    assert "times more" not in str(said.value)


def test_the_checks_end_where_a_tuner_thinks_for_ever_after_a_refusal():
    started = []

    def stuck(job):
        started.append(job.name)
        try:
            yield from Reconfigure(job.start)
        except Rejected:
            while True:
                pass

    with pytest.raises(AssertionError, match=r"with exchange 0 .* refused: It thinks for more than 0\.1 s"):
        check_tuner(stuck, thinking_limit_seconds=0.1)
    assert len(started) == 4  # as it is, a second time, replayed, and refused


def test_a_tuner_without_source_passes_the_look_at_it():
    made = {}
    exec("def mine(job):\n    yield from ()", made)  # noqa: S102
    check_source(made["mine"])
