"""Ringleader ASGD: asynchronous steps by the mean of all workers' latest gradients, for workers with different data.

Maranjyan, Richtarik, "Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity under Data Heterogeneity",
ICLR 2026, Algorithm 1. Servers keep a table with the gradients of each worker. A round has two phases:

1. Gradients are collected, several of a fast worker, until every worker has one in the table. The last one of them ends the
   phase with a step.
2. Every other worker's next gradient comes into the table and makes a step, n steps in all. A worker that has made its step
   goes on computing; what it pushes before the round ends is kept for the table of the next round.

Each step is x <- x - rate / n sum_i (G_i / b_i), where G_i is the sum of the b_i gradients of worker i in the table. So no
work is thrown away, nobody waits, and a fast worker's data counts no more than that of a slow one. No gradient in the
table is older than 2 n - 2 steps.

What that costs: a round lasts for two mini-batches of the slowest worker, and moves the parameters by n times the rate times
the mean gradient, as far as one round of BSP whose gradients are applied one by one. Where all workers have the same data
and some straggle, `ringleader` is therefore about as slow as BSP, and slower than ASP at every rate. It pays where workers
have different data. `tuners/baselines/README.md` has figures of both.

The paper was read through a public summary and the authors' public code, and not in full. As in that code, a worker that
pushes for the next round pulls the servers' present parameters. Where we differ: the learning rate is the job's, because it
is a knob of its own; the paper has 1 / (8 n L) at most. Where machines come or go, a round ends with those that are there.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tuners.actions import Decision, Install, Job, Push, Rejected, SyncPolicy, Tuner
from tuners.applicability import learns_nothing, nothing_to_tune_if, policy_cannot_be_installed

__all__ = ["ringleader", "ringleader_policy"]


def _nothing_is_learned(job: Job) -> str:
    return learns_nothing(job, "whose gradients it has does not matter") or policy_cannot_be_installed(job)


@nothing_to_tune_if(_nothing_is_learned)
def ringleader(job: Job) -> Tuner:
    """Install asynchronous SGD by a table of gradients, in rounds of one step per worker.

    Args:
        job: what is tuned.
    """
    if not _nothing_is_learned(job):
        with suppress(Rejected):
            yield from Install(ringleader_policy(), reason="every step has the gradients of all workers")


class _Round(NamedTuple):
    collecting: Array  # bool scalar: phase 1
    known: Array  # bool [k]: workers with a gradient in the table
    early: Array  # bool [k]: workers with a gradient for the next round
    stepped: Array  # bool [k]: workers that have made their step of this round


def ringleader_policy() -> SyncPolicy:
    """Rounds as in Algorithm 1 of the paper; nobody waits."""

    def init(active: Array) -> _Round:
        nobody = jnp.zeros_like(active)
        return _Round(jnp.asarray(True), nobody, nobody, nobody)

    return SyncPolicy("ringleader", init, _in_rounds, table=True)


def _in_rounds(state: _Round, push: Push) -> tuple[_Round, Decision]:
    mine = jnp.arange(push.active.shape[0]) == push.worker
    known = state.known | (mine & state.collecting)
    complete = jnp.all(known | ~push.active)
    later = ~state.collecting & jnp.any(mine & state.stepped)
    step = jnp.where(state.collecting, complete, ~later)
    stepped, early = state.stepped | (mine & step), state.early | (mine & later)
    turn = (complete | ~state.collecting) & jnp.all(stepped | ~push.active)  # also where the last one has left
    nobody = jnp.zeros_like(push.active)
    return (
        _Round(
            collecting=turn | (state.collecting & ~complete),
            known=jnp.where(turn, early, known),
            early=jnp.where(turn, nobody, early),
            stepped=jnp.where(turn, nobody, stepped),
        ),
        Decision(release=mine, step=step, later=later, turn=turn),
    )
