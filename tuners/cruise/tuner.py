"""Cruise: choose workers, servers, and their shares of data and model, by a cost model of an epoch (Lee et al., "Automating
System Configuration of Distributed Machine Learning", ICDCS 2019).

Monitors report what a mini-batch costs each worker (`tuners.cruise.monitor`). From that the model predicts the time of an
epoch under every split (`tuners.cruise.split`). When the best split gains enough, the job is reconfigured by migration.
Where we differ from the paper or had to choose:

* The gain compares two predictions, as in the public code. ``against="measured"`` compares the prediction with the measured
  epoch of the current split, so that an error of the model counts as a gain. The paper's threshold of 5 % is the default
  (the code's is 0), for one type of machine and for several (the code has none there). Mini-batches are not rounded up, as
  in Eq. 5; with `round_up` they are, as in Eq. 4.
* ``C_w.proc`` is the measured seconds per sample. ``M`` is the bytes of one pull under the current setting. ``b`` is the
  vendor's bandwidth of the NIC; ``bandwidth="measured"`` multiplies it by the share that the pulls achieved, because a
  server may serve slower than its NIC.
* The paper's model adds a server's work for all workers to each worker's compute. That is exact where all workers pull at
  the same time (BSP). Asynchronous workers pull while others compute, up to the servers' bandwidth. `overlap`, our
  addition, counts on that limit.
* `server_term` "paper" is Eq. 4, "sum" is the public code's. "own", our addition: a server serves others while it serves a
  worker with a narrow NIC, at the rate that the servers measure (the paper's server metrics), or else at that of its NIC.
  The terms differ where NICs differ, or where servers serve slower than their NIC. "queue", our default, has the same rates
  and overlap, and workers wait in a queue for busy servers (`tuners.cruise.queueing`). Where all workers wait for each
  other, "own" without overlap is used instead.
* Hence ``cruise[server_term=paper,overlap=false]`` is the paper's model and ``cruise[server_term=sum,overlap=false]`` the
  public code's. On machines of several types their choice can take far longer than the best (`tuners/cruise/README.md`).
* `solver` "milp" is the paper's programme (Fig. 3), "exact" is our method without a solver. The programme knows no overlap,
  so that ``cruise[solver=milp]`` does not count on it.
* After a reconfiguration all measurements are forgotten. Pushes during the reconfiguration do not count, nor does the first
  mini-batch after it, which may mix both settings.
* The threshold does not hold when machines come and go. When a machine in use was lost, any better split is taken. While a
  machine in use has been given notice, every split without it is better. New machines are used where that is strictly
  better than the best split of the machines in use, and gains `extra_gain` over the current split.
* No oscillation: of equal splits the current one is kept. A split that the job has left must gain twice the threshold to be
  chosen again, then four times, until machines come or go. Until then a refused split is not asked for again, either.
* Fig. 3 gives each machine its own compute time and bandwidth. Here machines of one type are alike, and of more than three
  types the most similar ones count as one, also for the solver: a straggler is no type of its own.
* Fig. 3 makes every machine a worker or a server. A server that would hold nothing is left idle, where the job allows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from tuners.actions import Job, NodeEvent, Reconfigure, Rejected, Run, Setting, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.cruise.blocks import place_blocks
from tuners.cruise.monitor import Memory, Monitor
from tuners.cruise.placement import ServerTerm
from tuners.cruise.split import TIE, CostModel, Roles, Solver, Wanted, roles
from tuners.factory_options import Count, NonNegative, Share, Whole, options_checked_by
from tuners.reasons import machines, short
from tuners.settings import Node

__all__ = ["cruise"]


def _roles_are_held(job: Job, blocks: bool) -> str:
    if blocks:
        return "" if job.blocks and job.space.frees("block") else "No blocks of embedding tables are free here."
    free = job.space.frees("worker_count") or job.space.frees("role")
    hint = " (`cruise[blocks=true]` places the blocks of embedding tables, which are)" if job.space.frees("block") else ""
    return "" if free else f"Neither the number of workers nor the roles of machines are free here{hint}."


def _check_options(options: Mapping[str, Any]) -> None:
    _server_term(options["server_term"], options["solver"], options["overlap"])


@options_checked_by(_check_options)
@nothing_to_tune_if(_roles_are_held)
def cruise(
    job: Job,
    *,
    gain: NonNegative = 0.05,
    extra_gain: NonNegative = 0.0,
    against: Literal["predicted", "measured"] = "predicted",
    bandwidth: Literal["nic", "measured"] = "nic",
    server_term: ServerTerm | None = None,
    overlap: bool | None = None,
    round_up: bool = False,
    solver: Solver = "exact",
    batches: Count = 10,
    warmup: Whole = 3,
    resume: Whole = 1,
    least: Count = 3,
    forget: Annotated[float, Meta(ge=0, lt=1)] = 0.0,
    recent: Whole = 0,
    newest: Share = 0.9,
    blocks: bool = False,
) -> Tuner:
    """Measure, predict, and reconfigure workers, servers and their shares when that gains more than `gain`.

    A job whose roles are not free keeps its setting. Raises ValueError for a solver that cannot be used.

    Args:
        job: what to tune.
        gain: predicted share of the current epoch time that a reconfiguration must save.
        extra_gain: the same, for a split that uses machines which have joined.
        against: the epoch time to compare with: the predicted or the measured one of the current split.
        bandwidth: b, as the vendor states it or as the pulls achieved it.
        server_term: the server's part of Eq. 4: the paper's, the public code's ("sum"), each server's own rate ("own"), or a
            queue before servers of such rates ("queue"). By default "queue", but "own" with `overlap` or the solver "milp".
        overlap: whether servers serve some workers while others compute; by default they do, except with the solver
            "milp". Never where all workers wait for each other (`Setting.waits_for_all`). The server term
            "queue" knows nothing else, and cannot be used with this option.
        round_up: whether the model rounds each worker's mini-batches up.
        solver: what finds the best placement on machines of several types: "exact" tries all corners (see
            `tuners.cruise.placement`); "milp" solves the paper's programme (see `tuners.cruise.milp`), which rounds up, in
            seconds to minutes, and knows neither `overlap` nor a queue: alone it implies ``overlap=False``; with these it
            is refused.
        batches: mini-batches per worker between two solves.
        warmup: first mini-batches of each worker that do not count.
        resume: the same after each reconfiguration.
        least: mini-batches of every worker that a solve needs.
        forget: the k-th newest mini-batch weighs (1 - forget)^k.
        recent: how many of the newest mini-batches are averaged; 0 is all since the last solve.
        newest: weight of the newest reading in the memory of a machine: its speed as a worker, used while it is none, and
            its rate as a server.
        blocks: place blocks of embedding tables by their measured loads (see `tuners.cruise.blocks`), and leave roles and
            shares as they are; of the other options, `gain`, `batches` and `warmup` count.
    """
    term = _server_term(server_term, solver, overlap)
    if _roles_are_held(job, blocks):
        return
    if blocks:
        yield from place_blocks(job, gain=gain, batches=batches, warmup=warmup)
        return
    model = CostModel(
        job=job,
        server_term=term,
        overlap=solver != "milp" if overlap is None else overlap,
        round_up=round_up,
        solver=solver,
        bandwidth=bandwidth,
        against=against,
    )
    current, monitor, known = job.start, Monitor(warmup, forget, recent), Memory(newest)
    resources = _Resources(frozenset(n.name for n in job.nodes))
    left, refused = Counter[Roles](), set[Roles]()  # splits since resources last changed
    while True:
        seen = yield from Run(clocks=batches * len(current.workers))
        available = seen.nodes or job.nodes
        if resources.change(current, available, seen.events):
            left, refused = Counter(), set()
        if seen.setting is not None and roles(seen.setting) != roles(current):
            # The system has lost a machine and changed the setting itself.
            monitor = Monitor(resume, forget, recent, seen.end_seconds)
        current = seen.setting or current
        monitor.add(seen, job)
        at_work = [w for w in current.workers if w in resources.names]
        holding = [s for s, m in current.model_by_server().items() if m > 0 and s in resources.names]
        if not monitor.ready(at_work, least, holding if term in ("own", "queue") else ()):
            continue
        readings = monitor.readings(at_work)
        known.add(readings, monitor.served_per_second())
        monitor.clear()
        wanted = model.best(current, available, readings, known, refused)
        if wanted is None:
            resources.considered()
            continue
        needed = resources.needed(wanted.setting, gain, extra_gain, left)
        if wanted.gain <= needed:
            resources.considered()
            continue
        why = _why(current, wanted, needed, against)
        try:
            cost = yield from Reconfigure(wanted.setting, method=job.method("migrate"), reason=why)
        except Rejected:
            refused.add(roles(wanted.setting))
            continue
        monitor = Monitor(resume, forget, recent, seen.end_seconds + cost.seconds)
        if cost.done:
            left[roles(current)] += 1
            current = wanted.setting
            resources.considered()


def _why(current: Setting, wanted: Wanted, needed: float, against: str) -> str:
    """Why the job changes to the split that is wanted."""
    change = f"{machines(current)} -> {machines(wanted.setting)}"
    if wanted.gain == 1:  # there is no epoch time to compare with
        return f"a machine in use is not available any more: {change}, {short(wanted.seconds)} s per epoch predicted"
    now = f"{short(wanted.seconds / (1 - wanted.gain))} s{' measured' if against == 'measured' else ''}"
    asked = f"{100 * needed:g} % is asked for" if needed > TIE else "any gain counts, as machines have come or gone"
    predicted = f"{short(wanted.seconds)} s per epoch predicted instead of {now}, {100 * wanted.gain:.3g} % less"
    return f"{change}: {predicted}; {asked}"


# ----------------------------------------------------------------------------------------- trigger and execution (IV-A.2, 3)


class _Resources:
    """The available machines, and whether a split has been chosen since they changed."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._lost = False  # a machine in use has left, and no split was chosen since then
        self._joined = frozenset[str]()  # machines that have come since a split was chosen

    def change(self, current: Setting, available: Iterable[Node], events: Iterable[NodeEvent]) -> bool:
        """Record the machines that are available now; True where any has come or gone."""
        before, self.names = self.names, frozenset(n.name for n in available)
        came = {e.node for e in events if e.event == "joined"} | (self.names - before)
        went = {e.node for e in events if e.event != "joined"} | (before - self.names)
        used = set(current.workers + current.servers)
        self._lost = self._lost or not used.isdisjoint(went) or not used <= self.names
        self._joined = (self._joined | came) & self.names
        return bool(came or went)

    def considered(self) -> None:
        """A split of these machines has been chosen."""
        self._lost, self._joined = False, frozenset()

    def needed(self, wanted: Setting, gain: float, extra_gain: float, left: Counter[Roles]) -> float:
        """The gain that a change to `wanted` needs: twice as much for each time that the job has `left` that split."""
        if self._lost:
            return TIE
        joins = not self._joined.isdisjoint(wanted.workers + wanted.servers)
        return max(TIE, extra_gain if joins else gain * 2 ** left[roles(wanted)])


def _server_term(term: ServerTerm | None, solver: str, overlap: bool | None) -> ServerTerm:
    """The server term to use. Raises ValueError for a solver that is not known, or options that exclude each other."""
    if solver not in get_args(Solver):
        raise ValueError(f"Cannot solve by {solver!r}: choose one of {', '.join(get_args(Solver))}.")
    if solver == "milp" and overlap:
        raise ValueError("Cannot use solver='milp' with overlap=True: Fig. 3 knows no overlap; leave one of them out.")
    if solver == "milp" and term == "queue":
        raise ValueError("Cannot use solver='milp' with server_term='queue': Fig. 3 knows no queue; leave one of them out.")
    if term == "queue" and overlap is not None:
        raise ValueError(f"Cannot use server_term='queue' with overlap={overlap}: leave one of them out, a queue overlaps.")
    return term or ("queue" if solver != "milp" and overlap is None else "own")
