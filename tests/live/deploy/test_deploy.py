"""`harness deploy`: what it refuses, what it says beforehand, and one job on Ray from its start to its end."""

import errno
import io
import json
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import safetensors.numpy
from msgspec.structs import fields
from rich.console import Console

import harness
from harness.cli.deploy import _stoppable
from harness.cli.main import main
from harness.comparison import run_process
from harness.comparison.results import hold_one_job
from harness.drive import play
from harness.live.deploy import deployment, job_folder
from harness.live.deploy.deployment import Deployment, LiveOptions, deploy, described, how_to_go_on
from harness.live.driver import control
from harness.live.driver.checkpoints import checkpoint_file, job_saver
from harness.live.driver.checkpoints.checkpoint_file import Checkpoint
from harness.live.driver.system import LiveSystem
from harness.live.links.emulated_links import why_not
from harness.live.processes import launch
from harness.live.protocol.messages import server
from harness.live.worker.spec import Spec
from harness.live.worker.tasks import WorkerTask
from harness.scenario import load, system
from harness.score import score
from simulators.cluster.conditions import Conditions
from tests.live.support.clusters import alone
from tests.live.support.pretend import PretendProcesses
from tests.support.made_up import score_row
from traces import parts, record, schema, store
from traces.exchanges import Exchange, read_log
from traces.parts import TraceWriter, check_trace
from tuners import resolve
from tuners.actions import Free, Reconfigure, Run

ROOT = Path(__file__).parents[3]

SMALL = """
summary = "Digits on four processes."
[cluster]
nodes = [{ type = "process", count = 4 }]
[workload]
name = "digits-logistic"
[workload.overrides.demand]
sample_seconds = 1e-5
fixed_seconds = 1e-3
[start]
worker_count = 2
policy = "bsp"
learning_rate = 1e-5
[free]
policy = { choice = ["bsp", "asp"] }
learning_rate = { real = [1e-5, 1.0], log = true }
"model_share/n2" = { real = [0.0, 1.0] }
"model_share/n3" = { real = [0.0, 1.0] }
[target]
metric = "loss"
value = 1.2
check_clocks = 25
[budget]
seconds = 100
[conditions]
jitter = 0.0
"""

TUNER = '''
"""A tuner and a policy of one's own."""
from dataclasses import replace
from pathlib import Path
from tuners.actions import Decision, Install, Reconfigure, Run, SyncPolicy


def free(state, push):
    return state, Decision(release=push.waiting)


def mover(job):
    """Too slow for the target, until as many runs are over as the file `go` says."""
    yield from Run(clocks=20)
    yield from Install(SyncPolicy("free", lambda active: (), free))
    setting = job.space.setting({"model_share/n2": 0.75, "model_share/n3": 0.25})
    yield from Reconfigure(setting, method="migrate")
    go, runs = Path("go"), 0
    while not go.exists() or runs < int(go.read_text()):
        yield from Run(clocks=20)
        runs += 1
    yield from Reconfigure(replace(setting, learning_rate=0.2))
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, with a small scenario and a tuner."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "movers.py").write_text(TUNER)
    return tmp_path


def refused(capsys, *arguments):
    assert main(["deploy", *arguments]) == 2
    return capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- before it starts


def test_without_live_it_is_a_dry_run(here, capsys):
    assert main(["deploy", "small.toml"]) == 0
    said = capsys.readouterr().out
    assert "2 workers, 2 servers, bsp" in said
    assert said.endswith("Nothing was started.\nStart it with:  harness deploy --live small.toml\n")
    named = [
        "--tuner",
        "movers:mover",
        "--seed",
        "3",
        "--out",
        "a b",
        "--emulate=nodes",
        "--still-limit",
        "9",
        "--silent-limit",
        "5",
        "--beside",
    ]
    assert main(["deploy", "small.toml", *named]) == 0
    shown = "--tuner movers:mover --seed 3 --out 'a b' --emulate nodes --still-limit 9 --silent-limit 5 --beside"
    assert capsys.readouterr().out.endswith(f"\nStart it with:  harness deploy --live small.toml {shown}\n")
    assert not (here / "deployed").exists()


def test_a_dry_run_says_what_would_run_where_and_starts_nothing(here, capsys):
    assert main(["deploy", "--live", "small.toml", "--dry-run", "--tuner", "movers:mover"]) == 0
    said = capsys.readouterr().out
    for words in ("tuner      movers:mover, seed 0", "650 parameters", "2 workers, 2 servers, bsp", "loss 1.2, within"):
        assert words in said
    assert "\nplacement\n  n0 ... n3  on this machine\n" in said
    assert re.search(r"^processes  6, on \d+ cores? of this machine(: they take turns)?$", said, re.MULTILINE)
    assert said.endswith("\nStart it with:  harness deploy --live small.toml --tuner movers:mover\n")
    assert not (here / "deployed").exists()
    wanted = Deployment(load("small.toml"), resolve("fixed"), 0, here / "out")
    assert described(wanted)[-1] == "Nothing was started."


def test_a_dry_run_of_a_contest_names_its_tuners_and_its_folder(here, capsys):
    assert main(["deploy", "small.toml", "--tuners", "fixed,ssp[staleness=2]", "--seeds", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        "A contest of fixed, ssp[staleness=2], 2 seeds each. 4 jobs, one after the other, of at most 100 s each: 400 s in"
        " all, besides the time to start them. The first job:"
    )
    assert "tuner      fixed, seed 0" in said
    assert "folder     deployed/small-contest" in said
    assert said[-1] == "Start it with:  harness deploy --live small.toml --tuners 'fixed,ssp[staleness=2]' --seeds 2"


def test_conditions_that_are_only_simulated_are_named_beforehand(here, capsys):
    sleeps, episode = (
        "probability = 0.5, mean_seconds = 1.0",
        'node = "n0", start_seconds = 1.0, seconds = 1.0, factor = 2.0',
    )
    (here / "small.toml").write_text(f"{SMALL}sleeps = {{ {sleeps} }}\nepisodes = [{{ {episode} }}]\n")
    assert main(["deploy", "--live", "small.toml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "\nNot applied: sleeps, episodes of [conditions]; live hosts have conditions of their own. Give --emulate" in said
    assert main(["deploy", "--live", "small.toml", "--dry-run", "--emulate=nodes"]) == 0
    said = capsys.readouterr().out
    assert "\nEmulated: the speed of nodes, and [conditions]. Not emulated: the speed of links.\n" in said
    (here / "small.toml").write_text(SMALL)
    assert main(["deploy", "--live", "small.toml", "--dry-run"]) == 0
    assert "Not applied" not in capsys.readouterr().out
    late, lost = '{ nodes = ["n0"], delay_seconds = 0.1 }', "{ every_seconds = 50.0 }"
    (here / "small.toml").write_text(
        f"{SMALL}delays = [{late}]\nlosses = [{lost}]\nreplay.bandwidth = 'shipped:uta-ec2-tokenbucket'\n"
    )
    assert main(["deploy", "small.toml"]) == 0
    assert "\nNot applied: delays, losses, replay of [conditions]" in capsys.readouterr().out
    assert main(["deploy", "small.toml", "--emulate=nodes"]) == 0
    assert "Not emulated: the speed of links, delays, token buckets.\n" in capsys.readouterr().out


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    ("when", "missing"), [("", ""), (", start_seconds = 1.0", " Not emulated: delays that come and go.")]
)
def test_delays_of_links_are_emulated_where_they_last(here, capsys, when, missing):
    (here / "small.toml").write_text(f'{SMALL}delays = [{{ nodes = ["n0"], delay_seconds = 0.1{when} }}]\n')
    assert main(["deploy", "small.toml", "--emulate"]) == 0
    assert f"Emulated: the speed of nodes and links, and [conditions].{missing}\n" in capsys.readouterr().out


def test_every_condition_is_said_or_has_no_effect_on_real_processes():
    named = {field.name for field in fields(Conditions)}
    # Noise of simulated times, and what a tuner's thinking costs there: a host has its own.
    assert named - {"jitter", "stagger", "thinking_seconds"} == set(deployment._SIMULATED)


def test_what_is_emulated_is_said_when_it_starts(here, monkeypatch):
    def stops(*_, **__):
        raise RuntimeError("stopped by the test")

    monkeypatch.setattr(launch, "cluster", stops)
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(RuntimeError, match="stopped by the test"):
        deploy(Deployment(load("small.toml"), resolve("fixed"), 0, here / "out", live=LiveOptions(emulate="nodes")), console)
    assert "Emulated: the speed of nodes, and [conditions]. Not emulated: the speed of links.\n" in console.file.getvalue()


def test_links_that_cannot_be_emulated_are_refused_with_the_reason(here, capsys, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    said = refused(capsys, "--live", "small.toml", "--emulate")
    assert "Cannot emulate links: network namespaces need root. Leave them out with --emulate=nodes." in said
    said = refused(capsys, "--live", "small.toml", "--emulate=all", "--address", "somewhere:6379")
    assert "Cannot emulate links on a Ray cluster that is there already" in said
    assert main(["deploy", "--live", "small.toml", "--dry-run", "--emulate=nodes"]) == 0
    assert not (here / "deployed").exists()


def test_a_job_is_resumed_with_what_was_emulated(here, capsys):
    begun(here / "out")
    said = refused(capsys, "--live", "small.toml", "--out", "out", "--resume", "--emulate=nodes")
    assert "it was deployed with emulate nothing, and this is nodes" in said


def test_an_address_without_a_cluster_is_refused(here, capsys):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    assert f"Cannot join a Ray cluster at {address}: nobody answers" in refused(
        capsys, "--live", "small.toml", "--address", address
    )
    assert not (here / "deployed").exists()


def test_an_address_that_the_environment_has_is_named_as_such(here, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    said = refused(capsys, "--live", "small.toml")
    assert "a Ray cluster at 'nonsense': write HOST:PORT, ray://HOST:PORT, auto or local; RAY_ADDRESS has this one." in said
    assert "unset RAY_ADDRESS" in refused(capsys, "--live", "small.toml", "--emulate")
    assert "RAY_ADDRESS" not in refused(capsys, "--live", "small.toml", "--address", "other")


def test_what_cannot_be_deployed_is_refused(here, capsys):
    assert "'cruise-nmf' is timing-only" in refused(capsys, "--live", "cruise-nmf-32")
    assert "No scenario 'smal'" in refused(capsys, "--live", "smal")
    assert "No tuner 'nobody'" in refused(capsys, "--live", "small.toml", "--tuner", "nobody")
    assert not (here / "deployed").exists()


# ------------------------------------------------------------------------------------------------------------- the winner


def results(folder, rows):
    """A results folder with these scores."""
    scenario = load("small.toml")
    names = list(dict.fromkeys(r["tuner"] for r in rows))
    manifest = {"schema": schema.VERSION, "scenarios": ["small"], "tuners": names, "oracles": [], "seeds": 3}
    (folder / "scenarios").mkdir(parents=True)
    (folder / "scenarios" / "small.toml").write_text(scenario.text)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    store.write(pl.DataFrame(rows, schema=schema.SCORES), folder / "scores.parquet", schema.SCORES)
    for name, table in (("evaluations", schema.EVALUATIONS), ("settings", schema.SETTINGS)):
        store.write(pl.DataFrame(schema=table), folder / f"{name}.parquet", table)
    store.write_host(pl.DataFrame(schema=schema.HOST), folder / "host.csv")
    return folder


def test_the_winner_of_a_comparison_is_deployed(here, capsys):
    speeds = {"fixed": 50, "cruise[gain=0.1]": 20, "tpe": 30}
    rows = [score_row("small", tuner, seed, speed + seed) for tuner, speed in speeds.items() for seed in range(3)]
    results(here / "won", rows)
    assert main(["deploy", "--live", "small.toml", "--dry-run", "--from", "won"]) == 0
    assert "tuner      cruise[gain=0.1], seed 0" in capsys.readouterr().out
    (here / "small.toml").write_text(SMALL.replace("1.2", "1.3"))
    assert "scenario 'small' has changed since" in refused(capsys, "--live", "small.toml", "--from", "won")


def test_without_a_winner_nothing_is_deployed(here, capsys):
    rows = [score_row("small", "fixed", seed, float("inf")) for seed in range(3)]
    results(here / "lost", rows)
    assert "Cannot name the winner on 'small'" in refused(capsys, "--live", "small.toml", "--from", "lost")
    assert "it has no manifest.json" in refused(capsys, "--live", "small.toml", "--from", "nowhere")


# --------------------------------------------------------------------------------------------------------- folder, resume


def begun(out, *, tuner="fixed", seed=0):
    """A folder as an interrupted job leaves it."""
    with job_folder.claimed(out, load("small.toml"), tuner, seed, resume=False) as folder:
        folder.begin()
        job_folder.ExchangeLog(job_folder.KeptExchanges(out), out).close()
        state = {"seconds": 1.0, "branch": 0, "exchanges": 0}
        checkpoint_file.save(out / job_folder.CHECKPOINT, Checkpoint({"0/parameters": np.ones(650, np.float32)}, state))


def copied(spec):
    """As another process gets it."""
    return pickle.loads(pickle.dumps(spec))  # noqa: S301


def test_a_job_whose_model_of_the_users_has_changed_is_not_resumed(here, capsys):
    text = (
        "def make_model(shape, classes):\n    return lambda _: {zeros}((64, classes)), lambda p, x: x.reshape(-1, 64) @ p\n"
    )
    (here / "mine.py").write_text("from jax.numpy import zeros\n" + text.format(zeros="zeros"))
    (here / "small.toml").write_text(re.sub(r"(?m)^name = .*", r'\g<0>\nmodel = "mine.py:make_model"', SMALL))
    begun(here / "out")
    assert main(["deploy", "small.toml", "--out", "out", "--resume"]) == 0
    assert "640 parameters" in capsys.readouterr().out
    spec, other = Spec.of(load("small.toml"), 0), Spec.of(load("small.toml"), 1)
    assert copied(spec).parameters.tobytes() == spec.parameters.tobytes()
    (here / "mine.py").write_text("from jax.numpy import ones\n" + text.format(zeros="ones"))
    assert "mine.py has changed since. Name another folder" in refused(
        capsys, "--live", "small.toml", "--out", "out", "--resume"
    )
    with pytest.raises(
        ValueError, match=r"mine\.py is not the file with which the job began\. Every machine needs the same"
    ):
        _ = copied(other).workload


def test_a_folder_is_written_once_and_resumed_as_it_was(here, capsys):
    live = ("--live", "small.toml", "--out", "out")
    assert "it has no checkpoint of a job" in refused(capsys, *live, "--resume")
    begun(here / "out")
    (here / "out" / job_folder.CHECKPOINT).unlink()  # stopped before there was one: it can begin anew, and only that
    assert "it has no checkpoint of a job" in refused(capsys, *live, "--resume")
    begun(here / "out")
    assert "it is there already. Go on with it by --resume" in refused(capsys, *live)
    assert "it was deployed with tuner fixed, and this is tpe" in refused(capsys, *live, "--resume", "--tuner", "tpe")
    assert "it was deployed with seed 0, and this is 1" in refused(capsys, *live, "--resume", "--seed", "1")
    (here / "out" / "score.json").write_text('{"status": "budget"}')
    assert "the job has ended (budget). Name another folder" in refused(capsys, *live, "--resume")
    assert refused(capsys, *live).endswith("it is there already. Name another with --out.\n")
    (here / "out" / "score.json").write_text('{"status": "error"}')  # its tuner has failed: the job may go on
    assert "Go on with it by --resume" in refused(capsys, *live)
    (here / "small.toml").write_text(SMALL.replace("1.2", "1.3"))
    assert "scenario 'small' has changed since" in refused(capsys, *live, "--resume")
    (here / "file").write_text("")
    assert "it is a file" in refused(capsys, "--live", "small.toml", "--out", "file")
    with job_folder.claimed(here / "busy", load("small.toml"), "fixed", 0, resume=False):
        assert "another job is running there" in refused(capsys, "--live", "small.toml", "--out", "busy")


def test_a_job_that_failed_before_its_first_checkpoint_is_not_sent_from_one_refusal_to_the_other(here, capsys):
    begun(here / "out")
    (here / "out" / job_folder.CHECKPOINT).unlink()
    (here / "out" / "score.json").write_text('{"status": "error"}')
    live = ("--live", "small.toml", "--out", "out")
    said = refused(capsys, *live, "--resume")
    assert "its job ended before it had a checkpoint. Name another folder with --out, without --resume." in said
    assert refused(capsys, *live).endswith("it is there already. Name another with --out.\n")
    (here / "mine").mkdir()
    (here / "mine" / "thesis.tex").write_text("")
    assert refused(capsys, "--live", "small.toml", "--out", "mine").endswith(
        "it is there already. Name another with --out.\n"
    )


@pytest.mark.parametrize("more", [(), ("--resume",)])
def test_the_folder_of_one_job_is_no_folder_of_a_contest(here, capsys, more):
    """`--resume` was named as the way out, and was refused for another reason."""
    begun(here / "out")
    said = refused(capsys, "--live", "small.toml", "--tuners", "fixed,asp", "--out", "out", *more)
    assert "Cannot write results to out: it is the folder of a deployed job. Name another with --out." in said


def test_a_dry_run_refuses_the_folder_that_the_job_would_be_refused(here, capsys):
    begun(here / "out")
    assert "it is there already" in refused(capsys, "small.toml", "--out", "out")
    assert "it is the folder of a deployed job" in refused(capsys, "small.toml", "--out", "out", "--tuners", "fixed,asp")
    assert "it has no checkpoint of a job" in refused(capsys, "small.toml", "--out", "none", "--resume")
    assert not (here / "none").exists()


def test_the_folder_of_a_job_that_has_not_ended_has_no_results_and_is_no_trace(here, capsys):
    begun(here / "out")
    for command, said in (
        (["report", "out"], "its job has not ended. `harness deploy --live` with --resume goes on with it, and `harness"),
        (["trace", "show", "out"], "it has a deployed job. Its trace is out/trace."),
    ):
        assert main(command) == 2
        assert said in capsys.readouterr().err
    (here / "out" / job_folder.CHECKPOINT).unlink()
    assert main(["report", "out"]) == 2  # it was sent to --resume, which refuses it
    assert "stopped before it had a checkpoint. `harness deploy --live`, without --resume, starts" in capsys.readouterr().err


def test_the_folder_of_one_job_has_the_results_and_the_page_of_its_run(here, capsys):
    """It is read as a comparison's folder is, but is no part of a larger one."""
    wanted = Deployment(load("small.toml"), resolve("fixed"), 3, here / "out")
    begun(wanted.out, seed=3)
    played = play(wanted.entry.factory, system(wanted.scenario, 3))
    scored = score(played, **wanted.run)
    run_process.save(wanted.out, scored, played.exchanges)
    hold_one_job(wanted.out, scored, 0.5, 2.0)
    assert main(["report", "out"]) == 0
    assert "1 of 1 runs: The target loss 1.2 was not reached in 100 s." in capsys.readouterr().out
    text = (wanted.out / "report.html").read_text()
    assert "real processes" in text
    assert "simulated" not in text
    assert 'data-gantt="gantt-0"' in text  # the workers of its run are drawn
    assert "href" not in text.partition('id="runs"')[2].partition("</section>")[0]  # no link to a folder that is not there
    loaded = harness.load_results("out")
    assert loaded.scores["seed"].to_list() == [3]
    assert loaded.plot.gantt() is not None
    assert loaded.plot.curves() is not None
    for command in (["merge", "out", "out", "--out", "all"], ["publish", "out", "--out", "site"]):
        assert main(command) == 2
        assert f"Cannot {command[0]} out: it has one deployed job." in capsys.readouterr().err
    assert main(["trace", "show", "out"]) == 2
    assert "Its trace is out/trace." in capsys.readouterr().err


def test_a_disk_that_is_full_at_the_end_promises_no_checkpoint_that_is_not_there(here):
    def full():
        raise OSError(errno.ENOSPC, "Cannot write it: the disk is full. Give the same command with --resume.")

    for name, said in (("none", "none has no checkpoint yet"), ("out", "out has the checkpoint of 1.0 s. The same command")):
        if name == "out":
            begun(here / "out")
        with pytest.raises(RuntimeError, match=said), deployment._full_disk_told(Path(name)):
            full()


def test_exchanges_wait_while_the_disk_is_full(here):
    """The file is cut where the last whole line ends, and has them all once there is room."""
    log = job_folder.ExchangeLog(job_folder.KeptExchanges(here), here)
    exchanges = [Exchange(float(i), Free(i), None) for i in range(4)]
    log(exchanges[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((here / job_folder.LOG).stat().st_size + 5, limits[1]))
    try:
        log(exchanges[1])
        log(exchanges[2])
        assert log.written == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list(job_folder.KeptExchanges(here, 1)) == exchanges[:1]
    log(exchanges[3])
    assert log.written == 4
    log.close()
    assert list(job_folder.exchanges_of(here)) == read_log(here / job_folder.LOG) == exchanges


def test_a_job_goes_on_while_the_disk_is_full_and_its_recording_is_whole(here, monkeypatch):
    """Only the last checkpoint, and the recording's end, cannot wait."""
    monkeypatch.setattr(deployment, "TraceWriter", partial(TraceWriter, part_rows=8))
    monkeypatch.setattr(record, "_BATCH", 8)
    monkeypatch.setattr(job_saver, "CHECKPOINT_SECONDS", 0.05)
    write, full = parts.write_bytes, [True]

    def written(path, data):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    for module in (parts, checkpoint_file, job_folder):
        monkeypatch.setattr(module, "write_bytes", written)
    said = []

    def tuner(job):
        for number in range(20):
            if number == 10:
                said.extend(what for _, what in live.job_status().events)
                full.clear()
            yield from Run(clocks=20)
        yield from Reconfigure(replace(job.start, learning_rate=1.0))

    (here / "small.toml").write_text(SMALL.replace("value = 1.2", "value = 0.5"))
    wanted = Deployment(load("small.toml"), resolve("fixed"), 0, here)
    spec, kept = Spec.of(wanted.scenario, 0), job_folder.KeptExchanges(here)
    log = job_folder.ExchangeLog(kept, here)
    processes = PretendProcesses(spec.job, learning=0.05)
    processes.answers.saved = lambda _: {0: {"parameters": spec.parameters}}
    with LiveSystem(spec, processes, keep=partial(deployment._keep, wanted, spec, log)) as live:
        played = deployment._drive(wanted, live, tuner, kept, log, Console(file=io.StringIO()), lambda _: None)
    log.close()
    assert any(what.startswith("the checkpoint is not written: No space left on device; the job goes on") for what in said)
    assert played.outcome.status == "target"
    assert (here / job_folder.CHECKPOINT).exists()
    windows = [e.answer for e in read_log(here / job_folder.LOG) if isinstance(e.action, Run)]
    assert check_trace(here / "trace")["iterations"] == sum(len(window.pushes.seconds) for window in windows)
    (extras,) = parts.scan(here / "trace", "runs").collect()["extras"]
    assert json.loads(extras)[schema.NODE_ORDER] == [node.name for node in spec.job.nodes]


def test_an_interrupt_waits_until_the_results_are_written(here):
    """A folder with a half of them could neither be reported nor resumed."""
    written = []

    def interrupted():
        with deployment._uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            written.append("all")

    # A shell lets what it starts in the background ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert written == ["all"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_that_ends_commands_stops_a_job_as_ctrl_c_does(number, status):
    """Where a connection breaks, the terminal closes: the job had no last checkpoint."""

    def other(*_):
        raise AssertionError("the signal is not heard")

    before = signal.signal(number, other)
    try:
        with pytest.raises(KeyboardInterrupt), _stoppable() as stop:
            signal.raise_signal(number)
        assert stop.status == status
        assert signal.getsignal(number) is other
    finally:
        signal.signal(number, before)


def test_only_ctrl_c_interrupts_the_last_checkpoint(monkeypatch):
    """And not one that comes twice, as `timeout -s INT` sends it: to the command, and to its group."""
    now = [0.0]
    monkeypatch.setattr("harness.cli.deploy.time.monotonic", lambda: now[0])
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with _stoppable() as stop:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            now[0] += 5.0
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert stop.status == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_job_goes_on_where_nohup_ignores_the_end_of_the_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _stoppable() as stop, deployment._uninterrupted():
            signal.raise_signal(signal.SIGHUP)
        assert stop.status == 130  # nothing has stopped it
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_starts_with_ray_ends_on_no_signal_that_a_group_of_processes_gets():
    with launch._own_signals():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= {signal.SIGTERM, signal.SIGHUP}
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGHUP}


@pytest.mark.parametrize("began", [False, True])
def test_an_interrupt_while_the_job_starts_or_ends_says_what_its_folder_has(here, capsys, monkeypatch, began):
    def stops(*_):
        if began:
            begun(here / "out")
        raise KeyboardInterrupt

    monkeypatch.setattr(deployment, "deploy", stops)
    assert main(["deploy", "--live", "small.toml", "--out", "out"]) == 130
    said = capsys.readouterr().err
    assert "interrupted; all processes have ended. out has " in said
    assert ("out has the checkpoint of 1.0 s. The same command with --resume goes on from there." in said) == began


def ended_without_checkpoint(here, tuner, error):
    """What is said when a job ends whose last checkpoint raises `error`, and how it ended."""
    (here / "small.toml").write_text(SMALL.replace("seconds = 100", "seconds = 0.2"))
    wanted = Deployment(load("small.toml"), resolve("fixed"), 0, here / "job")
    wanted.out.mkdir()
    spec, kept, said = Spec.of(wanted.scenario, 0), job_folder.KeptExchanges(wanted.out), []
    log = job_folder.ExchangeLog(kept, wanted.out)

    def full(_):
        raise error

    with LiveSystem(spec, PretendProcesses(spec.job), keep=full) as live:
        played = deployment._drive(wanted, live, tuner, kept, log, Console(file=io.StringIO()), said.append)
    return said, played.outcome


def test_a_job_that_ends_while_the_disk_is_full_has_no_result_that_would_forbid_to_resume_it(here):
    with pytest.raises(OSError, match="No space left"):
        ended_without_checkpoint(here, resolve("fixed").factory, OSError(errno.ENOSPC, "No space left on device"))


@pytest.mark.parametrize(
    ("fails", "words"), [(True, "so the job cannot be resumed."), (False, "No model, no checkpoint; log: ")]
)
def test_a_job_whose_last_checkpoint_failed_says_what_its_folder_has(here, monkeypatch, fails, words):
    def gone(_):
        raise RuntimeError("The job is broken: the coordinator is gone.")

    def tuner(job):
        yield from Run(seconds=0.01)
        if fails:
            raise KeyError("a fault")

    monkeypatch.setattr(LiveSystem, "checkpoint", gone)
    said, ended = ended_without_checkpoint(here, tuner, OSError())
    assert said[1] == "It could not be saved. The job is broken: the coordinator is gone."
    assert words in said[2]
    assert (ended.status == "error") == fails
    assert (
        ended.reason.endswith("gone. No model is saved: the last checkpoint could not be made, and there was none before.")
        != fails
    )


def test_a_last_checkpoint_that_waits_for_lost_nodes_says_so_at_once(here, monkeypatch):
    (here / "small.toml").write_text(SMALL.replace("value = 1.2", "value = 1e-6"))
    wanted = Deployment(load("small.toml"), resolve("fixed"), 0, here / "job")
    wanted.out.mkdir()
    spec, kept, said = Spec.of(wanted.scenario, 0), job_folder.KeptExchanges(wanted.out), []
    log, processes = job_folder.ExchangeLog(kept, wanted.out), PretendProcesses(spec.job)

    def tuner(job):
        yield from Run(clocks=5)
        processes.join_seconds = 1e9
        processes.kill(*map(server, job.start.servers))
        while not live.waits_for:
            yield from Run(seconds=0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "REPAIR_SECONDS", 0.1)
    with LiveSystem(spec, processes) as live:
        deployment._drive(wanted, live, tuner, kept, log, Console(file=io.StringIO()), said.append)
    assert said[:2] == ["Saving a checkpoint.", "The job has lost n2, n3, and repairs this before: it waits 30 s at most."]
    assert said[2].startswith("It could not be saved. The job still waits for")


def test_a_job_that_is_stopped_has_recorded_all_that_it_did(here):
    """`harness report` names the recording to who asks for the results of such a job."""

    def tuner(job):
        yield from Run(clocks=30)
        yield from Run(clocks=30)
        raise KeyboardInterrupt

    (here / "small.toml").write_text(SMALL.replace("value = 1.2", "value = 1e-6"))
    wanted = Deployment(load("small.toml"), resolve("fixed"), 0, here)
    spec, kept = Spec.of(wanted.scenario, 0), job_folder.KeptExchanges(here)
    log = job_folder.ExchangeLog(kept, here)
    processes = PretendProcesses(spec.job)
    processes.answers.saved = lambda _: {0: {"parameters": spec.parameters}}
    with LiveSystem(spec, processes, keep=partial(deployment._keep, wanted, spec, log)) as live:
        stopped = deployment._drive(wanted, live, tuner, kept, log, Console(file=io.StringIO()), lambda _: None)
    assert "The same command with --resume goes on." in str(stopped)
    windows = [e.answer for e in read_log(here / job_folder.LOG) if isinstance(e.action, Run)]
    assert check_trace(here / "trace")["iterations"] == sum(len(window.pushes.seconds) for window in windows) > 0


@pytest.mark.parametrize("harm", ["a bit", "cut", "other"])
def test_a_corrupt_checkpoint_is_not_resumed(here, capsys, harm):
    begun(here / "out")
    path = here / "out" / job_folder.CHECKPOINT
    whole = path.read_bytes()
    if harm == "a bit":
        path.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    elif harm == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    else:
        path.write_bytes(safetensors.numpy.save({"x": np.ones(3)}))
    said = refused(capsys, "--live", "small.toml", "--out", "out", "--resume")
    assert f"Cannot resume from {Path('out') / job_folder.CHECKPOINT}" in said
    assert "without --resume, to another folder" in said


# ------------------------------------------------------------------------------------------------------------- on Ray


class Job:
    """The command in a process of its own, in a session of its own, as in a terminal of its own."""

    def __init__(self, *arguments, under=()):
        """`under`: a command that runs this one."""
        self.mark = uuid.uuid4().hex
        paths = os.pathsep.join([str(ROOT), str(Path.cwd())])
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        environment |= {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "OF_TEST": self.mark}
        self.process = subprocess.Popen(  # noqa: S603
            [*under, sys.executable, "-m", "harness", "deploy", "--live", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.said = ""

    def read(self, words=None):
        """Read the output up to a line with some words, or to the end."""
        for line in self.process.stdout:
            self.said += line
            if words is not None and words in line:
                return
        assert words is None, self.said

    def ended(self):
        self.read()
        self.process.stdout.close()
        return self.process.wait()

    def left(self):
        """Processes that it started and that still run: identifiers and command lines."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (place / "environ").read_bytes():
                    found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
            except OSError:
                continue
        return found

    def nothing_left(self):
        until = time.monotonic() + 60
        while self.left() and time.monotonic() < until:
            time.sleep(0.1)
        return self.left() == {}


COMMAND = ("small.toml", "--tuner", "movers:mover", "--out", "out")


@pytest.fixture
def ray_alone():
    with alone():
        yield


@pytest.fixture
def temporary(monkeypatch):
    """The folder for temporary files of what is started. Its name is short, as names of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="t-") as made:
        monkeypatch.setenv("TMPDIR", made)
        yield Path(made)


@pytest.mark.timeout(300)
def test_a_job_on_ray_is_changed_and_comes_to_its_target(here, ray_alone):
    (here / "go").write_text("1")
    job = Job(*COMMAND, "--beside")
    assert job.ended() == 0, job.said
    assert job.nothing_left()
    assert "live / simulated" in job.said
    steps = (
        "Saving a checkpoint.",
        "Ending the job's processes.",
        "Ending Ray.",
        "Writing the results.",
        "in the simulator.",
    )
    assert sorted(steps, key=job.said.index) == list(steps)
    check_reached(job, here / "out")
    modes = {p.is_dir(): set() for p in (here / "out").rglob("*")}
    for path in [here / "out", *(here / "out").rglob("*")]:
        modes[path.is_dir()].add(path.stat().st_mode & 0o777)
    assert modes == {True: {0o700}, False: {0o600}}
    assert "real processes" in (here / "out" / "report.html").read_text()
    assert harness.load_results(here / "out").scores["reached"].all()


@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_job_on_ray_is_interrupted_and_resumed_to_its_target(here, ray_alone, number, status):
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("this process ignores the signal, as under nohup, and so does a job that it starts")
    job = Job(*COMMAND)
    job.read("migrate (")  # the model has moved while it trained
    job.read("clocks (")  # counted after that
    counted = clocks_of(job.said)
    while clocks_of(job.said) < counted + 100:  # and five windows have ended since
        job.read("clocks (")
    if number != signal.SIGTERM:
        os.killpg(job.process.pid, number)  # as a terminal does it, also when it closes
    else:
        job.process.send_signal(number)  # as an operator or a batch system does it
    assert job.ended() == status, job.said
    assert "The same command with --resume goes on." in job.said
    assert job.nothing_left()
    out = here / "out"
    kept = checkpoint_file.load(out / job_folder.CHECKPOINT)
    runs = kept.state["exchanges"] - 3
    assert runs > 0
    assert check_trace(out / "trace")["iterations"] >= counted + 100

    (here / "go").write_text(str(runs))
    job = Job(*COMMAND, "--resume")
    assert job.ended() == 0, job.said
    assert job.nothing_left()
    assert f"Resuming after {kept.state['seconds']:.1f} s: 2 workers, 2 servers" in job.said
    score, exchanges = check_reached(job, out)
    assert float(score["completion_seconds"]) > kept.state["seconds"]
    assert len(exchanges) > kept.state["exchanges"]


@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.parametrize("to", ["group", "timeout", "every process"])
def test_sigterm_leaves_a_checkpoint_whoever_else_receives_it(here, ray_alone, to):
    """As a shell, `timeout`, and systemd or Slurm send it: Ray's services and the job's processes get it, too."""
    job = Job(*COMMAND, under=["timeout", "--preserve-status", "1000"] if to == "timeout" else ())
    job.read("clocks (")
    if to == "group":
        os.killpg(job.process.pid, signal.SIGTERM)
    elif to == "timeout":
        job.process.send_signal(signal.SIGALRM)  # its time is over
    else:
        for process in job.left():
            os.kill(process, signal.SIGTERM)
    assert job.ended() == 143, job.said
    assert "out has a checkpoint. The same command with --resume goes on." in job.said
    steps = ("Saving a checkpoint.", "Ending the job's processes.", "Ending Ray.", "harness: Stopped after")
    assert sorted(steps, key=job.said.index) == list(steps)
    assert job.nothing_left()
    assert checkpoint_file.load(here / "out" / job_folder.CHECKPOINT).seconds > 0


def test_a_job_that_was_stopped_promises_no_checkpoint_that_it_does_not_have(here):
    assert how_to_go_on(here / "out", saved=False) == f"{here / 'out'} has no checkpoint yet, so the job cannot be resumed."
    begun(here / "out")
    said = how_to_go_on(here / "out", saved=False)
    assert said == f"{here / 'out'} has the checkpoint of 1.0 s. The same command with --resume goes on from there."


def clocks_of(said):
    """The clocks that the last line of a job's output shows."""
    return max([0, *(int(n) for n in re.findall(r"(\d+) clocks \(", said))])


@pytest.mark.live
@pytest.mark.timeout(500)
def test_a_driver_that_is_killed_leaves_what_the_next_start_removes_and_resumes(here, ray_alone, temporary):
    checkpoint = here / "out" / job_folder.CHECKPOINT
    job = Job(*COMMAND)
    while not checkpoint.exists():  # the first one that is due
        job.read("clocks (")
    job.process.kill()
    job.process.wait()
    job.process.stdout.close()
    assert list(temporary.iterdir())
    until = time.monotonic() + 20
    while any("gcs_server" in line or "raylet" in line for line in job.left().values()):
        assert time.monotonic() < until, job.left()
        time.sleep(0.1)
    seconds, state = checkpoint_file.load(checkpoint).seconds, checkpoint_file.load(checkpoint).state
    (here / "go").write_text(str(state["exchanges"] - 3))
    following = Job(*COMMAND, "--resume")
    assert following.ended() == 0, following.said
    assert f"Resuming after {seconds:.1f} s: 2 workers, 2 servers" in following.said
    check_reached(following, here / "out")
    assert not list(temporary.iterdir())
    assert job.nothing_left()
    assert following.nothing_left()


def check_reached(job, out):
    """Check the output and the files of a job that has reached its target; returns its score and exchanges."""
    assert "target after" in job.said
    score = json.loads((out / "score.json").read_text())
    assert (score["status"], score["reconfigurations"]) == ("target", 2)
    exchanges = read_log(out / "exchanges.jsonl.gz")
    seconds = [e.seconds for e in exchanges]
    assert seconds == sorted(seconds)
    moved = next(e.answer for e in exchanges if isinstance(e.action, Reconfigure))
    assert moved.steps == ("move 16 model blocks n3 -> n2",)
    assert moved.done

    rows = check_trace(out / "trace")
    assert rows["iterations"] == score["clocks"]
    assert rows["reconfigurations"] >= 1
    model = safetensors.numpy.load_file(out / "model.safetensors")
    assert sorted(a.shape for a in model.values()) == [(10,), (64, 10)]
    assert float(score["final_loss"]) <= 1.2
    # Pushes came while it was measured, the more the busier the machine is: the model that was saved is as good, or better.
    assert evaluated(out).loss <= float(score["final_loss"]) + 0.1
    return score, exchanges


def evaluated(out):
    """The model in the checkpoint, on the validation set."""
    spec = Spec.of(load("small.toml"), 0)
    kept = checkpoint_file.load(out / job_folder.CHECKPOINT)
    return spec.compute(WorkerTask("evaluate", 0, None, kept.tensors["0/parameters"]))
