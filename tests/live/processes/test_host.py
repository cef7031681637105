"""What a job needs of its machine: a loopback interface, and a folder with a short and plain path for Ray's sockets."""

import shutil
import socket
import subprocess
import sys
import tempfile
import threading

import pytest

from harness.live.processes import private_folder as module
from harness.live.processes.host import check_limits, check_loopback
from harness.live.processes.private_folder import private_folder, remove_left_behind

SOCKET = "session_2026-11-26_01-59-49_613488_4194303/sockets/plasma_store"


@pytest.fixture
def long_path(tmp_path, monkeypatch):
    """A folder for temporary files as a batch system gives it."""
    found = tmp_path / "scratch" / "a-user-with-a-long-name" / "slurm-job.12345678"
    found.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(found))
    return found


def test_a_folder_has_room_for_the_names_of_rays_sockets(long_path, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        monkeypatch.setattr(module, "_SHORT", (str(long_path / "not there"), short))
        with private_folder() as made:
            assert str(made.parent) == short
            (made / SOCKET).parent.mkdir(parents=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(made / SOCKET))  # raises OSError for a path that is too long
        assert not made.exists()
        left = module._made()
        remove_left_behind()
        assert not left.exists()
    assert not list(long_path.iterdir())


def test_a_folder_for_rays_sockets_has_a_path_in_ascii(monkeypatch):
    """Ray writes the paths of its sockets in ASCII, and ends if it cannot."""
    with tempfile.TemporaryDirectory(prefix="ü", dir="/tmp") as beyond, tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", beyond)
        monkeypatch.setattr(module, "_SHORT", (short,))
        with private_folder() as made:
            assert str(made.parent) == short


def test_without_a_short_path_it_is_said_how_to_get_one(long_path, monkeypatch):
    monkeypatch.setattr(module, "_SHORT", (str(long_path), "/proc"))
    with pytest.raises(
        ValueError, match=r"slurm-job.12345678 is too long .* Set TMPDIR to a folder with a short, plain path"
    ):
        module._made()


def test_a_machine_that_reaches_itself_can_run_a_job():
    check_loopback()


@pytest.mark.parametrize("processes", [7, 30])
def test_who_may_open_too_few_files_is_told_before_anything_starts(processes):
    ask = f"from harness.live.processes.host import check_limits; check_limits({processes})"
    limited = f"ulimit -n 64; exec {sys.executable} -c '{ask}'"
    found = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, check=False, timeout=60)  # noqa: S603, S607
    last = found.stderr.splitlines()[-1]
    assert last.startswith(
        f"ValueError: Cannot run a job of {processes} processes on this machine: a process may open 64 files"
    )
    assert "Raise the limit (`ulimit -Hn`)" in last


def test_who_may_start_too_few_threads_is_told_before_anything_starts(monkeypatch):
    before, start, left = set(threading.enumerate()), threading.Thread.start, [100]

    def starts(thread):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")  # as under `ulimit -u`, which root is exempt from
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    with pytest.raises(ValueError, match=r"7 processes .* at least \d+ threads, and only 100 more can be started\. Raise"):
        check_limits(7)
    assert set(threading.enumerate()) <= before


def test_a_machine_without_tight_limits_can_run_a_job():
    check_limits(7)


ALONE = [shutil.which("unshare"), "--user", "--map-root-user", "--net"]  # a new network, whose loopback interface is off


def asked(*command):
    return subprocess.run([*ALONE, *command], capture_output=True, text=True, check=False, timeout=60)  # noqa: S603


def can_be_alone():
    return ALONE[0] is not None and not asked("true").returncode


@pytest.mark.skipif(not can_be_alone(), reason="this user may not make a network")
def test_without_loopback_a_job_is_refused_at_once():
    ask = "from harness.live.processes.host import check_loopback; check_loopback()"
    assert "ValueError: Cannot run a job on this machine: it cannot reach itself" in asked(sys.executable, "-c", ask).stderr
