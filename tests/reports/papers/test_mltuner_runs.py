"""MLtuner in whole runs: how many branches it keeps, and its arena on CIFAR-10's own files."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from harness import scenario
from harness.drive import drive
from tests.simulators.workloads.test_datasets import cifar_folder  # noqa: F401
from tests.support.marks import slow
from tuners.actions import Fork, Free, Rejected, Target
from tuners.mltuner import mltuner, trials
from tuners.testing.toys import toys

# --------------------------------------------------------------------------------------------------- branches at once


@pytest.fixture
def deciding(monkeypatch):
    """Searches whose trial time is being decided at the moment (Algorithm 1)."""
    now, decide = [], trials.decide_trial_time

    def watched(at):
        now.append(at)
        try:
            return (yield from decide(at))
        finally:
            now.remove(at)

    monkeypatch.setattr(trials, "decide_trial_time", watched)
    return now


def at_once(tuner, simulated, deciding):
    """Per exchange: the number of branches after it, and of trials so far if the trial time is being decided."""
    alive, counts = {0}, []
    for exchange in drive(tuner, simulated):
        if isinstance(exchange.action, Fork) and not isinstance(exchange.answer, Rejected):
            alive.add(exchange.answer)
        elif isinstance(exchange.action, Free) and not isinstance(exchange.answer, Rejected):
            alive.remove(exchange.action.branch)
        counts.append((len(alive), deciding[0].tried if deciding else None))
    return counts


def three_at_most(counts):
    """The numbers of branches outside of Algorithm 1, which has its own bound."""
    assert all(n <= 1 + tried for n, tried in counts if tried)
    kept = [n for n, tried in counts if tried is None]
    assert max(kept, default=0) <= 3
    return kept


@pytest.mark.parametrize("toy", [slow("one knob"), "every knob"])
@pytest.mark.parametrize("snapshot", ["best", "none"])
@pytest.mark.parametrize("retune", [True, False], ids=["re-tuned", "tuned once"])
def test_three_branches_at_most_but_while_the_trial_time_is_decided(deciding, retune, snapshot, toy):
    """The parent, the best and the trial (Section 4.6). The best model is the parent of every search, and between searches
    the only other branch is the current one, so there is never a fourth. While the time is being decided, every trial so far
    has a branch, by Algorithm 1."""
    for seed in range(3):
        system = toys()[toy](seed)
        system.job = replace(system.job, target=Target("loss", 1e-6), budget_seconds=60.0)
        tuner = mltuner(system.job, as_printed=True, snapshot=snapshot, retune=retune, plateau_epochs=2, most_trials=12)
        kept = three_at_most(at_once(tuner, system, deciding))
        assert kept[-1] <= 2  # the budget may end with the kept model beside the one that is trained
        assert max(kept) == 3


# -------------------------------------------------------------------------------------------------------- CIFAR-10's files


def cifar_arena(data: str, origin: Path) -> scenario.Scenario:
    """MLtuner's arena as its file says to make it one of CIFAR-10, narrow and with as few samples as the test's files."""
    text = (files("harness") / "scenarios" / "mltuner-digits.toml").read_text("utf-8")
    for old, new in (
        ('name = "digits-cnn"', f'name = "cifar10-cnn"\n{data}'),
        ('optimizer = "momentum"', 'optimizer = "momentum", width = 2, hidden = [], valid_samples = 4'),
        ("[4, 16, 64]", "[2, 4]"),
        ("batch_size = 16", "batch_size = 4"),
        ("seconds = 28800", "seconds = 20"),
    ):
        assert old in text
        text = text.replace(old, new)
    return scenario.parse(text, name="cifar", origin=origin / "cifar.toml")


@pytest.fixture
def on_cifar(cifar_folder):  # noqa: F811
    return scenario.system(cifar_arena(f'data = "{cifar_folder.name}"', cifar_folder.parent), 0)


def test_the_arena_on_cifar10_files_is_theirs(on_cifar):
    assert (on_cifar.job.samples, on_cifar.job.name) == (20, "cifar")
    first = next(mltuner(on_cifar.job, as_printed=True, start_clocks=0))
    assert 0 <= on_cifar.perform(first).accuracy <= 1


@pytest.mark.slow
def test_a_whole_run_on_cifar10_files(on_cifar, deciding):
    simulated = on_cifar
    tuner = mltuner(simulated.job, as_printed=True, start_clocks=0, most_trials=3, retune=False, snapshot="none")
    three_at_most(at_once(tuner, simulated, deciding))
    assert simulated.now >= 20 or simulated.status == "target"


@pytest.mark.parametrize(
    ("data", "told"), [("", "it reads files; point to them"), ('data = "none"', "there is no such folder; give the one")]
)
def test_the_arena_without_its_files_says_so(data, told, tmp_path):
    with pytest.raises(ValueError, match=rf"cifar\.toml: \[workload\]:? .*{told}"):
        scenario.system(cifar_arena(data, tmp_path), 0)
