"""RLP: a learned synchronisation policy (Zhu et al. 2020, "Learning Efficient Parameter Server Synchronization Policies").

At every push a policy decides which workers go on. Two forms ship:

- the default is *broad* (`tuners.rlp.broad`, ours): a small network chooses one of a few simple rules. Its inputs know
  neither the number of workers nor the scale of losses and times; it is trained on jobs that differ in everything
  (`harness.training`).
- ``as_printed=True`` has the paper's form: a Q-network looks at the last ten pushes and releases nobody, the one that
  pushed, or all that wait (Section 3.2). `tuners.rlp.network` has its state, actions and network, `tuners.rlp.dqn` its
  training. The heads of these two files say where they differ from the paper. The policy that ships was trained with the
  paper's values on ten workers.

`tuners.rlp.policy_file` has the file format of both. A decision takes simulated time: for the paper's form by default what
the paper's Table 1 implies, 1.4 % of 311 s for 380 decisions; for the broad one what it takes here, with a margin.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tuners.actions import Decision, Install, Job, Push, Rejected, SyncPolicy, Tuner
from tuners.applicability import nothing_to_tune_if, policy_cannot_be_installed
from tuners.factory_options import NonNegative, options_checked_by
from tuners.rlp import policy_file
from tuners.rlp.broad import BROAD_DECISION_SECONDS, MODES, TrainedBroad, broad_policy
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

__all__ = ["DECISION_SECONDS", "greedy_policy", "policy_of", "rlp"]

DECISION_SECONDS = 0.0115
"""What one decision of the paper's network takes (Zhu et al. 2020, Table 1)."""


def _check_options(options: Mapping[str, Any]) -> None:
    _trained(options["policy"], options["as_printed"])


@options_checked_by(_check_options)
@nothing_to_tune_if(policy_cannot_be_installed)
def rlp(job: Job, *, policy: str = "", as_printed: bool = False, decision_seconds: NonNegative | None = None) -> Tuner:
    """Install the broad policy that ships with this package, the paper's form of it, or the policy of a file.

    Raises ValueError for a file that holds no policy, and for `as_printed` with a file that holds a broad one.

    Args:
        job: what is tuned.
        policy: file with a trained policy, of either form, as `harness train rlp` writes it; by default the one that ships.
        as_printed: the policy of the paper's form that ships, or a check that `policy` is of that form.
        decision_seconds: simulated time that one decision takes; by default what the paper implies or, for a broad policy,
            what is measured here.
    """
    del job
    trained = _trained(policy, as_printed)
    made = policy_of(trained, seconds=decision_seconds)
    does = "releases nobody, the worker that pushed, or all that wait"
    if isinstance(trained, TrainedBroad):
        does = f"chooses one of {', '.join(mode.name for mode in MODES)}"
    with suppress(Rejected):
        yield from Install(made, reason=f"at every push a trained network {does}, which takes {made.seconds:g} s")


def _trained(policy: str, as_printed: bool) -> Trained | TrainedBroad:
    """The policy that these options of `rlp` mean. Raises ValueError where there is none."""
    if not policy:
        return policy_file.shipped_as_printed() if as_printed else policy_file.shipped()
    trained = policy_file.load(policy)
    if as_printed and isinstance(trained, TrainedBroad):
        raise ValueError(f"Cannot play {policy} as printed: it holds a broad policy; leave as_printed out.")
    return trained


def policy_of(trained: Trained | TrainedBroad, *, seconds: float | None = None) -> SyncPolicy:
    """The policy of either form; a decision takes `seconds` of simulated time or, if None, what is usual for the form."""
    if isinstance(trained, TrainedBroad):
        return broad_policy(trained.network, seconds=BROAD_DECISION_SECONDS if seconds is None else seconds)
    return greedy_policy(trained, seconds=DECISION_SECONDS if seconds is None else seconds)


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
