"""TensorFlowOnline, scripted: its phases, its history of the job, its gate, and refusals and lost nodes."""

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest

from tests.support.marks import slow
from tests.support.toy import REFUSED, job, toys, window
from tests.tuners.bo_online.test_convergence import hogwild_losses
from tuners import resolve
from tuners.actions import Cost, Job, NodeEvent, Reconfigure, Run, Setting, Space, Target
from tuners.bo_online import bo_online
from tuners.bo_online.convergence import Estimator
from tuners.bo_online.costs import techniques
from tuners.bo_online.repository import triples
from tuners.bo_online.surrogate import Surrogate
from tuners.bo_online.tuner import JobHistory, Proposal, proposals, stretch_clocks
from tuners.settings import Choice, Integer, Node, Real
from tuners.testing import check_tuner, exchanges

NODES = tuple(Node(f"n{i}", "toy", 8, ("cpu",), 1e9, 1e9) for i in range(6))
NAMES = tuple(n.name for n in NODES)
START = Setting(workers=("n0", "n1"), servers=("n2", "n3", "n4", "n5"), intra_threads=4, inter_threads=4)
KNOBS = (Integer("worker_count", 1, 5), Integer("intra_threads", 1, 7), Integer("inter_threads", 1, 7))
GOAL = Job(
    name="scripted",
    nodes=NODES,
    start=START,
    space=Space(START, NODES, (*KNOBS, Real("learning_rate", 0.001, 1.0, log=True))),
    target=Target("loss", 0.2),
    budget_seconds=1e6,
    model_bytes=1e6,
    samples=1000,
    seed=3,
    methods=("checkpoint", "migrate", "relocate"),
)


@dataclass
class Curve:
    """A job whose loss follows Eq. 3 from 1 on under every setting; the setting decides the seconds per clock."""

    job: Job = GOAL
    change_seconds: float = 0.01
    hidden: float = 2000.0
    noise: float = 0.0  # relative deviation of losses
    now: float = 0.0
    status: str = "running"
    clocks: int = 0
    setting: Setting = START
    asked: list = field(default_factory=list)
    under: list = field(default_factory=list)  # workers and threads of each window

    def per_clock(self, setting):
        """Least for four workers and six threads within operations."""
        return 0.1 * (1 + (len(setting.workers) - 4) ** 2 + 0.3 * (setting.intra_threads - 6) ** 2)

    def perform(self, action):
        self.asked.append(action)
        if isinstance(action, Reconfigure):
            self.job.space.check(action.setting)
            self.setting, self.now = action.setting, self.now + self.change_seconds
            return Cost(seconds=self.change_seconds, stall_seconds=self.change_seconds)
        self.under.append((len(self.setting.workers), self.setting.intra_threads))
        steps = np.arange(self.clocks, self.clocks + action.clocks)
        losses = hogwild_losses(self.hidden, 1.0, steps)
        losses = losses * (1 + self.noise * np.random.default_rng(self.clocks).normal(size=len(steps)))
        seconds = self.now + self.per_clock(self.setting) * np.arange(1, action.clocks + 1)
        seen = window(self.job, losses, seconds, start=self.now, workers=self.setting.workers)
        self.clocks, self.now = self.clocks + action.clocks, float(seconds[-1])
        return replace(seen, setting=self.setting, nodes=self.job.nodes)


def played(factory=bo_online, most=60, **system):
    curve = Curve(**system)
    exchanges(factory, curve, most=most)
    return curve


def changes(curve):
    return [a.setting for a in curve.asked if isinstance(a, Reconfigure)]


# ------------------------------------------------------------------------------------------------------------------ phases


def test_the_initial_phase_tries_ten_settings_for_three_clocks_per_node_each():
    """As the paper has it; the default observes slow settings for fewer clocks."""
    curve = played(partial(bo_online, apart=False, careful=False), most=21)
    assert curve.asked[0] == Run(clocks=18)
    tried = curve.asked[1::2]
    assert all(isinstance(a, Reconfigure) and a.method == "relocate" for a in tried)
    assert len({a.setting for a in tried} | {START}) == 11
    assert curve.asked[2::2] == [Run(clocks=18)] * 10
    by_workers = played(partial(bo_online, apart=False, careful=False, per="workers"), most=21)
    assert by_workers.asked[::2] == [Run(clocks=3 * n) for n, _ in by_workers.under]


def test_one_change_is_made_in_parts_so_that_costs_can_be_told_apart():
    whole, parts = (changes(played(partial(bo_online, apart=a, careful=False), most=23)) for a in (False, True))
    extra = next(i for i, setting in enumerate(parts) if setting != whole[i])
    before, after = [START, *whole][extra], parts[extra + 1]
    assert parts[extra] == replace(after, workers=before.workers, servers=before.servers)
    assert parts[:extra] + parts[extra + 1 : 11] == whole[:10]


def test_the_first_part_of_a_change_relocates_nothing_of_embedding_tables_either():
    knobs = (*GOAL.space.knobs, Choice("placement", ("range", "hash")), Integer("hot_blocks", 0, 8))
    tables = replace(GOAL, blocks=8, space=replace(GOAL.space, knobs=knobs, blocks=8))
    whole, parts = (
        changes(played(partial(bo_online, apart=a, careful=False, knobs="all"), most=23, job=tables)) for a in (False, True)
    )
    extra = next(i for i, setting in enumerate(parts) if setting != whole[i])
    before, after = [START, *whole][extra], parts[extra + 1]
    assert after == whole[extra]
    assert after.placement != before.placement or after.hot_blocks != before.hot_blocks
    assert techniques(before, parts[extra]) == {"SSR"}


def test_threads_are_coupled_and_rates_left_alone():
    for setting in changes(played()):
        assert setting.intra_threads + setting.inter_threads == 8
        assert setting.learning_rate == START.learning_rate
    apart = changes(played(partial(bo_online, couple_threads=False, careful=False), most=21))
    assert len({s.intra_threads + s.inter_threads for s in apart}) > 1
    everything = changes(played(partial(bo_online, knobs="all", careful=False), most=21))
    assert len({s.learning_rate for s in everything}) == 10


@pytest.mark.parametrize(
    ("options", "clocks"), [({}, 18), ({"clocks": 7}, 7), ({"clocks_per_worker": 5, "per": "workers"}, 10)], ids=str
)
def test_how_long_a_setting_is_tried(options, clocks):
    assert next(bo_online(GOAL, **options)) == Run(clocks=clocks)
    if "clocks_per_worker" not in options:
        curve = played(partial(bo_online, careful=False, **options), most=21)
        assert {a for a in curve.asked if isinstance(a, Run)} == {Run(clocks=clocks)}


@pytest.mark.parametrize(("options", "each"), [({}, 10), ({"clocks_per_worker": 3}, 3)], ids=str)
def test_where_all_wait_for_all_a_setting_is_tried_for_ten_rounds_or_as_the_paper_says_for_three(options, each):
    start = replace(START, policy="bsp")
    waiting = replace(GOAL, start=start, space=Space(start, NODES, GOAL.space.knobs))
    assert next(bo_online(waiting, **options)) == Run(clocks=each * len(start.workers))
    assert next(bo_online(waiting, per="nodes", **options)) == Run(clocks=each * len(NODES))


def test_the_code_counts_the_start_among_the_initial_settings():
    """Later reconfigurations cost too much, so that only the initial ones are made: b, and b - 1."""
    one_knob = replace(GOAL, space=Space(START, NODES, KNOBS[:1]))
    for counting, count in (("paper", 4), ("code", 3)):
        curve = played(
            partial(bo_online, settings=4, counting=counting, careful=False), most=20, job=one_knob, change_seconds=1e9
        )
        assert len(changes(curve)) == count


@pytest.mark.parametrize("options", [{"settings": 0}, {"clocks_per_worker": 0}, {"clocks": 0}], ids=str)
def test_hyper_parameters_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="give at least 1 of each"):
        next(bo_online(GOAL, **options))


@pytest.mark.parametrize(
    ("written", "way_out"),
    [
        ("estimator=paper", "Add pooled=false"),
        ("state=last", "Add pooled=false"),
        ("clocks=20,clocks_per_worker=3", "leave one of them out"),
        ("clocks=20,per=nodes", "leave one of them out"),
    ],
)
def test_an_option_without_effect_beside_another_is_refused(written, way_out):
    option = written.rpartition(",")[2].partition("=")[0]
    with pytest.raises(ValueError, match=f"Cannot use {option}=.* with .*{way_out}"):
        resolve(f"bo_online[{written}]")


def test_a_job_without_system_knobs_just_runs():
    with pytest.raises(StopIteration):
        next(bo_online(replace(GOAL, space=Space(START, NODES, (Real("learning_rate", 0.1, 1.0),)))))


def test_the_baseline_changes_by_checkpoint_and_others_by_what_they_have():
    assert {a.method for a in played(partial(bo_online, method="checkpoint")).asked if isinstance(a, Reconfigure)} == {
        "checkpoint"
    }
    curve = played(job=replace(GOAL, methods=("migrate",)), most=3)
    assert curve.asked[1].method is None


# ---------------------------------------------------------------------------------------------------------------- the gate


@pytest.mark.parametrize("acquisition", ["ei", "pi", "lcb"])
@pytest.mark.parametrize("seed", [1, slow(2)])
def test_the_job_mostly_runs_under_what_finishes_it_soonest(acquisition, seed):
    """The best of 35 settings, where trials are cheap; the worst takes 18 times as long."""
    curve = played(partial(bo_online, acquisition=acquisition), most=120, job=replace(GOAL, seed=seed), change_seconds=2.0)
    later = curve.under[len(curve.under) // 2 :]
    assert later.count((4, 6)) > len(later) / 2


def test_where_a_change_costs_more_the_job_stays_with_one_of_the_best():
    """With 20 s for a change, the next settings are not worth a trial: they take 1.3 times the seconds of the best."""
    curve = played(most=150, job=replace(GOAL, seed=2), change_seconds=20.0)
    later = curve.under[len(curve.under) // 2 :]
    assert sum(later.count(s) for s in ((4, 6), (4, 7), (4, 5))) > len(later) / 2


def test_a_model_that_takes_longer_to_relocate_than_the_job_stays_where_it_is():
    """18 GB took 1,583 s, in a job that takes 880 s where they stay. Threads are still tried."""
    heavy = replace(GOAL, model_bytes=1e12, methods=("checkpoint",))  # a day
    tried = changes(played(most=40, job=heavy))
    assert {s.workers for s in tried} == {START.workers}
    assert {s.servers for s in tried} == {START.servers}
    assert len({s.intra_threads for s in tried}) > 3
    paper = changes(played(partial(bo_online, careful=False), most=40, job=heavy))
    assert len({s.workers for s in paper}) > 3


def test_a_model_moves_where_the_job_is_long_enough():
    heavy = replace(GOAL, model_bytes=1e9, methods=("checkpoint",))  # 100 s, of some 1,600
    assert len({s.workers for s in changes(played(most=40, job=heavy))}) > 1


@pytest.mark.slow
def test_a_change_has_to_gain_more_than_it_costs():
    """2,000 log(5) / 0.2 = 16,000 clocks of at least 0.1 s: a gain of hours is possible, of a year is not."""
    dear, cheap = (played(partial(bo_online, careful=False), change_seconds=c) for c in (1e9, 1.0))
    assert len(changes(dear)) == 11  # 10 initial settings, one of them in two parts
    assert len(changes(cheap)) > 11
    assert len(changes(played(change_seconds=1e9))) == 1  # the first one shows what a change costs


def test_the_public_code_has_no_gate():
    curve = played(partial(bo_online, gate=False, apart=False, careful=False), most=61, change_seconds=1e9)
    assert len(changes(curve)) > 10  # not only those of the initial phase


@pytest.mark.parametrize(
    ("change", "gain", "taken"),
    [
        ({"inter_threads": 5}, 1.0, True),
        ({"workers": ("n5",), "servers": NAMES[:5]}, 1.0, False),
        ({"workers": ("n5",), "servers": NAMES[:5]}, 2000.0, True),
    ],
)
def test_the_gate_knows_costs_by_technique(monkeypatch, change, gain, taken):
    """Threads cost nothing here and roles a thousand seconds, which the initial phase has shown."""

    class Apart(Curve):
        def perform(self, action):
            same = isinstance(action, Reconfigure) and action.setting.workers == self.setting.workers
            self.change_seconds = 0.0 if same else 1000.0
            return super().perform(action)

    def proposals(at, *_, **__):
        return [Proposal(replace(at.setting, **change), gain)]

    monkeypatch.setattr("tuners.bo_online.tuner.proposals", proposals)
    curve = Apart()
    exchanges(partial(bo_online, careful=False), curve, most=24)
    begun = [i for i, a in enumerate(curve.asked) if isinstance(a, Run)][10]
    assert isinstance(curve.asked[begun + 1], Reconfigure) == taken


@pytest.mark.parametrize("incumbent", ["current", "min", "last"])
def test_every_incumbent_leads_to_proposals(incumbent):
    curve = played(partial(bo_online, incumbent=incumbent), change_seconds=0.0)
    assert len(changes(curve)) > 10


# ------------------------------------------------------------------------------------------------- what makes it careful


def clocks_by_setting(curve):
    """Clocks of each stay, the setting in force and the seconds of one clock under it."""
    stays, setting = list[tuple[Setting, int]](), START
    for asked in curve.asked:
        if isinstance(asked, Reconfigure):
            setting = asked.setting
        elif stays and stays[-1][0] == setting:
            stays[-1] = setting, stays[-1][1] + asked.clocks
        else:
            stays.append((setting, asked.clocks))
    return stays


def test_a_setting_that_is_slow_beside_others_is_observed_for_fewer_clocks():
    """No longer than twice as long as with the fastest so far, but for at least one push of each worker."""
    curve = played(partial(bo_online, apart=False), most=80)
    fastest = np.inf
    for setting, clocks in clocks_by_setting(curve)[:10]:
        own = curve.per_clock(setting)
        least = 18 if fastest == np.inf else len(setting.workers)
        fastest = min(fastest, own)
        assert clocks == np.clip(int(2 * 18 * fastest / own + 1e-9), least, 18)


def test_pushes_that_were_begun_before_a_change_do_not_make_a_slow_setting_look_fast():
    """The first pushes of each worker after a change come at once, and say nothing of those that follow."""

    class Bursts(Curve):
        changed = 0

        def perform(self, action):
            if isinstance(action, Reconfigure):
                self.changed = self.clocks
                return super().perform(action)
            before = self.now
            seen = super().perform(action)
            soon = self.clocks - action.clocks == self.changed > 0
            each = np.full(action.clocks, self.per_clock(self.setting))
            each[: len(self.setting.workers)] *= 0.01 if soon else 1.0
            moments = before + np.cumsum(each)
            self.now = float(moments[-1])
            return replace(seen, pushes=seen.pushes._replace(seconds=moments), end_seconds=self.now)

    curve = Bursts()
    exchanges(partial(bo_online, apart=False), curve, most=60)
    fastest = np.inf
    for setting, clocks in clocks_by_setting(curve)[:10]:
        own = curve.per_clock(setting)
        fastest = min(fastest, own)
        if fastest < own:  # so many pushes of 18 take twice as long as 18 with the fastest; at most as many again were asked
            assert clocks <= max(2 * len(setting.workers), 2 * 2 * 18 * fastest / own + 1)


def test_after_the_initial_phase_the_job_takes_the_best_setting_that_it_knows():
    """The last initial setting is no better than any other. Losses have no noise here, so that the best one is known."""
    curve = played(partial(bo_online, apart=False), most=60, change_seconds=0.0)
    stays = [setting for setting, _ in clocks_by_setting(curve)]
    tried, then = stays[:11], stays[11]
    assert curve.per_clock(then) <= sorted(map(curve.per_clock, tried))[2]


def test_a_short_job_is_spared_most_of_the_initial_phase():
    """Ten settings of 50 s each are worth their time in a job of days, not in one that is over after 400 clocks."""
    short = replace(GOAL, target=Target("clocks", 400))
    long = replace(GOAL, target=Target("clocks", 400_000))
    tuner = partial(bo_online, apart=False)
    counts = [len(changes(played(tuner, most=m, job=j, change_seconds=50.0))) for m, j in ((40, short), (80, long))]
    assert counts[0] <= 3
    assert counts[1] >= 10


class Level(Curve):
    """A job whose settings all take the same time: nothing that is tried ever pays."""

    def per_clock(self, setting):
        return 0.1


@pytest.mark.slow
def test_where_trials_do_not_keep_what_the_model_promised_there_are_fewer_and_fewer():
    curve = Level(change_seconds=0.5)
    exchanges(bo_online, curve, most=300)
    made = [i for i, a in enumerate(curve.asked) if isinstance(a, Reconfigure)]
    assert len(made) < 40
    assert len([i for i in made if i > 150]) <= 8


@dataclass
class Noisy(Curve):
    """A job whose settings are nearly equal; stretches scatter by 5 %, which is more."""

    def per_clock(self, setting):
        return 0.1 * float(1 + 0.05 * np.random.default_rng([1, self.clocks]).normal())


@pytest.mark.parametrize("seed", [1, *(slow(s) for s in (2, 3))])
def test_noise_of_the_pace_does_not_move_the_job_to_and_fro(seed):
    """The job went to whichever known setting had been fastest by chance, at nearly every decision."""
    noisy = Noisy(job=replace(GOAL, seed=seed), change_seconds=0.2, hidden=1e6)
    exchanges(bo_online, noisy, most=300)
    made = changes(noisy)
    trials = len(set(made))
    assert trials > 10
    assert len(made) - trials <= trials / 2  # a trial that proves to be worse is followed by a change back


def test_no_change_is_made_for_what_comes_after_the_budget():
    """The remaining seconds of a job that will not reach its target were counted in full."""
    at = progress()
    for i, setting in enumerate((START, replace(START, intra_threads=6))):
        at.setting = setting
        seconds = at.since + (2 - i) * np.arange(1.0, 19.0)
        losses = hogwild_losses(2000.0, 1.0, np.arange(at.clocks, at.clocks + 18))
        at.take(replace(window(GOAL, losses, seconds, start=at.since, workers=setting.workers), setting=setting))
    at.setting, at.epsilon = START, 0.2
    gains = []
    for left in (1.0, 10.0):
        at.job = replace(GOAL, budget_seconds=at.since + left)
        seen = triples(at.stretches, GOAL.target, 1e6, at.epsilon, at.estimator, pooled=True, clocks=at.clocks)
        (back,) = proposals(at, seen, Surrogate(scale="log"), "ei", "min", search=False, careful=True)
        gains.append(back.gain_seconds)
    assert 0 < gains[0] <= 1.0
    assert gains[1] == pytest.approx(10 * gains[0])


@pytest.mark.parametrize("seed", [1, *(slow(s) for s in (2, 3))])
def test_trials_take_a_small_part_of_the_job(seed):
    """Whatever the model promises: after the initial phase, 20 % of the time, and the trial that was begun within them."""
    curve = Curve(job=replace(GOAL, seed=seed), change_seconds=30.0)
    moments, known, tried, longest = [], set(), 0.0, 0.0
    for exchange in exchanges(bo_online, curve, most=150):
        if isinstance(exchange.action, Reconfigure) and len(known) > 10:
            new = exchange.action.setting not in known
            moments.append((exchange.seconds - curve.change_seconds, new))
        known.add(curve.setting)
        if moments and isinstance(exchange.action, Run) and moments[-1][1]:
            took = exchange.seconds - moments[-1][0]
            tried, longest = tried + took, max(longest, took)
            moments[-1] = exchange.seconds, False
    assert tried <= 0.2 * curve.now + longest


def test_the_noise_of_the_loss_changes_no_decision():
    """Where the remaining clocks are those of the job, a setting is judged by them and by seconds per clock alone."""
    at = progress()
    for i, setting in enumerate((START, replace(START, intra_threads=6), replace(START, intra_threads=2))):
        at.setting = setting
        for _ in range(3):
            seconds = at.since + (1 + i) * np.arange(1.0, 19.0)
            losses = hogwild_losses(2000.0, 1.0, np.arange(at.clocks, at.clocks + 18))
            at.take(replace(window(GOAL, losses, seconds, start=at.since, workers=setting.workers), setting=setting))
    at.epsilon = 0.2
    seen = triples(at.stretches, GOAL.target, 1e6, at.epsilon, at.estimator, pooled=True, clocks=at.clocks)
    assert seen.stateless
    found = []
    for loss in (0.3, 0.9):
        at.loss, at.rng, at.fitted = loss, np.random.default_rng(5), None
        found.append(list(proposals(at, seen, Surrogate(scale="log"), "ei", "min", search=True, careful=True)))
    assert [p.setting for p in found[0]] == [p.setting for p in found[1]]
    assert [p.gain_seconds for p in found[0]] == [p.gain_seconds for p in found[1]]


def test_samples_are_counted_as_clocks_are():
    """The same job twice: its end is given in clocks, and in samples of clocks of equal batches."""
    by_clocks = played(job=replace(GOAL, target=Target("clocks", 5000)), most=60)
    by_samples = played(job=replace(GOAL, target=Target("samples", 5000 * START.batch_size)), most=60)
    assert [type(a) for a in by_clocks.asked] == [type(a) for a in by_samples.asked]
    assert changes(by_clocks) == changes(by_samples)


def test_the_current_setting_is_never_proposed():
    curve = Curve(change_seconds=0.0)
    for exchange in exchanges(partial(bo_online, gate=False), curve, most=60):
        if isinstance(exchange.action, Reconfigure):
            before = curve.asked[: curve.asked.index(exchange.action)]
            last = next((a.setting for a in reversed(before) if isinstance(a, Reconfigure)), START)
            assert exchange.action.setting != last


# ------------------------------------------------------------------------------------------------- refusals and lost nodes


def test_a_setting_that_was_refused_is_not_asked_for_again():
    refused = []

    class Fussy(Curve):
        def perform(self, action):
            if isinstance(action, Reconfigure) and len(action.setting.workers) > 2:
                refused.append(action.setting)
                raise REFUSED
            return super().perform(action)

    curve = Fussy()
    exchanges(bo_online, curve, most=80)
    assert len(refused) == len(set(refused)) > 3
    assert len(curve.setting.workers) <= 2
    assert curve.now > 0


def test_lost_nodes_are_not_proposed_and_their_stretch_does_not_count():
    left = NODES[1:]

    class Losing(Curve):
        def perform(self, action):
            seen = super().perform(action)
            if isinstance(action, Run) and self.clocks > 60:
                if "n0" in self.setting.workers + self.setting.servers:
                    workers = tuple(n for n in self.setting.workers if n != "n0") or ("n1",)
                    servers = tuple(n.name for n in left if n.name not in workers)
                    self.setting = replace(self.setting, workers=workers, servers=servers)
                seen = replace(seen, nodes=left, setting=self.setting)
            return seen

    curve = Losing(change_seconds=0.0)
    exchanges(partial(bo_online, gate=False), curve, most=80)
    runs = [i for i, a in enumerate(curve.asked) if isinstance(a, Run)]
    done = np.cumsum([curve.asked[i].clocks for i in runs])
    after = curve.asked[runs[int(np.argmax(done > 60))] + 1 :]
    proposed = [a.setting for a in after if isinstance(a, Reconfigure)]
    assert len(proposed) > 5
    assert not any("n0" in s.workers + s.servers for s in proposed)


def progress(of=GOAL, **options):
    return JobHistory(of, "system", True, Estimator(**options))


def test_what_is_pushed_during_a_change_belongs_to_no_setting():
    at = progress(smoothing=1)
    at.take(window(GOAL, [1.0, 0.9], [1.0, 2.0]))
    at.since += 2.5  # a change that was complete at 4.5, while training went on
    at.take(window(GOAL, [0.8, 0.7, 0.6, 0.5], [3.0, 4.0, 5.0, 6.0], start=2.0))
    first, second = at.stretches
    assert first.curve.losses.tolist() == [1.0, 0.9]
    assert (first.curve.loss_before, first.seconds, first.curve.clocks_before) == (1.0, 2.0, 0)
    assert second.curve.losses.tolist() == [0.6, 0.5]
    assert (second.curve.loss_before, second.seconds, second.curve.clocks_before) == (0.9, 1.5, 4)
    assert (at.loss, at.clocks) == (0.5, 6)


def test_windows_without_a_setting_of_their_own_do_not_count():
    at = progress()
    at.take(window(GOAL, [], start=0.0))
    at.take(replace(window(GOAL, [1.0] * 4), setting=replace(START, intra_threads=1)))  # the system changed it
    assert at.setting.intra_threads == 1
    at.take(replace(window(GOAL, [1.0] * 4, start=4.0), events=(NodeEvent(5.0, "n1", "failed"),)))
    at.take(replace(window(GOAL, [1.0] * 4, start=8.0), events=(NodeEvent(9.0, "n9", "left"),)))  # not in use
    assert [s.curve.clocks_before for s in at.stretches] == [8]


def test_refusals_are_forgotten_when_nodes_come():
    at = progress()
    at.refused.add(START)
    at.take(window(GOAL, [1.0]))
    assert at.refused == {START}
    at.take(replace(window(GOAL, [1.0], start=1.0), nodes=NODES[:5]))
    assert not at.refused


def test_a_change_that_was_rolled_back_leaves_the_setting_as_it_was():
    tuner = bo_online(GOAL)
    next(tuner)
    first = tuner.send(window(GOAL, [1.0] * 6))
    assert isinstance(first, Reconfigure)
    asked = tuner.send(Cost(seconds=3.0, stall_seconds=3.0, done=False))
    assert isinstance(asked, Reconfigure)
    assert asked.setting != first.setting
    # That failed, too, and a third time: on to the next, and after all of them on with the job under X_0.
    while isinstance(asked, Reconfigure):
        asked = tuner.send(Cost(seconds=3.0, stall_seconds=3.0, done=False))
    assert asked == Run(clocks=18)


def test_ssp_with_staleness_0_is_observed_for_rounds_as_bsp_is():
    bsp, same, loose = (replace(START, policy=p, staleness=s) for p, s in (("bsp", 0), ("ssp", 0), ("ssp", 2)))
    assert stretch_clocks(same, 6) == stretch_clocks(bsp, 6) == 20
    assert stretch_clocks(loose, 6) == 18


@pytest.mark.parametrize("option", ["estimator", "surrogate"])
def test_forms_of_estimator_and_surrogate_have_names(option):
    """A name makes the same run as the object, and is what brackets can give."""
    made = {"estimator": Estimator(smoothing=1, falls=None), "surrogate": Surrogate()}
    curves = Curve(noise=0.05), Curve(noise=0.05), Curve(noise=0.05)
    for curve, value in zip(curves, ("paper", made[option], "ours"), strict=True):
        exchanges(partial(bo_online, pooled=False, **{option: value}), curve, most=60)
    assert curves[0].asked == curves[1].asked != curves[2].asked
    written = resolve(f"bo_online[{option}=paper,pooled=false]").factory
    assert dict(written.keywords) == {option: "paper", "pooled": False}
    with pytest.raises(ValueError, match=f"Cannot use {option} 'mine': choose one of ours, paper, code"):
        next(bo_online(GOAL, pooled=False, **{option: "mine"}))


# ------------------------------------------------------------------------------------------------------------- conformance

FORKS = {
    "the public code": partial(
        bo_online,
        per="nodes",
        counting="code",
        design="centred",
        estimator=Estimator(d_rule="max", origin="first", smoothing=1, falls=None),
        repeats="contiguous",
        state="last",
        surrogate=Surrogate(kernel="matern12", fitted=False, scaling="standard"),
        incumbent="last",
        pooled=False,
        careful=False,
        gate=False,
        method="checkpoint",
    ),
    "all knobs, at random": partial(bo_online, settings=2, knobs="all", design="random", acquisition="lcb", repeats="all"),
}


@pytest.mark.parametrize("system", ["no forks", slow("timing only")])
@pytest.mark.parametrize("fork", FORKS)
def test_every_fork_keeps_the_contract(fork, system):
    check_tuner(FORKS[fork], systems={system: toys()[system]}, most=20)


def test_the_job_of_the_toys_is_another_with_another_seed():
    logs = [[str(e) for e in exchanges(bo_online, toys()["no forks"](seed), most=20)] for seed in (1, 2)]
    assert logs[0] != logs[1]


def test_nothing_heavy_is_imported_before_it_is_needed():
    tuner = bo_online(job("every knob"))
    assert next(tuner) == Run(clocks=15)


def test_choices_among_options_are_learnt():
    """A graph option that doubles the time of a clock is switched off."""
    space = Space(START, NODES, (Choice("option/jit", ("off", "on", "more")), Integer("worker_count", 1, 5)))
    base = replace(GOAL, start=replace(START, options=(("jit", "on"),)))
    of = replace(base, space=replace(space, base=base.start))

    class Optional(Curve):
        def per_clock(self, setting):
            return 0.1 * {"off": 1, "on": 2, "more": 4}[dict(setting.options)["jit"]] * (1 + abs(len(setting.workers) - 3))

    curve = Optional(job=of, setting=of.start)
    exchanges(bo_online, curve, most=80)
    assert dict(curve.setting.options)["jit"] == "off"
    assert len(curve.setting.workers) == 3
