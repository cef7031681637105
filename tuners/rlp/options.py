"""How RLP's policy learns, by options; the defaults are the paper's (Zhu et al. 2020, Sections 3.3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass

import optax

__all__ = ["OPTIMIZERS", "Options"]

OPTIMIZERS = {"sgd": optax.sgd, "adam": optax.adam}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to learn; the defaults are the paper's. Raises ValueError for what makes no sense."""

    gamma: float = 0.8  # discount per push
    epsilon: float = 0.1  # of all actions are drawn at random
    rate: float = 0.01
    anneal: int = 0  # pushes over which the rate falls to nothing; 0: it stays
    replay: int = 50  # N: pushes in the pool
    batch: int = 32  # transitions per step of learning
    steps: int = 1  # pushes that a transition spans
    copy: int = 5  # c: pushes between two copies of the network into the target network
    optimizer: str = "adam"  # or sgd; the print does not say
    double: bool = False  # the network that learns chooses the next action, the target network values it
    returns: str = "undiscounted"  # to regress on in pre-training; or discounted, which is what gamma then goes on with
    unit_seconds: float = 1.0  # rewards are counted in
    as_printed: bool = False

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
