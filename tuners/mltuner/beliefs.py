"""What trials are expected to gain, before they are made and after they have won or failed. Ours."""

from __future__ import annotations

from tuners.mltuner.branch_record import BranchRecord
from tuners.mltuner.moves import Move

__all__ = ["LEAST_FALL", "Beliefs"]

LEAST_FALL = 0.005  # of the loss; less is no progress

_HIGHER_RATE = 0.1  # of the time left: what a higher rate is expected to save
_LITTLE = 0.05  # the other moves
_STUCK = 0.4  # another rate, while the loss does not fall
_SIZES = (0.25, 8.0)  # of steps, the least and the most


class Beliefs:
    """What is expected of each move: the share of the time left that it saves.

    After a success it is half of what that has gained. After a failure it is a quarter of what it was, or a sixteenth if the
    trial was cut short, and the next step is half as long. All are halved with every failure in a row. If neither the trial
    nor the reference has made any progress, the next step is twice as long instead.
    """

    def __init__(self) -> None:
        self.known: dict[Move, float] = {}  # since a success
        self.doubt: dict[Move, float] = {}  # factor since failures
        self.sizes: dict[Move, float] = {}  # of steps
        self.failures = 0.0  # in a row

    def expected(self, move: Move, reference: BranchRecord, fall: float, *, stuck: bool) -> float:
        """The expected gain, where the loss of the reference has fallen by the share `fall`."""
        prior = _prior(move, reference, fall, stuck=stuck) * self.doubt.get(move, 1.0)
        return float(max(prior, self.known.get(move, 0.0)) * 0.5**self.failures)

    def size(self, move: Move) -> float:
        return self.sizes.get(move, 1.0)

    def forget(self, much: float) -> None:
        """Forget `much` of the failures in a row."""
        self.failures = max(self.failures - much, 0.0)
        self.doubt = {move: min(doubt * 4**much, 1.0) for move, doubt in self.doubt.items()}

    def succeeded(self, move: Move, gain: float) -> None:
        self.known[move], self.failures, self.sizes[move] = gain / 2, 0.0, 1.0

    def failed(self, move: Move, *, flat: bool, lost: bool) -> None:
        self.failures += 1
        self.known.pop(move, None)
        if not flat:
            self.doubt[move] = self.doubt.get(move, 1.0) / (16 if lost else 4)
        self.sizes[move] = min(max(self.size(move) * (2.0 if flat else 0.5), _SIZES[0]), _SIZES[1])


def _prior(move: Move, reference: BranchRecord, fall: float, *, stuck: bool) -> float:
    """The expected gain of a move that has not been tried."""
    if not (move.up or stuck):
        return 0.0  # a calmer setting always looks good for a while, because losses are less noisy, and is slower then
    if move.name == "learning_rate":
        if stuck and fall < LEAST_FALL:
            return _STUCK if move.up == (fall > -LEAST_FALL) else _STUCK / 2
        return _HIGHER_RATE if move.up else _LITTLE
    if move.name == "waiting" and move.up:
        return max(_LITTLE, reference.waiting / 2)
    if move.name == "batch_size" and move.up:
        return max(_LITTLE, reference.computing / 4)
    return _LITTLE
