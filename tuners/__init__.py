"""Tuners of parameter servers, their contract with a system, and the synchronisation policies that they use.

This file is the registry: the names of all tuners, where each is defined, and how a tuner of another package is found. A
tuner's module is imported when the tuner is used, so that listing the names is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tuners.actions import Scalar, TunerFactory

__all__ = ["Entry", "embedded", "parse", "registry", "resolve"]

_GROUP = "harness.tuners"
"""The entry-point group in which other distributions register tuners."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tuner: its name, and where its factory is defined."""

    name: str
    where: str  # "package.module:factory"
    summary: str
    contestant: bool = True  # False: reported apart, because it uses knowledge that no tuner can have
    embedded: bool = True  # ships with this distribution
    options: tuple[tuple[str, Scalar], ...] = ()  # keyword arguments of the factory that differ from its defaults

    @property
    def factory(self) -> TunerFactory:
        """The factory, imported now. Raises ValueError where module, name or function do not exist."""
        module_name, _, attribute = self.where.partition(":")
        if not module_name or not attribute:
            raise ValueError(f"Cannot find tuner {self.where!r}: write package.module:factory.")
        try:
            module = import_module(module_name)
        except Exception as error:
            raise ValueError(
                f"Cannot import tuner {self.where!r} ({type(error).__name__}: {error}): "
                "is its module free of errors, and installed or on PYTHONPATH?"
            ) from error
        if not hasattr(module, attribute):
            near = get_close_matches(attribute, dir(module))
            raise ValueError(f"Cannot find tuner {self.where!r}: {module_name} has no {attribute!r}.{_did_you_mean(near)}")
        found = getattr(module, attribute)
        if not callable(found):
            raise ValueError(f"Cannot use {self.where!r} as a tuner: it is no function; give one that takes a Job.")  # noqa: TRY004
        _check_options(self.name, found, dict(self.options))
        return cast("TunerFactory", partial(found, **dict(self.options)) if self.options else found)


_EMBEDDED = {
    e.name: e
    for e in (
        Entry("fixed", "tuners.baselines.fixed:fixed", "keeps the start setting"),
        Entry(
            "bsp", "tuners.baselines.fixed:bsp", "bulk synchronous: all workers wait for each other after every mini-batch"
        ),
        Entry("asp", "tuners.baselines.fixed:asp", "asynchronous: no worker waits"),
        Entry(
            "ssp", "tuners.baselines.fixed:ssp", "stale synchronous: no worker runs more than 3 clocks ahead of the slowest"
        ),
        Entry("dssp", "tuners.baselines.fixed:dssp", "dynamic stale synchronous: the bound varies between 3 and 15 clocks"),
        Entry(
            "k_sync",
            "tuners.baselines.fixed:k_sync",
            "K-sync: a round ends when 70 % of the workers have pushed; the others start again",
        ),
        Entry(
            "k_batch_sync",
            "tuners.baselines.fixed:k_batch_sync",
            "K-batch-sync: as K-sync, but a fast worker may push several times in a round",
        ),
        Entry(
            "k_async",
            "tuners.baselines.fixed:k_async",
            "K-async: a worker that has pushed waits until 70 % of the workers have pushed",
        ),
        Entry(
            "backup_workers",
            "tuners.baselines.fixed:backup_workers",
            "backup workers: a round ends early, and a late gradient is dropped",
        ),
        Entry("sync_switch", "tuners.baselines.fixed:sync_switch", "Sync-Switch: BSP for the first 100 pushes, then ASP"),
        Entry(
            "joint",
            "tuners.joint:joint",
            "ours: tunes every free knob by expected seconds left, pushes left times seconds per push",
        ),
        Entry(
            "rlp", "tuners.rlp:rlp", "RLP: a policy trained by deep Q-learning decides at every push which workers continue"
        ),
        Entry(
            "random_search",
            "tuners.baselines.random_search:random_search",
            "tries random settings on the running job and keeps the best",
        ),
        Entry(
            "tpe",
            "tuners.baselines.tpe:tpe",
            "tries settings of Optuna's tree-structured Parzen estimator and keeps the best",
        ),
        Entry(
            "cruise", "tuners.cruise:cruise", "Cruise: chooses workers, servers and their shares by a cost model of an epoch"
        ),
        Entry("bo_online", "tuners.bo_online:bo_online", "TensorFlowOnline: Bayesian optimisation of the remaining seconds"),
        Entry(
            "mltuner",
            "tuners.mltuner:mltuner",
            "MLtuner: tries learning rates and other tunables in branches, again at each plateau",
        ),
        Entry(
            "spearmint",
            "tuners.baselines.spearmint:spearmint",
            "Bayesian optimisation over complete trainings, as MLtuner measured it",
        ),
        Entry(
            "hyperband", "tuners.baselines.hyperband:hyperband", "Hyperband with an infinite horizon, as MLtuner measured it"
        ),
        Entry("asha", "tuners.baselines.asha:asha", "random settings; Optuna's pruners stop the slow ones early"),
        Entry(
            "bespoke_bo",
            "tuners.bespoke_bo:bespoke_bo",
            "Bespoke BO: finds a schedule in ten evaluations with a structured model",
        ),
        Entry(
            "uniform_devices",
            "tuners.baselines.schedule_search:uniform_devices",
            "shares the batch out evenly among all devices",
        ),
        Entry("uniform_gpus", "tuners.baselines.schedule_search:uniform_gpus", "shares the batch out evenly among the GPUs"),
        Entry(
            "schedule_search",
            "tuners.baselines.schedule_search:schedule_search",
            "searches schedules by a bandit over techniques, as OpenTuner does",
        ),
        Entry(
            "best_fixed",
            "tuners.baselines.best_fixed:best_fixed",
            "the oracle: the best of 20 fixed settings, chosen after running all of them",
            contestant=False,
        ),
    )
}


def registry() -> dict[str, Entry]:
    """Every tuner by name: the embedded ones in their order, then those of other distributions.

    Another distribution cannot replace an embedded tuner.
    """
    offered = (_from_entry_point(p) for p in sorted(entry_points(group=_GROUP), key=lambda p: p.name))
    return _EMBEDDED | {e.name: e for e in offered if e.name not in _EMBEDDED}


def embedded() -> tuple[str, ...]:
    """The tuners that ``--tuners all`` means: all embedded contestants, and the oracle."""
    return tuple(_EMBEDDED)


def resolve(name: str) -> Entry:
    """The tuner of that name, or the one at ``package.module:factory``.

    Options follow in brackets, as in ``cruise[gain=0.1,bandwidth=measured]``. Raises ValueError, with the nearest names,
    for an unknown tuner or option.
    """
    plain, options = parse(name)
    if options:
        entry = replace(resolve(plain), name=name, options=options)
        _ = entry.factory  # refuses a misspelt option before anything runs
        return entry
    known = registry()
    if name in known:
        return known[name]
    if ":" in name:
        entry = Entry(name, name, "a tuner of your own", embedded=False)
        _ = entry.factory  # refuses a misspelt name before anything runs
        return entry
    near = get_close_matches(name, known)
    raise ValueError(
        f"No tuner {name!r}.{_did_you_mean(near)} Choose from {', '.join(known)}, or write package.module:factory."
    )


def parse(name: str) -> tuple[str, tuple[tuple[str, Scalar], ...]]:
    """The name before the brackets in ``cruise[gain=0.1]``, and the options in them. Raises ValueError for bad options."""
    plain, bracket, options = name.partition("[")
    if not bracket:
        return plain, ()
    if not options.endswith("]"):
        raise ValueError(f"Cannot read the options of tuner {name!r}: write {plain}[option=value,...].")
    return plain, tuple(_option(name, o) for o in options[:-1].split(","))


def _option(tuner: str, text: str) -> tuple[str, Scalar]:
    """The name of an option and its value: a number, true or false, or else a word."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise ValueError(f"Cannot read option {text!r} of tuner {tuner!r}: write option=value.")
    for read in (int, float):
        try:
            return name, read(value)
        except ValueError:
            continue
    return name, {"true": True, "false": False}.get(value.lower(), value.strip("\"'"))


def _check_options(name: str, factory: Callable[..., object], options: Mapping[str, Scalar]) -> None:
    if not options:
        return
    known = [p.name for p in signature(factory).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            near = get_close_matches(option, known)
            raise ValueError(
                f"Tuner {name!r} has no option {option!r}.{_did_you_mean(near)} It has {', '.join(known) or 'none'}."
            )


def _from_entry_point(point: EntryPoint) -> Entry:
    origin = point.dist.name if point.dist is not None else "another distribution"
    return Entry(point.name, point.value, f"from {origin}", embedded=False)


def _did_you_mean(near: Iterable[str]) -> str:
    names = " or ".join(repr(n) for n in near)
    return f" Did you mean {names}?" if names else ""
