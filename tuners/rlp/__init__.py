"""RLP (Zhu et al., 2020): a synchronisation policy learned by deep Q-learning."""

from tuners.rlp.tuner import rlp

__all__ = ["rlp"]
