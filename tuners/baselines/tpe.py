"""TPE online: Optuna's tree-structured Parzen estimator (Bergstra et al. 2011) proposes what to try next.

An example of the ask/tell adapter: this file asks Optuna, `tuners.search.online_search` makes the trials on the running job.
MLtuner's default searcher (HyperOpt) is the same estimator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import optuna

from tuners.actions import Job, Scalar, Tuner
from tuners.adapters import from_ask_tell
from tuners.applicability import no_knob_is_free, nothing_to_tune_if
from tuners.factory_options import Count, Share, Whole

__all__ = ["tpe"]


@nothing_to_tune_if(no_knob_is_free)
def tpe(job: Job, *, trials: Count = 12, share: Share = 0.1, clocks: Count | None = None, startup: Whole = 5) -> Tuner:
    """Try up to `trials` settings, the first `startup` of them random, within `share` of the job's budget.

    Each trial takes the same time, or `clocks` where that is given.

    Args:
        job: what is tuned.
        trials: trials at the most, besides the start setting.
        share: of the job's budget, for all trials together.
        clocks: pushes per trial; by default all trials take the same time.
        startup: random trials before the estimator proposes.
    """
    return from_ask_tell(lambda j: _Study(j, startup), trials=trials, share=share, clocks=clocks)(job)


class _Study:
    """One Optuna study over the job's space. A setting without a score ranks below all settings with one."""

    def __init__(self, job: Job, startup: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=job.seed, n_startup_trials=startup)
        self._distributions = job.space.to_optuna()
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._asked: optuna.Trial | None = None

    def ask(self) -> Mapping[str, Scalar]:
        self._asked = self._study.ask(self._distributions)
        return self._asked.params

    def tell(self, values: Mapping[str, Scalar], score: float) -> None:
        del values
        if self._asked is None:
            raise ValueError("Cannot tell a score that was not asked for: ask first.")
        if math.isfinite(score):
            self._study.tell(self._asked, score)
        else:
            self._study.tell(self._asked, state=optuna.trial.TrialState.PRUNED)
        self._asked = None
