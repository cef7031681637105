"""How much longer cycles are where flows to unlike servers end by themselves: `python -m tests.bench.tables.unlike_servers`.

Simulated time, so the table is the same on every machine. Rows are of servers, columns of the time that a mini-batch
computes, in pulls that a worker does alone over a link as fast as the first server's; of each, cycles with two, three and
six workers.
"""

import numpy as np

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.workloads.workload import Demand
from tests.support.small_jobs import job, machine, system
from tuners.actions import Run, Setting

LINK, WORKERS = 100.0, (2, 3, 6)
CASES = (  # servers' links, their shares of the model, workers' links, how many servers are workers, too
    ((1, 1), (1 / 3, 2 / 3), 1, 0),
    ((1, 2), (1 / 3, 2 / 3), 1, 0),
    ((1, 2), (1 / 3, 2 / 3), 2, 0),
    ((1, 1, 1, 1), (0.4, 0.2, 0.2, 0.2), 1, 0),
    ((1, 2), (), 1, 0),
    ((1, 1), (), 1, 1),
)


def seconds(case, workers, policy, compute, seed, *, independent):
    """Of 3,000 pushes, after 1,000 others."""
    links, shares, own, both = case
    names = tuple(f"n{i}" for i in range(workers + len(links)))
    nodes = zip(names, (own,) * workers + links, strict=True)
    cluster = Cluster(tuple((n, machine(LINK * x)) for n, x in nodes), independent_flows=independent)
    roles = {"workers": names[: workers + both], "servers": names[workers:]}
    setting = Setting(**roles, batch_size=8, policy=policy, model_shares=shares)
    demand = Demand(model_bytes=LINK, sample_seconds=0.0, fixed_seconds=compute)
    pushed = system(cluster, job(demand), setting, Conditions(), seed).perform(Run(clocks=4000)).pushes.seconds
    return pushed[-1] - pushed[999]


def longer(*case, seeds=(1, 2, 3)):
    """Per cent, the mean of some seeds."""
    found = [seconds(*case, s, independent=True) / seconds(*case, s, independent=False) for s in seeds]
    return 100 * (np.mean(found) - 1)


def main():
    print("policy, servers' links, shares, workers' links, servers that work: compute for 0.25, 1 and 2 pulls")  # noqa: T201
    for policy in ("asp", "bsp"):
        for case in CASES:
            cells = (", ".join(f"{longer(case, w, policy, z):.0f}" for w in WORKERS) for z in (0.25, 1.0, 2.0))
            print(policy, *case, *(f"| {cell} %" for cell in cells), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
