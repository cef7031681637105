"""MLtuner: tune the training tunables of a job by branching it, at its start and whenever it gets stuck (Cui, Ganger &
Gibbons, "MLtuner: System Support for Automatic Machine Learning Tuning", 2018), with its public code where the two part
ways.

Settings are tried in branches of the running job, each for a short while, and the one whose training loss falls fastest
goes on (`tuners.mltuner.trials`, `tuners.mltuner.summarizer`). After every epoch the model is validated; where it has not
become better for some epochs the tunables are tuned again (Section 4.4). It sees training losses while it searches and
validation quality between searches. Where we differ or had to choose:

* The best model so far is kept as a branch (``snapshot="best"``), and a search starts from it. The paper starts from the
  model as it is, and frees it (``snapshot="none"``): where training loss and accuracy part, or training diverges, there is
  no way back.
* A re-tuning begins one epoch before the rule of convergence would hold, and the epoch after it decides: with
  ``plateau_epochs=5``, the paper's rule for its larger jobs (20 for Cifar10), after 4. An epoch that is as good as the best
  is not better.
* A trial lasts one epoch at most, in the first search, too, as in the public code; the paper has no such bound there
  (``bound="retune"``), and doubles its way to trials of many epochs where an epoch is short. A re-tuning has no more trials
  than the search before; the first search has 40 and half of the budget, which is our choice.
* A job whose target is a loss is tuned once and trained to it, with no re-tuning (Section 5.1); ``retune`` decides
  otherwise. The same serves adaptive optimizers: ``tuned="rate"`` with ``retune=False`` tunes their initial rate alone
  (Section 5.3).
* ``initial=False`` begins with the job's own setting and leaves all to re-tuning (Section 5.5), ``copies=2`` doubles the
  tunables (Section 5.6).
* Once nothing is found, or the rule of convergence holds, the tuner has finished: the job goes on with the best model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from tuners.actions import Action, Job, Space, Tuner
from tuners.mltuner.summarizer import Summariser
from tuners.mltuner.trials import Rules, find, warn_of
from tuners.search.epochs import TrainedBranch, drop, fork, plateaued, train_epoch, validate
from tuners.search.searchers import Searcher, SearcherKind, searcher
from tuners.search.tunables import Convention, Which, tunables

__all__ = ["MakeSearcher", "mltuner"]

MakeSearcher: TypeAlias = Callable[[Space, Sequence[int]], Searcher]
"""From a space and a seed to a searcher of one's own."""

_SHARE = 0.5  # of the budget, after which the first search begins no further trial


def mltuner(
    job: Job,
    *,
    search: SearcherKind | MakeSearcher = "tpe",
    tuned: Which = "all",
    momentum: Convention = "heavy_ball",
    copies: int = 1,
    initial: bool = True,
    retune: bool | None = None,
    plateau_epochs: int = 5,
    most_trials: int = 40,
    bound: Literal["always", "retune"] = "always",
    snapshot: Literal["best", "none"] = "best",
    windows: int = 10,
    windows_rule: Literal["equal", "code"] = "equal",
    diverges: float = 10.0,
    least_clocks: int = 3,
    start_clocks: int = 10,
    decision_seconds: float = 0.0,
    trial_time: Literal["decided", "branch"] = "decided",
) -> Tuner:
    """Tune at the start, train by the epoch, and tune again on a plateau, until that helps no more.

    A job without a tunable to tune, or without losses, just runs. Raises ValueError for options that make no tuner.
    """
    if plateau_epochs < 2 or min(most_trials, copies, least_clocks) < 1 or min(start_clocks, decision_seconds) < 0:
        raise ValueError(
            f"Cannot tune with plateau_epochs={plateau_epochs}, most_trials={most_trials}, copies={copies}, "
            f"least_clocks={least_clocks}, start_clocks={start_clocks}, decision_seconds={decision_seconds}: give 2 epochs "
            "or more, at least 1 of the next three, and nothing negative."
        )
    make = search if callable(search) else _named(search)
    summariser = Summariser(windows=windows, windows_rule=windows_rule, diverges=diverges)
    what = tunables(job, tuned, copies=copies, convention=momentum)
    if not what.space.knobs or job.target.counts:
        return
    at = _Training(job, TrainedBranch(0, job.start), most_trials, snapshot == "best")
    retunes = job.target.metric == "accuracy" if retune is None else retune

    def tune(*, first: bool = False) -> Generator[Action[Any], Any, bool]:
        """Find a setting for the model as it is, and let the winner go on; False where there is none."""
        rules = Rules(
            most=at.trials,
            epochs=math.inf if first and bound == "retune" else 1,
            until_seconds=_SHARE * job.budget_seconds if first else math.inf,
            least_clocks=least_clocks,
            start_clocks=start_clocks,
            decision_seconds=decision_seconds,
            longest=trial_time == "branch",
        )
        at.searches += 1
        with suppress(_SearcherError):
            found = yield from find(job, at.line, what, _made(make, what.space, job.seed, at.searches), summariser, rules)
            at.trials = found.tried if found.line is not None else at.trials
            return (yield from at.go_on(found.line))
        return False

    # Initial tuning, Section 3.3.
    yield from at.begin()
    if initial:
        yield from tune(first=True)

    # Training and re-tuning, Section 4.4.
    while True:
        lost = not (yield from at.epoch())
        converged = retunes and plateaued(at.qualities, plateau_epochs)
        if converged or (lost and at.good is None):
            break
        if lost or (retunes and plateaued(at.qualities, plateau_epochs - 1)):
            yield from at.go_back()
            if not (yield from tune()):
                break
    yield from at.finish()


class _SearcherError(Exception):
    """A searcher that cannot even be made."""


def _named(kind: SearcherKind) -> MakeSearcher:
    if kind not in get_args(SearcherKind):
        raise ValueError(f"Cannot search by {kind!r}: choose one of {', '.join(get_args(SearcherKind))}.")
    return lambda space, seed: searcher(kind, space, seed)


def _made(make: MakeSearcher, space: Space, *seed: int) -> Searcher:
    try:
        return make(space, seed)
    except Exception as error:
        warn_of(error, "It cannot be made, and tuning ends")
        raise _SearcherError(str(error)) from error


# ---------------------------------------------------------------------------------------------------------------- training


class _Good(NamedTuple):
    """A model worth keeping."""

    line: TrainedBranch  # a branch of its own, or, until that trains on, the one that is trained
    quality: float


@dataclass(slots=True)
class _Training:
    """The job: the line that is being trained, and the best model so far."""

    job: Job
    line: TrainedBranch
    trials: int  # that the next search may make
    keeps: bool
    good: _Good | None = None
    searches: int = 0
    qualities: list[float] = field(default_factory=list)  # after each epoch

    def begin(self) -> Generator[Action[Any], Any, None]:
        if self.keeps:
            self.good = _Good(self.line, (yield from validate(self.job, self.line.branch)))

    @property
    def at_best(self) -> bool:
        """Whether the branch that is trained is the best model itself."""
        return self.good is not None and self.good.line.branch == self.line.branch

    def epoch(self) -> Generator[Action[Any], Any, bool]:
        """Train for one epoch; False where the line is lost by that."""
        if self.good is not None and self.at_best:
            copy = yield from fork(self.line.branch)
            self.good = None if copy is None else self.good._replace(line=self.line._replace(branch=copy))
        done = yield from train_epoch(self.job, self.line)
        self.line = done.trained
        self.qualities.append(done.quality)
        if self.keeps and not done.lost and (self.good is None or done.quality > self.good.quality):
            if self.good is not None:
                yield from drop(self.good.line.branch)
            self.good = _Good(self.line, done.quality)
        return not done.lost

    def go_back(self) -> Generator[Action[Any], Any, None]:
        """To the best model so far, where it was kept."""
        if self.good is not None and not self.at_best:
            yield from drop(self.line.branch)
            self.line = self.good.line

    def go_on(self, winner: TrainedBranch | None) -> Generator[Action[Any], Any, bool]:
        """With the winner of a search, if there is one."""
        if winner is None:
            return False
        if not self.at_best:
            yield from drop(self.line.branch)
        self.line = winner
        return True

    def finish(self) -> Generator[Action[Any], Any, None]:
        """Leave the better one of the two models, for the job to go on with."""
        if self.good is None or self.at_best:
            return
        if self.qualities and self.good.quality > self.qualities[-1]:
            yield from self.go_back()
        else:
            yield from drop(self.good.line.branch)
