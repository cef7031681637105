"""How links are shared is chosen from a recording, and the user's word comes first."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from harness.calibrating import GivenConstants
from simulators.calibration import closed_form, fit, links, simulations
from simulators.calibration import least_squares as search
from simulators.calibration.fit import fit_all
from simulators.calibration.links import FORMS, OtherSharing, Sharing, SharingChoice, choose, told_apart
from simulators.calibration.model import Constants
from simulators.calibration.output import Provenance, to_toml
from simulators.calibration.recorded.recordings import Recording
from simulators.calibration.recorded.row import Row
from simulators.calibration.simulations import simulated
from tests.support.marks import slow

TRUE = Constants(
    cores=1,
    model_bytes=5e4,
    nic_bytes_per_second=1e6,
    fixed_seconds=0.02,
    sample_seconds=0.002,
    apply_seconds=0.01,
    jitter=0.1,
)
GIVEN = {"toy": Constants(cores=1, nic_bytes_per_second=1e6)}
GRID = [(policy, workers, servers) for policy in ("bsp", "asp") for workers in (2, 5) for servers in (1, 2)]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Simulate fewer pushes and search for a shorter time."""
    for name, value in (("_PUSHES", 400), ("_CYCLES", 20), ("_WARM_UP", 10), ("_LEAST_SEEDS", 2), ("_PRECISE", 1.0)):
        monkeypatch.setattr(simulations, name, value)
    monkeypatch.setattr(search, "_EVALUATIONS", 15)
    monkeypatch.setattr(closed_form, "_ROUNDS", 20)


def recorded(links, shares=(), grid=GRID, true=TRUE):
    """A recording of a job whose links are shared so, by two servers with these `shares` of the model."""
    made = []
    for i, (policy, workers, servers) in enumerate(grid):
        row = Row("run", "toy", workers, servers, 1.0, (16, 48)[i % 2 ^ i // 2 % 2], policy=policy, machines=7)
        row = replace(row, model_shares=shares if servers == 2 else ())
        spans = simulated(links.put_into(true), row).spans
        parts = {f"{name}_seconds": float(getattr(spans, name)) for name in ("compute", "pull", "push", "cycle")}
        made.append(replace(row, pushes=100, **parts))
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "true",
    [
        FORMS[0],
        Sharing("uneven", 1.0),
        Sharing("fifo", 0.0),
        Sharing("serial", 0.0),
    ],
)
def test_the_form_of_a_recording_is_chosen_from_it(true):
    made = choose({"toy": recorded(true)}, GIVEN, FORMS)
    assert made.links == true
    assert all(rival.error > made.error for rival in made.rivals)
    assert next(rival for rival in made.rivals if rival.links.discipline != true.discipline).worse


@pytest.mark.slow
def test_what_is_to_stay_as_given_does_so_under_every_form():
    """Queues are fitted with other constants than shared links: these took no notice of it."""
    forms = (FORMS[0], Sharing("serial"))
    made = choose({"toy": recorded(FORMS[0])}, GIVEN, forms, without=("apply_seconds", "apply_exponent"))
    assert {*forms} <= made.fitted.keys()
    assert {of["toy"].apply_seconds for of in made.fitted.values()} == {0.0}


@pytest.mark.slow
def test_the_chosen_form_is_that_of_the_fit():
    true = Sharing("uneven", 0.0)
    found = fit_all(recorded(true), GIVEN, links=FORMS[:2], resamples=0)["toy"]
    assert (found.constants.discipline, found.choice.links) == ("uneven", true)
    told = fit_all(recorded(true), {"toy": true.put_into(GIVEN["toy"])}, resamples=0)["toy"]
    assert (found.constants, told.choice) == (told.constants, None)


def without_parts(rows):
    none = {f"{part}_seconds": float("nan") for part in ("compute", "pull", "push")}
    return [replace(r, **none) for r in rows]


@pytest.mark.slow
def test_nothing_is_chosen_where_transfers_are_not_known():
    assert choose({"toy": without_parts(recorded(FORMS[0]))}, GIVEN, FORMS) is None


@pytest.mark.slow
def test_flows_end_by_themselves_where_transfers_are_known():
    rows, one = recorded(FORMS[0]), FORMS[:1]
    assert fit_all(rows, GIVEN, links=one, resamples=0)["toy"].constants.independent_flows
    assert not fit_all(without_parts(rows), GIVEN, links=one, resamples=0)["toy"].constants.independent_flows
    assert not fit_all(rows, GIVEN, resamples=0)["toy"].constants.independent_flows


@pytest.mark.slow
@pytest.mark.parametrize("independent", [True, False])
def test_what_flows_do_is_told_by_unlike_servers(independent):
    true, more = Sharing("maxmin", 0.0, independent), [(p, w, 2) for p in ("asp", "bsp") for w in (3, 4)]
    alike, unlike = recorded(true), recorded(true, (0.2, 0.8), [*GRID, *more])
    forms = both(FORMS[0])
    assert told_apart(forms, alike) == forms[:1]
    assert told_apart(forms, unlike) == forms
    made = choose({"toy": unlike}, GIVEN, forms)
    assert made.links == true
    assert made.rivals[0].error > made.error


@pytest.mark.slow
def test_flows_end_by_themselves_unless_the_recording_clearly_says_otherwise():
    """Of one combination with unlike servers, no test can tell."""
    together = Sharing("maxmin", 0.0, independent_flows=False)
    rows = recorded(together, grid=GRID[:-1]) + recorded(together, (0.2, 0.8), GRID[-1:])
    made = choose({"toy": rows}, GIVEN, both(FORMS[0]))
    assert made.links == FORMS[0]
    assert [rival.links for rival in made.rivals] == [together]


@pytest.mark.slow
def test_unlike_servers_are_predicted_as_flows_that_end_by_themselves_leave_them():
    """Fitted to alike servers, which cannot tell: of two thirds of the model on one server, the larger flow ends last."""
    found = fit_all(recorded(FORMS[0]), GIVEN, links=FORMS[:1], resamples=0)["toy"].constants
    unlike = Row("run", "toy", 3, 2, 1.0, 16, policy="asp", model_shares=(1 / 3, 2 / 3), machines=7)
    apart, together = (
        float(simulated(replace(TRUE, independent_flows=flows), unlike).spans.cycle) for flows in (True, False)
    )
    assert apart > 1.05 * together
    assert float(simulated(found, unlike).spans.cycle) == pytest.approx(apart, rel=0.03)


def test_nothing_is_chosen_where_leaving_out_the_only_combination_leaves_nothing():
    first = recorded(FORMS[0])[0]
    one = [replace(first, run=f"r{i}", cycle_seconds=(1 + i / 100) * first.cycle_seconds) for i in range(3)]
    assert choose({"toy": one}, GIVEN, FORMS) is None


def test_further_physics_whose_constant_is_refused_is_no_form(monkeypatch):
    """Such a form simulates what the form without it does, and was chosen where its fit happened to be nearer."""
    monkeypatch.setattr(links, "_PROMISING", 1e9)
    monkeypatch.setattr(links, "_MOST_FURTHER", 9)
    made = choose({"toy": recorded(FORMS[0])}, GIVEN, FORMS[:1])
    assert made.links.has_effect(made.fitted[made.links].values())
    assert all(rival.links.has_effect(made.fitted[rival.links].values()) for rival in made.rivals)


@pytest.mark.parametrize("form", [Sharing(switch="each way"), Sharing(server_threads=2)])
def test_further_physics_of_alike_servers_predicts_unlike_ones(form):
    """A fit to equal hosts that found a switch could not predict unlike ones: the engine refused flows that end by
    themselves beside it."""
    true = replace(TRUE, switch_bytes_per_second=1.2e6)
    unlike = Row("run", "toy", 3, 2, 1.0, 16, policy="asp", nics=(1.0, 1.0, 1.0, 1.0, 0.5), machines=7)
    further, without = (float(simulated(of.put_into(true), unlike).spans.cycle) for of in (form, Sharing()))
    assert further != without
    together = form._replace(independent_flows=False)
    assert further == float(simulated(together.put_into(true), unlike).spans.cycle)


@pytest.mark.slow
def test_a_switch_that_two_workers_use_is_told_and_predicts_four():
    """The choice found the switch, and the fit of the chosen form did not: latency took the place of messages, and four
    workers were 18 % off."""
    form = Sharing("fifo", switch="each way")
    true = replace(TRUE, model_bytes=1e5, message_seconds=1e-3, apply_seconds=4e-3, switch_bytes_per_second=1.25e6)
    true = replace(true, fixed_seconds=0.01, sample_seconds=7e-4)
    few, many = (
        [(policy, w, s) for policy in ("bsp", "asp") for w in workers for s in (1, 2) for _ in range(2)]
        for workers in ((1, 2), (3, 4))
    )
    found = fit_all(recorded(form, grid=few, true=true), GIVEN, links=FORMS, resamples=0)["toy"]
    assert found.choice.links == form
    assert found.constants.switch_bytes_per_second == pytest.approx(1.25e6, rel=0.05)
    assert found.constants.message_seconds == pytest.approx(1e-3, rel=0.2)
    rows = recorded(form, grid=many, true=true)
    assert fit.predicted(found.constants, rows) == pytest.approx([r.cycle_seconds for r in rows], rel=0.05)


@pytest.mark.slow
def test_servers_whose_threads_apply_pushes_side_by_side_are_told_where_links_are_shared():
    """Threads were sought beside queues alone, and four of one queue stood in for two beside fair links."""
    form = Sharing(server_threads=2)
    rows = recorded(form, grid=[*GRID, ("asp", 3, 1)], true=replace(TRUE, apply_seconds=0.08))
    made = choose({"toy": rows}, GIVEN, FORMS)
    assert made.links == form
    assert made.fitted[form]["toy"].apply_seconds == pytest.approx(0.08, rel=0.1)


def test_further_physics_that_servers_which_also_work_cannot_have_is_not_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(links, "_further", lambda *_: tried.append(True) or [])
    rows = recorded(FORMS[0])
    choose({"toy": rows}, GIVEN, FORMS[:1], wanted=[replace(rows[0], shared=True)])
    assert not tried
    choose({"toy": rows}, GIVEN, FORMS[:1], wanted=rows)
    assert tried


@pytest.mark.parametrize(("rate", "narrow"), [slow(1.2e6, True), (1.93e6, False)])
def test_a_switch_that_carries_as_much_as_all_links_is_no_form(rate, narrow, monkeypatch):
    """Two servers have links of 1 MB/s each: what is within errors of their sum would only limit larger clusters."""
    monkeypatch.setattr(links, "_PROMISING", 1e9)
    form = Sharing(switch="each way")
    true = replace(TRUE, model_bytes=2e5, switch_bytes_per_second=rate)
    monkeypatch.setattr(links, "_further", lambda *_: [form])
    made = choose({"toy": recorded(form, true=true)}, {"toy": replace(GIVEN["toy"], model_bytes=2e5)}, FORMS[:1])
    assert (form in made.fitted) == narrow


@pytest.mark.slow
def test_a_fit_that_refuses_the_chosen_physics_is_without_it(monkeypatch):
    switch, plain = Sharing(switch="each way"), SharingChoice(Sharing(), 0.03, ())
    monkeypatch.setattr(fit, "choose", lambda *_: SharingChoice(switch, 0.02, (), plain=plain))
    rows = recorded(FORMS[0])
    found = fit_all(rows, GIVEN, links=FORMS, resamples=0)
    assert "switch_bytes_per_second" not in found["toy"].intervals
    assert found["toy"].choice == plain
    assert Sharing.of(found["toy"].constants) == Sharing()
    told = tomllib.loads(to_toml(found, Recording(tuple(rows), None, (), (), (), ()), Provenance(*"abcdef")))
    assert told["scenario"]["toy"]["cluster"] == {"discipline": "maxmin", "independent_flows": True, "latency_seconds": 0.0}


def both(*forms):
    """With flows that end by themselves, and with flows that end together."""
    return (*forms, *(form._replace(independent_flows=False) for form in forms))


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ({}, FORMS),
        ({"discipline": "uneven"}, both(Sharing("uneven", 0.0), Sharing("uneven", 1.0))),
        ({"control_queue": 0.0}, both(*(Sharing(how, 0.0) for how in ("maxmin", "uneven", "fifo", "serial")))),
        ({"control_queue": 0.5}, both(*(Sharing(how, 0.5) for how in ("maxmin", "uneven", "fifo")))),
        ({"discipline": "serial"}, both(Sharing("serial", 0.0))),
        ({"discipline": "uneven", "control_queue": 1.0}, both(Sharing("uneven", 1.0))),
        ({"independent_flows": False}, FORMS[7:]),
        ({"discipline": "uneven", "control_queue": 1.0, "independent_flows": True}, (Sharing("uneven", 1.0),)),
    ],
)
def test_what_the_user_says_is_not_chosen(said, left):
    options = GivenConstants(**said)
    assert options.links_left_open == left
    recording = Recording(tuple(recorded(FORMS[0])), None, (), (), (), ())
    given = options.constants(recording)["toy"]
    assert (given.discipline, given.control_queue) == left[0][:2]
    assert given.independent_flows == bool(options.independent_flows)


def test_a_choice_says_how_clear_it_is():
    made = SharingChoice(
        Sharing("uneven", 1.0),
        0.041,
        (OtherSharing(Sharing("maxmin", 0.0), 0.072, worse=True), OtherSharing(Sharing("uneven", 0.0), 0.042, worse=False)),
    )
    assert str(made) == (
        "links: uneven, control queue 1, chosen by the error of rows that are left out, 4.1%; "
        "clearly more otherwise: 7.2% (maxmin, control queue 0); "
        "not clearly more otherwise: 4.2% (uneven, control queue 0)"
    )
