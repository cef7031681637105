"""Synchronisation policies as pure pairs (init, decide): which workers start their next mini-batch after a push.

BSP, ASP and SSP are one rule with different bounds, so they share one `decide` and one compiled engine: a worker may
continue while it is at most `bound` clocks ahead of the slowest one. The bound is that of Ho et al. (2013): 0 is BSP,
infinity is ASP. RLP's paper writes s + 1 for the same bound (Zhu et al. 2020, Section 3; see `ssp_as_printed`). K-sync and
its relatives (Dutta et al. 2018) are one rule, too: a group ends after K pushes; a policy says which workers continue before
that, and which workers abandon their mini-batch then.

`discard` and `admit` bound the age of a gradient: the updates between its pull and its push, `Push.staleness`. Asynchronous
reinforcement learning tunes such a bound over 0, 1, 2, 4, 8, 16 ("off-policyness", "maximum staleness"). A job discards what
is older when it comes; or it limits how many gradients are in progress, as AReaL does, and admits what is older all the
same. SSP's bound is another one: it counts mini-batches of the slowest worker.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tuners.actions import Decision, Push, Rejected, Setting, SyncPolicy
from tuners.settings import POLICIES

__all__ = [
    "admit",
    "asp",
    "backup_workers",
    "bsp",
    "buffered",
    "discard",
    "dssp",
    "k_async",
    "k_batch_sync",
    "k_sync",
    "named",
    "of_setting",
    "quorum",
    "ssp",
    "ssp_as_printed",
    "sync_switch",
]

_UNBOUNDED = 2**30  # clocks: more than any worker completes, in an int32
_DSSP_RANGE = 12  # clocks by which the bound varies: with s = 3 from 3 to 15 (Zhao et al. 2019)


def _first(value: Any, kind: type = np.int32) -> Any:
    """A part of a policy's first state. An array of NumPy, because JAX would compile a program for each."""
    return np.asarray(value, kind)


class _Bound(NamedTuple):
    bound: Array  # int32 scalar: clocks by which a worker may be ahead of the slowest


def bsp() -> SyncPolicy:
    """Bulk synchronous parallel: all workers wait for each other after every mini-batch (Valiant 1990)."""
    return _bounded("bsp", 0)


def asp() -> SyncPolicy:
    """Asynchronous parallel: no worker waits."""
    return _bounded("asp", _UNBOUNDED)


def ssp(staleness: int) -> SyncPolicy:
    """Stale synchronous parallel: no worker is more than `staleness` clocks ahead of the slowest (Ho et al. 2013).

    Raises ValueError for a negative bound.
    """
    if staleness < 0:
        raise ValueError(f"Cannot bound staleness by {staleness}: 0 is BSP, larger lets workers run ahead.")
    return _bounded(f"ssp({staleness})", staleness)


def ssp_as_printed(s: int) -> SyncPolicy:
    """SSP with the bound as RLP's paper writes it: s = 1 is BSP, and s = 0 would never release a worker.

    Raises ValueError for s below 1.
    """
    if s < 1:
        raise ValueError(f"Cannot run SSP as RLP prints it with s = {s}: s = 0 deadlocks, s = 1 is BSP.")
    return ssp(s - 1)


def _bounded(name: str, bound: int) -> SyncPolicy:
    def init(active: Array) -> _Bound:
        del active
        return _Bound(_first(bound))

    return SyncPolicy(name, init, _within_bound, rounds=bound == 0)


def _within_bound(state: _Bound, push: Push) -> tuple[_Bound, Decision]:
    slowest = jnp.min(jnp.where(push.active, push.clocks, _UNBOUNDED))
    release = push.waiting & (push.clocks - slowest <= state.bound)
    # With bound 0 the barrier ends a group of gradients; else every push is a group of its own.
    step = (state.bound > 0) | jnp.any(release)
    return state, Decision(release=release, step=step)


class _Dynamic(NamedTuple):
    low: Array  # int32 scalar: s_L, the bound of every worker
    offers: Array  # int32 [s_U - s_L + 1]: 0, 1, ..., the extra clocks that the controller may grant
    last_seconds: Array  # float [k]: time of each worker's last push
    interval_seconds: Array  # float [k]: between its last two pushes
    credit: Array  # int32 [k]: extra clocks that a worker still has


def dssp(low: int, high: int) -> SyncPolicy:
    """Dynamic SSP: the bound varies within [low, high] (Zhao et al. 2019, Algorithms 1 and 2).

    The fastest worker, when it reaches `low`, gets up to high - low extra clocks: the number after which its predicted wait
    for the slowest worker is shortest. Raises ValueError unless 0 <= low <= high.
    """
    if not 0 <= low <= high:
        raise ValueError(f"Cannot bound staleness by [{low}, {high}]: give 0 <= low <= high.")

    def init(active: Array) -> _Dynamic:
        never = _first(np.zeros(active.shape), float)  # float64 where JAX is set to it, as the simulator does
        return _Dynamic(_first(low), _first(range(high - low + 1)), never, never, _first(never))

    return SyncPolicy(f"dssp({low},{high})", init, _within_dynamic_bound)


def _within_dynamic_bound(state: _Dynamic, push: Push) -> tuple[_Dynamic, Decision]:
    """The decision of `dssp` after a push: Algorithms 1 and 2 of Zhao et al."""
    p, high = push.worker, state.low + state.offers[-1]
    interval = jnp.asarray(state.interval_seconds).at[p].set(push.seconds - state.last_seconds[p])
    last = jnp.asarray(state.last_seconds).at[p].set(push.seconds)
    clocks = jnp.where(push.active, push.clocks, _UNBOUNDED)
    slowest = jnp.argmin(clocks)
    ahead = clocks - clocks[slowest]
    fastest = clocks[p] >= jnp.max(jnp.where(push.active, push.clocks, -1))

    granted = jnp.where(fastest & (state.credit[p] == 0), _extra_clocks(state, last, interval, p, slowest), 0)
    credit = jnp.asarray(state.credit).at[p].add(granted.astype(jnp.int32))
    over = ahead > state.low
    spend = over[p] & (credit[p] > 0) & (ahead[p] <= high)
    release = push.waiting & ~over
    release = release.at[p].set(release[p] | spend)
    # Credit is lost when the worker is within the lower bound again; then the controller decides anew.
    credit = jnp.where(over, credit, 0).at[p].add(-spend.astype(jnp.int32))
    credit = jnp.maximum(credit, 0)
    return state._replace(last_seconds=last, interval_seconds=interval, credit=credit), Decision(
        release=release, step=(high > 0) | jnp.any(release)
    )


def _extra_clocks(state: _Dynamic, last: Array, interval: Array, p: Array, slowest: Array) -> Array:
    """The number of extra clocks in [0, s_U - s_L] after which worker `p` would wait least for the slowest one."""
    mine = last[p] + state.offers * interval[p]
    theirs = last[slowest] + (state.offers + 1) * interval[slowest]
    gap = jnp.min(jnp.abs(mine[:, None] - theirs[None, :]), axis=1)
    return state.offers[jnp.argmin(gap)]


class _Ages(NamedTuple):
    bound: Array  # int32 scalar: updates between the pull and the push of a gradient that is applied
    stops: Array  # bool scalar: a mini-batch is abandoned as soon as its gradient would be older
    updates: Array  # int32 scalar: gradients applied since the policy was installed
    pulled: Array  # int32 [k]: `updates` when each worker pulled


def discard(age: int, *, stops: bool = False) -> SyncPolicy:
    """No worker waits; a gradient that is more than `age` updates old when it comes is dropped.

    With `stops`, a worker abandons its mini-batch, and begins another, as soon as its gradient would be dropped. Raises
    ValueError for a negative age.
    """
    _check_age("Cannot discard gradients", age)

    def init(active: Array) -> _Ages:
        return _Ages(_first(age), _first(stops, bool), _first(0), _first(np.zeros(active.shape)))

    return SyncPolicy(f"discard({age}{',stops' if stops else ''})", init, _without_old)


def _without_old(state: _Ages, push: Push) -> tuple[_Ages, Decision]:
    mine = jnp.arange(push.active.shape[0]) == push.worker
    fresh = push.staleness <= state.bound
    updates = state.updates + fresh
    late = push.active & (updates - state.pulled > state.bound)
    release = mine | (late & state.stops)
    pulled = jnp.where(release, updates, state.pulled)
    return state._replace(updates=updates, pulled=pulled), Decision(release=release, accept=fresh)


def admit(age: int) -> SyncPolicy:
    """At most `age` + 1 gradients are in progress; workers beyond these wait, and every gradient is applied.

    So the age of gradients is `age` on average; that of a slow worker is older, and is admitted. The worker with the fewest
    pushes goes on first, so that all parts of the training data count the same. All workers begin at once when the policy is
    installed; those too many wait after their first push. Raises ValueError for a negative age.
    """
    _check_age("Cannot bound gradients in progress", age)

    def init(active: Array) -> _Bound:
        del active
        return _Bound(_first(age))

    return SyncPolicy(f"admit({age})", init, _few_in_progress)


def _few_in_progress(state: _Bound, push: Push) -> tuple[_Bound, Decision]:
    free = state.bound + 1 - jnp.sum(push.active & ~push.waiting)
    workers = jnp.arange(push.waiting.shape[0], dtype=jnp.int32)

    def release(_: Any, released: Array) -> Array:
        """One more: that with the fewest pushes; of equals the first.

        Without sorting, for the reason in `simulators.engine.links.network.first_of`.
        """
        left = push.waiting & ~released
        chosen: Array = left & (workers == jnp.argmin(jnp.where(left, push.clocks, _UNBOUNDED)))
        return released | chosen

    most = jnp.minimum(free, jnp.sum(push.waiting))
    return state, Decision(release=jax.lax.fori_loop(0, most, release, jnp.zeros_like(push.waiting)))


def _check_age(what: str, age: int) -> None:
    if age < 0:
        raise ValueError(f"{what} by an age of {age} updates: 0 is the least; larger lets gradients be older.")


class _Group(NamedTuple):
    size: Array  # int32 scalar: pushes that end a group, or the number of active workers where that is smaller
    repeats: Array  # bool scalar: a worker that has pushed continues at once
    cancels: Array  # bool scalar: workers that are busy when the group ends abandon their mini-batch
    pushed: Array  # int32 scalar: in this group so far


def k_sync(size: int) -> SyncPolicy:
    """The first `size` pushes end a round: the other workers abandon their mini-batch, all start anew (Dutta et al. 2018).

    Raises ValueError for a size below 1, as its relatives do.
    """
    return _grouped(f"k_sync({size})", size, repeats=False, cancels=True)


def k_batch_sync(size: int) -> SyncPolicy:
    """As `k_sync`, but a worker that has pushed continues: any `size` pushes end a round (Dutta et al. 2018).

    Where the servers apply every push at once, that worker pulls parameters with updates of this round; where they sum or
    average groups, it pulls the same parameters again, as in the paper.
    """
    return _grouped(f"k_batch_sync({size})", size, repeats=True, cancels=True)


def k_async(size: int) -> SyncPolicy:
    """A worker that has pushed waits until `size` have; they continue together, none starts over (Dutta et al. 2018)."""
    return _grouped(f"k_async({size})", size, repeats=False, cancels=False)


def buffered(size: int) -> SyncPolicy:
    """No worker waits; the servers step when `size` pushes have come (FedBuff: Nguyen et al. 2022).

    Where the servers apply every push at once, this is ASP.
    """
    return _grouped(f"buffered({size})", size, repeats=True, cancels=False)


def _grouped(name: str, size: int, *, repeats: bool, cancels: bool) -> SyncPolicy:
    _check_size(name, size)

    def init(active: Array) -> _Group:
        del active
        return _Group(_first(size), _first(repeats, bool), _first(cancels, bool), _first(0))

    return SyncPolicy(name, init, _within_group, rounds=cancels or (size > 1 and not repeats))


def _within_group(state: _Group, push: Push) -> tuple[_Group, Decision]:
    pushed = state.pushed + 1
    # There may be fewer active workers than `size`; workers that continue at once still reach any size.
    full = (pushed >= state.size) | (~state.repeats & (pushed >= jnp.sum(push.active)))
    mine = jnp.arange(push.active.shape[0]) == push.worker
    together = jnp.where(state.cancels, push.active, push.waiting)
    release = jnp.where(full, together, mine & state.repeats)
    return state._replace(pushed=jnp.where(full, 0, pushed)), Decision(release=release, step=full)


class _Backup(NamedTuple):
    size: Array  # int32 scalar: gradients that end a round
    round: Array  # int32 scalar: rounds completed
    begun: Array  # int32 [k]: round in which each worker pulled
    pushed: Array  # int32 scalar: gradients of this round so far


def backup_workers(size: int) -> SyncPolicy:
    """Synchronous rounds of the first `size` gradients; a gradient that comes after its round is dropped (Chen et al. 2016).

    The workers beyond `size` are backups. No worker is interrupted: a late one finishes its mini-batch, its gradient is
    dropped, and it joins the current round. Raises ValueError for a size below 1.
    """
    _check_size("backup_workers", size)

    def init(active: Array) -> _Backup:
        return _Backup(_first(size), _first(0), _first(np.zeros(active.shape)), _first(0))

    return SyncPolicy(f"backup_workers({size})", init, _with_backups, rounds=True)


def _with_backups(state: _Backup, push: Push) -> tuple[_Backup, Decision]:
    mine = jnp.arange(push.active.shape[0]) == push.worker
    fresh = state.begun[push.worker] == state.round
    pushed = state.pushed + fresh
    full = pushed >= jnp.minimum(state.size, jnp.sum(push.active))
    release = jnp.where(full, push.waiting, mine & ~fresh)
    now = state.round + full
    begun = jnp.where(release, now, state.begun)
    state = state._replace(round=now, begun=begun, pushed=jnp.where(full, 0, pushed))
    return state, Decision(release=release, accept=fresh, step=full)


class _Quorum(NamedTuple):
    late: _Backup  # rounds and their gradients, as with backup workers
    grace_seconds: Array  # float scalar


def quorum(size: int, grace_seconds: float) -> SyncPolicy:
    """Rounds that end `grace_seconds` after their first `size` gradients, or when all workers have pushed.

    What comes within the grace counts; what comes later is dropped, and its worker joins the current round. Without grace
    these are `backup_workers`. Raises ValueError for a size below 1, and a grace that is negative or not finite.
    """
    _check_size("quorum", size)
    if not 0 <= grace_seconds < float("inf"):
        raise ValueError(f"Cannot wait {grace_seconds:g} s after a quorum: give 0 or more, and a number.")
    rounds = backup_workers(size)

    def init(active: Array) -> _Quorum:
        return _Quorum(rounds.init(active), _first(grace_seconds, float))

    return SyncPolicy(f"quorum({size},{grace_seconds:g})", init, _with_grace, timers=True, rounds=True)


def _with_grace(state: _Quorum, push: Push) -> tuple[_Quorum, Decision]:
    rounds, workers = state.late, jnp.sum(push.active)
    fresh = ~push.timer & (rounds.begun[push.worker] == rounds.round)
    pushed = rounds.pushed + fresh
    enough = pushed >= jnp.minimum(rounds.size, workers)
    full = push.timer | (pushed >= workers) | (enough & (state.grace_seconds <= 0))
    mine = (jnp.arange(push.active.shape[0]) == push.worker) & ~push.timer
    release = jnp.where(full, push.waiting, mine & ~fresh)
    now = rounds.round + full
    begun = jnp.where(release, now, rounds.begun)
    first = enough & (rounds.pushed < jnp.minimum(rounds.size, workers))  # this push completes the quorum
    timer = jnp.where(full, jnp.inf, jnp.where(first, state.grace_seconds, jnp.nan))
    late = _Backup(rounds.size, now, begun, jnp.where(full, 0, pushed))
    return _Quorum(late, state.grace_seconds), Decision(release=release, accept=fresh, step=full, timer=timer)


class _Switch(NamedTuple):
    after: Array  # int32 scalar: pushes under BSP


def sync_switch(clocks: int) -> SyncPolicy:
    """BSP for the first `clocks` pushes, then ASP (Sync-Switch: Li et al. 2021). Raises ValueError for a negative number."""
    if clocks < 0:
        raise ValueError(f"Cannot switch from BSP to ASP after {clocks} pushes: give 0 (ASP from the beginning) or more.")

    def init(active: Array) -> _Switch:
        del active
        return _Switch(_first(clocks))

    return SyncPolicy(f"sync_switch({clocks})", init, _until_switched)


def _until_switched(state: _Switch, push: Push) -> tuple[_Switch, Decision]:
    done = jnp.sum(jnp.where(push.active, push.clocks, 0))
    bound = jnp.where(done < state.after, 0, _UNBOUNDED)
    return state, _within_bound(_Bound(bound), push)[1]


def _check_size(name: str, size: int) -> None:
    if size < 1:
        raise ValueError(f"Cannot wait for {size} workers ({name}): give at least 1.")


def of_setting(setting: Setting) -> SyncPolicy:
    """The policy that a setting names, with its bounds. Raises Rejected for an unknown name."""
    return named(setting.policy, setting.staleness, setting.quorum, setting.grace_seconds)


def named(policy: str, staleness: int, size: int = 0, grace_seconds: float = 0.0) -> SyncPolicy:
    """The policy of that name, with a bound on staleness or, for "quorum", its size (0: all workers) and grace.

    Raises Rejected for an unknown name.
    """
    made: dict[str, Any] = {
        "bsp": bsp,
        "asp": asp,
        "ssp": lambda: ssp(staleness),
        "dssp": lambda: dssp(staleness, staleness + _DSSP_RANGE),
        "discard": lambda: discard(staleness),
        "admit": lambda: admit(staleness),
        "quorum": lambda: quorum(size or _UNBOUNDED, grace_seconds),
    }
    if policy not in made:
        raise Rejected(f"Cannot install policy {policy!r}: choose one of {', '.join(POLICIES)}.")
    built: SyncPolicy = made[policy]()
    return built
