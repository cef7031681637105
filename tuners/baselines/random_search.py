"""Random search online: try random settings, each for a while on the running job, then keep the best.

Every search must beat this baseline (Bergstra & Bengio 2012). Trials take the job's own time (see
`tuners.search.online_search`) and are compared by how fast the training loss falls (see `tuners.search.progress_rate`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tuners.actions import Job, Scalar, Tuner
from tuners.adapters import from_ask_tell
from tuners.applicability import no_knob_is_free, nothing_to_tune_if
from tuners.factory_options import Count, Share

__all__ = ["random_search"]


@nothing_to_tune_if(no_knob_is_free)
def random_search(job: Job, *, trials: Count = 12, share: Share = 0.1, clocks: Count | None = None) -> Tuner:
    """Draw up to `trials` settings, every knob independently, and try them within `share` of the job's budget.

    Each trial takes the same time, or `clocks` where that is given.

    Args:
        job: what is tuned.
        trials: trials at the most, besides the start setting.
        share: of the job's budget, for all trials together.
        clocks: pushes per trial; by default all trials take the same time.
    """
    return from_ask_tell(_Draws, trials=trials, share=share, clocks=clocks)(job)


class _Draws:
    """Random proposals, without learning."""

    def __init__(self, job: Job) -> None:
        self._space = job.space
        self._rng = np.random.default_rng(job.seed)

    def ask(self) -> Mapping[str, Scalar]:
        return self._space.sample(self._rng)

    def tell(self, values: Mapping[str, Scalar], score: float) -> None:
        """Random search has nothing to learn."""
