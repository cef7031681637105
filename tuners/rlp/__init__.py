"""RLP (Zhu et al., 2020): learned synchronisation policies, the paper's by deep Q-learning, and one of ours."""

from tuners.rlp.tuner import rlp

__all__ = ["rlp"]
