"""A parameter server in simulated time: cluster, workloads, engine, reconfiguration, calibration.

Importing this package, before JAX has started, tells XLA two things: to compile the event loop as one function (by
default it dispatches every small operation by itself, which is four times slower), and to stay on one thread, so that
results do not depend on the host and parallel runs do not compete for cores. Flags that are already set stay.
"""

import os

_FLAGS = {
    "--xla_backend_extra_options": "xla_cpu_small_while_loop_byte_threshold=160000",
    "--xla_cpu_multi_thread_eigen": "false",
}

_set = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [_set, *(f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _set)]
).strip()
