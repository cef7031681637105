"""The options of RLP's training; the defaults are the paper's (Zhu et al. 2020, Sections 3.3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass

import optax

__all__ = ["OPTIMIZERS", "Options"]

OPTIMIZERS = {"sgd": optax.sgd, "adam": optax.adam}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to learn; the defaults are the paper's. Raises ValueError for a value out of range."""

    gamma: float = 0.8  # discount per push
    epsilon: float = 0.1  # share of actions that are drawn at random
    rate: float = 0.01
    anneal: int = 0  # pushes over which the rate falls to 0; 0: it stays
    replay: int = 50  # N: pushes in the pool
    batch: int = 32  # transitions per step of learning
    steps: int = 1  # pushes that a transition spans
    copy: int = 5  # c: pushes between two copies of the network into the target network
    optimizer: str = "adam"  # or sgd; the paper does not say
    double: bool = False  # double Q-learning: the network that learns chooses the next action, the target network values it
    returns: str = "undiscounted"  # goals of pre-training; or discounted, by `gamma`
    unit_seconds: float = 1.0  # unit in which rewards are counted
    as_printed: bool = False  # Algorithm 2 to the letter, and features that are not scaled; see `tuners.rlp.dqn`

    def __post_init__(self) -> None:
        rules = {
            "gamma": 0 < self.gamma <= 1,
            "epsilon": 0 <= self.epsilon <= 1,
            "rate": self.rate > 0,
            "anneal": self.anneal >= 0,
            "replay": self.replay >= self.batch,
            "batch": self.batch >= 1,
            "steps": 1 <= self.steps <= self.replay,
            "copy": self.copy >= 1,
            "optimizer": self.optimizer in OPTIMIZERS,
            "returns": self.returns in ("undiscounted", "discounted"),
            "unit_seconds": self.unit_seconds > 0,
        }
        for name, sound in rules.items():
            if not sound:
                raise ValueError(f"Cannot train RLP with {name} {getattr(self, name)!r}: {_SOUND[name]}.")


_SOUND = {
    "gamma": "it lies above 0, up to 1",
    "epsilon": "it is a probability",
    "rate": "give more than 0",
    "anneal": "give pushes, or 0 for never",
    "replay": "the pool must hold a mini-batch at least",
    "batch": "give at least 1",
    "steps": "give at least 1, and no more than the pool holds",
    "copy": "give at least 1",
    "optimizer": f"choose one of {', '.join(OPTIMIZERS)}",
    "returns": "choose undiscounted or discounted",
    "unit_seconds": "give more than 0",
}
