"""A System in simulated time: the engine trains, the control plane acts, and tuners' actions are carried out between."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from simulators import engine, jobs, measured, reconfigure, transitions
from simulators.cluster import Cluster, ControlPlane
from simulators.conditions import Conditions
from simulators.conditions import check as check_conditions
from simulators.flight import WAIT
from simulators.learning import evaluate
from simulators.plant import Plant, build, compute_times, loads, overlapping
from simulators.reconfigure import Costs, Step
from simulators.workloads import Workload
from tuners import policies
from tuners.actions import (
    Action,
    Cost,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    Install,
    Reconfigure,
    Rejected,
    Run,
    Setting,
    Status,
    SyncPolicy,
    Target,
    Window,
)
from tuners.settings import Knob

__all__ = ["SimulatedSystem"]

T = TypeVar("T")

_ROWS = 512  # of pushes per call of the engine
_NOTHING = np.zeros((0, len(engine.Records._fields)))


@dataclass(slots=True)
class _Branch:
    """One line of training: its state, and the setting and policy that rule it."""

    setting: Setting
    policy: SyncPolicy
    testing: bool
    program: engine.Program
    plant: Plant
    state: engine.State
    until_seconds: float  # how far it has been trained
    unseen: NDArray[np.float64]  # records of what went on while the tuner thought, [n, 11]
    thought_seconds: float = 0.0  # how long that was; its next window begins so much earlier

    @property
    def status(self) -> Status:
        return cast(Status, engine.STATUSES[int(self.state.clock.status)])


class SimulatedSystem:
    """A parameter server in simulated time. Raises ValueError where scenario, cluster and workload do not fit together."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        workload: Workload,
        start: Setting,
        knobs: tuple[Knob, ...],
        target: Target,
        budget_seconds: float,
        conditions: Conditions,
        costs: Costs,
        evaluate_clocks: int,
        seed: int,
    ) -> None:
        names = tuple(n for n, _ in cluster.nodes)
        check_conditions(conditions, names)
        reconfigure.check(costs)
        self._cluster, self._workload, self._conditions, self._costs = cluster, workload, conditions, costs
        self._evaluate_clocks, self._seed = evaluate_clocks, seed
        self._control = ControlPlane(names, conditions)
        self._now = 0.0
        self.job = jobs.job(name, cluster, workload, start, knobs, target, budget_seconds, seed)
        try:
            self.job.space.check(start)
            self._data, parameters = jobs.drawn(workload, seed)
            self._branches = {0: self._first_branch(start, parameters)}
        except Rejected as error:
            raise ValueError(f"Scenario {name!r} cannot start: {error}") from error
        self._next_branch = 1

    @property
    def now(self) -> float:
        """Simulated seconds since the job began."""
        return self._now

    @property
    def status(self) -> Status:
        """Done when any branch is; lost when every branch is."""
        found = [b.status for b in self._branches.values()]
        if "target" in found:
            return "target"
        return "running" if "running" in found else found[-1]

    def perform(self, action: Action[T]) -> T:
        """Carry out `action`. Raises Rejected, and changes nothing, where it cannot be done."""
        handlers: dict[type[Action[Any]], Any] = {
            Run: self._run,
            Reconfigure: self._reconfigure,
            Install: self._install,
            Fork: self._fork,
            Free: self._free,
            Evaluate: self._evaluate,
        }
        if type(action) not in handlers:
            raise Rejected(f"Cannot carry out {action!r}: this system knows {', '.join(a.__name__ for a in handlers)}.")
        if self._conditions.thinking_seconds > 0:
            self._think(action)
        return cast(T, handlers[type(action)](action))

    # ------------------------------------------------------------------------------------------------------------ run

    def _run(self, action: Run) -> Window:
        branch = self._branch(action.branch)
        if branch.status != "running" and not len(branch.unseen):
            raise Rejected(f"Cannot run branch {action.branch}: it has {branch.status}; free it and go on with another.")
        self._bring_to_now(branch)
        start = self._now
        limit = min(self.job.budget_seconds, np.inf if action.seconds is None else start + action.seconds)
        table = self._train(branch, 2**31 - 1 if action.clocks is None else action.clocks, limit)
        table, branch.unseen = np.concatenate([branch.unseen, table]), _NOTHING
        start, branch.thought_seconds = start - branch.thought_seconds, 0.0
        return measured.window(
            self.job,
            branch.setting,
            table,
            start_seconds=start,
            end_seconds=self._now,
            pushes_before=int(branch.state.clock.pushes) - len(table),
            status=branch.status,
            devices=compute_times(self._cluster.nodes, self._workload.demand, branch.setting),
            samples={w: sum(row) for w, row in loads(self._cluster.nodes, branch.setting).items()},
        )

    def _think(self, action: Action[Any]) -> None:
        """While a tuner thinks, the branch it thinks about goes on; its next window tells what happened meanwhile."""
        branch = self._branches.get(getattr(action, "branch", -1))
        if branch is not None and branch.status == "running":
            self._bring_to_now(branch)
            start = self._now
            table = self._train(branch, 2**31 - 1, start + self._conditions.thinking_seconds)
            branch.unseen = np.concatenate([branch.unseen, table])
            branch.thought_seconds += self._now - start

    def _train(self, branch: _Branch, clocks: int, limit: float) -> NDArray[np.float64]:
        """Train `branch` for so many clocks or to `limit`, control events included; the records, [n, 11]."""
        tables, left = [_NOTHING], clocks
        while left > 0 and branch.status == "running":
            until = min(self._control.next_seconds, limit)
            branch.state, table, used = engine.advance(
                branch.program,
                self._data,
                branch.plant,
                branch.state,
                jnp.asarray(min(left, _ROWS), jnp.int32),
                jnp.asarray(until, jnp.float64),
                rows=_ROWS,
            )
            count = int(used)
            tables.append(np.asarray(table)[:count])
            left -= count
            if count == _ROWS or left == 0 or branch.status != "running":
                self._now = max(self._now, float(branch.state.clock.seconds))
                continue
            self._now = max(self._now, until)  # the limit may be past: a change can end after the budget
            if until >= limit:
                break
            self._act(branch)
        branch.until_seconds = self._now
        return np.concatenate(tables)

    def _act(self, branch: _Branch) -> None:
        """Let the control plane act at `now`, and the branch feel it."""
        branch.state = transitions.coast(branch.program, branch.plant, branch.state, jnp.asarray(self._now, jnp.float64))
        self._control.act()
        branch.plant = branch.plant._replace(slowdown=jnp.array(self._control.slowdown))

    def _bring_to_now(self, branch: _Branch) -> None:
        """A branch that stood still goes on as if no time had passed for it."""
        if branch.until_seconds < self._now:
            branch.state = transitions.resumed(branch.state, self._now - branch.until_seconds)
            branch.until_seconds = self._now
        branch.plant = branch.plant._replace(slowdown=jnp.array(self._control.slowdown))

    # ----------------------------------------------------------------------------------------------- settings, policies

    def _reconfigure(self, action: Reconfigure) -> Cost:
        branch, setting = self._branch(action.branch), action.setting
        method = action.method or self.job.methods[0]
        if method not in self.job.methods:
            raise Rejected(f"Cannot reconfigure by {method!r}: this system can {', '.join(self.job.methods)}.")
        self.job.space.check(setting)
        start = self._now
        steps = self._bring_under(branch, setting, self._policy(branch, setting))
        return Cost(
            seconds=self._now - start,
            stall_seconds=self._now - start,
            bytes_moved=math.fsum(s.bytes_moved for s in steps),
            steps=tuple(s.name for s in steps),
        )

    def _install(self, action: Install) -> None:
        branch = self._branch(action.branch)
        self._bring_under(branch, branch.setting, action.policy)

    def _policy(self, branch: _Branch, setting: Setting) -> SyncPolicy:
        """The policy that `setting` names; an installed one stays while the setting names the same as before."""
        old = branch.setting
        if (old.policy, old.staleness) == (setting.policy, setting.staleness):
            return branch.policy
        return policies.named(setting.policy, setting.staleness)

    def _bring_under(self, branch: _Branch, setting: Setting, policy: SyncPolicy) -> tuple[Step, ...]:
        """Put `branch` under a setting and a policy, which takes the time of the steps returned.

        In place, cycles under way go on, and a new policy releases those that wait. After a restart everybody begins
        anew; gradients under way are given up.
        """
        program, made = self._compiled(setting, policy, testing=branch.testing)
        self._bring_to_now(branch)
        steps = reconfigure.plan(branch.setting, setting, self.job.model_bytes, self._costs)
        if steps:
            self._stand_still(steps)
            branch.state = transitions.halted(branch.state, self._now)
            release = made.active
        else:
            branch.state = transitions.coast(branch.program, branch.plant, branch.state, jnp.asarray(self._now, jnp.float64))
            release = made.active & (branch.state.clock.flight.phase == WAIT)
        renewed = bool(steps) or policy is not branch.policy
        branch.setting, branch.policy, branch.program, branch.plant = setting, policy, program, made
        branch.until_seconds = self._now
        if renewed:
            branch.state = self._launched(branch, release)
        return steps

    def _stand_still(self, steps: tuple[Step, ...]) -> None:
        """Carry out steps during which nobody trains; the control plane goes on."""
        done = self._control.carry_out(steps, self._now)
        while not done.triggered:
            self._control.act()
        self._now = max(self._now, cast(float, done.value))

    def _compiled(self, setting: Setting, policy: SyncPolicy, *, testing: bool) -> tuple[engine.Program, Plant]:
        """What the engine needs to run a setting. Raises Rejected where it cannot."""
        fifo = self._cluster.discipline == "fifo"
        if fifo and overlapping(setting):
            raise Rejected("Cannot queue transfers first come first served where a node is worker and server: use maxmin.")
        built = build(
            self._cluster.nodes,
            self._cluster.latency_seconds,
            self._workload,
            setting,
            self._conditions,
            self.job.target,
            evaluate_clocks=self._evaluate_clocks,
            policy_seconds=policy.seconds,
            slowdown=self._control.slowdown.copy(),
            seed=self._seed,
        )
        largest = max(sum(row) for row in loads(self._cluster.nodes, setting).values())
        program = engine.Program(
            model=jobs.model(self._workload, self.job.space, largest),
            decide=policy.decide,
            probes=policy.probes,
            discipline=self._cluster.discipline,
            overlapping=overlapping(setting),
            testing=testing,
        )
        return program, built

    def _launched(self, branch: _Branch, release: jax.Array, offsets: NDArray[np.float64] | None = None) -> engine.State:
        longer = jnp.zeros(len(self.job.nodes)) if offsets is None else jnp.asarray(offsets)
        begun = branch.policy.init(branch.plant.active)
        args = (branch.program, self._data, branch.plant, branch.state, begun, release, longer)
        launched: engine.State = transitions.launch(*args)
        return launched

    # -------------------------------------------------------------------------------------------------------- branches

    def _branch(self, number: int) -> _Branch:
        if number not in self._branches:
            alive = ", ".join(map(str, self._branches))
            raise Rejected(f"Cannot use branch {number}: it was never forked, or was freed; there are {alive}.")
        return self._branches[number]

    def _first_branch(self, setting: Setting, parameters: Any) -> _Branch:
        policy = policies.named(setting.policy, setting.staleness)
        program, built = self._compiled(setting, policy, testing=False)
        branch = _Branch(
            setting, policy, False, program, built, transitions.blank(program, built, parameters), 0.0, _NOTHING
        )
        first_cycle = np.asarray(built.compute_seconds + built.sleep_probability * built.sleep_mean_seconds)
        spread = np.random.default_rng([self._seed, 2]).random(len(first_cycle)) * first_cycle
        branch.state = self._launched(branch, built.active, spread if self._conditions.stagger else None)
        return branch

    def _fork(self, action: Fork) -> int:
        parent = self._branch(action.branch)
        setting = parent.setting if action.setting is None else action.setting
        self.job.space.check(setting)
        child = replace(parent, testing=action.testing, unseen=_NOTHING, thought_seconds=0.0)
        policy = self._policy(parent, setting)
        self._compiled(setting, policy, testing=action.testing)
        self._bring_to_now(parent)
        copying = Step("fork", self._snapshot_bytes(parent) / self._costs.fork_bytes_per_second, 0.0)
        self._stand_still((copying,))
        self._bring_under(child, setting, policy)
        number, self._next_branch = self._next_branch, self._next_branch + 1
        self._branches[number] = child
        return number

    def _snapshot_bytes(self, branch: _Branch) -> float:
        """Parameters and optimizer slots at nominal size."""
        learned = branch.state.learned
        if learned is None:
            return self.job.model_bytes
        own, slots = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (learned.parameters, learned.slots))
        return self.job.model_bytes * (1 + float(slots) / float(own))

    def _free(self, action: Free) -> None:
        self._branch(action.branch)
        if len(self._branches) == 1:
            raise Rejected(f"Cannot free branch {action.branch}: it is the last one, and the job would be lost.")
        del self._branches[action.branch]

    def _evaluate(self, action: Evaluate) -> Evaluation:
        branch = self._branch(action.branch)
        clocks = int(branch.state.clock.pushes)
        if branch.program.model is None or branch.state.learned is None:
            return Evaluation(self._now, clocks, float("nan"), float("nan"))
        loss, accuracy = evaluate(branch.program.model, self._data, branch.state.learned.parameters)
        return Evaluation(self._now, clocks, float(loss), float(accuracy))
