"""Tuners of parameter servers, their contract with a system, and the synchronisation policies that they use.

This file is the registry: the names of all tuners, where each is defined, and how a tuner of another package is found. An
entry's module is imported when the tuner is used (`entries`), so that listing the names is fast.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points

from tuners.entries import Entry, as_module, entry_of, parse, split_names
from tuners.near_names import did_you_mean

__all__ = ["Entry", "embedded", "entry_of", "parse", "registry", "resolve", "resolve_contestant", "split_names"]

_GROUP = "harness.tuners"
"""The entry-point group in which other distributions register tuners."""


_POLICY = "the synchronisation policy, once"
_TRAINING = "learning rate, momentum, mini-batch, staleness"
_LEARNS = "one of them free, and a target of accuracy or loss"
_SCHEDULE = "roles of machines, load of every device"
_DUTTA = "Dutta et al., Slow and Stale Gradients Can Win the Race, 2018"
_HO = "Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, 2013"

_EMBEDDED = {
    e.name: e
    for e in (
        Entry(
            "fixed",
            "tuners.baselines.fixed:fixed",
            "keeps the start setting",
            tunes="nothing",
        ),
        Entry(
            "bsp",
            "tuners.baselines.fixed:bsp",
            "bulk synchronous: all workers wait for each other after every mini-batch",
            tunes=_POLICY,
            paper="Valiant, A Bridging Model for Parallel Computation, 1990",
        ),
        Entry(
            "asp",
            "tuners.baselines.fixed:asp",
            "asynchronous: no worker waits",
            tunes=_POLICY,
            paper=_HO,
        ),
        Entry(
            "ssp",
            "tuners.baselines.fixed:ssp",
            "stale synchronous: no worker runs more than 3 clocks ahead of the slowest",
            tunes=_POLICY,
            paper=_HO,
        ),
        Entry(
            "dssp",
            "tuners.baselines.fixed:dssp",
            "dynamic stale synchronous: the bound varies between 3 and 15 clocks",
            tunes=_POLICY,
            paper="Zhao et al., Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning, 2019",
        ),
        Entry(
            "k_sync",
            "tuners.baselines.fixed:k_sync",
            "K-sync: a round ends when 70 % of the workers have pushed; the others start again",
            tunes=_POLICY,
            paper=_DUTTA,
        ),
        Entry(
            "k_batch_sync",
            "tuners.baselines.fixed:k_batch_sync",
            "K-batch-sync: as K-sync, but a fast worker may push several times in a round",
            tunes=_POLICY,
            paper=_DUTTA,
        ),
        Entry(
            "k_async",
            "tuners.baselines.fixed:k_async",
            "K-async: a worker that has pushed waits until 70 % of the workers have pushed",
            tunes=_POLICY,
            paper=_DUTTA,
        ),
        Entry(
            "backup_workers",
            "tuners.baselines.fixed:backup_workers",
            "backup workers: a round ends early, and a late gradient is dropped",
            tunes=_POLICY,
            paper="Chen et al., Revisiting Distributed Synchronous SGD, 2016",
        ),
        Entry(
            "joint",
            "tuners.joint:joint",
            "ours: tunes every free knob by expected seconds left, pushes left times seconds per push",
            tunes="every free knob",
            needs="a free knob",
        ),
        Entry(
            "sync_switch",
            "tuners.baselines.fixed:sync_switch",
            "Sync-Switch: BSP for the first 100 pushes, then ASP",
            tunes=_POLICY,
            paper="Li et al., Sync-Switch: Hybrid Parameter Synchronization for Distributed Deep Learning, 2021",
        ),
        Entry(
            "ringmaster",
            "tuners.baselines.ringmaster:ringmaster",
            "Ringmaster ASGD: asynchronous; a gradient that is too many updates old is ignored",
            tunes=_POLICY,
            needs="a target of accuracy or loss",
            paper="Maranjyan et al., Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity, 2025",
        ),
        Entry(
            "ringleader",
            "tuners.baselines.rivals.ringleader:ringleader",
            "Ringleader ASGD: asynchronous; every step is by the mean of all workers' latest gradients",
            tunes=_POLICY,
            needs="a target of accuracy or loss",
            paper="Maranjyan and Richtarik, Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity under "
            "Data Heterogeneity, 2026",
        ),
        Entry(
            "dbw",
            "tuners.baselines.dbw:dbw",
            "DBW: backup workers, their number chosen for every round by gain per second",
            tunes="how many gradients a round waits for, every round",
            needs="a target of accuracy or loss",
            paper="Xu, Neglia and Sebastianelli, Dynamic Backup Workers for Parallel Machine Learning, 2020",
        ),
        Entry(
            "adasync",
            "tuners.baselines.adasync:adasync",
            "AdaSync: K-async with a K that grows as the loss falls",
            tunes="how many workers wait for each other, every group",
            needs="a target of accuracy or loss",
            paper="Dutta, Wang and Joshi, Slow and Stale Gradients Can Win the Race, 2021",
        ),
        Entry(
            "abs",
            "tuners.baselines.abs:adaptive_bounded_staleness",
            "ABS: AdaSync's groups, in which a worker that is too stale starts over",
            tunes="how many workers wait for each other and who starts over, every group",
            needs="a target of accuracy or loss",
            paper="Tan, Zhu and Zhang, ABS: Adaptive Bounded Staleness Converges Faster and Communicates Less, 2023",
        ),
        Entry(
            "lb_bsp",
            "tuners.baselines.lb_bsp:lb_bsp",
            "LB-BSP: samples of every device in proportion to its measured speed",
            tunes="load of every device",
            needs="loads free, and BSP at the start",
            paper="Chen et al., Semi-Dynamic Load Balancing, SoCC 2020",
        ),
        Entry(
            "omnilearn",
            "tuners.baselines.rivals.omnilearn:omnilearn",
            "OmniLearn: samples move from devices that take longer than the mean, until none does",
            tunes="load of every device",
            needs="loads free",
            paper="Tyagi and Sharma, OmniLearn: ... Distributed Deep Learning over Heterogeneous Clusters, TPDS 2025",
        ),
        Entry(
            "ata",
            "tuners.baselines.rivals.ata:ata",
            "ATA: a bandit decides how many gradients of a round each worker computes",
            tunes="gradients per worker, every round",
            paper="Maranjyan et al., ATA: Adaptive Task Allocation for Efficient Resource Management, ICML 2025",
        ),
        Entry(
            "optimus",
            "tuners.baselines.rivals.optimus:optimus",
            "Optimus: workers and servers by a fitted speed function and marginal gain",
            tunes="number of workers and servers",
            needs="worker_count or roles free",
            paper="Peng et al., Optimus: An Efficient Dynamic Resource Scheduler for Deep Learning Clusters, EuroSys 2018",
        ),
        Entry(
            "dlrover_rm",
            "tuners.baselines.rivals.dlrover_rm:dlrover_rm",
            "DLRover-RM: workers and servers by a resource model; no machine that adds little",
            tunes="number of workers and servers",
            needs="worker_count or roles free",
            paper="Wang et al., DLRover-RM: Resource Optimization for Deep Recommendation Models Training, VLDB 2024",
        ),
        Entry(
            "pollux",
            "tuners.baselines.rivals.pollux:pollux",
            "Pollux: batch and rate of the highest goodput, by the gradient noise scale",
            tunes="batch and learning rate",
            needs="both free, and a target of accuracy or loss; simulated jobs",
            paper="Qiao et al., Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning, OSDI 2021",
        ),
        Entry(
            "dlrover_hot",
            "tuners.baselines.rivals.dlrover_hot:dlrover_hot",
            "DLRover: a parameter server that is hot moves to a larger machine",
            tunes="which machine a hot server is",
            needs="roles free, and an idle machine",
            paper="Wang et al., DLRover-RM: Resource Optimization for Deep Recommendation Models Training, VLDB 2024",
        ),
        Entry(
            "local_sgd",
            "tuners.baselines.local_steps.local_sgd:local_sgd",
            "local SGD: the servers average the workers' copies after every 8 local steps",
            tunes="local steps, once",
            needs="local_steps free",
            paper="Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019",
        ),
        Entry(
            "diloco",
            "tuners.baselines.local_steps.diloco:diloco",
            "DiLoCo: 16 local steps, then an outer step with Nesterov momentum",
            tunes="local steps and the outer optimizer, once",
            needs="local_steps free",
            paper="Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023",
        ),
        Entry(
            "adacomm",
            "tuners.baselines.local_steps.adacomm:adacomm",
            "AdaComm: local SGD whose number of local steps falls with the loss",
            tunes="local steps, at intervals of time",
            needs="local_steps free, and a target of accuracy or loss",
            paper="Wang and Joshi, Adaptive Communication Strategies ... in Local-Update SGD, SysML 2019",
        ),
        Entry(
            "dylu",
            "tuners.baselines.local_steps.dylu:dylu",
            "DyLU: local SGD in which every worker takes local steps in proportion to its speed",
            tunes="local steps of every worker",
            needs="local_steps free",
            paper="Liu et al., Asynchronous Local-SGD Training for Language Modeling, 2024",
        ),
        Entry(
            "fedbuff",
            "tuners.baselines.local_steps.fedbuff:fedbuff",
            "FedBuff: local steps without waiting; the servers average half as many pushes as workers",
            tunes="local steps and the policy, once",
            needs="local_steps free, and the policy not held",
            paper="Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022",
        ),
        Entry(
            "quorum",
            "tuners.baselines.local_steps.quorum:quorum",
            "local SGD in rounds that end some grace after three quarters of the workers have pushed",
            tunes="local steps and the policy, once",
            needs="local_steps free, and the policy not held",
            paper="Bonawitz et al., Towards Federated Learning at Scale: System Design, MLSys 2019",
        ),
        Entry(
            "rlp",
            "tuners.rlp:rlp",
            "RLP: a policy trained on simulated jobs decides at every push which workers continue",
            tunes="which workers go on, at every push",
            paper="Zhu et al., Learning Efficient Parameter Server Synchronization Policies, 2020",
        ),
        Entry(
            "random_search",
            "tuners.baselines.random_search:random_search",
            "tries random settings on the running job and keeps the best",
            tunes="every free knob",
            needs="a free knob",
            paper="Bergstra and Bengio, Random Search for Hyper-Parameter Optimization, 2012",
        ),
        Entry(
            "tpe",
            "tuners.baselines.tpe:tpe",
            "tries settings of Optuna's tree-structured Parzen estimator and keeps the best",
            tunes="every free knob",
            needs="a free knob",
            paper="Bergstra et al., Algorithms for Hyper-Parameter Optimization, 2011",
        ),
        Entry(
            "cruise",
            "tuners.cruise:cruise",
            "Cruise: chooses workers, servers and their shares by a cost model of an epoch",
            tunes="workers, servers, shares of data and model",
            needs="worker_count or roles free",
            paper="Lee et al., Automating System Configuration of Distributed Machine Learning, ICDCS 2019",
        ),
        Entry(
            "bo_online",
            "tuners.bo_online:bo_online",
            "TensorFlowOnline: Bayesian optimisation of the remaining seconds",
            tunes="system knobs: roles, policy, threads, bits, graph options",
            needs="a free system knob",
            paper="Liu et al., Towards Self-Tuning Parameter Servers, 2020",
        ),
        Entry(
            "mltuner",
            "tuners.mltuner:mltuner",
            "MLtuner: tries learning rates and other tunables in branches of the job, while that pays",
            tunes=f"{_TRAINING}, policy",
            needs=_LEARNS,
            paper="Cui, Ganger and Gibbons, MLtuner: System Support for Automatic Machine Learning Tuning, 2018",
        ),
        Entry(
            "spearmint",
            "tuners.baselines.spearmint:spearmint",
            "Bayesian optimisation over complete trainings, as MLtuner measured it",
            tunes=_TRAINING,
            needs=_LEARNS,
            paper="Snoek, Larochelle and Adams, Practical Bayesian Optimization of Machine Learning Algorithms, 2012",
        ),
        Entry(
            "hyperband",
            "tuners.baselines.hyperband:hyperband",
            "Hyperband with an infinite horizon, as MLtuner measured it",
            tunes=_TRAINING,
            needs=_LEARNS,
            paper="Li et al., Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization, 2016",
        ),
        Entry(
            "asha",
            "tuners.baselines.asha:asha",
            "random settings; Optuna's pruners stop the slow ones early",
            tunes=_TRAINING,
            needs=_LEARNS,
            paper="Li et al., Massively Parallel Hyperparameter Tuning, 2018; Golovin et al., Google Vizier, 2017",
        ),
        Entry(
            "bespoke_bo",
            "tuners.bespoke_bo:bespoke_bo",
            "Bespoke BO: finds a schedule in ten evaluations with a structured model",
            tunes=_SCHEDULE,
            needs="roles and loads free",
            paper="Dalibard et al., Tuning the Scheduling of Distributed SGD with Bayesian Optimization, 2017",
        ),
        Entry(
            "uniform_devices",
            "tuners.baselines.schedule_search:uniform_devices",
            "shares the batch out evenly among all devices",
            tunes="loads, once",
            needs="roles and loads free",
            paper="Dalibard et al. 2017, Section 4",
        ),
        Entry(
            "uniform_gpus",
            "tuners.baselines.schedule_search:uniform_gpus",
            "shares the batch out evenly among the GPUs",
            tunes="loads, once",
            needs="roles and loads free, and GPUs",
            paper="Dalibard et al. 2017, Section 4",
        ),
        Entry(
            "schedule_search",
            "tuners.baselines.schedule_search:schedule_search",
            "searches schedules by a bandit over techniques, as OpenTuner does",
            tunes=_SCHEDULE,
            needs="roles and loads free",
            paper="Ansel et al., OpenTuner: An Extensible Framework for Program Autotuning, 2014",
        ),
        Entry(
            "best_fixed",
            "tuners.baselines.best_fixed:best_fixed",
            "the oracle: the best fixed setting that a search finds, chosen after running all of them",
            contestant=False,
            tunes="nothing: the start setting is chosen in hindsight",
            paper="Liu et al. 2020, Table III",
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
    if name in _EMBEDDED:  # first, because to look for those of other distributions takes milliseconds
        return _EMBEDDED[name]
    known = registry()
    if name in known:
        entry = known[name]
        try:
            _ = entry.factory  # others may be broken
        except ValueError as error:
            raise ValueError(f"Cannot use tuner {name!r} {entry.summary}: {error}") from error
        return entry
    if ":" in name:
        entry = Entry(name, name, "a tuner of your own", embedded=False)
        _ = entry.factory  # refuses a misspelt name before anything runs
        return entry
    near = _as_written(name) or get_close_matches(name, known) or _in_module(name)
    others = "`harness list tuners` has all." + ("" if near else " One of your own is package.module:factory.")
    raise ValueError(f"No tuner {name!r}.{did_you_mean(near)} {others}")


def resolve_contestant(name: str) -> Entry:
    """`resolve`, for what plays single runs. Raises ValueError for a reference, which is chosen after many runs."""
    entry = resolve(name)
    if not entry.contestant:
        raise ValueError(f"Cannot play {name!r} alone: it is the best of many runs, in hindsight. Compare it with others.")
    return entry


def _as_written(name: str) -> list[str]:
    """How a tuner is written whose `name` looks like a path of attributes, or like a file: module:factory."""
    if name.endswith(".py"):
        return [f"{as_module(name)}:FUNCTION"]
    module, _, attribute = as_module(name).rpartition(".")
    return [f"{module}:{attribute}"] if module and attribute else []


def _in_module(name: str) -> list[str]:
    """How a tuner is written whose `name` is that of a module alone."""
    return [f"{name}:FUNCTION"] if name.isidentifier() and PathFinder.find_spec(name) is not None else []


def _from_entry_point(point: EntryPoint) -> Entry:
    origin = point.dist.name if point.dist is not None else "another distribution"
    return Entry(point.name, point.value, f"from {origin}", embedded=False)
