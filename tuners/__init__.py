"""Tuners of parameter servers, the contract they speak, and the synchronisation policies they install.

This file is the registry: which tuners there are, where each lives, and how an outsider's is found. Nothing is imported
until a tuner is wanted, so that listing names costs nothing.
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
"""The entry-point group under which other distributions offer tuners."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tuner by name, and where its factory lives."""

    name: str
    where: str  # "package.module:factory"
    summary: str
    contestant: bool = True  # False: reported apart, because it knows what no tuner can know
    embedded: bool = True  # ships with this distribution
    options: tuple[tuple[str, Scalar], ...] = ()  # keyword arguments of the factory that are not the default

    @property
    def factory(self) -> TunerFactory:
        """The factory itself, imported now. Raises ValueError where there is no such module, name or function."""
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
        Entry("fixed", "tuners.baselines.fixed:fixed", "leaves the job as it starts"),
        Entry("bsp", "tuners.baselines.fixed:bsp", "bulk synchronous: everybody waits for everybody"),
        Entry("asp", "tuners.baselines.fixed:asp", "asynchronous: nobody waits"),
        Entry("ssp", "tuners.baselines.fixed:ssp", "stale synchronous: nobody runs more than 3 clocks ahead"),
        Entry("dssp", "tuners.baselines.fixed:dssp", "dynamic stale synchronous: the bound moves between 3 and 15 clocks"),
        Entry("k_sync", "tuners.baselines.fixed:k_sync", "K-sync: 70 % of the workers end a round, the others begin anew"),
        Entry(
            "k_batch_sync",
            "tuners.baselines.fixed:k_batch_sync",
            "K-batch-sync: a round of mini-batches, whoever's they are",
        ),
        Entry("k_async", "tuners.baselines.fixed:k_async", "K-async: who has pushed waits until 70 % of the workers have"),
        Entry(
            "backup_workers",
            "tuners.baselines.fixed:backup_workers",
            "backup workers: what comes after its round is dropped",
        ),
        Entry("sync_switch", "tuners.baselines.fixed:sync_switch", "Sync-Switch: BSP for 100 pushes, ASP from then on"),
        Entry("rlp", "tuners.rlp:rlp", "RLP: a policy trained by deep Q-learning says at every push who goes on"),
        Entry(
            "random_search",
            "tuners.baselines.random_search:random_search",
            "tries random settings online, stays with the best",
        ),
        Entry("tpe", "tuners.baselines.tpe:tpe", "Optuna's tree-structured Parzen estimator, online"),
        Entry("cruise", "tuners.cruise:cruise", "Cruise: workers against servers, from a cost model of an epoch"),
        Entry("bo_online", "tuners.bo_online:bo_online", "TensorFlowOnline: Bayesian optimisation of the seconds left"),
        Entry("mltuner", "tuners.mltuner:mltuner", "MLtuner: tries training tunables in branches, again on a plateau"),
        Entry(
            "spearmint",
            "tuners.baselines.spearmint:spearmint",
            "Bayesian optimisation of whole trainings, as MLtuner measured it",
        ),
        Entry(
            "hyperband", "tuners.baselines.hyperband:hyperband", "Hyperband with an infinite horizon, as MLtuner measured it"
        ),
        Entry(
            "asha", "tuners.baselines.asha:asha", "random settings, those that fall behind stopped early by Optuna's pruners"
        ),
        Entry("bespoke_bo", "tuners.bespoke_bo:bespoke_bo", "Bespoke BO: a structured model schedules in ten evaluations"),
        Entry(
            "uniform_devices",
            "tuners.baselines.schedule_search:uniform_devices",
            "schedules the batch evenly on all devices",
        ),
        Entry("uniform_gpus", "tuners.baselines.schedule_search:uniform_gpus", "schedules the batch evenly on the GPUs"),
        Entry(
            "schedule_search", "tuners.baselines.schedule_search:schedule_search", "a bandit over techniques, as OpenTuner's"
        ),
        Entry(
            "best_fixed",
            "tuners.baselines.best_fixed:best_fixed",
            "the oracle: the best of 20 random fixed settings, known in hindsight",
            contestant=False,
        ),
    )
}


def registry() -> dict[str, Entry]:
    """Every tuner by name: the embedded ones in their order, then those that other distributions offer.

    An embedded name cannot be taken over.
    """
    offered = (_from_entry_point(p) for p in sorted(entry_points(group=_GROUP), key=lambda p: p.name))
    return _EMBEDDED | {e.name: e for e in offered if e.name not in _EMBEDDED}


def embedded() -> tuple[str, ...]:
    """What ``--tuners all`` stands for: every embedded tuner that competes, and the oracle that they are held against."""
    return tuple(_EMBEDDED)


def resolve(name: str) -> Entry:
    """The tuner of that name, or the one at ``package.module:factory``.

    Options stand in brackets behind it, as in ``cruise[gain=0.1,bandwidth=measured]``. Raises ValueError, with the nearest
    names, where there is no such tuner or option.
    """
    plain, options = parse(name)
    if options:
        entry = replace(resolve(plain), name=name, options=options)
        _ = entry.factory  # so that a misspelt option is refused before anything runs
        return entry
    known = registry()
    if name in known:
        return known[name]
    if ":" in name:
        entry = Entry(name, name, "a tuner of your own", embedded=False)
        _ = entry.factory  # so that a misspelt one is refused before anything runs
        return entry
    near = get_close_matches(name, known)
    raise ValueError(
        f"No tuner {name!r}.{_did_you_mean(near)} Choose from {', '.join(known)}, or write package.module:factory."
    )


def parse(name: str) -> tuple[str, tuple[tuple[str, Scalar], ...]]:
    """What stands before the brackets in ``cruise[gain=0.1]``, and the options within. Raises ValueError for bad ones."""
    plain, bracket, options = name.partition("[")
    if not bracket:
        return plain, ()
    if not options.endswith("]"):
        raise ValueError(f"Cannot read the options of tuner {name!r}: write {plain}[option=value,...].")
    return plain, tuple(_option(name, o) for o in options[:-1].split(","))


def _option(tuner: str, text: str) -> tuple[str, Scalar]:
    """An option and its value: a number, true or false, or else a word."""
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
