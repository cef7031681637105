"""One job, one tuner: which actions are carried out, how the job ends, and every way in which a tuner can fail."""

from __future__ import annotations

import inspect
import json
import re
import signal
import sysconfig
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.drive import Outcome, drive, play
from traces.exchanges import Exchange
from tuners.actions import (
    Action,
    Cost,
    Evaluate,
    Fork,
    Free,
    Job,
    Reconfigure,
    Rejected,
    Run,
    Target,
    Tuner,
    Window,
)
from tuners.testing.toys import Toy, toys


def toy(**changed: Any) -> Toy:
    """A job that ends at its budget of 20 s, unless `changed` says otherwise."""
    made = toys()["one knob"](0)
    pinned = {"target": Target("loss", -1.0), "budget_seconds": 20.0}
    return Toy(replace(made.job, **(pinned | changed)))


def ended(tuner: Tuner, system: Toy, **options: Any) -> tuple[list[Exchange], Outcome]:
    """Everything that `drive` yields, and what it returns."""
    exchanges, running = [], drive(tuner, system, **options)
    while True:
        try:
            exchanges.append(next(running))
        except StopIteration as end:
            return exchanges, end.value


# ------------------------------------------------------------------------------------------------------- normal runs


def test_a_tuner_is_sent_what_the_system_answered() -> None:
    answers: list[Any] = []

    def listens(job: Job) -> Tuner:
        answers.append((yield from Run(clocks=5)))
        answers.append((yield from Reconfigure(replace(job.start, learning_rate=0.02))))
        answers.append((yield from Fork(0)))
        answers.append((yield from Evaluate(answers[-1])))

    system = toy()
    exchanges, outcome = ended(listens(system.job), system)
    assert [type(a) for a in answers[:2]] == [Window, Cost]
    assert answers == [e.answer for e in exchanges if e.asked]
    assert outcome.status == "budget"
    assert outcome.reason == ""


def test_a_run_is_clipped_to_what_is_left_of_the_budget() -> None:
    asked: list[Action[Any]] = []

    class Watched(Toy):
        def perform(self, action: Action[Any]) -> Any:
            asked.append(action)
            return super().perform(action)

    def greedy(job: Job) -> Tuner:
        yield from Run(seconds=15.0)
        yield from Run(seconds=15.0, reason="the loss falls")
        raise AssertionError("the budget is spent")

    system = Watched(toy().job)
    exchanges, outcome = ended(greedy(system.job), system)
    assert asked == [Run(seconds=15.0), Run(seconds=5.0, reason="the loss falls")]  # a live job shows the reason
    assert [e.action for e in exchanges] == [
        Run(seconds=15.0),
        Run(seconds=15.0, reason="the loss falls"),
    ]  # the log has the actions as they were asked
    assert outcome == Outcome("budget", "", 20.0, outcome.thinking_seconds)


def test_the_job_ends_at_its_target_and_the_tuner_is_closed() -> None:
    closed: list[bool] = []

    def endless(job: Job) -> Tuner:
        try:
            while True:
                yield from Run(clocks=10)
        finally:
            closed.append(True)

    system = toy(target=Target("loss", 1.0))
    _, outcome = ended(endless(system.job), system)
    assert outcome.status == "target"
    assert outcome.seconds == system.now < system.job.budget_seconds
    assert closed == [True]


def test_a_job_of_clocks_ends_after_so_many() -> None:
    system = toy(target=Target("clocks", 400))

    def endless(job: Job) -> Tuner:
        while True:
            yield from Run(clocks=150)

    exchanges, outcome = ended(endless(system.job), system)
    assert outcome.status == "target"
    assert sum(e.answer.clocks for e in exchanges) == 400


def test_a_job_that_diverges_or_deadlocks_says_so() -> None:
    def reckless(job: Job) -> Tuner:
        yield from Reconfigure(replace(job.start, learning_rate=30.0))

    system = toy()
    assert ended(reckless(system.job), system)[1].status == "diverged"

    made = toys()["no knobs"](0)
    lonely = Toy(made.job, leaving={"n0": 1.0, "n1": 1.0, "n2": 1.0})
    assert ended(reckless_never(), lonely)[1].status == "deadlock"


def test_a_job_that_deadlocks_while_a_tuner_would_think_is_no_fault_of_it() -> None:
    """With `thinking_seconds` a job can end before the window that the harness asks for: then there is nothing to tell."""

    class Thoughtful(Toy):
        def perform(self, action: Action[Any]) -> Any:
            if self.now > 5.0:
                self.status = "deadlock"
                raise Rejected(f"Cannot run branch 0: it has {self.status}; free it and go on with another.")
            return super().perform(action)

    exchanges, outcome = ended(reckless_never(), Thoughtful(toy().job))
    assert (outcome.status, outcome.reason) == ("deadlock", "")
    assert exchanges[-1].after_end


def reckless_never() -> Tuner:
    yield from ()


def test_after_a_tuner_returns_its_job_continues_under_its_last_setting() -> None:
    def brief(job: Job) -> Tuner:
        yield from Reconfigure(replace(job.start, learning_rate=0.02))
        branch = yield from Fork(0, replace(job.start, learning_rate=0.03))
        yield from Run(clocks=3, branch=branch)

    system = toy()
    exchanges, outcome = ended(brief(system.job), system)
    after = [e for e in exchanges if not e.asked]
    assert outcome.status == "budget"
    assert outcome.seconds == 20.0
    assert {e.action.branch for e in after} == {1}
    assert after[-1].answer.end_seconds == 20.0


def test_a_refusal_is_thrown_into_the_tuner() -> None:
    reasons: list[str] = []

    def tries(job: Job) -> Tuner:
        try:
            yield from Reconfigure(replace(job.start, policy="bsp"))
        except Rejected as error:
            reasons.append(str(error))
        seen = yield from Run(clocks=1)
        assert isinstance(seen, Window)

    system = toy()
    exchanges, outcome = ended(tries(system.job), system)
    assert "policy" in reasons[0]
    assert isinstance(exchanges[0].answer, Rejected)
    assert isinstance(exchanges[1].answer, Window)
    assert outcome.status == "budget"


def test_thinking_is_measured_and_costs_no_simulated_time() -> None:
    def ponders(job: Job) -> Tuner:
        time.sleep(0.05)
        yield from Run(clocks=3)
        time.sleep(0.05)

    quick, slow = toy(), toy()
    _, without = ended(reckless_never(), quick)
    _, outcome = ended(ponders(slow.job), slow)
    assert 0.1 <= outcome.thinking_seconds < 5.0
    assert outcome.seconds == without.seconds


# --------------------------------------------------------------------------------------------------- faults


def raises(job: Job) -> Tuner:
    yield from Run(clocks=3)
    raise ZeroDivisionError("so it goes")


def exits(job: Job) -> Tuner:
    yield from Run(clocks=3)
    raise SystemExit(3)


def yields_nonsense(job: Job) -> Tuner:
    yield from Run(clocks=3)
    yield "faster, please"  # type: ignore[misc]


def yields_a_class(job: Job) -> Tuner:
    yield Run  # type: ignore[misc]


def yields_nothing(job: Job) -> Tuner:
    yield None  # type: ignore[misc]


def does_not_catch(job: Job) -> Tuner:
    yield from Run(clocks=3)
    yield from Free(7)


def spends_no_time(job: Job) -> Tuner:
    while True:
        yield from Evaluate()


def spends_crumbs(job: Job) -> Tuner:
    while True:
        yield from Run(seconds=1e-13)


def forks_for_ever(job: Job) -> Tuner:
    while True:
        yield from Free((yield from Fork(0)))


def raises_at_once(job: Job) -> Tuner:
    raise LookupError("no such luck")


def is_no_generator(job: Job) -> Any:
    return [Run(clocks=3)]


def returns_nothing(job: Job) -> Any:
    return None


class Greedy:
    """A tuner that keeps state; its objects are called with the job."""

    def __init__(self, factor: Any = 2.0) -> None:
        self.factor = factor

    def __call__(self, job: Job) -> Tuner:
        yield from Run(clocks=3)


class Random:
    """An optimiser as libraries have it."""

    def __init__(self, job: Job) -> None:
        self.knobs = job.space.knobs

    def ask(self) -> dict[str, float]:
        return {}

    def tell(self, values: dict[str, float], score: float) -> None:
        pass


async def waits(job: Job) -> Tuner:
    return reckless(job)


async def waits_and_yields(job: Job) -> Any:
    yield Run(clocks=3)


def returns_a_pair(job: Job) -> Any:
    return 0, Run(clocks=3)


def checks_by_itself(job: Job) -> Tuner:
    yield from Run(clocks=3)
    job.space.check(replace(job.start, workers=()))


def asks_for_the_impossible(job: Job) -> Tuner:
    yield from Run(clocks=3, branch=[])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (raises, r"The tuner raised ZeroDivisionError: so it goes \(test_drive\.py, line \d+\)"),
        (exits, r"The tuner raised SystemExit: 3"),
        (yields_nonsense, r"The tuner yielded 'faster, please', which is no action"),
        (yields_a_class, r"The tuner yielded <class .*Run'>, which is no action"),
        (yields_nothing, r"The tuner yielded None, which is no action"),
        (does_not_catch, r"The tuner did not catch that an action was refused: Cannot use branch 7"),
        (checks_by_itself, r"The tuner raised Rejected: Cannot run with no workers.* \(test_drive\.py, line \d+\)"),
        (spends_no_time, r"The tuner trained nothing in 1000 exchanges"),
        (spends_crumbs, r"The tuner trained nothing in 1000 exchanges"),
        (forks_for_ever, r"The tuner trained nothing in 1000 exchanges"),
        (raises_at_once, r"The tuner raised LookupError: no such luck"),
        (is_no_generator, r"The tuner is no generator but \[Run\(.*write a function of a Job that yields actions"),
        (returns_nothing, r"The tuner is no generator but None: write a function of a Job that yields actions\.$"),
        (Greedy, r"it is a Greedy, which can be called; give an object, Greedy\(\.\.\.\), and not the class\.$"),
        (
            Random,
            r"give tuners\.adapters\.from_ask_tell\(make\), and make\(job\) returns a Random\.$",
        ),
        (waits, r"write def, without async\.$"),
        (waits_and_yields, r"write def, without async\.$"),
        (returns_a_pair, r"it is a state and an action; give tuners\.adapters\.from_pair\(init, update\)\.$"),
        (asks_for_the_impossible, r"The system could not carry out Run\(.*TypeError"),
    ],
)
def test_a_bad_tuner_is_an_outcome_with_a_reason(factory: Any, reason: str) -> None:
    played = play(factory, toy())
    assert played.outcome.status == "error"
    assert re.search(reason, played.outcome.reason), played.outcome.reason
    assert "\n" not in played.outcome.reason


def runs_for_less_than_nothing(job: Job) -> Tuner:
    yield from Run(clocks=-3)  # refused in the contract's file


def fails_in_a_library(job: Job) -> Tuner:
    json.loads("{")
    yield from Run(clocks=3)


@pytest.mark.parametrize("factory", [runs_for_less_than_nothing, fails_in_a_library])
def test_the_reason_names_the_line_of_the_tuner(factory: Any) -> None:
    line = inspect.getsourcelines(factory)[1] + 1
    assert play(factory, toy()).outcome.reason.endswith(f"(test_drive.py, line {line})")


def test_the_author_is_told_where_it_failed() -> None:
    trace = play(raises, toy()).outcome.trace
    assert 'raise ZeroDivisionError("so it goes")' in trace
    assert re.findall(r'File ".*/(.*)"', trace) == ["test_drive.py"]  # and not what has played the tuner
    assert play(reckless, toy()).outcome.trace == ""


def reckless(job: Job) -> Tuner:
    yield from Run(clocks=1)


def test_of_an_installed_tuner_the_line_is_in_its_own_package_and_not_in_a_library() -> None:
    installed = Path(sysconfig.get_path("purelib"))
    reads = compile(
        "def read(text):\n    import json\n    return json.loads(text)\n", str(installed / "mine" / "read.py"), "exec"
    )
    tunes = compile("def tuner(job):\n    yield read('{')\n", str(installed / "mine" / "tuner.py"), "exec")
    names: dict[str, Any] = {}
    exec(reads, names)  # noqa: S102
    exec(tunes, names)  # noqa: S102
    assert play(names["tuner"], toy()).outcome.reason.endswith("(read.py, line 3)")


def test_what_was_done_before_the_fault_is_kept() -> None:
    played = play(raises, toy())
    assert [e.action for e in played.exchanges] == [Run(clocks=3)]


def hangs(job: Job) -> Tuner:
    yield from Run(clocks=3)
    while True:
        try:
            time.sleep(60)
        except Exception:  # noqa: S112 (a tuner that hides everything that ordinary code may hide)
            continue


def never_yields(job: Job) -> Tuner:
    while job:
        pass
    yield from Run(clocks=1)


@pytest.mark.parametrize("factory", [hangs, never_yields])
def test_a_tuner_that_never_yields_is_stopped(factory: Any) -> None:
    played = play(factory, toy(), thinking_limit_seconds=0.1)
    assert played.outcome.status == "error"
    assert "thought for more than 0.1 s" in played.outcome.reason


def test_a_timer_that_was_running_continues() -> None:
    rung: list[bool] = []
    before = signal.getsignal(signal.SIGALRM)
    left = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        play(reckless, toy())
        time.sleep(0.2)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)
    assert rung == [True]


def test_outside_the_main_thread_there_is_no_limit_and_no_error() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(play(reckless, toy()).outcome.status))
    thread.start()
    thread.join()
    assert found == ["budget"]


def test_a_tuner_that_ignores_its_end_does_not_stop_the_run() -> None:
    def clings(job: Job) -> Tuner:
        while True:
            try:
                yield from Run(seconds=30.0)
            except GeneratorExit:
                yield from Run(clocks=1)

    assert play(clings, toy()).outcome.status == "budget"


def test_a_tuner_that_frees_every_branch_and_returns_is_an_error() -> None:
    class Generous(Toy):
        def perform(self, action: Action[Any]) -> Any:
            return None if isinstance(action, Free) else super().perform(action)

    def ends_it(job: Job) -> Tuner:
        yield from Free(0)

    played = play(ends_it, Generous(toy().job))
    assert "freed every branch" in played.outcome.reason


def test_a_diverged_fork_that_trained_last_ends_the_job() -> None:
    class Stuck(Toy):
        def perform(self, action: Action[Any]) -> Any:
            if not isinstance(action, Run):
                return super().perform(action)
            answer = super().perform(replace(action, seconds=1e-12, clocks=None))
            return replace(answer, status="diverged", end_seconds=self.now)

        @property
        def now(self) -> float:
            return 1.0

        @now.setter
        def now(self, value: float) -> None:
            pass

    played = play(lambda job: reckless_never(), Stuck(toy().job))
    assert played.outcome.status == "diverged"
    assert len(played.exchanges) == 1


def test_closing_the_driver_closes_the_tuner() -> None:
    closed: list[bool] = []

    def endless(job: Job) -> Generator[Any, Any, None]:
        try:
            while True:
                yield from Run(clocks=1)
        finally:
            closed.append(True)

    system = toy()
    running = drive(endless(system.job), system)
    next(running)
    running.close()
    assert closed == [True]


def test_a_target_reached_too_late_is_not_reached() -> None:
    class Late(Toy):
        """Runs beyond its budget."""

        def perform(self, action: Action[Any]) -> Any:
            answer = super().perform(action)
            self.now, self.status = 21.0, "target"
            return answer

    played = play(reckless, Late(toy().job))
    assert (played.outcome.status, played.outcome.seconds) == ("budget", 21.0)
