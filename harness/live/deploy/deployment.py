"""Deploys one job: starts its processes, lets the tuner drive it to the end, and records it."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Console

from harness.comparison.results import hold_one_job
from harness.comparison.run_process import save
from harness.drive import Played, play, replay
from harness.lines import say
from harness.live.deploy import job_folder
from harness.live.deploy.beside_simulation import RunFigures, measured
from harness.live.deploy.compiled_ahead import compiled_ahead
from harness.live.deploy.history import History
from harness.live.deploy.progress_view import watched
from harness.live.driver.checkpoints import checkpoint_file
from harness.live.driver.checkpoints.checkpoint_file import Checkpoint
from harness.live.driver.control import REPAIR_SECONDS
from harness.live.driver.repairs.standstill import Limits
from harness.live.driver.system import LiveSystem
from harness.live.driver.view.status import setting_words
from harness.live.links.emulated_links import why_not
from harness.live.processes import launch
from harness.live.protocol.names import process_count
from harness.live.worker.spec import Spec
from harness.machines.machine import cores
from harness.record import MADE_BY
from harness.scenario import Scenario, parse, system
from harness.score import score
from simulators.cluster.conditions import LinkDelay, Replay
from simulators.cluster.trace_driven import roles
from traces.exchanges import Exchange
from traces.parts import Origin, TraceWriter
from traces.record import Recorder
from tuners import Entry, resolve
from tuners.actions import Action, Install, Job, Rejected, SyncPolicy, Tuner, TunerFactory
from tuners.playing.thinking import next_action

__all__ = [
    "Deployment",
    "Emulated",
    "Interrupted",
    "LiveOptions",
    "check",
    "check_folder",
    "cluster_for",
    "deploy",
    "described",
    "how_to_go_on",
    "play_on",
    "simulated",
    "what_is_saved",
]

_SIMULATED = ("sleeps", "stragglers", "episodes", "delays", "buckets", "nodes", "losses", "replay")
"""Conditions that slow nodes or links down or remove nodes; a live job applies them only where it emulates them."""


_NO_MODEL = "No model is saved: the last checkpoint could not be made, and there was none before."

Emulated: TypeAlias = Literal["", "nodes", "all"]


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Where and how the processes of a job, or of all jobs of a contest, are run."""

    address: str | None = None  # of a Ray cluster; None: on this machine
    insecure: bool = False  # also on several machines on which Ray has neither a token nor TLS
    limits: Limits = field(default_factory=Limits)
    emulate: Emulated = ""  # of the scenario: its nodes, with their conditions, or all: their links, too


@dataclass(frozen=True, slots=True)
class Deployment:
    """What to deploy, and where."""

    scenario: Scenario
    entry: Entry
    seed: int
    out: Path
    resume: bool = False
    live: LiveOptions = field(default_factory=LiveOptions)

    @property
    def run(self) -> dict[str, Any]:
        """The run's columns in tables."""
        return {"scenario": self.scenario.name, "tuner": self.entry.name, "seed": self.seed}


class Interrupted(Exception):
    """The user stopped the job, and it can be resumed. Takes the finished message."""


def deploy(wanted: Deployment, console: Console) -> Played:
    """Start a job and drive it to its end. All its processes are ended afterwards, however it ends. The exchanges of the
    result have no pushes; the whole ones are in the folder.

    Raises ValueError, before anything is started, for a job that cannot be deployed; RuntimeError for one that does not
    start, or whose results do not fit on the disk; Interrupted if the user stops it.
    """
    with _full_disk_told(wanted.out), ExitStack() as ray:
        return _played(wanted, console, lambda spec: ray.enter_context(cluster_for(wanted, spec)), ray)


def cluster_for(wanted: Deployment, spec: Spec) -> AbstractContextManager[tuple[launch.ClusterNode, ...]]:
    """The cluster of a job. It is started for it where none is named, if this machine can run that many processes."""
    return launch.cluster(wanted.live.address, insecure=wanted.live.insecure, processes=process_count(spec.job.start))


def play_on(wanted: Deployment, offers: tuple[launch.ClusterNode, ...], console: Console) -> Played:
    """Like `deploy`, on a cluster that is joined already, and stays so."""
    return _played(wanted, console, lambda _: offers, None)


def _played(
    wanted: Deployment, console: Console, joined: Callable[[Spec], tuple[launch.ClusterNode, ...]], ray: ExitStack | None
) -> Played:
    """Play a job on the cluster that `joined` joins; closing `ray` leaves it. None: it stays joined."""
    began_seconds, spec = time.monotonic(), check(wanted)
    of = wanted.scenario, wanted.entry.name, wanted.seed
    with job_folder.claimed(wanted.out, *of, resume=wanted.resume, emulate=wanted.live.emulate) as folder:
        begun = checkpoint_file.load(wanted.out / job_folder.CHECKPOINT) if wanted.resume else None
        if begun is not None:
            begun.check(spec.layout.size)
        kept = job_folder.KeptExchanges(wanted.out, 0 if begun is None else begun.state["exchanges"])
        installed: dict[int, SyncPolicy] = {}
        factory = _resumed(wanted.entry.factory, spec.job, kept, installed) if kept else wanted.entry.factory
        for line in _not_applied(wanted):
            say(console, line)
        step = _Steps(console)
        if ray is not None:
            step("Joining Ray." if _address(wanted) else "Starting Ray.")
            if not _address(wanted):
                ray.enter_context(compiled_ahead(spec))
        placement = launch.place_nodes(spec.job.nodes, joined(spec))
        step(_beginning(spec, begun))
        emulates, rates = bool(wanted.live.emulate), _rates(wanted)
        with launch.launch(
            placement,
            spec,
            insecure=wanted.live.insecure,
            emulates=emulates,
            rates=rates,
            delays=_delays(wanted),
            join_seconds=wanted.live.limits.join_seconds,
            silent_seconds=wanted.live.limits.silent_seconds,
        ) as processes:
            folder.begin()  # not before: there is room for the job
            log = job_folder.ExchangeLog(kept, wanted.out)
            keep = partial(_keep, wanted, spec, log)
            with LiveSystem(spec, processes, begun, keep, installed, wanted.live.limits, step, emulates=emulates) as live:
                if begun is not None:
                    step(f"Resuming after {begun.seconds:.1f} s: {setting_words(live.job_status().setting)}.")
                played = _drive(wanted, live, factory, kept, log, console, step)
            step("Ending the job's processes.")
        if ray is not None:
            step("Ending Ray.")
            ray.close()
        if isinstance(played, Interrupted):
            raise played
        step("Writing the results.")
        with _uninterrupted():
            log.close()
            scored = score(played, **wanted.run)
            save(wanted.out, scored, None, played.outcome.trace)
            if ray is not None:  # the folder is no run of a contest's
                hold_one_job(wanted.out, scored, played.outcome.thinking_seconds, time.monotonic() - began_seconds)
    return played


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP wait until the context ends. A job with a half of its results could neither be reported
    nor resumed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda got, _: came.append(got)) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for first in came[:1]:
            signal.raise_signal(first)


class _Steps:
    """Prints what is being done, with the seconds since the step before."""

    def __init__(self, console: Console) -> None:
        self._console, self._since_seconds = console, time.monotonic()

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        took, self._since_seconds = now - self._since_seconds, now
        say(self._console, f"{what}  (+{took:.1f} s)")


def _beginning(spec: Spec, begun: Checkpoint | None) -> str:
    if begun is None:
        return f"Starting {setting_words(spec.job.start)}."
    return f"Starting from the checkpoint of {begun.seconds:.1f} s, {begun.state['exchanges']} exchanges."


def check_folder(wanted: Deployment) -> None:
    """Raise ValueError where the folder of the job is of something else, or cannot be resumed."""
    of = wanted.scenario, wanted.entry.name, wanted.seed
    job_folder.checked(wanted.out, *of, resume=wanted.resume, emulate=wanted.live.emulate)


def described(wanted: Deployment) -> list[str]:
    """Lines that say what would run where; nothing is started. Raises as `deploy` does, but looks at no folder."""
    spec = check(wanted)
    start = spec.job.start
    address = _address(wanted)
    here = nullcontext((launch.ClusterNode("here", "this machine", math.inf),))
    with launch.cluster(address, insecure=wanted.live.insecure) if address else here as offers:
        placement = launch.place_nodes(spec.job.nodes, offers)
        where = [f"  {line}" for line in str(placement).splitlines()]
    target = spec.job.target
    return [
        f"{wanted.scenario.name}: {wanted.scenario.summary}",
        f"tuner      {wanted.entry.name}, seed {wanted.seed}",
        f"model      {spec.layout.size:,} parameters in {spec.layout.count} blocks, {spec.workload.optimizer}",
        f"start      {setting_words(start)}",
        f"target     {target.metric} {target.value:g}, within {spec.job.budget_seconds:g} s",
        f"folder     {wanted.out}",
        *_not_applied(wanted),
        *([] if address else [_shared(process_count(start))]),
        "placement",
        *where,
        "Nothing was started.",
    ]


def _shared(processes: int) -> str:
    """What the processes of a job share, where all are on this machine."""
    count = cores()
    turns = ": they take turns" if processes > count else ""
    return f"processes  {processes}, on {count} core{'' if count == 1 else 's'} of this machine{turns}"


def _address(wanted: Deployment) -> str | None:
    """The address of the Ray cluster to join; None: start one on this machine."""
    return wanted.live.address or os.environ.get("RAY_ADDRESS") or None


def _not_applied(wanted: Deployment) -> list[str]:
    """Lines that say which conditions of the scenario a live job does not have."""
    conditions = wanted.scenario.conditions
    given = [name for name in _SIMULATED if getattr(conditions, name)]
    if wanted.live.emulate:
        missing = [] if wanted.live.emulate == "all" else ["the speed of links"]
        missing += ["latency"] * (wanted.scenario.cluster.latency_seconds > 0)
        if wanted.live.emulate == "all":
            missing += ["delays that come and go"] * (not all(map(_lasts, conditions.delays)))
        else:
            missing += ["delays"] * bool(conditions.delays)
        missing += ["token buckets"] * (bool(conditions.buckets) or "bandwidth" in roles(conditions.replay or Replay()))
        left_out = f" Not emulated: {', '.join(missing)}." if missing else ""
        return [f"Emulated: the speed of nodes{' and links' * (wanted.live.emulate == 'all')}, and [conditions].{left_out}"]
    if not given:
        return []
    return [
        f"Not applied: {', '.join(given)} of [conditions]; live hosts have conditions of their own. Give --emulate to have "
        "them emulated."
    ]


def _lasts(delay: LinkDelay) -> bool:
    """Whether a link is delayed from the start to the end."""
    return not (delay.start_seconds or delay.seconds or delay.every_seconds)


def _delays(wanted: Deployment) -> dict[str, float]:
    """Seconds, in each direction, that links of nodes are delayed from the start to the end."""
    found: dict[str, float] = {}
    for delay in filter(_lasts, wanted.scenario.conditions.delays):
        for node in delay.nodes:
            found[node] = found.get(node, 0.0) + delay.delay_seconds
    return found


def _rates(wanted: Deployment) -> dict[str, float] | None:
    """The speed of every node's link, bytes per second in each direction, where links are emulated."""
    nodes = wanted.scenario.cluster.nodes
    return {name: kind.nic_bytes_per_second for name, kind in nodes} if wanted.live.emulate == "all" else None


def simulated(wanted: Deployment) -> RunFigures:
    """The figures of the same run in the simulator, which a process of its own makes."""
    scenario = wanted.scenario
    given = scenario.name, str(scenario.origin), scenario.text, wanted.entry.name, wanted.seed
    # Not forked: this process has had threads, and the child is to begin as any other run. A pool would need semaphores,
    # and some machines have no place for these (/dev/shm).
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_simulated, args=(there, *given, sys.path), daemon=True)
    process.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        raise RuntimeError("Cannot run the job in the simulator: the process that does it has died.") from None
    process.join()
    if isinstance(found, Exception):
        raise found
    figures: RunFigures = found
    return figures


def _send_simulated(there: Connection, *given: Any) -> None:
    try:
        there.send(_simulated(*given))
    except (OSError, RuntimeError, ValueError) as error:
        there.send(error)


def _simulated(name: str, origin: str, text: str, tuner: str, seed: int, path: list[str]) -> RunFigures:
    sys.path[:] = path  # the tuner's module may be in the folder of the command
    scenario = parse(text, name=name, origin=Path(origin))
    played = play(resolve(tuner).factory, system(scenario, seed))
    return measured(played, played.exchanges)


def check(wanted: Deployment) -> Spec:
    """The job that this deploys. Raises ValueError for one that cannot be deployed."""
    if wanted.live.emulate == "all":
        if _address(wanted):
            raise ValueError(
                "Cannot emulate links on a Ray cluster that is there already: its machines have their own. Leave them out "
                f"with --emulate=nodes, or {'leave out --address' if wanted.live.address else 'unset RAY_ADDRESS'}."
            )
        if reason := why_not():
            raise ValueError(f"Cannot emulate links: {reason}. Leave them out with --emulate=nodes.")
    spec = Spec.of(wanted.scenario, wanted.seed)
    try:
        spec.check(spec.job.start)
    except Rejected as error:
        raise ValueError(f"Cannot deploy {spec.name}: {error}") from None
    return spec


# --------------------------------------------------------------------------------------------------------------- driving


def _drive(
    wanted: Deployment,
    live: LiveSystem,
    factory: TunerFactory,
    kept: Iterable[Exchange],
    log: job_folder.ExchangeLog,
    console: Console,
    step: Callable[[str], None],
) -> Played | Interrupted:
    history = History()
    title = f"{wanted.scenario.name}, tuned by {wanted.entry.name}"
    trace, recorder = _recording(wanted, live.job)
    for exchange in kept:
        history.append(exchange)
        recorder(exchange)

    def note(exchange: Exchange) -> None:
        history.append(exchange)
        log(exchange)
        recorder(exchange)

    stopped = False
    with watched(console, title, live.latest_status):
        try:
            played = play(factory, live, watch=note, keeps=False)
        except KeyboardInterrupt:
            stopped = True
    step("Saving a checkpoint.")
    if away := live.waits_for:
        step(f"The job has lost {', '.join(away)}, and repairs this before: it waits {REPAIR_SECONDS:g} s at most.")
    unsaved = ""  # why
    try:
        live.checkpoint()
    except (RuntimeError, OSError) as error:
        unsaved = "The disk is full." if _disk_is_full(error) else str(error)
        step(f"It could not be saved. {unsaved}")
        if not stopped and isinstance(error, OSError):
            raise  # without a result: the job goes on once there is room, and has its model then
    if stopped:
        log.close()
        with suppress(OSError):  # a resumed job is recorded from its start
            recorder.pause()
            trace.close()
        return Interrupted(f"Stopped after {live.now:.1f} s; {how_to_go_on(wanted.out, saved=not unsaved)}")
    ended = played.outcome
    if unsaved:
        has = f"{what_is_saved(wanted.out)}: {wanted.out}"
        step(how_to_go_on(wanted.out, saved=False) if ended.status == "error" else has)
        if not (wanted.out / job_folder.CHECKPOINT).exists():
            ended = replace(ended, reason=f"{ended.reason or unsaved} {_NO_MODEL}")
    recorder.end(status=ended.status, seconds=ended.seconds, workload=live.job.name, seed=wanted.seed, reason=ended.reason)
    trace.close()
    return replace(played, exchanges=history.exchanges, outcome=ended)


@contextmanager
def _full_disk_told(out: Path) -> Iterator[None]:
    """Say what the folder `out` of a job has, where its results do not fit on the disk."""
    try:
        yield
    except OSError as error:
        if not _disk_is_full(error):
            raise
        raise RuntimeError(
            f"Cannot write the results of the job: the disk is full. Free some space. {how_to_go_on(out, saved=False)}"
        ) from error


def _disk_is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def how_to_go_on(out: Path, *, saved: bool) -> str:
    """What the folder of a job that was stopped has. `saved`: whether a last checkpoint could be made."""
    if saved:
        return f"{out} has a checkpoint. The same command with --resume goes on."
    if not (out / job_folder.CHECKPOINT).exists():
        return f"{out} has no checkpoint yet, so the job cannot be resumed."
    seconds = checkpoint_file.load(out / job_folder.CHECKPOINT).seconds
    return f"{out} has the checkpoint of {seconds:.1f} s. The same command with --resume goes on from there."


def what_is_saved(out: Path) -> str:
    """What the folder of a job that has ended has. Its last checkpoint could not be made, maybe, so the time is told."""
    if not (out / job_folder.CHECKPOINT).exists():
        return "No model, no checkpoint; log"
    return f"Model and checkpoint of {checkpoint_file.load(out / job_folder.CHECKPOINT).seconds:.1f} s, log"


def _recording(wanted: Deployment, job: Job) -> tuple[TraceWriter, Recorder]:
    """A trace, and the recorder of the whole run. A resumed run is recorded from its start, so the recording of before is
    deleted. A trace that is not closed is unfinished."""
    where = wanted.out / "trace"
    shutil.rmtree(where, ignore_errors=True)
    named = "{scenario}, {tuner}, seed {seed}, live".format(**wanted.run)
    trace = TraceWriter(where, Origin("harness", MADE_BY, named), waits=True)
    run = "{scenario}/{tuner}/{seed}".format(**wanted.run)
    return trace, Recorder(trace, run, start=job.start, method=job.methods[0], nodes=[node.name for node in job.nodes])


def _keep(wanted: Deployment, spec: Spec, log: job_folder.ExchangeLog, saved: Checkpoint) -> None:
    """Write a checkpoint and the model. Raises OSError, and leaves the files of before, if the disk is full."""
    if log.written < saved.state["exchanges"]:
        raise OSError(
            errno.ENOSPC, f"the disk is full: {wanted.out} lacks the last exchanges, and its checkpoint waits for them"
        )
    checkpoint_file.save(wanted.out / job_folder.CHECKPOINT, saved)
    branch = saved.state["branch"]
    job_folder.write_model(wanted.out / "model.safetensors", spec.tree(saved.tensors[f"{branch}/parameters"]))


def _resumed(factory: TunerFactory, job: Job, kept: Iterable[Exchange], installed: dict[int, SyncPolicy]) -> TunerFactory:
    """A factory of a tuner in the state in which it was interrupted. The policies that it has installed are added to
    `installed`, by the number of the exchange. Raises ValueError if it is not the same tuner."""

    def note(number: int, action: Action[Any]) -> None:
        if isinstance(action, Install):
            installed[number] = action.policy

    tuner = factory(job)
    action = replay(tuner, kept, watch=note)

    def resumed(_: Job) -> Tuner:
        asked: Action[Any] | None = action
        while asked is not None:
            try:
                answer: Any = yield asked
            except Rejected as refusal:
                answer = refusal
            try:
                asked = next_action(tuner, answer)
            except StopIteration:
                return

    return resumed
