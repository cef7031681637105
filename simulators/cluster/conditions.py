"""The conditions of a run: noise, stragglers, sleeps, slow-downs, token buckets, nodes that join, leave and fail.

The structs are the `[conditions]` tables of a scenario's TOML file. All random draws come from the run's seed only, so that
every tuner gets the same draws.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tuners.actions import Setting

__all__ = [
    "Bucket",
    "Conditions",
    "Disturbance",
    "Episode",
    "LinkDelay",
    "NodeChange",
    "RackLosses",
    "Replay",
    "ReplayedTrace",
    "Sleeps",
    "Stragglers",
    "absent_at_start",
    "check",
    "check_lasting",
    "link_delays",
    "locate_traces",
    "straggling",
]


_MOST_EVENTS = 1_000_000
"""Of one condition in a run. The control plane acts at each, about a thousand times in a second of computing."""


class Sleeps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Random sleeps: in every mini-batch, each worker sleeps with `probability`, for max(0, N(mean, sd)) seconds."""

    probability: float
    mean_seconds: float
    sd_seconds: float = 0.0


class Stragglers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Persistent slow nodes: they sleep for max(0, N(mean, sd)) seconds in every mini-batch (RLP, Section 4.1).

    Stragglers are the named `nodes`, and every other node with `probability`, drawn once per seed; at least one of the two
    is given (a probability may be 0, for comparisons). With `spread_seconds` each straggler has its own mean, drawn once per
    seed from N(mean, spread). With `node_seconds` each of the named `nodes` has the mean that is given for it.
    """

    mean_seconds: float
    sd_seconds: float = 0.0
    probability: float | None = None
    nodes: tuple[str, ...] = ()
    spread_seconds: float = 0.0
    node_seconds: tuple[float, ...] = ()  # means, one for each of `nodes`, in place of `mean_seconds`


class Episode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A slow-down: for some `seconds`, computing on one node takes `factor` times as long; repeats with `every_seconds`."""

    node: str
    start_seconds: float
    seconds: float
    factor: float
    every_seconds: float = 0.0  # period, from start to start; 0: once


class LinkDelay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every message from or to these nodes takes `delay_seconds` longer, one way, as with `tc netem delay` on their links.

    From `start_seconds` on, for `seconds`; repeats with `every_seconds`. A mini-batch waits for as many delays as the
    workload's `delay_messages` says; the rates of the links stay.
    """

    nodes: tuple[str, ...]
    delay_seconds: float
    start_seconds: float = 0.0
    seconds: float = 0.0  # 0: to the end
    every_seconds: float = 0.0  # period, from start to start; 0: once


class Disturbance(NamedTuple):
    """What conditions do to the nodes at present."""

    slowdown: NDArray[np.float64]  # [k] factor on compute time
    delay_seconds: NDArray[np.float64]  # [k] of a message over the node's link, one way, besides the cluster's latency


class Bucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token bucket on what each of `nodes` sends, as clouds shape their networks (Uta et al., NSDI'20).

    Every byte sent takes a token. While the bucket has tokens, a node sends at the rate of its NIC; then it sends at the
    refill rate. All buckets are full at the start.
    """

    nodes: tuple[str, ...]
    capacity_bytes: float
    refill_bytes_per_second: float


class NodeChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes join, leave or fail. A node whose first change is "joins" is absent at the start.

    A node that leaves works until its notice is over; then it is gone, even if it is in use. A node that fails gives no
    notice.
    """

    nodes: tuple[str, ...]
    seconds: float
    event: Literal["joins", "leaves", "fails"]
    notice_seconds: float = 0.0  # for "leaves" only


class RackLosses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes are lost at random, some of them together, and come back after a repair; see `simulators.cluster.drawn_losses`.

    Drawn once per seed. `python -m simulators.cluster.loss_fit TRACE` prints the values that fit a recording.
    """

    every_seconds: float  # mean time between the losses of one node, while it is there
    together: float = 1.0  # mean number of nodes that one event takes, all of one rack: geometric, at most the rack
    rack: Annotated[int, msgspec.Meta(le=2**31 - 1)] = (
        0  # nodes in a rack or zone, which follow each other in the cluster; 0: all are in one
    )
    repair_seconds: float = 0.0  # median time until a node is back; 0: it stays away
    repair_spread: float = 0.0  # standard deviation of the logarithm of that time
    event: Literal["leaves", "fails"] = "fails"
    notice_seconds: float = 0.0  # for "leaves" only
    nodes: tuple[str, ...] = ()  # that can be lost; () is all
    spot: bool = False  # only those of them that are spot instances


class ReplayedTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trace that drives `nodes`, and how its machines are assigned to them; see `simulators.cluster.trace_driven`."""

    trace: str  # folder; in a scenario's file, relative to that file; or "shipped:NAME"
    runs: str = "*"  # pattern of the runs that may be replayed: "AR", "minibatch/*"
    nodes: tuple[str, ...] = ()  # nodes of the simulated cluster that the trace drives; () is all
    deal: Literal["lot", "order"] = "lot"  # assignment of machines to nodes: drawn for each seed, or in order
    against: Literal["run", "worker"] = "run"  # reference of ratios: the median of the run, or each worker's own median
    faster: float = 1.0  # how many recorded seconds pass in a simulated one, for `stragglers`, `bandwidth` and `nodes`
    fitted: bool = False  # draw from distributions that are fitted to the trace, in place of its replay


class Replay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Traces that drive the run, one per role; a text is the folder of a trace."""

    # The order of the fields is the number of each role's random stream (see `trace_driven.expand_replay`): keep it.
    compute: ReplayedTrace | str | None = None  # compute times of mini-batches, in place of `jitter`
    stragglers: ReplayedTrace | str | None = None  # lasting differences between machines, and episodes of slowness
    bandwidth: ReplayedTrace | str | None = None  # token buckets
    nodes: ReplayedTrace | str | None = None  # nodes that join, leave and fail
    # Every role for which this trace has data and no other is given. A text means: a recording of this very cluster, so in
    # order, from its beginning, and relative to each machine's own median, because its usual speed is in the node's type.
    all: ReplayedTrace | str | None = None

    def traces(self) -> dict[str, ReplayedTrace]:
        """The traces that are given, by role."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        found = {}
        for role, recording in given.items():
            if isinstance(recording, str) and role == "all":
                found[role] = ReplayedTrace(recording, deal="order", against="worker")
            elif recording is not None:
                found[role] = ReplayedTrace(recording) if isinstance(recording, str) else recording
        return found


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All conditions of a run."""

    jitter: float = 0.2  # coefficient of variation of the compute time (lognormal)
    stagger: bool = True  # workers start at random points of their first cycle, not in lockstep
    sleeps: Sleeps | None = None
    stragglers: Stragglers | None = None
    episodes: tuple[Episode, ...] = ()
    delays: tuple[LinkDelay, ...] = ()  # those of one node are added
    buckets: tuple[Bucket, ...] = ()  # at most one for each node
    nodes: tuple[NodeChange, ...] = ()  # the changes of each node in the order of time
    losses: tuple[RackLosses, ...] = ()
    replay: Replay | None = None
    thinking_seconds: float = 0.0  # simulated time charged for every action of the tuner


def check(conditions: Conditions, nodes: tuple[str, ...]) -> None:
    """Raise ValueError for impossible conditions, and for a node that the cluster does not have."""
    _check_nodes(conditions)
    named = (
        [e.node for e in conditions.episodes]
        + [n for d in conditions.delays for n in d.nodes]
        + [n for c in conditions.nodes for n in c.nodes]
        + [n for b in conditions.buckets for n in b.nodes]
        + [n for x in conditions.losses for n in x.nodes]
        + [n for r in (conditions.replay or Replay()).traces().values() for n in r.nodes]
        + list(conditions.stragglers.nodes if conditions.stragglers else ())
    )
    for name in named:
        if name not in nodes:
            raise ValueError(f"Cannot set conditions for node {name!r}: this cluster has {', '.join(nodes)}.")
    for label, value in _probabilities(conditions):
        if not 0 <= value <= 1:
            raise ValueError(f"Cannot use {label} = {value}: give a probability, from 0 to 1.")
    for label, value in _amounts(conditions):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"Cannot use {label} = {value}: it must be finite and not negative.")
    _check_named(conditions)
    for episode in conditions.episodes:
        if not (episode.factor > 0 and math.isfinite(episode.factor)):
            raise ValueError(f"Cannot slow {episode.node} down by {episode.factor}: the factor must be positive and finite.")
        if 0 < episode.every_seconds < episode.seconds:
            raise ValueError(
                f"Cannot repeat an episode of {episode.node} every {episode.every_seconds:g} s: it lasts "
                f"{episode.seconds:g} s; give a longer period."
            )
    for delay in conditions.delays:
        if delay.every_seconds and not 0 < delay.seconds <= delay.every_seconds:
            raise ValueError(
                f"Cannot repeat a delay of {', '.join(delay.nodes)} every {delay.every_seconds:g} s: it lasts "
                f"{delay.seconds:g} s; give a longer period, and seconds that are positive."
            )
    for role, recording in (conditions.replay or Replay()).traces().items():
        if not (recording.faster > 0 and math.isfinite(recording.faster)):
            raise ValueError(f"Cannot use replay.{role}: faster = {recording.faster}: it must be positive and finite.")
        if recording.fitted and recording.deal == "order":
            raise ValueError(f"Cannot use replay.{role}: fitted draws have no order; leave out deal or fitted.")
    _check_buckets(conditions)
    _check_losses(conditions)


def check_lasting(conditions: Conditions, nodes: tuple[str, ...], budget_seconds: float) -> None:
    """Raise ValueError for conditions that come again so soon that a run of `budget_seconds` would never end."""
    again = [
        *((f"repeat an episode of {e.node}", e.every_seconds, 1.0) for e in conditions.episodes),
        *((f"repeat a delay of {', '.join(d.nodes)}", d.every_seconds, 1.0) for d in conditions.delays),
        *(("lose each node", x.every_seconds, len(x.nodes or nodes) / x.together) for x in conditions.losses),
    ]
    for what, every_seconds, at_once in again:
        least_seconds = at_once * budget_seconds / _MOST_EVENTS
        if 0 < every_seconds < least_seconds:
            times = at_once * budget_seconds / every_seconds
            raise ValueError(
                f"Cannot {what} every {every_seconds:g} s: that is {times:.2g} times in a "
                f"budget of {budget_seconds:g} s; give at least {least_seconds:g} s."
            )


def _check_named(conditions: Conditions) -> None:
    """Raise ValueError for conditions that concern no node, which is never meant."""
    slow = conditions.stragglers
    if slow and not slow.nodes and slow.probability is None:
        raise ValueError("Cannot use stragglers: there are none; give nodes, or a probability.")
    if slow and slow.node_seconds and len(slow.node_seconds) != len(slow.nodes):
        raise ValueError(
            f"Cannot use stragglers.node_seconds: there are {len(slow.node_seconds)} means for {len(slow.nodes)} nodes: "
            "give one for each."
        )
    for what, named_here in (
        *(("delays", d.nodes) for d in conditions.delays),
        *(("buckets", b.nodes) for b in conditions.buckets),
        *(("nodes", c.nodes) for c in conditions.nodes),
    ):
        if not named_here:
            raise ValueError(f"Cannot use an entry of {what} that names no nodes: give nodes, or leave it out.")


def _check_losses(conditions: Conditions) -> None:
    """Raise ValueError for losses that cannot be drawn, and where more than one condition says when nodes come and go."""
    for losses in conditions.losses:
        if not (losses.every_seconds > 0 and math.isfinite(losses.every_seconds)):
            raise ValueError(f"Cannot lose nodes every {losses.every_seconds:g} s: give a positive, finite number.")
        if not 1 <= losses.together < math.inf:
            raise ValueError(f"Cannot lose {losses.together:g} nodes together: give 1 or more.")
        if losses.rack < 0:
            raise ValueError(f"Cannot use losses.rack = {losses.rack}: give a number of nodes, or 0 for one rack of all.")
        if losses.notice_seconds and losses.event != "leaves":
            raise ValueError("Cannot lose nodes that fail with notice: only a node that leaves gives notice.")
    given = (conditions.replay or Replay()).traces().keys() & {"nodes", "all"}
    if conditions.losses and (conditions.nodes or given):
        raise ValueError("Cannot draw losses where nodes or replay say who comes and goes: leave out one of the two.")
    named = [n for losses in conditions.losses for n in losses.nodes or ("all",)]
    if len(conditions.losses) > 1 and (len(set(named)) < len(named) or "all" in named):
        raise ValueError("Cannot draw losses of a node twice: with several losses, each names its own nodes.")


def _check_buckets(conditions: Conditions) -> None:
    """Raise ValueError for a node with two buckets, and for a bucket without refill: its node could never send again."""
    held: set[str] = set()
    for bucket in conditions.buckets:
        if held & set(bucket.nodes):
            raise ValueError(f"Cannot give {', '.join(sorted(held & set(bucket.nodes)))} two buckets: give each node one.")
        held |= set(bucket.nodes)
        if not bucket.refill_bytes_per_second > 0:
            raise ValueError(
                f"Cannot refill a bucket by {bucket.refill_bytes_per_second} bytes per second: give a positive number."
            )


def locate_traces(conditions: Conditions, folder: Path) -> Conditions:
    """The conditions with the folders of their traces, whose paths are relative to `folder`. Raises as `locate` does."""
    if conditions.replay is None:
        return conditions
    from traces.shipped import locate  # here, because it imports polars, which most scenarios do not need

    given = conditions.replay.traces()
    found = {k: msgspec.structs.replace(r, trace=str(locate(r.trace, folder))) for k, r in given.items()}
    return msgspec.structs.replace(conditions, replay=Replay(**found))


def absent_at_start(conditions: Conditions) -> frozenset[str]:
    """The nodes that join later."""
    first: dict[str, str] = {}
    for change in conditions.nodes:
        for node in change.nodes:
            first.setdefault(node, change.event)
    return frozenset(node for node, event in first.items() if event == "joins")


def _check_nodes(conditions: Conditions) -> None:
    """Raise ValueError for changes of a node that are out of order, or that contradict each other."""
    absent = absent_at_start(conditions)
    state: dict[str, tuple[bool, float]] = {}  # whether the node is in the cluster, and since when
    for change, node in ((c, n) for c in conditions.nodes for n in c.nodes):
        what = f"Cannot use the change that node {node} {change.event} at {change.seconds:g} s"
        present, since = state.get(node, (node not in absent, 0.0))
        if change.seconds < since:
            raise ValueError(f"{what}: its previous change ends at {since:g} s; give changes in the order of time.")
        if present == (change.event == "joins"):
            raise ValueError(f"{what}: the node is {'already' if present else 'not'} in the cluster then.")
        if change.notice_seconds and change.event != "leaves":
            raise ValueError(f"{what} with notice: only a node that leaves gives notice.")
        state[node] = (change.event == "joins", change.seconds + change.notice_seconds)


def _probabilities(conditions: Conditions) -> list[tuple[str, float]]:
    found = []
    if conditions.sleeps:
        found.append(("sleeps.probability", conditions.sleeps.probability))
    if conditions.stragglers and conditions.stragglers.probability is not None:
        found.append(("stragglers.probability", conditions.stragglers.probability))
    return found


def _amounts(conditions: Conditions) -> list[tuple[str, float]]:
    """All numbers in the conditions that must not be negative, by the name of their key."""
    found = [("jitter", conditions.jitter), ("thinking_seconds", conditions.thinking_seconds)]
    for label, sleep in (("sleeps", conditions.sleeps), ("stragglers", conditions.stragglers)):
        if sleep:
            found += [(f"{label}.mean_seconds", sleep.mean_seconds), (f"{label}.sd_seconds", sleep.sd_seconds)]
    if conditions.stragglers:
        found.append(("stragglers.spread_seconds", conditions.stragglers.spread_seconds))
        found += [("stragglers.node_seconds", seconds) for seconds in conditions.stragglers.node_seconds]
    for episode in conditions.episodes:
        found += [("episodes.start_seconds", episode.start_seconds), ("episodes.seconds", episode.seconds)]
        found += [("episodes.every_seconds", episode.every_seconds)]
    for delay in conditions.delays:
        found += [(f"delays.{n}", getattr(delay, n)) for n in ("delay_seconds", "start_seconds", "seconds", "every_seconds")]
    for bucket in conditions.buckets:
        found += [("buckets.capacity_bytes", bucket.capacity_bytes)]
        found += [("buckets.refill_bytes_per_second", bucket.refill_bytes_per_second)]
    for losses in conditions.losses:
        found += [(f"losses.{n}", getattr(losses, n)) for n in ("repair_seconds", "repair_spread", "notice_seconds")]
    for change in conditions.nodes:
        found += [("nodes.seconds", change.seconds), ("nodes.notice_seconds", change.notice_seconds)]
    return found


def link_delays(
    names: tuple[str, ...], setting: Setting, delay_seconds: NDArray[np.float64], messages: float
) -> NDArray[np.float64]:
    """Seconds that delays of links add to a mini-batch of every worker, [k]; 0 for other nodes.

    A worker asks all servers side by side, so it waits for the most delayed path. A path has the delays of both ends; a
    server on the worker's own machine has none. `messages` follow each other.
    """
    own, found = dict(zip(names, delay_seconds, strict=True)), np.zeros(len(names))
    for i, name in enumerate(names):
        if name in setting.workers:
            paths = [own[name] + own[server] for server in setting.servers if server != name]
            found[i] = messages * max(paths, default=0.0)
    return found


def straggling(conditions: Conditions, nodes: tuple[str, ...], rng: np.random.Generator) -> np.ndarray:
    """Which nodes straggle in this run, bool [k]. Always draws one number per node."""
    # Even without stragglers: later draws from `rng` must not depend on the conditions.
    drawn = rng.random(len(nodes))
    if conditions.stragglers is None:
        return np.zeros(len(nodes), bool)
    named = np.array([n in conditions.stragglers.nodes for n in nodes])
    return named | (drawn < (conditions.stragglers.probability or 0.0))
