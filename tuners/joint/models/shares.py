"""Shares of a setting whose roles are chosen: samples of each device, parts of the data, and of the model.

Each has a best value in closed form, so nothing is searched (`machines.candidates` balances every setting that it
compares). What is free is chosen so that all machines take equally long:

* Shares of the model in proportion to what the servers serve per second, as Cruise's placement has them.
* Loads where all workers wait for each other: all devices end at the same time. A device takes a fixed time and one for
  each sample, so this is LB-BSP's rule with the fixed time that the system model has fitted. Where nobody waits, equal
  mini-batches are as good.
* Shares of the data in proportion to what workers complete per second, where the target is counted by share (Cruise, Eq. 1);
  in proportion to their loads where all wait, so that every sample counts the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tuners.actions import Job, Setting
from tuners.joint.models.system_model import SystemModel, waits
from tuners.settings import Integer, shared_out
from tuners.space import share_batch

__all__ = ["Shares"]

_EVEN = 1e-3  # relative difference of shares that counts as none


class Shares:
    """Balances the settings of one job, as far as shares are free there."""

    def __init__(self, job: Job, system: SystemModel) -> None:
        self._job, self._system = job, system
        self.are_even = False  # whether loads are left as they are shared out evenly
        self._of_loads, self._of_data, self._of_model = map(job.space.frees, ("load", "data_share", "model_share"))

    @property
    def is_free(self) -> bool:
        """Whether any share is free."""
        return self._of_loads or self._of_data or self._of_model

    @property
    def counts_by_share(self) -> bool:
        """Whether every worker has to do a part of the work that is free to choose."""
        return self._of_data and self._job.target.by_share

    def push_seconds(self, setting: Setting) -> float:
        """Seconds for each push that the target asks for, where each worker has its own part: those of the slowest."""
        parts, cycles, work = setting.shares()[0], self._system.cycle_seconds(setting), self._work(setting)
        return max(part * cycle / done for part, cycle, done in zip(parts, cycles, work, strict=True))

    def coverage(self, setting: Setting) -> float:
        """How many samples a round counts for, over those that it has: 1 where all workers have equal loads.

        Of one batch that is shared out, every sample counts the same, and data count as often as they are used. Else every
        mini-batch counts the same, and the smallest ones make the mean noisy.
        """
        if not setting.loads or (self._of_data and self._job.space.whole_batch):
            return 1.0
        samples = [sum(row) for row in setting.loads]
        if self._job.space.whole_batch:
            return sum(samples) ** 2 / (len(samples) * sum(n**2 for n in samples))
        return len(samples) ** 2 / (sum(samples) * sum(1 / n for n in samples))

    def is_less_even(self, setting: Setting, other: Setting) -> bool:
        """Whether the data of workers count less evenly under `setting` than under `other`."""
        return self.coverage(setting) < self.coverage(other)

    def _work(self, setting: Setting) -> list[float]:
        """What a push of each worker completes of what the target counts."""
        if self._job.target.metric != "samples":
            return [1.0] * len(setting.workers)
        rows = setting.loads or [(setting.batch_size,)] * len(setting.workers)
        return [float(setting.steps_of(w) * sum(row)) for w, row in zip(setting.workers, rows, strict=True)]

    def choices(self, setting: Setting) -> Iterator[Setting]:
        """`setting` with the shares that may be the best ones: where uneven loads cost learning, also half as uneven."""
        yield self.balanced(setting)
        if self._of_loads and not self._job.target.counts and waits(setting) and not self.are_even:
            yield self.balanced(setting, 0.5)

    def balanced(self, setting: Setting, part: float = 1.0) -> Setting:
        """`setting` with the best shares on its workers and servers, as far as they are free and known; loads are moved
        so far that devices end at the same time, or a `part` of that from equal ones."""
        if self._of_loads and self._are_of_another_batch(setting):
            setting = replace(setting, loads=())
        if self._of_loads and waits(setting) and not self.are_even:
            setting = self._with_loads(setting, part)
        elif self._of_loads and not setting.loads:
            setting = share_batch(self._job.space, setting)
        if self._of_model:
            rates = [self._system.served_per_second(s) for s in setting.servers]
            setting = replace(setting, model_shares=_shares(rates))
        if self._of_data and self._job.target.by_share:
            work, cycles = self._work(setting), self._system.cycle_seconds(setting)
            setting = replace(setting, data_shares=_shares([w / c for w, c in zip(work, cycles, strict=True)]))
        elif self._of_data and setting.loads and waits(setting):
            setting = replace(setting, data_shares=_shares([float(sum(row)) for row in setting.loads]))
        return setting

    def _are_of_another_batch(self, setting: Setting) -> bool:
        """Whether the loads were for mini-batches of another size than the one that is to be chosen now."""
        sizes_are_free = self._job.space.knob("batch_size") is not None and not self._job.space.whole_batch
        return sizes_are_free and sum(map(sum, setting.loads)) != setting.batch_size * len(setting.workers)

    def _with_loads(self, setting: Setting, part: float) -> Setting:
        """`setting` with the samples of all its mini-batches on devices that then take equally long, for a `part` of 1."""
        space, job = self._job.space, self._job
        devices = {n.name: len(n.devices) for n in job.nodes}
        rows = setting.loads or share_batch(space, setting).loads
        if not rows:
            rows = tuple((setting.batch_size, *[0] * (devices[w] - 1)) for w in setting.workers)
        made = [list(row) for row in rows]
        found = dict[tuple[int, int], tuple[float, float]]()
        for at, worker in enumerate(setting.workers):
            for device in range(devices[worker]):
                free = space.knob(f"load/{worker}/{device}") is not None
                seconds = self._system.compute.device_seconds(setting, worker, device, made[at][device]) if free else None
                if seconds is not None:
                    found[at, device] = seconds
        whole = sum(made[at][device] for at, device in found)
        if space.knob("batch_size") is not None and not space.whole_batch:
            whole = setting.batch_size * len(setting.workers)
        most = [self._most(setting.workers[at], device) or whole for at, device in found]
        if len(found) < 2 or not len(found) <= whole <= sum(most):
            return replace(setting, loads=rows)
        level = _level(whole, list(found.values()), most)
        mixed = [part * n + (1 - part) * whole / len(found) for n in level]
        spare = whole - len(found)  # every device keeps a sample: it could not be measured any more without
        extra = shared_out([n - 1 for n in mixed], spare) if spare else [0] * len(found)
        for (at, device), samples in zip(found, extra, strict=True):
            made[at][device] = 1 + samples
        return replace(setting, loads=tuple(map(tuple, made)))

    def _most(self, worker: str, device: int) -> int:
        """The most samples that the knob of that device allows; 0 where it is a weight."""
        knob = self._job.space.knob(f"load/{worker}/{device}")
        return knob.high if isinstance(knob, Integer) else 0


def _level(whole: int, seconds: Sequence[tuple[float, float]], most: Sequence[int]) -> list[float]:
    """Samples of each device, one at least and `most` at most, `whole` in all, so that all end at the same time.

    Args:
        whole: samples in all.
        seconds: of each device, of one sample and of what does not depend on their number.
        most: samples of each device.
    """
    counts, rest = dict[int, float](), float(whole)
    while True:
        free = [i for i in range(len(seconds)) if i not in counts]
        per_second = sum(1 / seconds[i][0] for i in free)
        end = (rest + sum(fixed / each for each, fixed in (seconds[i] for i in free))) / per_second if free else 0.0
        wanted = {i: (end - seconds[i][1]) / seconds[i][0] for i in free}
        # Too little first: to give a device its one sample makes all others end sooner.
        beyond = {i: 1.0 for i, n in wanted.items() if n < 1} or {
            i: float(most[i]) for i, n in wanted.items() if n > most[i]
        }
        if not beyond:
            return [(counts | wanted)[i] for i in range(len(seconds))]
        counts |= beyond
        rest -= sum(beyond.values())


def _shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Each weight over their sum; () where all are about equal."""
    total = sum(weights)
    return () if max(weights) - min(weights) <= _EVEN * max(weights) else tuple(w / total for w in weights)
