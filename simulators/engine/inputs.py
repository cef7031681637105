"""The engine's inputs: the cluster under one setting, as numbers that `simulators.engine.preparation` makes.

All are arguments of the compiled engine, so that a new setting of the same shapes compiles nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jax import Array

__all__ = ["Copies", "EngineInputs", "RowPlacement", "SnapshotCosts"]

_NOTHING: Any = np.zeros(0)


class RowPlacement(NamedTuple):
    """Where the rows of embedding tables are, by block of consecutive rows, [b], and what each of them costs."""

    pulled: Array  # [b, k]: the part of each block's pulled rows that each node sends
    pushed: Array  # [b, k]: the part of each block's pushed rows that each node receives of workers
    pull_row_bytes: Array  # scalar, as transferred
    push_row_bytes: Array  # scalar
    apply_row_seconds: Array  # scalar: a server's time to apply the gradient of one row
    cache_rows: Any = 0  # int32: the most popular rows, of which each worker keeps copies
    cache_clocks: Any = 0  # int32: mini-batches for which a copy is used after the one that pulled it
    forwarded: Any = ()  # [b, k]: the part of each block's pushed rows that each node sends on; () where none is replicated
    copied: Any = ()  # [b, k]: the part that each node receives of another server; () where none is replicated


class Copies(NamedTuple):
    """How long workers compute on the copy of the parameters that they have pulled."""

    clocks: Any  # int32 scalar: mini-batches on one copy
    pull_overhead_seconds: Any  # [k] of a cycle's overhead, what a cycle without a pull saves


class SnapshotCosts(NamedTuple):
    """Copies of the servers' state, which each server sends to another one, or out of the cluster if it is alone."""

    clocks: Any  # int32 scalar: pushes from one to the next
    bytes: Any  # [k] that each node sends of one
    usage: Any  # [k, r] resources per byte of them; with connections [2ks + s, r], of all flows; () with `Proportions`
    weights: Any  # [k] of their rates beside those of pulls and pushes


class EngineInputs(NamedTuple):
    """The cluster under one setting. Arrays have one entry per node, [k]; units are seconds, bytes, bytes per second."""

    key: Array  # uint64 scalar: all noise is a hash of it and of (worker, clock)
    active: Array  # bool [k]: is a worker
    compute_seconds: Array  # [k] mean time of one mini-batch, before noise
    overhead_seconds: Array  # [k] per cycle without noise: messages, latency, the policy's own time
    slowdown: Array  # [k] factor on compute time at present (1: normal)
    jitter: Array  # scalar: coefficient of variation of the compute time (lognormal)
    factors: Array  # [k, m] recorded compute times over the usual one, in order, in place of jitter; no rows: none
    factor_counts: Array  # int32 [k] how many each node has; they repeat after that; 0: the node has jitter
    sleep_probability: Array  # [k] of sleeping in a mini-batch ...
    sleep_mean_seconds: Array  # [k] ... for max(0, N(mean, sd))
    sleep_sd_seconds: Array  # [k]
    pull_bytes: Array  # scalar: one full pull, as transferred
    push_bytes: Array  # scalar
    nic: Array  # [k] a worker's own limit, each direction
    nic_levels: Array  # [t] the values that occur in it, the largest perhaps repeated
    serve_out: Array  # scalar: all servers together, pulls; min_j(capacity_j / share_j)
    serve_in: Array  # scalar: the same for pushes
    # [2k, r] resources per byte of each node's pull (first k rows) and push, as `Proportions` in large clusters; see
    # `simulators.engine.links.usage`. [2k, 0]: all servers are one resource.
    usage: Any
    capacity: Array  # [r]
    bucket_bytes: Array  # [k] tokens that each node's bucket can hold, a byte each; [0] where no node has one
    bucket_refill: Array  # [k] tokens per second that are added
    bucket_taken: Array  # [k] bytes per second that a reconfiguration sends
    control_queue: Array  # [1]: share of the queued pushes that a message to a server waits for; [0]: messages never wait
    apply_seconds: Array  # scalar: to commit one push and apply it at a server; pushes queue in order of arrival
    blocked_until_seconds: Array  # scalar: pulls and pushes that end earlier wait until then (model blocks are moving)
    samples: Array  # int32 [k]: in one mini-batch of each worker
    shard_start: Array  # int32 [k]: each worker's part of the training data
    shard_length: Array  # int32 [k]
    learning_rate: Array  # scalar float32
    momentum: Array  # scalar float32
    evaluate_clocks: Array  # int32: pushes between two validations
    target_loss: Array  # done when validation loss <= this (-inf: never)
    target_accuracy: Array  # or validation accuracy >= this (inf: never)
    target_clocks: Array  # or after this number of pushes
    target_samples: Array  # or when these have used this number of samples
    assigned: Array  # [k] the part of a target by share that each node has by its data share; [0] for any other target
    push_work: Array  # [k] of that, what a push of each node completes; [0] for any other target
    local_steps: Array = _NOTHING  # int32 [k]: mini-batches between a pull and the push; [0]: a push is one gradient
    outer_rate: Array = _NOTHING  # float32 [1]: of the servers, for what local steps have changed; [0] as above
    outer_momentum: Array = _NOTHING  # float32 [1]; [0] as above
    placement: Any = ()  # `RowPlacement` of embedding tables; (): every mini-batch pulls and pushes the whole model
    copies: Any = ()  # `Copies`; (): workers pull before every mini-batch
    snapshots: Any = ()  # `SnapshotCosts`; (): none is taken
    connections: Any = ()  # `connections.Connections`; (): the flows of a transfer move as one
    unevenness: Any = ()  # scalar: deviation of the logarithms of pulls' weights; (): 1, or links are not shared unevenly
