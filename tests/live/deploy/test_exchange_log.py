"""What a live job keeps of its exchanges: all of them on disk, and in memory no more than its score needs."""

import tracemalloc
from dataclasses import asdict

import numpy as np
import pytest

from harness.drive import Outcome, Played, play
from harness.live.deploy.history import History
from harness.live.deploy.job_folder import LOG, ExchangeLog, KeptExchanges, exchanges_of
from harness.live.driver.view.job_view import DECIMALS
from harness.scenario import job, load
from harness.score import score
from traces.exchanges import Exchange, lines_of, read_log
from tuners.actions import Evaluation, Fork, Free, Pushes, Run, Window, WorkerWindow
from tuners.testing.toys import toys

JOB = job(load("live-digits"), 0)
PUSHES = 100


def window(number, rng, *evaluations):
    """A window as a live job reports it: 2 ms per push, times to a microsecond."""
    workers = JOB.start.workers

    def seconds(mean):
        return np.round(rng.gamma(20.0, mean / 20.0, PUSHES), DECIMALS)

    pushes = Pushes(
        seconds=np.round(number * 0.2 + np.cumsum(rng.exponential(0.002, PUSHES)), DECIMALS),
        worker=rng.integers(0, len(workers), PUSHES).astype(np.int32),
        clock=(number * PUSHES + np.arange(PUSHES)).astype(np.int32) // len(workers),
        compute_seconds=seconds(2e-3),
        pull_seconds=seconds(5e-4),
        push_seconds=seconds(5e-4),
        wait_seconds=seconds(1e-4),
        staleness=rng.integers(0, 5, PUSHES).astype(np.int32),
        loss=rng.gamma(2.0, 0.5, PUSHES).astype(np.float32).astype(np.float64),
    )
    rows = tuple(WorkerWindow(w, PUSHES // len(workers), 800, 0.2, 0.05, 0.05, 0.01, (0.2,)) for w in workers)
    return Window(
        start_seconds=number * 0.2,
        end_seconds=(number + 1) * 0.2,
        clocks=PUSHES,
        pushes=pushes,
        workers=rows,
        evaluations=evaluations,
        nodes=JOB.nodes,
        setting=JOB.start,
    )


def run(number, rng, *evaluations, branch=0):
    return Exchange((number + 1) * 0.2, Run(clocks=PUSHES, branch=branch), window(number, rng, *evaluations))


def runs(count, rng):
    return (run(number, rng) for number in range(count))


def test_a_long_job_needs_little_disk_and_no_more_memory_than_a_short_one(tmp_path):
    rng, history = np.random.default_rng(0), History()
    log = ExchangeLog(KeptExchanges(tmp_path), tmp_path)
    tracemalloc.start()
    try:
        for number, exchange in enumerate(runs(300, rng)):
            history.append(exchange)
            log(exchange)
            if number == 100:
                before = tracemalloc.get_traced_memory()[0]
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    log.close()
    assert grown < 100_000  # 20,000 pushes, which as arrays have 1.1 MB
    assert (tmp_path / LOG).stat().st_size < 35 * 300 * PUSHES  # 35 bytes per push; as lines of JSON it was 170
    assert len(history) == 1
    assert history.exchanges[0].answer.clocks == 300 * PUSHES


def test_a_log_is_continued_after_the_exchanges_that_are_kept(tmp_path):
    rng = np.random.default_rng(1)
    first, later = list(runs(5, rng)), [Exchange(2.0, Free(1), None)]
    log = ExchangeLog(KeptExchanges(tmp_path), tmp_path)
    for exchange in first:
        log(exchange)
    # Not closed: its process was killed, and the last append was cut short.
    (tmp_path / LOG).write_bytes((tmp_path / LOG).read_bytes()[:-9])
    assert len(list(lines_of(tmp_path / LOG))) == 4
    kept = KeptExchanges(tmp_path, 3)
    before = list(kept.lines())
    log = ExchangeLog(kept, tmp_path)
    assert log.written == 3
    for exchange in later:
        log(exchange)
    log.close()
    assert list(kept.lines()) == before
    assert [e.seconds for e in kept] == [e.seconds for e in first[:3]]
    whole = [e.seconds for e in read_log(tmp_path / LOG)]
    assert whole == [e.seconds for e in exchanges_of(tmp_path)] == [e.seconds for e in [*first[:3], *later]]
    with pytest.raises(ValueError, match="has 4 exchanges of 5"):
        list(KeptExchanges(tmp_path, 5))
    (tmp_path / LOG).write_bytes(b"no log")
    with pytest.raises(ValueError, match="is missing or damaged"):
        list(kept)


def test_what_is_kept_in_memory_has_the_same_score():
    rng = np.random.default_rng(2)
    made = [*runs(8, rng), Exchange(1.65, Fork(0), 1), *(run(9 + i, rng, branch=1) for i in range(3))]
    made += [run(12, rng, Evaluation(2.5, 1250, 0.9, 0.5)), run(13, rng)]
    history = History()
    for exchange in made:
        history.append(exchange)
    assert len(history) == 4
    assert_same_score(JOB, made, history)


@pytest.mark.parametrize("toy", sorted(toys()))
def test_what_is_kept_in_memory_of_a_played_job_has_the_same_score(toy):
    def tuner(_):
        for clocks in (1, 3, 5, 2, 1, 1):
            yield from Run(clocks=clocks)

    history = History()
    played = play(tuner, toys()[toy](0), watch=history.append)
    assert_same_score(played.job, played.exchanges, history)


def assert_same_score(of, exchanges, history):
    ended = Outcome("budget", "", exchanges[-1].seconds, 0.0)
    run = {"scenario": "", "tuner": "", "seed": 0}
    whole, short = (score(Played(of, tuple(e), ended), **run) for e in (exchanges, history.exchanges))
    assert (short.evaluations, short.settings) == (whole.evaluations, whole.settings)
    for name, value in asdict(whole.score).items():
        assert asdict(short.score)[name] == (pytest.approx(value, nan_ok=True) if isinstance(value, float) else value), name
