"""A parameter server in simulated time: cluster, workloads, engine, reconfiguration, calibration.

Importing this package, before JAX has started, tells XLA three things: to compile the event loop as one function (by
default it dispatches every small operation by itself, which is four times slower), to stay on one thread, so that
results do not depend on the host and parallel runs do not compete for cores, and to generate code without MLIR. Flags
that are already set stay.
"""

import os

# XLA's newer way to generate code sets MLIR up for each of the some 100 fused kernels of a program, which is a third to a
# half of the time to compile (measured). The results have the same bytes. A version of XLA ignores options it does not know.
_FLAGS = {
    "--xla_backend_extra_options": "xla_cpu_small_while_loop_byte_threshold=160000,xla_cpu_disable_new_fusion_emitters=true",
    "--xla_cpu_multi_thread_eigen": "false",
}

_set = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [_set, *(f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _set)]
).strip()
