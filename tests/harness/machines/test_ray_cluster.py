"""What is refused before Ray is asked."""

import os
import socket
import sys
import threading
from contextlib import contextmanager

import pytest

BYTES = b"caf\xe9"  # a name in Latin-1, as old file systems have them


# Ray reads its environment when it is imported, and tests/live/conftest.py sets that while tests are collected.
def _joined():
    from harness.machines.ray_cluster import joined

    return joined("127.0.0.1:1")


def _started():
    from harness.live.processes import launch

    return launch.cluster(None)


@pytest.mark.parametrize("where", ["word", "folder"])
@pytest.mark.parametrize("join", [_joined, _started], ids=["joined", "started"])
def test_names_that_are_no_text_are_refused_before_ray_is_asked(join, where, tmp_path, monkeypatch):
    """Ray fails on them after seconds, in the words of a decoder."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if where == "word":
        monkeypatch.setattr(sys, "orig_argv", [*sys.orig_argv, os.fsdecode(BYTES)])
    else:
        folder = tmp_path / os.fsdecode(BYTES)
        folder.mkdir()
        monkeypatch.chdir(folder)
    said = r"Cannot use Ray with the name '.*caf\\\\xe9', which is no text in utf-8\."
    with pytest.raises(ValueError, match=said), join():
        pass


@contextmanager
def _grpc_server():
    """What says of itself that it is a gRPC server; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listens:

        def answer():
            line, _ = listens.accept()
            with line:
                line.sendall(bytes(3) + b"\x04" + bytes(5))  # a frame of settings, without any

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listens.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("mode", "token", "words"),
    [
        ("", None, r"it asks for a token\. Set RAY_AUTH_MODE=token for this command\. Copy .* from ~/\.ray/auth_token of"),
        ("token", "0" * 64, r"its token is another one\. Copy .* ~/\.ray/auth_token of its head"),
        ("token", None, r"this command finds no token\. Copy .* ~/\.ray/auth_token of its head"),
    ],
    ids=["no token", "another token", "no file"],
)
def test_a_cluster_that_wants_another_token_says_so_at_once(monkeypatch, tmp_path, mode, token, words):
    """Ray tries for 20 s, and then says only that it failed; without a file, it ends in a traceback."""
    from harness.machines import ray_cluster

    def refuse(address):
        raise ray_cluster.AuthenticationError("InvalidAuthToken")

    for name, value in {"HOME": str(tmp_path), "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token}.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    for name in ("RAY_USE_TLS", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray_cluster, "GcsClient", refuse)
    loader = ray_cluster.AuthenticationTokenLoader.instance()
    loader.reset_cache()
    try:
        with _grpc_server() as address, pytest.raises(ValueError, match=words), ray_cluster.joined(address):
            pass
    finally:
        loader.reset_cache()
