"""Join a Ray cluster, or say in a sentence why not.

An address is what users of Ray expect: ``HOST:PORT`` of the head, ``ray://HOST:PORT`` for Ray's client, ``auto`` for
`RAY_ADDRESS` or else the cluster that runs on this machine, ``local`` for one of our own that lasts as long as we do.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray

__all__ = ["cores", "joined"]

_ANSWER_SECONDS = 5.0

_SETTINGS = b"\x04"
"""The type of the frame with which a gRPC server greets whoever calls (RFC 9113, section 6.5)."""


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Be part of the cluster at `address`; raises ValueError where there is none, it does not let us in, or has no CPUs."""
    _knock(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, ImportError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"Cannot join the Ray cluster at {address}: {said}") from None
    try:
        if not cores():
            raise ValueError(f"Cannot use the Ray cluster at {address}: it has no CPUs. Add a node to it by `ray start`.")
        yield
    finally:
        ray.shutdown()


def cores() -> int:
    """How many CPUs the cluster we joined has, whoever uses them now."""
    return int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]


def _knock(address: str) -> None:
    """Raise ValueError unless somebody like Ray listens at `address`; Ray itself would try for minutes."""
    place = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if place in {"auto", "local"}:
        return
    host, _, port = place.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"Cannot join a Ray cluster at {place!r}: write HOST:PORT, ray://HOST:PORT, auto or local.")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS) as line:
            if os.environ.get("RAY_USE_TLS") == "1" or line.recv(4)[3:] == _SETTINGS:
                return
            answer = "what answers there is no Ray"
    except TimeoutError:
        answer = "what listens there says nothing"
    except OSError as error:
        answer = f"nobody answers there ({error.strerror or error})"
    raise ValueError(
        f"Cannot join a Ray cluster at {place}: {answer}. Start one with `ray start --head`, or name another address."
    )
