"""Join a Ray cluster, or say in one sentence why that is impossible.

Addresses are those of Ray: ``HOST:PORT`` of the head, ``ray://HOST:PORT`` for Ray's client, ``auto`` for `RAY_ADDRESS` or
else the cluster that runs on this machine, ``local`` for a new cluster on this machine, which ends with this process.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

__all__ = ["check_names", "cores", "joined", "own_breakpoint", "protected", "quiet_services"]

_ANSWER_SECONDS = 5.0

_SETTINGS = b"\x04"
"""The type of the first frame that a gRPC server sends to a client (RFC 9113, section 6.5)."""


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Join the cluster at `address`. Raises ValueError if there is none, if it refuses us, or if it has no CPUs."""
    check_names()
    _check_listening(address)
    _check_token(address)
    try:
        with own_breakpoint():
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


def check_names() -> None:
    """Raise ValueError if a word of this command, or the path of a folder that it imports from, is no text by this locale:
    Ray tells its processes all of them, as UTF-8."""
    for name in (*sys.orig_argv, str(Path.cwd()), *sys.path):
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(name).decode(errors="backslashreplace")
            raise ValueError(
                f"Cannot use Ray with the name {shown!r}, which is no text in {sys.getfilesystemencoding()}. Rename the "
                "file or folder, name a link to it, or use a locale with UTF-8, as LC_ALL=C.UTF-8."
            ) from None


@contextmanager
def own_breakpoint() -> Iterator[None]:
    """Keep what `breakpoint()` does in this process, where tuners run: Ray puts a debugger in its place that wants a package
    of its own. Processes that Ray starts have Ray's."""
    before = os.environ.get("PYTHONBREAKPOINT")
    try:
        yield
    finally:
        os.environ.pop("PYTHONBREAKPOINT", None)
        if before is not None:
            os.environ["PYTHONBREAKPOINT"] = before


@contextmanager
def quiet_services() -> Iterator[None]:
    """No thread of this process prints what Ray's services say, if this process joins Ray meanwhile.

    A live job tells of its losses itself. Ray would write a stack trace into the job's table where a machine is lost, and
    warns of every job with many processes."""
    own = getattr(ray._private.worker, "listen_error_messages", None)  # other versions of Ray may not have it
    if own is None:
        yield
        return
    ray._private.worker.listen_error_messages = lambda *_: None
    try:
        yield
    finally:
        ray._private.worker.listen_error_messages = own


def protected() -> bool:
    """Whether this process, and all that Ray starts for it, talk to Ray with a token or through TLS. A cluster without both
    obeys whoever reaches it."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token" or _uses_tls()


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "").lower() in {"1", "true"}  # as Ray reads it


def cores() -> int:
    """The number of CPUs of the joined cluster, busy or idle."""
    return int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]


def _check_listening(address: str) -> None:
    """Raise ValueError unless a gRPC server listens at `address`. Without this check, Ray itself would try for minutes."""
    place = _place(address)
    if place in {"auto", "local"}:
        return
    host, _, port = place.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"Cannot join a Ray cluster at {place!r}: write HOST:PORT, ray://HOST:PORT, auto or local"
            f"{_of_environment(place)}."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS) as line:
            # With TLS the server waits for the client's handshake and sends nothing first: a connection is all we can check.
            if _uses_tls() or line.recv(4)[3:] == _SETTINGS:
                return
            answer = "what answers there is no Ray"
    except TimeoutError:
        answer = "what listens there says nothing; if it wants TLS, this command needs RAY_USE_TLS=1 and its files, too"
    except OSError as error:
        answer = f"nobody answers there ({error.strerror or error})"
    raise ValueError(
        f"Cannot join a Ray cluster at {place}: {answer}. Start one with `ray start --head`, or name another address"
        f"{_of_environment(place)}."
    )


def _check_token(address: str) -> None:
    """Raise ValueError if the cluster at `address` has another token than this process. Ray itself would try for 20 s, and
    then not say why; where this process has none, it ends in a traceback."""
    place = _place(address)
    copy = "Copy the cluster's token from ~/.ray/auth_token of its head to the same file here."
    with_token = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    if place != "local" and with_token and not _has_token():
        raise ValueError(f"Cannot join the Ray cluster at {place}: this command finds no token. {copy}")
    if place in {"auto", "local"} or place.startswith("ray://"):
        return
    try:
        GcsClient(address=place)
    except AuthenticationError:
        why = "its token is another one" if with_token else "it asks for a token. Set RAY_AUTH_MODE=token for this command"
        raise ValueError(f"Cannot join the Ray cluster at {place}: {why}. {copy}") from None
    except Exception:  # noqa: S110 - Ray tries again, and says what it is
        pass


def _has_token() -> bool:
    try:
        return bool(AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))
    except AuthenticationError:  # RAY_AUTH_TOKEN_PATH names no such file
        return False


def _place(address: str) -> str:
    """The address that is meant by `address`."""
    return os.environ.get("RAY_ADDRESS", address) if address == "auto" else address


def _of_environment(place: str) -> str:
    """What to add where an address is that of the environment, which the user may not have thought of."""
    return "; RAY_ADDRESS has this one" if os.environ.get("RAY_ADDRESS") == place else ""
