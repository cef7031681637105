"""The cache of compiled programs: whole entries or none, no failure of a disk ends a run, and results are the same bytes."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.comparison.compare import compare
from harness.machines import program_cache
from harness.machines.program_cache import ProgramFolder
from harness.scenario import load

BIG = 4_000_000

WRITER = f"""
import sys
from pathlib import Path
from harness.machines.program_cache import ProgramFolder
programs = ProgramFolder(Path(sys.argv[1]))
print("ready", flush=True)
for n in range(int(sys.argv[2])):
    programs.put("program", bytes([n % 256]) * {BIG})
    found = programs.get("program")
    assert found is not None and found == found[:1] * {BIG}
"""

COMPILER = """
import os, sys
from harness.machines import program_cache
used = program_cache.use()
import jax, jax.numpy as jnp
assert program_cache.use() == used
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)

@jax.jit
def program(x):
    return jnp.sin(x) @ jnp.cos(x).T

print(program(jnp.arange(12.0).reshape(3, 4)).tobytes().hex(), len(hits), used)
"""

SETTINGS_OF_ONES_OWN = """
import jax
from harness.machines import program_cache
jax.config.update("jax_enable_compilation_cache", False)
assert program_cache.use() is None
jax.config.update("jax_enable_compilation_cache", True)
jax.config.update("jax_compilation_cache_dir", "elsewhere")
assert program_cache.use() is None
assert jax.config.jax_compilation_cache_dir == "elsewhere"
"""


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow beyond 1,000 bytes: a write stops in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def python(text: str, *arguments: str, **environment: str) -> str:
    """Run a program in which every warning is an error, without settings of this process; return what it prints."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION", "JAX_PERSISTENT", "HARNESS_"))}
    command = [sys.executable, "-W", "error", "-c", text, *arguments]
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True)  # noqa: S603
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


# ---------------------------------------------------------------------------------------------------------- the folder


def test_what_is_put_is_got_by_another_process(tmp_path):
    ProgramFolder(tmp_path / "new").put("program", b"code")
    assert ProgramFolder(tmp_path / "new").get("program") == b"code"
    assert ProgramFolder(tmp_path / "new").get("other") is None
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0  # entries are code that we run


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:10], lambda b: b"", lambda b: b[:-1] + b"?"])
def test_a_damaged_entry_is_replaced(tmp_path, damage):
    programs = ProgramFolder(tmp_path)
    programs.put("program", b"code" * 100)
    (file,) = files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert programs.get("program") is None
    assert files(tmp_path) == []
    programs.put("program", b"code" * 100)
    assert programs.get("program") == b"code" * 100


def test_a_full_disk_leaves_no_part_of_an_entry(tmp_path):
    programs = ProgramFolder(tmp_path)
    with full_disk():
        programs.put("large", bytes(5000))
        programs.put("small", bytes(500))
    assert programs.get("large") is None
    assert programs.get("small") == bytes(500)
    assert len(files(tmp_path)) == 1


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    programs = ProgramFolder(tmp_path / "file" / "programs")
    programs.put("program", b"code")
    assert programs.get("program") is None


def test_a_read_only_folder_is_read(tmp_path, monkeypatch):
    programs = ProgramFolder(tmp_path)
    programs.put("program", b"code")
    programs.put("damaged", b"code")
    (damaged,) = (f for f in files(tmp_path) if f.name.endswith("damaged"))
    damaged.write_bytes(b"?")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    for module, name in ((os, "utime"), (os, "open"), (Path, "unlink"), (Path, "rename")):
        monkeypatch.setattr(module, name, refuse)
    programs.put("more", b"code")
    assert programs.get("more") is None
    assert programs.get("program") == b"code"
    assert programs.get("damaged") is None


def test_a_process_that_is_killed_while_it_writes_leaves_no_damage(tmp_path):
    for attempt in range(5):
        command = [sys.executable, "-c", WRITER, str(tmp_path), "1000000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.02 * (attempt + 1))
            process.send_signal(signal.SIGKILL)
        found = ProgramFolder(tmp_path).get("program")
        assert found is None or found == found[:1] * BIG
    ProgramFolder(tmp_path).put("program", b"code")
    assert ProgramFolder(tmp_path).get("program") == b"code"


def test_unfinished_files_of_killed_processes_are_deleted_later(tmp_path):
    programs = ProgramFolder(tmp_path)
    (tmp_path / "old.part").write_bytes(b"cod")
    (tmp_path / "new.part").write_bytes(b"cod")
    os.utime(tmp_path / "old.part", (0, 0))
    programs.put("program", b"code")
    assert [f.name for f in files(tmp_path) if f.suffix == ".part"] == ["new.part"]


def test_two_processes_that_write_the_same_entry_read_whole_entries(tmp_path):
    commands = [[sys.executable, "-c", WRITER, str(tmp_path), "30"] for _ in range(2)]
    processes = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for c in commands]  # noqa: S603
    errors = [p.communicate()[1] for p in processes]
    assert errors == [b"", b""]
    assert len(files(tmp_path)) == 1


def test_the_folder_is_bounded_and_drops_what_was_not_used_for_longest(tmp_path):
    programs = ProgramFolder(tmp_path, limit_bytes=3500)
    for number in range(3):
        programs.put(f"program-{number}", bytes(1000))
    for file in files(tmp_path):
        os.utime(file, (1, 1) if file.name.endswith("0") else (2, 2))
    assert programs.get("program-0") is not None  # used now
    programs.put("program-3", bytes(1000))
    assert sum(f.stat().st_size for f in files(tmp_path)) <= 3500
    assert [programs.get(f"program-{n}") is not None for n in (0, 3)] == [True, True]
    assert sum(programs.get(f"program-{n}") is not None for n in (1, 2)) == 1


def test_a_process_looks_through_the_folder_once_and_when_it_has_filled_it(tmp_path, monkeypatch):
    looked, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(path) or scandir(path))
    programs = ProgramFolder(tmp_path, limit_bytes=64_000)
    for number in range(40):
        programs.put(f"program-{number}", bytes(1000))
    assert len(looked) == 1
    for number in range(40, 140):
        programs.put(f"program-{number}", bytes(1000))
    assert len(looked) < 1 + 100 // 3
    assert sum(f.stat().st_size for f in files(tmp_path)) <= 64_000
    assert programs.get("program-139") is not None


# ----------------------------------------------------------------------------------------------------------- which folder


def test_where_the_folder_is(monkeypatch, tmp_path):
    for name in ("HARNESS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert program_cache.folder() == tmp_path / ".cache" / "ps-harness" / "programs"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the rules say: to be ignored
    assert program_cache.folder() == tmp_path / ".cache" / "ps-harness" / "programs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    assert program_cache.folder() == tmp_path / "kept" / "ps-harness" / "programs"
    monkeypatch.setenv("HARNESS_CACHE", "~/mine")
    assert program_cache.folder() == tmp_path / "mine"
    for off in ("off", "OFF", "0"):
        monkeypatch.setenv("HARNESS_CACHE", off)
        assert program_cache.folder() is None
        assert program_cache.use() is None


# ---------------------------------------------------------------------------------------------------------------- with JAX


@pytest.mark.slow
def test_jax_reads_what_another_process_compiled(tmp_path):
    """Also if entries are damaged, the disk is full or the cache is off: the same bytes, no warning, nothing printed."""
    environment = {"HARNESS_CACHE": str(tmp_path / "programs"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    result, hits, used = python(COMPILER, **environment).split()
    assert (hits, used) == ("0", str(tmp_path / "programs"))
    entries = files(tmp_path)
    assert any("jit_program" in f.name for f in entries)

    assert python(COMPILER, **environment).split() == [result, str(len(entries)), used]
    for file in entries:
        file.write_bytes(file.read_bytes()[:-100])
    assert python(COMPILER, **environment).split() == [result, "0", used]
    assert files(tmp_path) == entries
    assert python(COMPILER, **environment | {"HARNESS_CACHE": "off"}).split() == [result, "0", "None"]


def test_settings_of_ones_own_for_the_cache_of_jax_are_kept(tmp_path):
    python(SETTINGS_OF_ONES_OWN, HARNESS_CACHE=str(tmp_path))
    assert files(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_comparison_is_the_same_bytes_with_programs_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # all of them, however busy the machine is
    path = tmp_path / "small.toml"
    path.write_text(Path(load("digits-logistic").origin).read_text().replace("value = 0.92", "value = 0.8"))
    results, programs = [], []
    for name in ("compiled", "read"):
        out = tmp_path / name
        compare([path], ["fixed"], out=out, seeds=1)
        results.append({str(f.relative_to(out)): f.read_bytes() for f in files(out) if f.name != "host.csv"})
        programs.append({f.name: f.stat().st_ino for f in files(tmp_path / "programs")})
    assert any("advance" in name for name in programs[0])
    assert programs[0] == programs[1]  # the second comparison has compiled nothing
    assert results[0] == results[1]
