"""RLP: a learned synchronisation policy (Zhu et al. 2020, "Learning Efficient Parameter Server Synchronization Policies").

At every push a small network looks at the last ten pushes and decides which workers go on: none, the one that pushed, or all
that wait (Section 3.2). This file has the tuner and the policy that it installs. `tuners.rlp.network` has the state, the
actions and the network, `tuners.rlp.policy_file` the file format, `tuners.rlp.dqn` the training.

A decision takes simulated time, by default what the paper's Table 1 implies: 1.4 % of 311 s for 380 decisions.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tuners.actions import Decision, Install, Job, Push, Rejected, SyncPolicy, Tuner
from tuners.applicability import nothing_to_tune_if, policy_cannot_be_installed
from tuners.factory_options import NonNegative
from tuners.rlp.network import (
    FEATURES,
    HISTORY,
    Network,
    Scaling,
    Trained,
    allowed_actions,
    decision_of,
    may_hold,
    network_input,
    q_values,
    with_push,
)
from tuners.rlp.policy_file import load, shipped

__all__ = ["DECISION_SECONDS", "greedy_policy", "rlp"]

DECISION_SECONDS = 0.0115


@nothing_to_tune_if(policy_cannot_be_installed)
def rlp(job: Job, *, policy: str = "", decision_seconds: NonNegative = DECISION_SECONDS) -> Tuner:
    """Install the policy of the file `policy`, as `harness train rlp` writes it, or the one that ships with this package.

    Raises ValueError for a file that holds no policy.

    Args:
        job: what is tuned.
        policy: file with a trained policy; by default the one that ships.
        decision_seconds: simulated time that one decision takes.
    """
    del job
    trained = load(policy) if policy else shipped()
    with suppress(Rejected):
        yield from Install(greedy_policy(trained, seconds=decision_seconds))


def greedy_policy(trained: Trained, *, seconds: float = DECISION_SECONDS) -> SyncPolicy:
    """The policy that always takes the best action by `trained`; each decision takes `seconds` of simulated time.

    All such policies share one `decide` function, and so one compiled engine.
    """
    network, scaling = trained.network, trained.scaling

    def init(active: Array) -> _Memory:
        del active
        return _Memory(*_as_arrays(network, scaling), jnp.zeros((HISTORY, FEATURES), jnp.float32))

    return SyncPolicy("rlp", init, _decide, probes=True, seconds=seconds)


class _Memory(NamedTuple):
    network: Network
    scaling: Scaling
    history: Array  # float32 [H, 4]


@jax.jit  # for callers that are not compiled, such as live servers; inside the compiled engine it changes nothing
def _decide(memory: _Memory, push: Push) -> tuple[_Memory, Decision]:
    history = with_push(memory.history, push)
    values = q_values(memory.network, network_input(memory.scaling, history))
    action = jnp.argmax(jnp.where(allowed_actions(may_hold(push)), values, -jnp.inf))
    return memory._replace(history=history), decision_of(action, push)


def _as_arrays(network: Network, scaling: Scaling) -> tuple[Network, Scaling]:
    return (
        Network(tuple(map(jnp.asarray, network.weights)), tuple(map(jnp.asarray, network.biases))),
        Scaling(*map(jnp.asarray, scaling)),
    )
