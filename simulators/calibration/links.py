"""Chooses how links are shared by the errors of rows that are left out: no recording says it, but its times may.

Every form is fitted, with the same constants, and predicts each combination of policy, workers and servers from the others.
This error is that of the linear model at the solution (`TimesSolution.left_out_costs`): no form is fitted once per
combination.
The form with the least error over all workloads of a recording is chosen; of forms with the same error, the first one. How
clear that is tells a paired t-test over the combinations. Flows to unlike servers end by themselves, as those of real
connections do, unless this test says otherwise: few recordings have many such servers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from simulators.calibration.determined import fit_determined, fittable
from simulators.calibration.least_squares import TimesProblem, TimesSolution
from simulators.calibration.model import Constants, Row, comparable
from simulators.cluster.cluster import Discipline

__all__ = ["FORMS", "QUEUES", "UNEVEN_BYTES", "OtherSharing", "Sharing", "SharingChoice", "choose", "told_apart"]

_Costs = NDArray[np.float64]  # of combinations

_ROUNDS = 2  # of correcting the closed form to the engine, for each further form
_SAME = 1e-3  # relative difference of costs below which two forms count as equal
_CLEAR = 0.95  # probability at which a form counts as worse than the chosen one
QUEUES = ("fifo", "serial")  # disciplines that serve in the order of arrival
UNEVEN_BYTES = 77e3
"""Where links are shared unevenly, shares of flows of this size are drawn with a deviation of 1: the whole model of the
recordings in `traces/data`. Flows of its halves and thirds share less evenly there."""


class Sharing(NamedTuple):
    """How transfers share links, as in `Cluster`."""

    discipline: Discipline = "maxmin"
    control_queue: float = 0.0
    independent_flows: bool = True

    @classmethod
    def of(cls, constants: Constants) -> Sharing:
        """As the links of `constants` are shared."""
        return cls(constants.discipline, constants.control_queue, constants.independent_flows)

    def put_into(self, constants: Constants) -> Constants:
        """The constants with links that are shared so."""
        return replace(constants, **self._asdict(), uneven_bytes=UNEVEN_BYTES if self.discipline == "uneven" else 0.0)

    def __str__(self) -> str:
        together = "" if self.independent_flows else ", flows end together"
        return f"{self.discipline}, control queue {self.control_queue:g}{together}"


FORMS = tuple(
    Sharing(discipline, queue, independent)
    for independent in (True, False)
    for queue in (0.0, 1.0)
    for discipline in get_args(Discipline)
    if not (queue and discipline == "serial")  # requests are in the one queue as it is
)
"""Every form that can be chosen, the default first."""


def told_apart(forms: Sequence[Sharing], rows: Iterable[Row]) -> tuple[Sharing, ...]:
    """The forms that `rows` can tell apart: where all servers are alike, only those with the flows of the first one.

    Where servers send snapshots, the engine has no queues: such forms are left out, unless there is no other.
    """
    rows = list(rows)
    if any(row.snapshot_clocks for row in rows):
        forms = [form for form in forms if form.discipline not in QUEUES] or forms
    if any(row.unlike_servers for row in rows):
        return tuple(forms)
    return tuple(form for form in forms if form.independent_flows == forms[0].independent_flows)


class OtherSharing(NamedTuple):
    """A form that was not chosen."""

    links: Sharing
    error: float  # relative, of rows that are left out
    worse: bool  # clearly, than the chosen one


@dataclass(frozen=True, slots=True)
class SharingChoice:
    """The form that was chosen, and the others."""

    links: Sharing
    error: float  # relative, of rows that are left out
    rivals: tuple[OtherSharing, ...]

    @property
    def clear(self) -> bool:
        """Whether every other form is clearly worse."""
        return all(rival.worse for rival in self.rivals)

    def __str__(self) -> str:
        said = [f"links: {self.links}, chosen by the error of rows that are left out, {self.error:.1%}"]
        for worse, words in ((True, "clearly more"), (False, "not clearly more")):
            if mine := [f"{rival.error:.1%} ({rival.links})" for rival in self.rivals if rival.worse == worse]:
                said.append(f"{words} otherwise: {', '.join(mine)}")
        return "; ".join(said)


def choose(
    rows: Mapping[str, Sequence[Row]], given: Mapping[str, Constants], forms: Sequence[Sharing], without: Sequence[str] = ()
) -> SharingChoice | None:
    """The form with the least error over all workloads; None where in none of them parts of cycles were timed, of more than
    one combination: of one, nothing is left when it is left out.

    Rows and initial constants are by workload; constants in `without` stay as given. Flows do what they do in the first form
    unless the chosen one with other flows, if that is in `forms`, is clearly better. It costs an engine's pass over the
    settings for each further form, twice, beside one fit of the first form.
    """
    forms = told_apart(forms, [row for mine in rows.values() for row in mine])
    fitted = [first for name, mine in rows.items() if (first := _fitted(mine, given[name], forms[0], without)) is not None]
    if not fitted:
        return None
    count = sum(len(first.residuals) for first in fitted)

    def costs(form: Sharing) -> _Costs:
        return np.concatenate([_under(form, first).left_out_costs() for first in fitted])

    found = {form: costs(form) for form in forms if form.independent_flows == forms[0].independent_flows}
    least = min(float(of.sum()) for of in found.values())
    best = next(form for form, of in found.items() if float(of.sum()) <= (1 + _SAME) * least)
    other = best._replace(independent_flows=not best.independent_flows)
    if other in forms:
        found[other] = costs(other)
        if _worse(found[best] - found[other]):
            best = other
    errors = {form: math.sqrt(2 * float(of.sum()) / count) for form, of in found.items()}
    rivals = [OtherSharing(form, errors[form], _worse(of - found[best])) for form, of in found.items() if form != best]
    return SharingChoice(best, errors[best], tuple(rivals))


def _fitted(rows: Sequence[Row], given: Constants, form: Sharing, without: Sequence[str]) -> TimesSolution | None:
    """The rows of a workload, fitted with links that are shared so; None where they cannot tell how."""
    rows = comparable(rows)
    free, refused = fittable(rows, given, without)
    if not any(row.has_parts for row in rows) or not (given.model_bytes or "model_bytes" in free):
        return None
    if len({row.combination for row in rows}) < 2:
        return None
    return fit_determined(TimesProblem(rows, form.put_into(given)), free, refused)[0]


def _under(form: Sharing, fitted: TimesSolution) -> TimesSolution:
    """The same with links that are shared in another form."""
    known = fitted.problem.given
    if form.put_into(known) == known:
        return fitted
    problem = fitted.problem.shared_as(form.put_into(known))
    if form.discipline in QUEUES:
        return fit_determined(problem, *fittable(problem.rows, problem.given))[0]
    return problem.corrected(replace(fitted, problem=problem), _ROUNDS)


def _worse(more: _Costs) -> bool:
    """Whether the costs of combinations, of which `more` are the differences, are clearly higher: a paired t-test."""
    if len(more) < 2:
        return False
    error = float(more.std(ddof=1)) / math.sqrt(len(more))
    return float(more.mean()) > error * float(t.ppf(_CLEAR, len(more) - 1))
