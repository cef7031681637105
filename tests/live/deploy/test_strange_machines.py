"""The command on machines that lack something: each time in namespaces, or under limits, of the command's own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.deploy.test_deploy import SMALL, ray_alone
from traces import store

__all__ = ["ray_alone"]

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]

needs_root = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root")

# Devices that every program may expect, and nothing else: no folder for shared memory.
NO_SHARED_MEMORY = """
mkdir devices
mount -t tmpfs none devices
for name in null zero full random urandom tty
do touch devices/$name && mount --bind /dev/$name devices/$name
done
ln -s /proc/self/fd devices/fd
mount --rbind devices /dev
! test -e /dev/shm
"""
ALL_READ_ONLY = """
mkdir readonly
mount -t tmpfs -o ro none readonly
mount --bind readonly /dev/shm
export HOME=$PWD/readonly HARNESS_CACHE=$PWD/readonly/cache
! touch $HOME/file
! touch /dev/shm/file
"""


@pytest.fixture
def here(tmp_path, monkeypatch, ray_alone):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "small.toml").write_text(SMALL.replace('metric = "loss"\nvalue = 1.2', 'metric = "clocks"\nvalue = 100'))
    return tmp_path


def shell(lines, *outer):
    command = [*outer, "bash", "-c", lines]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)  # noqa: S603


JOB = f"exec {sys.executable} -m harness deploy --live small.toml --out out"


@needs_root
@pytest.mark.parametrize(
    ("machine", "more"),
    [(NO_SHARED_MEMORY, "--beside"), (ALL_READ_ONLY, "")],
    ids=["no shared memory", "home, cache and shared memory are read-only"],
)
def test_a_job_needs_nothing_but_its_folder(here, machine, more):
    made = shell(f"set -e\n{machine}\n{JOB} {more}", "unshare", "--mount")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "target after" in made.stdout
    assert ("live / simulated" in made.stdout) == bool(more)
    assert (here / "out" / "checkpoint.safetensors").exists()


def test_only_workers_with_a_device_compute_on_one(here):
    """The user asks for CUDA, which is not here: whoever chose to compute on it would fail."""
    made = shell(f"export JAX_PLATFORMS=cuda\n{JOB} --tuner asp")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "target after" in made.stdout


# A home, and what Python and this project need, for a user who may not enter root's home. He sees no process but his own.
NOBODY = f"""
mount -t tmpfs -o mode=755 none /mnt
export HOME="/mnt/Heim von ü"
export TMPDIR="$HOME" HARNESS_CACHE="$HOME/cache"
mkdir "$HOME" && cp small.toml "$HOME" && cd "$HOME" && chown --recursive nobody "$HOME"
number=0
kept=({sys.base_prefix} {sys.prefix} {ROOT})
for folder in ${{kept[@]}}
do mkdir /mnt/$((number += 1)) && mount --bind $folder /mnt/$number
done
for parent in /root /home
do mount -t tmpfs -o mode=755 none $parent
done
number=0
for folder in ${{kept[@]}}
do mkdir -p $folder && mount --bind /mnt/$((number += 1)) $folder
done
mount -t proc -o hidepid=2 proc /proc
ip link set lo up
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
hostname no.such.host
as_nobody="setpriv --reuid=nobody --regid=nogroup --clear-groups --inh-caps=-all"
"""


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="this test needs setpriv")
def test_a_user_without_rights_has_a_job_in_folders_of_any_name(here):
    """There is neither IPv6 nor an address of the machine's name."""
    lines = f"""
        $as_nobody {sys.executable} -m harness deploy --live small.toml --out 'out ☃'
        stat --format=%U "$HOME/out ☃/checkpoint.safetensors"
    """
    made = shell(f"set -e\n{NOBODY}\n{lines}", *["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child"])
    assert made.returncode == 0, made.stdout + made.stderr
    assert "target after" in made.stdout
    assert made.stdout.endswith("\nnobody\n")


@pytest.mark.parametrize("more", ["", "--tuners fixed,asp"], ids=["job", "contest"])
def test_a_job_that_a_limit_forbids_leaves_nothing(here, more):
    before = sorted(here.iterdir())
    made = shell(f"ulimit -n 64\n{JOB} {more}")
    assert made.returncode == 2
    assert "harness: Cannot run a job of 6 processes on this machine: a process may open 64 files" in made.stderr
    assert sorted(here.iterdir()) == before


def test_a_job_whose_reader_is_gone_comes_to_its_target(here):
    made = shell(f"{JOB.removeprefix('exec ')} | head -1\nexit ${{PIPESTATUS[0]}}")
    assert (made.returncode, made.stdout) == (0, "Loading JAX, Ray and the job.\n")
    assert made.stderr == "harness: nobody reads the output any more; this goes on, and Ctrl-C stops it.\n"
    assert (here / "out" / "checkpoint.safetensors").exists()


def test_a_contest_whose_process_is_killed_goes_on(here):
    command = [
        *f"{sys.executable} -m harness deploy --live small.toml --out out".split(),
        "--tuners",
        "fixed,asp",
        "--seeds",
        "1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:  # noqa: S603
        for line in process.stdout:
            if "run 2 of 2" in line:
                break
        process.kill()
    made = shell(" ".join([*command, "--resume"]))
    assert made.returncode == 0, made.stdout + made.stderr
    assert "asp, seed 0: run 1 of 1" in made.stdout
    assert store.load_results(here / "out").scores["status"].to_list() == ["target", "target"]
