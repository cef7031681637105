"""Chooses how links are shared, and what else limits servers, by the errors of rows that are left out: no recording says it,
but its times may.

Every form is fitted, with the same constants, and predicts each combination of policy, workers and servers from the others.
This error is that of the linear model at the solution (`TimesSolution.left_out_costs`): no form is fitted once per
combination.
The form with the least error over all workloads of a recording is chosen; of forms with the same error, the first one. How
clear that is tells a paired t-test over the combinations. Flows to unlike servers end by themselves, as those of real
connections do, unless this test says otherwise: few recordings have many such servers.

Further physics (a switch in the middle, servers of several threads, updates that take longer with more workers) is tried
beside that, and kept only if it errs less in nearly all weightings of the combinations. Where the constant of the physics
is refused, the form is no other than that without it: it is not tried further.

Forms that are not told apart may all be the right one. How likely each is, a Bayesian bootstrap over the combinations says
(Rubin 1981; as weights of models, Yao et al. 2018, Using Stacking to Average Bayesian Predictive Distributions): predictions
are spread over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from simulators.calibration.determined import fit_determined, fittable
from simulators.calibration.least_squares import TimesProblem, TimesSolution
from simulators.calibration.model import Constants, Switch
from simulators.calibration.recorded.row import Row
from simulators.calibration.recorded.speeds import comparable
from simulators.cluster.cluster import Discipline

__all__ = ["FORMS", "QUEUES", "UNEVEN_BYTES", "OtherSharing", "Sharing", "SharingChoice", "choose", "told_apart"]

_Costs = NDArray[np.float64]  # of combinations

_ROUNDS = 2  # of correcting the closed form to the engine, for each further form
_SAME = 1e-3  # relative difference of costs below which two forms count as equal
_CLEAR = 0.95  # probability at which a form counts as worse than the chosen one
_SURE = 0.95  # part of the weightings of combinations in which further physics errs less, from which it is kept
_PROMISING = 0.9  # of the best form's cost: what that of further physics must be below, corrected once, to be tried further
_MOST_FURTHER = 3  # forms with further physics that are tried further, those with the least costs
_FEW_EVALUATIONS = 20  # of the search that finds that out
_OF_FURTHER = ("service_bytes_per_second", "switch_bytes_per_second", "apply_growth")
_THREADS = (2, 4)  # of servers, that are tried
_WEIGHINGS = 4000  # of the bootstrap
_NARROW = 0.95  # of what links carry together, that a switch must carry less than: more is within the errors of a fit
_HARDLY = 0.01  # chance below which a form takes no part in predictions
_EVEN: tuple[Discipline, ...] = ("maxmin", "uneven")  # disciplines that share links among all transfers
QUEUES = ("fifo", "serial")  # disciplines that serve in the order of arrival
UNEVEN_BYTES = 77e3
"""Where links are shared unevenly, shares of flows of this size are drawn with a deviation of 1: the whole model of the
recordings in `traces/data`. Flows of its halves and thirds share less evenly there."""


class Sharing(NamedTuple):
    """How transfers share links, as in `Cluster`."""

    discipline: Discipline = "maxmin"
    control_queue: float = 0.0
    independent_flows: bool = True
    switch: Switch = "none"
    server_threads: int = 1
    updates_grow: bool = False

    @classmethod
    def of(cls, constants: Constants) -> Sharing:
        """As the links of `constants` are shared."""
        return cls(*(getattr(constants, name) for name in cls._fields))

    def put_into(self, constants: Constants) -> Constants:
        """The constants with links that are shared so."""
        # The engine has no rule for flows that end by themselves beside these. Alike servers tell of these, and have no such
        # flows; unlike ones can be predicted nevertheless.
        apart = self.independent_flows and self.switch == "none" and self.server_threads == 1
        uneven = UNEVEN_BYTES if self.discipline == "uneven" else 0.0
        return replace(constants, **self._replace(independent_flows=apart)._asdict(), uneven_bytes=uneven)

    @property
    def plain(self) -> Sharing:
        """The same way to share links, without further physics."""
        return Sharing(*self[:3])

    def has_effect(self, fitted: Iterable[Constants]) -> bool:
        """Whether the further physics changes any time, by the constants that were `fitted` under this form."""
        fitted = list(fitted)
        switched = self.switch == "none" or any(math.isfinite(c.switch_bytes_per_second) for c in fitted)
        return switched and (not self.updates_grow or any(c.apply_growth > 0 and c.apply_seconds > 0 for c in fitted))

    def __str__(self) -> str:
        said = [self.discipline, f"control queue {self.control_queue:g}"]
        said += ["flows end together"] if not self.independent_flows else []
        said += [f"a switch, {self.switch}"] if self.switch != "none" else []
        said += [f"servers of {self.server_threads} threads"] if self.server_threads > 1 else []
        said += ["updates grow with workers"] if self.updates_grow else []
        return ", ".join(said)


FORMS = tuple(
    Sharing(discipline, queue, independent)
    for independent in (True, False)
    for queue in (0.0, 1.0)
    for discipline in get_args(Discipline)
    if not (queue and discipline == "serial")  # requests are in the one queue as it is
)
"""Every form that can be chosen without further physics, the default first."""


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
    chance: float = 0.0  # that it has the least error of other combinations


@dataclass(frozen=True, slots=True)
class SharingChoice:
    """The form that was chosen, and the others."""

    links: Sharing
    error: float  # relative, of rows that are left out
    rivals: tuple[OtherSharing, ...]
    fitted: Mapping[Sharing, Mapping[str, Constants]] = field(default_factory=dict, compare=False, repr=False)
    # The constants of every form, by workload.
    plain: SharingChoice | None = field(default=None, compare=False, repr=False)
    # What is chosen without the further physics of `links`; None: it has none.

    def undecided(self, workload: str) -> tuple[tuple[float, Constants], ...]:
        """The chance of every form that is not told from the chosen one, and a workload's constants under it."""
        return tuple(
            (rival.chance, self.fitted[rival.links][workload])
            for rival in self.rivals
            if not rival.worse and rival.chance >= _HARDLY and workload in self.fitted.get(rival.links, {})
        )

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
    rows: Mapping[str, Sequence[Row]],
    given: Mapping[str, Constants],
    forms: Sequence[Sharing],
    without: Sequence[str] = (),
    wanted: Sequence[Row] = (),
) -> SharingChoice | None:
    """The form with the least error over all workloads; None where in none of them parts of cycles were timed, of more than
    one combination: of one, nothing is left when it is left out.

    Rows and initial constants are by workload; constants in `without` stay as given. Flows do what they do in the first form
    unless the chosen one with other flows, if that is in `forms`, is clearly better. It costs an engine's pass over the
    settings for each further form, twice (queues: four times), beside one fit of the first form. Where all servers are alike
    and do nothing else, further physics is tried, unless servers of the `wanted` rows, which are to be predicted, also work.
    """
    every = [row for mine in rows.values() for row in mine]
    forms = told_apart(forms, every)
    firsts = {name: _fitted(mine, given[name], forms[0], without) for name, mine in rows.items()}
    fitted = {name: first for name, first in firsts.items() if first is not None}
    if not fitted:
        return None
    first = [form for form in forms if form.independent_flows == forms[0].independent_flows]
    solved = {form: _all_under(form, fitted, without) for form in first}
    found = {form: _costs(of) for form, of in solved.items()}
    least = min(float(of.sum()) for of in found.values())
    best = plain = next(form for form, of in found.items() if float(of.sum()) <= (1 + _SAME) * least)
    other = best._replace(independent_flows=not best.independent_flows)
    if other in forms:
        solved[other] = _all_under(other, fitted, without)
        found[other] = _costs(solved[other])
        if _worse(found[best] - found[other]):
            best = plain = other
    elif not any(row.unlike_servers or row.snapshot_clocks for row in every) and not any(
        row.shared for row in (*every, *wanted)
    ):
        more = _promising(_further(found, best), fitted, solved, float(found[best].sum()), without)
        solved |= more
        found |= {form: _costs(of) for form, of in more.items()}
        surer = [form for form in more if float(np.mean(_weighted(found[best] - found[form]) > 0)) >= _SURE]
        plain, best = best, min((best, *surer), key=lambda form: float(found[form].sum()))
    count = sum(len(first.residuals) for first in fitted.values())
    constants = {form: {name: of.constants for name, of in mine.items()} for form, mine in solved.items()}
    made = _choice(best, found, count, constants)
    if best == plain:
        return made
    return replace(made, plain=_choice(plain, {f: of for f, of in found.items() if f == f.plain}, count, constants))


def _choice(
    best: Sharing, found: Mapping[Sharing, _Costs], count: int, constants: Mapping[Sharing, Mapping[str, Constants]]
) -> SharingChoice:
    """The choice of a form, of which costs are `found` for `count` residuals, and what is said of the others."""
    errors = {form: math.sqrt(2 * float(of.sum()) / count) for form, of in found.items()}
    worse = {form: _worse(of - found[best]) for form, of in found.items()}
    left = [form for form in found if not worse[form]]
    drawn = _weighted(np.stack([found[form] for form in left], axis=1))
    chances = dict(zip(left, np.bincount(drawn.argmin(axis=1), minlength=len(left)) / _WEIGHINGS, strict=True))
    rivals = [OtherSharing(f, errors[f], worse[f], float(chances.get(f, 0.0))) for f in found if f != best]
    return SharingChoice(best, errors[best], tuple(rivals), constants)


def _costs(solved: Mapping[str, TimesSolution]) -> _Costs:
    """The costs of all combinations that are left out, of all workloads."""
    return np.concatenate([of.left_out_costs() for of in solved.values()])


def _further(found: Mapping[Sharing, _Costs], best: Sharing) -> list[Sharing]:
    """Forms with further physics: each kind beside the disciplines that it may be confused with."""
    plain = {form.discipline: form for form in reversed([*found]) if not form.control_queue}
    even = [plain[d] for d in _EVEN if d in plain]
    shared = [min(even, key=lambda form: float(found[form].sum()))] if even else []
    first_come, serial = ([plain[d]] if d in plain else [] for d in QUEUES)
    return [
        *(form._replace(switch=switch) for form in (*shared, *first_come) for switch in ("each way", "both ways")),
        *(form._replace(server_threads=_THREADS[0]) for form in (*shared, *first_come, *serial)),
        best._replace(updates_grow=True),
    ]


def _promising(
    further: Iterable[Sharing],
    fitted: Mapping[str, TimesSolution],
    solved: Mapping[Sharing, Mapping[str, TimesSolution]],
    cost: float,
    without: Sequence[str],
) -> dict[Sharing, dict[str, TimesSolution]]:
    """The forms that err less than the best one, by its `cost`, when the closed form is corrected to the engine once; at
    most `_MOST_FURTHER`. Those that are most alike to the first one come with them. None is without effect."""
    glimpsed = {form: {name: _glimpse(form, of, without) for name, of in solved[form.plain].items()} for form in further}
    tried = {form: of for form, of in glimpsed.items() if _has_effect(form, of)}
    costs = {form: float(_costs(of).sum()) for form, of in tried.items()}
    better = sorted((form for form in costs if costs[form] < _PROMISING * cost), key=costs.__getitem__)[:_MOST_FURTHER]
    alike = list[Sharing]()
    for form in better[:1]:
        if form.server_threads > 1:
            alike += [form._replace(server_threads=count) for count in _THREADS]
        if form.switch != "none" and form.discipline in _EVEN:
            alike += [form._replace(discipline=discipline) for discipline in _EVEN]
    made = {form: {name: of.problem.corrected(of, _ROUNDS) for name, of in tried[form].items()} for form in better}
    made |= {form: _all_under(form, fitted, without) for form in alike if form not in made}
    return {form: of for form, of in made.items() if _has_effect(form, of)}


def _has_effect(form: Sharing, solved: Mapping[str, TimesSolution]) -> bool:
    """Whether the further physics changes any time; a switch, that it is narrower than the links of some fitted row."""
    if form.switch != "none" and not any(_narrower(of.constants, of.problem.rows) for of in solved.values()):
        return False
    return form.has_effect(of.constants for of in solved.values())


def _narrower(constants: Constants, rows: Iterable[Row]) -> bool:
    """Whether the switch carries clearly less than the links of some row do together.

    Elsewhere it limits nothing: its rate only imitates what the form lacks, and would limit larger clusters.
    """
    ways = 2 if constants.switch == "both ways" else 1
    link = min(constants.nic_bytes_per_second, constants.service_bytes_per_second)
    most = 0.0
    for row in rows:
        each = row.nics or (1.0,) * (row.workers + row.servers)
        most = max(most, min(sum(each[: row.workers]), sum(each[row.workers :])))
    return constants.switch_bytes_per_second < _NARROW * ways * link * most


def _glimpse(form: Sharing, plain: TimesSolution, without: Sequence[str]) -> TimesSolution:
    """A form with further physics, fitted by a short search of the constants that the same form without it determines, and
    those that the physics needs."""
    problem = plain.problem.shared_as(form.put_into(plain.problem.given))
    problem.evaluations = _FEW_EVALUATIONS
    free, refused = fittable(problem.rows, problem.given, without)
    return fit_determined(problem, [n for n in free if n in (*plain.free, *_OF_FURTHER)], refused, rounds=0)[0]


def _all_under(form: Sharing, fitted: Mapping[str, TimesSolution], without: Sequence[str]) -> dict[str, TimesSolution]:
    """`_under`, of every workload."""
    return {name: _under(form, first, without) for name, first in fitted.items()}


def _fitted(rows: Sequence[Row], given: Constants, form: Sharing, without: Sequence[str]) -> TimesSolution | None:
    """The rows of a workload, fitted with links that are shared so; None where they cannot tell how."""
    rows = comparable(rows)
    free, refused = fittable(rows, given, without)
    if not any(row.has_parts for row in rows) or not (given.model_bytes or "model_bytes" in free):
        return None
    if len({row.combination for row in rows}) < 2:
        return None
    return fit_determined(TimesProblem(rows, form.put_into(given)), free, refused)[0]


def _under(form: Sharing, fitted: TimesSolution, without: Sequence[str]) -> TimesSolution:
    """The solution of the same problem with links that are shared in another form."""
    known = fitted.problem.given
    if form.put_into(known) == known:
        return fitted
    problem = fitted.problem.shared_as(form.put_into(known))
    if form.discipline in QUEUES or form.switch != "none":
        return fit_determined(problem, *fittable(problem.rows, problem.given, without))[0]
    return problem.corrected(replace(fitted, problem=problem), _ROUNDS)


def _weighted(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean costs of combinations, [c] or [c, f], under each of the bootstrap's weightings, [w] or [w, f]."""
    weights = np.random.default_rng(0).dirichlet(np.ones(len(costs)), _WEIGHINGS)
    found: NDArray[np.float64] = weights @ costs
    return found


def _worse(more: _Costs) -> bool:
    """Whether the costs of combinations, of which `more` are the differences, are clearly higher: a paired t-test."""
    if len(more) < 2:
        return False
    error = float(more.std(ddof=1)) / math.sqrt(len(more))
    return float(more.mean()) > error * float(t.ppf(_CLEAR, len(more) - 1))
