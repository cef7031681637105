"""Chooses how links are shared by the errors of rows that are left out: no recording says it, but its times may.

Every form is fitted, with the same constants, and predicts each combination of policy, workers and servers from the others.
This error is that of the linear model at the solution (`TimesSolution.left_out_costs`): no form is fitted once per
combination.
The form with the least error over all workloads of a recording is chosen; of forms with the same error, the first one. How
clear that is tells a paired t-test over the combinations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from scipy.stats import t

from simulators.calibration.determined import fit_determined, fittable
from simulators.calibration.least_squares import TimesProblem
from simulators.calibration.model import Constants, Row, comparable

__all__ = ["FORMS", "OtherSharing", "Sharing", "SharingChoice", "choose"]

_ROUNDS = 2  # of correcting the closed form to the engine, for each further form
_SAME = 1e-3  # relative difference of costs below which two forms count as equal
_CLEAR = 0.95  # probability at which a form counts as worse than the chosen one


class Sharing(NamedTuple):
    """How transfers share links, as in `Cluster`."""

    discipline: Literal["maxmin", "uneven"] = "maxmin"
    control_queue: float = 0.0
    independent_flows: bool = True

    def put_into(self, constants: Constants) -> Constants:
        """The constants with links that are shared so."""
        return replace(constants, **self._asdict())

    def __str__(self) -> str:
        together = "" if self.independent_flows else ", flows end together"
        return f"{self.discipline}, control queue {self.control_queue:g}{together}"


FORMS = tuple(Sharing(discipline, queue) for queue in (0.0, 1.0) for discipline in ("maxmin", "uneven"))
"""Every form that can be chosen, the default first. In all of them flows end by themselves, as real connections do."""


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

    Rows and initial constants are by workload; constants in `without` stay as given. It costs an engine's pass over the
    settings for each further form, twice, beside one fit of the first form.
    """
    costs, counts = [], 0
    for name, mine in rows.items():
        found = _costs(mine, given[name], forms, without)
        if found is not None:
            costs.append(found[0])
            counts += found[1]
    if not costs:
        return None
    each = np.concatenate(costs, axis=1)  # [forms, combinations]
    total = each.sum(axis=1)
    best = int(np.argmax(total <= (1 + _SAME) * total.min()))
    errors = np.sqrt(2 * total / counts)
    rivals = [
        OtherSharing(form, float(errors[i]), _worse(each[i] - each[best])) for i, form in enumerate(forms) if i != best
    ]
    return SharingChoice(forms[best], float(errors[best]), tuple(rivals))


def _costs(
    rows: Sequence[Row], given: Constants, forms: Sequence[Sharing], without: Sequence[str]
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float64]], int] | None:
    """Of each form and combination, the cost of leaving it out, [forms, combinations]; and the number of residuals."""
    rows = comparable(rows)
    free, refused = fittable(rows, given, without)
    if not any(row.has_parts for row in rows) or not (given.model_bytes or "model_bytes" in free):
        return None
    if len({row.combination for row in rows}) < 2:
        return None
    first, _ = fit_determined(TimesProblem(rows, forms[0].put_into(given)), free, refused)
    solved = [first]
    for form in forms[1:]:
        problem = TimesProblem(rows, form.put_into(first.problem.given))
        solved.append(problem.corrected(replace(first, problem=problem), _ROUNDS))
    return np.array([s.left_out_costs() for s in solved]), len(first.residuals)


def _worse(more: np.ndarray[tuple[int], np.dtype[np.float64]]) -> bool:
    """Whether the costs of combinations, of which `more` are the differences, are clearly higher: a paired t-test."""
    if len(more) < 2:
        return False
    error = float(more.std(ddof=1)) / math.sqrt(len(more))
    return float(more.mean()) > error * float(t.ppf(_CLEAR, len(more) - 1))
