"""MLtuner: tune the training tunables of a job in branches, at its start and whenever it stops improving (Cui, Ganger &
Gibbons, "MLtuner: System Support for Automatic Machine Learning Tuning", 2018). Options cover the points where the paper and
its public code differ.

Settings are tried in branches of the running job, each for a short time, and the branch whose training loss falls fastest
goes on (`tuners.mltuner.trials`, which has Algorithm 1, and `tuners.mltuner.summariser`). After every epoch the model is
validated; if it has not improved for some epochs, the tunables are tuned again (Section 4.4). The tuner uses training losses
during a search and validation quality between searches. Where we differ or had to choose:

* The best model so far is kept as a branch (``snapshot="best"``), and every search starts from it. The paper starts from the
  current model and frees it (``snapshot="none"``); then there is no way back if training diverges, or if the accuracy falls
  although the training loss does, too.
* Re-tuning begins one epoch before the rule of convergence would hold, and the epoch after it decides. With
  ``plateau_epochs=5``, the paper's rule for its larger jobs (20 for Cifar10), that is after 4. An epoch as good as the best
  is not an improvement.
* A trial lasts at most one epoch, also in the first search, as in the public code, and the first search has at most 40
  trials and half of the budget, which is our choice. The paper bounds only re-tuning (``bound="retune"``): if an epoch is
  short, the trials of the first search double to many epochs. A re-tuning has no more trials than the search before.
* A job whose target is a loss is tuned once and trained to it, without re-tuning (Section 5.1), unless ``retune`` says
  otherwise. For adaptive optimizers ``tuned="rate"`` with ``retune=False`` tunes only the initial rate (Section 5.3).
* ``initial=False`` begins with the job's own setting and only re-tunes (Section 5.5); ``copies=2`` doubles the tunables
  (Section 5.6).
* When a search finds nothing, or the rule of convergence holds, the tuner ends: the job goes on with the best model.

All this is ``as_printed=True``. The default is ours, `tuners.mltuner.frugal`: the same branches, and trials that begin only
while they are worth their time. On jobs of minutes or hours the paper's search takes longer than the training it speeds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

from msgspec import Meta

from tuners.actions import Action, Job, Space, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.factory_options import AboveZero, Count, NonNegative, Whole, options_checked_by
from tuners.mltuner.frugal import frugal
from tuners.mltuner.moves import no_move_is_free
from tuners.mltuner.summariser import Summariser
from tuners.mltuner.trials import Rules, find, warn_of
from tuners.search.branches import TrainedBranch, drop, fork
from tuners.search.epochs import plateaued, train_epoch, validate
from tuners.search.searchers import Searcher, SearcherKind, searcher
from tuners.search.tunables import Convention, Which, no_tunable_is_free, tunables

__all__ = ["MakeSearcher", "mltuner"]

MakeSearcher: TypeAlias = Callable[[Space, Sequence[int]], Searcher]
"""Makes a searcher from a space and a seed."""

_SHARE = 0.5  # share of the budget after which the first search begins no further trial


def _nothing_is_free(job: Job, tuned: Which, as_printed: bool) -> str:
    """Why there is nothing to tune in `job`, or "". Unlike the paper's form, ours tunes the policy, too."""
    return no_tunable_is_free(job, tuned) if as_printed else no_move_is_free(job, tuned)


def _check_options(options: Mapping[str, Any]) -> None:
    if not options["as_printed"]:
        _check_ours(options)


@options_checked_by(_check_options)
@nothing_to_tune_if(_nothing_is_free)
def mltuner(
    job: Job,
    *,
    as_printed: bool = False,
    search: SearcherKind | MakeSearcher = "tpe",
    tuned: Which = "all",
    momentum: Convention = "heavy_ball",
    copies: Count = 1,
    initial: bool = True,
    retune: bool | None = None,
    plateau_epochs: Annotated[int, Meta(ge=2)] = 5,
    most_trials: Count = 40,
    bound: Literal["always", "retune"] = "always",
    snapshot: Literal["best", "none"] = "best",
    windows: Annotated[int, Meta(ge=2)] = 10,
    windows_rule: Literal["equal", "code"] = "equal",
    diverges: AboveZero = 10.0,
    least_clocks: Count = 3,
    start_clocks: Whole = 10,
    decision_seconds: NonNegative = 0.0,
    trial_time: Literal["decided", "branch"] = "decided",
) -> Tuner:
    """Tune at the start, train by epochs, and tune again on a plateau, until that no longer helps.

    A job without free tunables, or without losses, runs as it is. Raises ValueError for options that are out of range, and,
    without `as_printed`, for those of the paper's form: all but `tuned` and `copies`.

    Args:
        job: what is tuned.
        as_printed: the paper's form, to which the other options belong but `tuned` and `copies`; by default ours, which
            makes a trial only while that is expected to pay.
        search: how settings are proposed: Optuna's Parzen estimator, a Gaussian process, at random, or on a grid.
        tuned: all free tunables, or the learning rate alone.
        momentum: the convention of rate and momentum in the searched space (see `tuners.search.tunables`).
        copies: how often each tunable is in the searched space; copies have no effect (Section 5.6).
        initial: whether to tune at the start of the job.
        retune: whether to tune again on a plateau; by default where the target is an accuracy.
        plateau_epochs: epochs without improvement after which training has converged.
        most_trials: trials of the first search at the most, where that has a bound.
        bound: whether every search is bounded, to trials of one epoch and to some of them, or only those that tune again.
        snapshot: whether the best model so far is kept as a branch, and every search starts from it.
        windows: windows into which the losses of a trial are averaged, K.
        windows_rule: exactly K windows, or as many as in the public code.
        diverges: a trial has diverged if its last window is above this multiple of the starting loss.
        least_clocks: clocks of every trial, one push of each worker each.
        start_clocks: clocks for the loss at the start of a search; 0 compares each trial with its own first window.
        decision_seconds: first trial time; 0 measures it on the first trial.
        trial_time: whether later trials last as long as was decided, or as the branch that converged did.
    """
    if not as_printed:
        _check_ours({**locals()})
        yield from frugal(job, tuned=tuned, copies=copies)
        return
    if plateau_epochs < 2 or min(most_trials, copies, least_clocks) < 1 or min(start_clocks, decision_seconds) < 0:
        raise ValueError(
            f"Cannot tune with plateau_epochs={plateau_epochs}, most_trials={most_trials}, copies={copies}, "
            f"least_clocks={least_clocks}, start_clocks={start_clocks}, decision_seconds={decision_seconds}: give 2 epochs "
            "or more, at least 1 of the next three, and nothing negative."
        )
    make = search if callable(search) else _named(search)
    summariser = Summariser(windows=windows, windows_rule=windows_rule, diverges=diverges)
    what = tunables(job, tuned, copies=copies, convention=momentum)
    if no_tunable_is_free(job, tuned):
        return
    training = _Training(job, TrainedBranch(0, job.start), most_trials, snapshot == "best")
    retunes = job.target.metric == "accuracy" if retune is None else retune

    def tune(why: str, *, first: bool = False) -> Generator[Action[Any], Any, bool]:
        """One search from the current model, for the reason `why`; the winner goes on. False if there is none."""
        unbounded = first and bound == "retune"
        rules = Rules(
            most=math.inf if unbounded else training.trials,
            epochs=math.inf if unbounded else 1,
            until_seconds=_SHARE * job.budget_seconds if first and not unbounded else math.inf,
            least_clocks=least_clocks,
            start_clocks=start_clocks,
            decision_seconds=decision_seconds,
            own_time=trial_time == "branch",
        )
        training.searches += 1
        with suppress(_SearcherError):
            proposes = _made(make, what.space, job.seed, training.searches)
            found = yield from find(job, training.trained, what, proposes, summariser, rules, why)
            training.follow(found.parent)
            training.news = found.why
            training.trials = found.tried if found.winner is not None else training.trials
            return (yield from training.switch_to(found.winner))
        return False

    # Initial tuning, Section 3.3.
    yield from training.begin()
    if initial:
        yield from tune("initial tuning", first=True)

    # Training and re-tuning, Section 4.4.
    while True:
        lost = not (yield from training.epoch())
        converged = retunes and plateaued(training.qualities, plateau_epochs)
        if converged or (lost and training.good is None):
            break
        if lost or (retunes and plateaued(training.qualities, plateau_epochs - 1)):
            yield from training.restore_best()
            why = "the last epoch was lost" if lost else f"none of the last {plateau_epochs - 1} epochs was the best"
            if not (yield from tune(f"tuned again: {why}")):
                break
    yield from training.finish()


def _check_ours(given: Mapping[str, Any]) -> None:
    """Raise ValueError for options that the default form of the tuner does not have."""
    if given["copies"] < 1:
        raise ValueError(f"Cannot tune with copies={given['copies']}: give at least 1.")
    papers = {p.name: p.default for p in signature(mltuner).parameters.values() if p.name not in ("job", "tuned", "copies")}
    foreign = ", ".join(f"{name}={given[name]!r}" for name, default in papers.items() if given[name] != default)
    if foreign:
        raise ValueError(f"Cannot tune with {foreign}: only the paper's form has this option; add as_printed=true.")


class _SearcherError(Exception):
    """A searcher cannot be made."""


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
    """The best model so far."""

    trained: TrainedBranch  # the current branch until that trains on, then a copy of it
    quality: float


@dataclass(slots=True)
class _Training:
    """The state of the job: the branch that is trained, and the best model so far."""

    job: Job
    trained: TrainedBranch
    trials: int  # limit of the next search
    keeps_best: bool
    good: _Good | None = None
    searches: int = 0
    qualities: list[float] = field(default_factory=list)  # after each epoch
    news: str = ""  # what came of the last search, for people; the next epoch tells it

    def begin(self) -> Generator[Action[Any], Any, None]:
        """Keep the initial model as the best so far, if a snapshot is wanted."""
        if self.keeps_best:
            self.good = _Good(self.trained, (yield from validate(self.job, self.trained.branch)))

    @property
    def at_best(self) -> bool:
        """Whether the current branch is the best model itself."""
        return self.good is not None and self.good.trained.branch == self.trained.branch

    def epoch(self) -> Generator[Action[Any], Any, bool]:
        """Train for one epoch; False if the branch is lost by that: it diverged, or the system refuses to run it."""
        # Training changes the branch in place, so the best model is copied first.
        if self.good is not None and self.at_best:
            copy = yield from fork(self.trained.branch)
            self.good = None if copy is None else self.good._replace(trained=self.trained._replace(branch=copy))
        done = yield from train_epoch(self.job, self.trained, self.news)
        self.news = ""
        self.trained = done.trained
        self.qualities.append(done.quality)
        if self.keeps_best and not done.lost and (self.good is None or done.quality > self.good.quality):
            if self.good is not None:
                yield from drop(self.good.trained.branch)
            self.good = _Good(self.trained, done.quality)
        return not done.lost

    def restore_best(self) -> Generator[Action[Any], Any, None]:
        """Go on from the best model so far, if it was kept."""
        if self.good is not None and not self.at_best:
            yield from drop(self.trained.branch)
            # It may have to recover first, of which only the other one has told.
            self.trained = self.good.trained._replace(nodes=self.trained.nodes)

    def follow(self, parent: TrainedBranch) -> None:
        """Take over what a search has done to the current branch: after a loss of machines it had to train it on."""
        if self.good is not None and self.at_best:
            self.good = self.good._replace(trained=parent)
        self.trained = parent

    def switch_to(self, winner: TrainedBranch | None) -> Generator[Action[Any], Any, bool]:
        """Go on with the winner of a search; False if there is none."""
        if winner is None:
            return False
        # The best model stays: the next search, or the end of the tuner, may need it.
        if not self.at_best:
            yield from drop(self.trained.branch)
        self.trained = winner
        return True

    def finish(self) -> Generator[Action[Any], Any, None]:
        """Keep the better of the best and the current model, and free the other."""
        if self.good is None or self.at_best:
            return
        if self.qualities and self.good.quality > self.qualities[-1]:
            yield from self.restore_best()
        else:
            yield from drop(self.good.trained.branch)
