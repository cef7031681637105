"""The oracle for the engine: the same cluster event by event, in plain Python and float64, written to be read.

One loop, one event at a time, no compiled code and no code of the simulator: transfers are filled progressively over
every NIC by name, and a gradient is computed when its push *arrives*, on a copy of the parameters that were pulled.
"""

import math
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

WAIT, REQUEST, PULL, COMPUTE, PUSH, APPLY = "wait", "request", "pull", "compute", "push", "apply"


# -------------------------------------------------------------------------------------------------------------- network


def progressive_filling(flows, capacity, weights=None):
    """Max-min fair rates: raise all in proportion to `weights` (default 1); a flow stops where one of its resources is full.

    `flows` maps a name to {resource: bytes there per byte of the flow}, `capacity` a resource to bytes per second.
    """
    rates, weights = dict.fromkeys(flows, 0.0), weights or {}
    free = dict(capacity)
    rising = {f for f, uses in flows.items() if any(u > 0 for u in uses.values())}
    for f in set(flows) - rising:
        rates[f] = math.inf
    while rising:
        demand = {r: sum(weights.get(f, 1.0) * flows[f].get(r, 0.0) for f in sorted(rising)) for r in free}
        tight = {r: free[r] / demand[r] for r in free if demand[r] > 0}
        grow = min(tight.values())
        for f in rising:
            rates[f] += grow * weights.get(f, 1.0)
        for r in free:
            free[r] = max(free[r] - grow * demand[r], 0.0)
        full = {r for r, headroom in tight.items() if headroom <= grow * (1 + 1e-12)}
        rising -= {f for f in rising if any(flows[f].get(r, 0.0) > 0 for r in full)}
    return rates


def first_come(flows, capacity):
    """Each transfer in turn takes all it can; `flows` is in order of arrival.

    A flow that is named (transfer, connection) divides that with the transfer's other flows, as fair as these can.
    """
    free, rates, turns = dict(capacity), {}, {}
    for f in flows:
        turns.setdefault(f[0] if isinstance(f, tuple) else f, []).append(f)
    for turn in turns.values():
        rates |= progressive_filling({f: flows[f] for f in turn}, free)
        for f in turn:
            for r, u in flows[f].items():
                free[r] = max(free[r] - rates[f] * u, 0.0) if u > 0 else free[r]
    return rates


# ------------------------------------------------------------------------------------------------------------- policies


@dataclass
class Bounded:
    """BSP (0), SSP, ASP (infinity): go on while at most `bound` clocks ahead of the slowest."""

    bound: float
    oldest: float = math.inf  # gradients that are older are dropped

    @property
    def rounds(self):
        return self.bound == 0

    def decide(self, worker, clocks, waiting, seconds):
        slowest = min(clocks.values())
        release = [w for w in waiting if clocks[w] - slowest <= self.bound]
        return release, self.bound > 0 or bool(release)


@dataclass
class Few(Bounded):
    """At most `bound` + 1 gradients are in progress; the workers with the fewest pushes go on."""

    rounds = False

    def decide(self, worker, clocks, waiting, seconds):
        free = self.bound + 1 - (len(clocks) - len(waiting))
        return sorted(waiting, key=lambda w: (clocks[w], list(clocks).index(w)))[: max(free, 0)], True


@dataclass
class Dynamic:
    """DSSP: the fastest gets the extra clocks after which it is predicted to wait least for the slowest."""

    low: int
    high: int
    oldest: float = math.inf
    rounds = False
    last: dict = field(default_factory=dict)
    interval: dict = field(default_factory=dict)
    credit: dict = field(default_factory=dict)

    def decide(self, worker, clocks, waiting, seconds):
        self.interval[worker] = seconds - self.last.get(worker, 0.0)
        self.last[worker] = seconds
        slowest = min(clocks, key=lambda w: (clocks[w], w))
        ahead = {w: clocks[w] - clocks[slowest] for w in clocks}
        if clocks[worker] == max(clocks.values()) and not self.credit.get(worker, 0):
            self.credit[worker] = self.granted(worker, slowest)
        release = [w for w in waiting if ahead[w] <= self.low]
        self.credit = {w: c if ahead[w] > self.low else 0 for w, c in self.credit.items()}
        if ahead[worker] > self.low and self.credit.get(worker, 0) > 0 and ahead[worker] <= self.high:
            release.append(worker)
            self.credit[worker] -= 1
        return sorted(release), True

    def granted(self, p, slowest):
        at = {w: (self.last.get(w, 0.0), self.interval.get(w, 0.0)) for w in (p, slowest)}
        steps = range(self.high - self.low + 1)
        theirs = [at[slowest][0] + (r + 1) * at[slowest][1] for r in range(13)]
        gaps = [min(abs(at[p][0] + r * at[p][1] - t) for t in theirs) for r in steps]
        return gaps.index(min(gaps))


# --------------------------------------------------------------------------------------------------------------- cluster


@dataclass
class Worker:
    """Where one worker is in its cycle."""

    phase: str = WAIT
    left: dict = field(default_factory=dict)  # bytes of a transfer by connection (see `Oracle`), else {None: seconds}
    began: float = 0.0
    arrival: int = 0
    begun: int = 0  # mini-batches
    pulled: dict = field(default_factory=dict)
    total: dict = field(default_factory=dict)  # of all gradients, when it pulled
    version: int = 0
    took: dict = field(default_factory=dict)


@dataclass
class Backup(Bounded):
    """A barrier that waits for all but `spare` workers, which then lose the gradient in progress."""

    bound: float = 0
    spare: int = 1

    def decide(self, worker, clocks, waiting, seconds):
        done = len(waiting) >= len(clocks) - self.spare
        return (list(clocks), True) if done else ([], False)


class Oracle:
    """One job under one setting. `rows` has a dict per completed push.

    With `Cluster.independent_flows`, a transfer is a flow per server, each of which ends when its own bytes are sent.
    Without, it is one flow that moves the servers' shares in proportion, {None: bytes}.
    """

    def __init__(self, cluster, workload, setting, conditions, policy, seed, model=None, factors=None):
        """`factors` has, for nodes that are driven by a recording, their compute times over the mean."""
        self.factors = factors or {}
        self.kinds, self.names = dict(cluster.nodes), [n for n, _ in cluster.nodes]
        self.discipline, self.workload, self.setting, self.conditions = cluster.discipline, workload, setting, conditions
        self.control_queue = cluster.control_queue
        self.snapshot_clocks = max(cluster.snapshot_clocks, 4 * len(setting.workers)) if cluster.snapshot_clocks else 0
        self.copying, self.uncopied = {}, 0  # bytes that each server has yet to send; pushes since the last snapshot
        self.policy, self.model = policy, model
        self.key = int(np.random.default_rng([seed, 0]).integers(2**63))
        self.share = dict(zip(setting.servers, setting.model_shares or [1 / len(setting.servers)] * 99, strict=False))
        self.connections = cluster.independent_flows
        self.switch = {}
        if rate := cluster.switch_bytes_per_second:
            self.switch = {("switch", way): rate for way in ((None,) if cluster.switch_both_ways else (PULL, PUSH))}
        self.both_ways, self.threads = cluster.switch_both_ways, cluster.server_threads
        self.now, self.server_free, self.arrivals = 0.0, [0.0] * self.threads, 0
        self.slow = dict.fromkeys(self.names, 1.0)
        self.changes = sorted(
            [(e.start_seconds, e.node, e.factor) for e in conditions.episodes]
            + [(e.start_seconds + e.seconds, e.node, 1 / e.factor) for e in conditions.episodes]
        )
        self.buckets = {n: b for b in conditions.buckets for n in b.nodes}
        self.tokens = {n: b.capacity_bytes for n, b in self.buckets.items()}
        d = workload.demand
        self.overhead = 2 * cluster.latency_seconds + 2 * d.message_seconds * len(setting.servers)
        self.samples = dict.fromkeys(setting.workers, setting.batch_size)
        if setting.policy == "quorum" or policy.rounds:
            largest = max(self.share.values()) ** d.apply_exponent
            self.overhead += d.step_seconds * largest + d.master_sample_seconds * setting.batch_size * len(setting.workers)
        self.mean = {w: d.fixed_seconds + d.sample_seconds * self.samples[w] / self._speed(w) for w in setting.workers}
        self.lazy = self._sleepers(seed)
        self.workers = {w: Worker() for w in self.names if w in setting.workers}
        self.rows, self.version, self.group = [], 0, []
        if model:
            order = np.random.default_rng([seed, 3]).permutation(len(model.train[0]))
            self.train = [np.asarray(column)[order] for column in model.train]
            self.parameters = {k: np.asarray(v, np.float64) for k, v in model.first.items()}
            self.velocity, self.total, self.z, self.largest = (
                {k: np.zeros_like(v) for k, v in self.parameters.items()} for _ in range(4)
            )
            ends = np.round(np.cumsum(setting.data_shares or [1 / len(self.workers)] * len(self.workers)) * len(order))
            begins = [0, *ends[:-1]]
            self.shard = {w: (int(a), int(b)) for w, a, b in zip(setting.workers, begins, ends, strict=True)}
        extra = self._stagger(seed)
        for w in self.workers:
            self._begin(w, extra[w])

    def _speed(self, worker):
        """Of its processor, sped up by threads as Amdahl says."""
        kind, serial = self.kinds[worker], self.workload.demand.serial_fraction
        threads = min(self.setting.intra_threads or kind.cores, kind.cores)
        return kind.devices[0].speed / (serial + (1 - serial) / threads)

    # ---- random draws

    def _sleepers(self, seed):
        """Probability, mean and deviation of every worker's sleep."""
        usual = self.conditions.sleeps
        common = (usual.probability, usual.mean_seconds, usual.sd_seconds) if usual else (0.0, 0.0, 0.0)
        slow = self.conditions.stragglers
        if slow is None:
            return dict.fromkeys(self.names, common)
        drawn = np.random.default_rng([seed, 1]).random(len(self.names))
        return {
            n: (1.0, slow.mean_seconds, slow.sd_seconds) if n in slow.nodes or u < (slow.probability or 0.0) else common
            for n, u in zip(self.names, drawn, strict=True)
        }

    def _stagger(self, seed):
        if not self.conditions.stagger:
            return dict.fromkeys(self.workers, 0.0)
        drawn = dict(zip(self.names, np.random.default_rng([seed, 2]).random(len(self.names)), strict=True))
        return {w: drawn[w] * (self.mean[w] + self.lazy[w][0] * self.lazy[w][1]) for w in self.workers}

    def _uniform(self, worker, batch, which):
        """SplitMix64 in whole numbers."""
        mask = 2**64 - 1
        x = (self.key + ((self.names.index(worker) << 40) + (batch << 2) + which) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return (((x ^ (x >> 31)) >> 11) + 0.5) * 2.0**-53

    def _draw(self, worker, batch):
        """Seconds of compute in that mini-batch: lognormal of the wanted mean and variation, overhead, maybe a sleep."""
        variance = math.log(1 + self.conditions.jitter**2)
        noise = NormalDist().inv_cdf(self._uniform(worker, batch, 0))
        factor = math.exp(math.sqrt(variance) * noise - variance / 2)
        if recorded := self.factors.get(worker):
            factor = recorded[batch % len(recorded)]
        seconds = self.mean[worker] * factor + self.overhead
        probability, mean, sd = self.lazy[worker]
        if self._uniform(worker, batch, 1) < probability:
            seconds += max(0.0, mean + sd * NormalDist().inv_cdf(self._uniform(worker, batch, 2)))
        return seconds

    # ---- time

    def _rates(self):
        """Progress per second of all that workers do, by (worker, connection), and tokens that every bucket loses."""
        rates = {}
        for w, state in self.workers.items():
            if state.phase == COMPUTE:
                rates[w, None] = 1 / self.slow[w]
            elif state.phase in (REQUEST, APPLY):
                rates[w, None] = 1.0
        moving = sorted(
            (w for w, s in self.workers.items() if s.phase in (PULL, PUSH)), key=lambda w: self.workers[w].arrival
        )
        flows = {
            (w, server): self._uses(w, self.workers[w].phase == PULL, {server: 1.0} if server else self.share)
            for w in moving
            for server, left in self.workers[w].left.items()
            if left > 0 or not server
        }
        serial = self.discipline == "serial"
        busy = sum(s.phase == APPLY for s in self.workers.values()) / self.threads
        if serial and busy >= 1:
            flows = {}  # servers do nothing else
        flows |= {("snapshot", server): self._copy_uses(server) for server in self.copying}
        capacity = {("nic", way, n): kind.nic_bytes_per_second for n, kind in self.kinds.items() for way in ("in", "out")}
        capacity |= {("server", p, n): k.service_bytes_per_second for n, k in self.kinds.items() for p in (PULL, PUSH)}
        capacity |= self.switch
        if self.threads > 1:
            each = {n: kind.service_bytes_per_second / self.threads for n, kind in self.kinds.items()}
            capacity |= {("thread", w, n): rate for w in moving for n, rate in each.items()}
        for n, bucket in self.buckets.items():
            if self.tokens[n] == 0:
                capacity["nic", "out", n] = min(capacity["nic", "out", n], bucket.refill_bytes_per_second)
        if serial:
            capacity |= {("time", n): 1.0 - busy for n in self.kinds}
            flows = {f: self._in_one_queue(f[0], uses) for f, uses in flows.items()}
        capacity = {r: c for r, c in capacity.items() if c < math.inf}
        flows = {w: {r: u for r, u in uses.items() if r in capacity} for w, uses in flows.items()}
        # As a flow of a pull: beside connections, as one of these.
        weights = {("snapshot", server): 1.0 if self.connections else self.share[server] for server in self.copying}
        queues = self.discipline in ("fifo", "serial")
        moves = first_come(flows, capacity) if queues else progressive_filling(flows, capacity, weights)
        moves |= {(w, c): 0.0 for w in moving for c in self.workers[w].left if (w, c) not in moves}
        drains = {}
        for n, bucket in self.buckets.items():
            way = ("nic", "out", n)
            sent = math.fsum(moves[f] * uses[way] for f, uses in flows.items() if way in uses)
            even = abs(sent - bucket.refill_bytes_per_second) < 1e-9 * sent
            drains[n] = 0.0 if even else sent - bucket.refill_bytes_per_second
        return rates | moves, drains

    def _in_one_queue(self, worker, uses):
        """The same where a server has one queue for both ways: each byte takes its time by its NIC or its process."""
        found = {r: u for r, u in uses.items() if r[0] != "server"}
        for (kind, *_, n), part in uses.items():
            if kind == "server":
                machine = self.kinds[n]
                nic = math.inf if n == worker else machine.nic_bytes_per_second
                found["time", n] = part / min(nic, machine.service_bytes_per_second)
        return found

    def _copy_uses(self, server):
        """What one byte of a server's snapshot puts on NICs and processes, its own and those of the next server, if any."""
        servers = list(self.share)
        backup = servers[(servers.index(server) + 1) % len(servers)]
        uses = {("nic", "out", server): 1.0, ("server", PULL, server): 1.0}
        return uses if backup == server else uses | {("nic", "in", backup): 1.0, ("server", PUSH, backup): 1.0}

    def _snapshot(self):
        """Count a push; every so many of them, twice as many while servers still send, all of them begin to send a copy."""
        self.uncopied += 1
        if self.snapshot_clocks and self.uncopied >= self.snapshot_clocks * (2 if self.copying else 1):
            vectors = 1 + {"sgd": 0, "momentum": 1, "adarevision": 3}[self.workload.optimizer]
            size = self.workload.demand.model_bytes * (vectors + (self.workload.aggregation != "each"))
            self.copying = {s: self.copying.get(s, 0.0) + part * size for s, part in self.share.items() if part}
            self.uncopied = 0

    def _uses(self, worker, pulls, share):
        """What one byte of a transfer, of which servers have these shares, puts on every NIC and server process."""
        uses = {}
        for server, part in share.items():
            way = PULL if pulls else PUSH
            uses["server", way, server] = uses["thread", worker, server] = part
            if server != worker:
                source, sink = (server, worker) if pulls else (worker, server)
                for end in (("nic", "out", source), ("nic", "in", sink)):
                    uses[end] = uses.get(end, 0.0) + part
                middle = "switch", None if self.both_ways else way
                uses[middle] = uses.get(middle, 0.0) + part
        return uses

    def run(self, pushes):
        """Go on until so many pushes are completed, or no worker is left that could push."""
        while len(self.rows) < pushes and any(s.phase != WAIT for s in self.workers.values()):
            rates, drains = self._rates()
            left = {(w, c): x for w, s in self.workers.items() if s.phase != WAIT for c, x in s.left.items()}
            ends = {f: (x / rates[f] if rates[f] else math.inf) if x > 0 else 0.0 for f, x in left.items()}
            # What is next of each worker: the end of a connection that still sends, if any.
            due = {w: min((e for f, e in ends.items() if f[0] == w and left[f] > 0), default=0.0) for w, _ in ends}
            worker = min(due, key=lambda w: (due[w], self.names.index(w)))
            elapsed = due[worker]
            lasting = {n: t / drains[n] for n, t in self.tokens.items() if t > 0 and drains[n] > 0}
            emptied = lasting and min(lasting.values()) < elapsed
            if emptied:
                elapsed = min(lasting.values())
            copied = {s: left / rates["snapshot", s] for s, left in self.copying.items()}
            sent = copied and min(copied.values()) < elapsed
            if sent:
                elapsed, emptied = min(copied.values()), False
            change = self.changes and self.changes[0][0] < self.now + elapsed
            if change:
                elapsed, emptied, sent = self.changes[0][0] - self.now, False, False
            self.copying = {
                s: left - rates["snapshot", s] * elapsed for s, left in self.copying.items() if copied[s] > elapsed
            }
            for n, bucket in self.buckets.items():
                kept = min(max(self.tokens[n] - drains[n] * elapsed, 0.0), bucket.capacity_bytes)
                self.tokens[n] = 0.0 if emptied and lasting.get(n) == elapsed else kept
            over = not (change or emptied or sent)
            for (w, connection), x in left.items():
                ended = over and ends[w, connection] <= elapsed
                self.workers[w].left[connection] = 0.0 if ended else max(x - rates.get((w, connection), 0.0) * elapsed, 0.0)
            self.now += elapsed
            if change:
                _, node, factor = self.changes.pop(0)
                self.slow[node] *= factor
            elif over and not any(self.workers[worker].left.values()):
                self._next(worker)
        return self

    def _next(self, name):
        """The worker has ended its phase."""
        worker, d = self.workers[name], self.workload.demand
        if worker.phase == APPLY:
            return self._pushed(name)
        if worker.phase == REQUEST:
            worker.phase, worker.left = PULL, self._connections(d.model_bytes)
            return None
        if worker.phase != PUSH:
            worker.took[worker.phase] = self.now - worker.began
            worker.began = self.now
        if worker.phase == PULL:
            worker.phase, worker.left = COMPUTE, {None: worker.took["drawn"]}
        elif worker.phase == COMPUTE:
            worker.phase = PUSH
            worker.left = self._connections(d.model_bytes if d.push_bytes is None else d.push_bytes)
            worker.arrival, self.arrivals = self.arrivals, self.arrivals + 1
        else:
            # Servers apply side by side; the one with the largest share is the last.
            grown = 1 + d.apply_growth * (len(self.workers) - 1)
            free = (
                max(min(self.server_free), self.now)
                + d.apply_seconds * max(self.share.values()) ** d.apply_exponent * grown
                + d.commit_seconds * len(self.share)
            )
            self.server_free[self.server_free.index(min(self.server_free))] = free
            worker.phase, worker.left = APPLY, {None: free - self.now}
            if worker.left[None] <= 0:
                return self._pushed(name)
        return None

    def _connections(self, size):
        """What a transfer of so many 32-bit bytes has to send over each of its connections."""
        sent = size * self.setting.transfer_bits / 32
        return {s: sent * part for s, part in self.share.items()} if self.connections else {None: sent}

    def _begin(self, name, extra=0.0):
        worker = self.workers[name]
        waited = self.now - worker.began if worker.phase == WAIT else 0.0  # one released in a cycle has not waited
        worker.took = {WAIT: waited, "drawn": self._draw(name, worker.begun) + extra}
        worker.phase, worker.left = PULL, self._connections(self.workload.demand.model_bytes)
        if behind := self.control_queue * self._queued():
            worker.phase, worker.left = REQUEST, {None: behind}
        worker.arrival, self.arrivals = self.arrivals, self.arrivals + 1
        worker.began, worker.version = self.now, self.version
        worker.begun += 1
        if self.model:
            worker.pulled = {k: v.copy() for k, v in self.parameters.items()}
            worker.total = dict(self.total)

    def _queued(self):
        """Seconds until the switch and every server's link have carried what workers have sent so far of their pushes."""
        d = self.workload.demand
        size = (d.model_bytes if d.push_bytes is None else d.push_bytes) * self.setting.transfer_bits / 32
        waiting = dict.fromkeys(self.share, 0.0)
        for name, worker in self.workers.items():
            if worker.phase == PUSH:
                sent = min(size, self.kinds[name].nic_bytes_per_second * (self.now - worker.began))
                if self.connections:
                    for server, bytes_sent in self._sent(size, sent).items():
                        carried = size * self.share[server] - worker.left[server]
                        waiting[server] += max(bytes_sent - carried, 0.0)
                else:
                    behind = max(sent - (size - sum(worker.left.values())), 0.0)
                    waiting = {server: waiting[server] + part * behind for server, part in self.share.items()}
        limits = {n: min(self.kinds[n].nic_bytes_per_second, self.kinds[n].service_bytes_per_second) for n in self.share}
        slowest = max((waiting[n] / limits[n] for n in self.share), default=0.0)
        middle = self.switch.get(("switch", PUSH), math.inf)  # what all servers' links have not carried may queue there
        return max(slowest, sum(waiting.values()) / middle)

    def _sent(self, size, sent):
        """Of each connection, where `sent` of `size` bytes have left the worker: evenly, while a connection has some."""
        found, left = {}, sent
        for i, server in enumerate(ordered := sorted(self.share, key=self.share.get)):
            found[server] = min(size * self.share[server], left / (len(ordered) - i))
            left -= found[server]
        return found

    # ---- learning

    def _pushed(self, name):
        worker = self.workers[name]
        worker.phase, worker.took[PUSH], worker.began = WAIT, self.now - worker.began, self.now
        loss, gradient = self._gradient(name) if self.model else (0.0, {})
        row = {
            "seconds": self.now,
            "worker": self.names.index(name),
            "clock": worker.begun - 1,
            "compute_seconds": worker.took[COMPUTE],
            "pull_seconds": worker.took[PULL],
            "push_seconds": worker.took[PUSH],
            "wait_seconds": worker.took[WAIT],
            "staleness": self.version - worker.version,
            "loss": loss,
        }
        self.rows.append(row)
        self._snapshot()
        counts = {w: sum(r["worker"] == self.names.index(w) for r in self.rows) for w in self.workers}
        waiting = [w for w, s in self.workers.items() if s.phase == WAIT]
        release, step = self.policy.decide(name, counts, waiting, self.now)
        if row["staleness"] <= self.policy.oldest:
            self.group.append(gradient)
        if self.workload.optimizer == "adarevision":
            self._revise(worker)
        elif self.group and (step or self.workload.aggregation == "each"):
            self._step()
        for w in self.names:
            if w in release:
                self._begin(w)

    def _gradient(self, name):
        """Of the mini-batch that has arrived, at the parameters that were pulled for it."""
        worker, n = self.workers[name], self.samples[name]
        begin, end = self.shard[name]
        at = begin + (np.arange(n) + (worker.begun - 1) * n) % (end - begin)
        return self.model.gradient(worker.pulled, [column[at] for column in self.train])

    def _step(self):
        size = len(self.group) if self.workload.aggregation == "mean" else 1
        momentum = self.setting.momentum if self.workload.optimizer == "momentum" else 0.0
        for k in self.group[0]:
            self.velocity[k] = momentum * self.velocity[k] + sum(g[k] for g in self.group) / size
            self.parameters[k] = self.parameters[k] - self.setting.learning_rate * self.velocity[k]
        self.version += len(self.group)
        self.group = []

    def _revise(self, worker):
        """AdaptiveRevision (McMahan & Streeter 2014): the server's part, for each coordinate."""
        (gradient,) = self.group
        for k, g in gradient.items():
            back, old = self.total[k] - worker.total[k], self._rate(k)
            self.z[k] = self.z[k] + g**2 + 2 * g * back
            self.largest[k] = np.maximum(self.largest[k], self.z[k])
            new = self._rate(k)
            self.parameters[k] = self.parameters[k] - new * g + (old - new) * back
            self.total[k] = self.total[k] + g
        self.version += 1
        self.group = []

    def _rate(self, k):
        largest = self.largest[k]
        return self.setting.learning_rate * np.where(largest > 0, 1 / np.sqrt(largest + 1e-7), 0.0)

    def column(self, name):
        """One field of all rows."""
        return np.array([r[name] for r in self.rows])
