"""DLRover: a parameter server that is hot moves to a larger machine.

Wang et al., "DLRover-RM: Resource Optimization for Deep Recommendation Models Training in the Cloud", VLDB 2024: a server
whose utilisation is above a threshold slows down all workers; it is replaced by one with more resources, and its parameters
move there while training goes on (seamless migration). The default threshold, 0.8, is that of the public code's
configuration of its hot-server optimiser.

Their public code (DLRover: `optimize_job_hot_ps_resource`) gives every server more processors in one ratio, the number of
workers that is aimed at over that of now, up to 32 processors each. We know no figure for what a job
gains from this alone.

Where we differ: the paper asks a cloud for a pod with more processors; here machines have fixed sizes, so the new server is
the idle machine with the widest network interface, if this is wider than the hot one's. Utilisation is the busier direction
of the server's network interface, because that is what limits servers here. The paper's model of throughput, from which it
chooses numbers of workers and servers, is not part of this baseline.
"""

from __future__ import annotations

from dataclasses import replace

from tuners.actions import Job, Reconfigure, Rejected, Run, Setting, Tuner, Window
from tuners.applicability import nothing_to_tune_if
from tuners.factory_options import Count, Share

__all__ = ["dlrover_hot", "hottest", "moved"]


def _no_machine_can_replace_a_server(job: Job) -> str:
    if not job.space.frees("role"):
        return "The roles of machines are held here, so that no server can move to another."
    used = {*job.start.workers, *job.start.servers}
    if all(n.name in used for n in job.nodes):
        return "No machine is idle here that a hot server could move to."
    return ""


@nothing_to_tune_if(_no_machine_can_replace_a_server)
def dlrover_hot(job: Job, *, hot: Share = 0.8, batches: Count = 10) -> Tuner:
    """Move a server that is busy for more than `hot` of the time to an idle machine with a wider network interface.

    Args:
        job: what is tuned.
        hot: the share of the time for which a hot server is busy, at least.
        batches: mini-batches per worker between two decisions.
    """
    if _no_machine_can_replace_a_server(job):
        return
    current, refused = job.start, set[tuple[str, str]]()
    while True:
        seen = yield from Run(clocks=batches * len(current.workers))
        if seen.status != "running":
            return
        current = seen.setting or current
        found = hottest(seen, hot)
        if found is None or seen.changes:
            continue
        server, utilisation = found
        nics = {n.name: n.nic_bytes_per_second for n in job.nodes}
        idle = [n.name for n in seen.nodes or job.nodes if n.name not in (*current.workers, *current.servers)]
        wider = [n for n in idle if nics[n] > nics[server] and (server, n) not in refused]
        if not wider:
            continue
        larger = max(wider, key=lambda n: nics[n])
        try:
            yield from Reconfigure(
                moved(current, server, larger, job.blocks),
                method=job.method("migrate"),
                reason=f"{server} is busy {utilisation:.0%} of the time; {larger} takes its part",
            )
        except Rejected:
            refused.add((server, larger))


def hottest(seen: Window, hot: float) -> tuple[str, float] | None:
    """The busiest server and the share of the window for which it was busy; None if no server is as busy as `hot`."""
    shares = {s.node: max(s.pull_seconds, s.push_seconds) / seen.seconds for s in seen.servers if seen.seconds > 0}
    if not shares:
        return None
    server = max(shares, key=lambda n: shares[n])
    return (server, shares[server]) if shares[server] >= hot else None


def moved(setting: Setting, server: str, to: str, blocks: int) -> Setting:
    """`setting` with `to` in the place of `server`; as the owner of its part of `blocks` blocks, if any."""
    owners = tuple(to if owner == server else owner for owner in setting.owners(blocks)) if blocks else ()
    return replace(
        setting,
        servers=tuple(to if s == server else s for s in setting.servers),
        model_shares=() if owners else setting.model_shares,
        block_owners=owners,
    )
