"""Drawn scenarios: a member is the same file for ever, its start is late, and what cannot be drawn is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from harness.cli.main import main
from harness.comparison.compare import compare
from harness.comparison.plan import planned
from harness.families import FAMILIES, audience, drawn, member_name, members, parse_name, reference, single
from harness.families.draft import MemberGoal, written
from harness.families.ingredients import fitted, losses
from harness.families.lot import Lot, rounded
from harness.scenario import job, load, parse, system
from harness.scenario.description import Scenario
from tests.support.marks import slow
from tests.test_architecture import ROOT
from traces import store
from traces.parts import scan
from tuners import resolve
from tuners.actions import Rejected, Run

DIGESTS = Path(__file__).parent / "digests.txt"
TODAY = ("hotkeys", "localsteps", "ages", "preempted")
SHIPPED = dict.fromkeys(FAMILIES, 20) | {"replayed": 17} | dict.fromkeys(TODAY, 10)  # members whose goals ship
STAND_IN = {"accuracy": 0.5, "loss": 1.0}


# ------------------------------------------------------------------------------------------------------------------ draws


def test_draws_depend_on_the_name_alone_and_on_no_version_of_python() -> None:
    lot = Lot("learning-v1-0000/0")
    first = [lot.share(0, 1), lot.log(1, 100), lot.whole(1, 6), lot.among("abc"), lot.some("abcdef", 3)]
    assert first == FIRST
    assert Lot("learning-v1-0001/0").share(0, 1) != first[0]


FIRST: list[object] = [0.66, 7.6, 2, "c", ("a", "b", "c")]


def test_draws_have_the_distribution_that_they_name() -> None:
    lot = Lot("distribution")
    logs = np.log([lot.log(0.01, 100.0) for _ in range(2000)])
    assert abs(logs.mean()) < 4 * np.log(1e4) / np.sqrt(12 * 2000)
    wholes = np.bincount([lot.whole(0, 4) for _ in range(2000)], minlength=5)
    assert np.abs(wholes - 400).max() < 4 * np.sqrt(2000 * 0.2 * 0.8)
    some = [lot.some(range(5), 2) for _ in range(500)]
    assert all(a < b for a, b in some)
    assert len(set(some)) == 10


@pytest.mark.parametrize(
    ("value", "up", "expected"),
    [(1234.0, None, 1200.0), (1201.0, True, 1300.0), (1300.0, True, 1300.0), (0.0129, False, 0.012)],
)
def test_numbers_are_rounded_to_two_digits(value: float, up: bool | None, expected: float) -> None:
    assert rounded(value, up=up) == expected


# ---------------------------------------------------------------------------------------------------------------- members


def test_members_are_named_by_family_version_and_index() -> None:
    assert members("learning[7]") == ["learning-v1-0007"]
    assert members(" elastic[18:21] ") == [member_name("elastic", i) for i in (18, 19, 20)]
    assert parse_name("mixed-v1-0012") == ("mixed", 12)
    with pytest.raises(ValueError, match="No member 'mixed-v0-0012' of a family: names are like learning-v1-0007"):
        parse_name("mixed-v0-0012")
    assert single("policies-v1-1234") == "drawn:policies[1234]"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "colours[0:2]",
            "No family 'colours': choose one of learning, placement, policies, elastic, replayed, mixed, hotkeys, ",
        ),
        ("learning", r"Cannot draw all members of 'learning': say which, as in learning\[0:20\]"),
        ("learning[-1:2]", "members are numbered from 0 to 999999"),
        ("learning[5:5]", "the first comes before the last"),
        ("learning[0:2000000]", "members are numbered from 0 to 999999"),
        ("learning[a:b]", r"write FAMILY\[7\], or FAMILY\[0:20\]"),
    ],
)
def test_members_that_do_not_exist_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        members(text)


def test_what_members_are_for_depends_on_their_index() -> None:
    said = [audience(i) for i in (0, 19, 20, 99, 100, 999, 1000, 50_000)]
    assert said[0] == said[1] != said[2] == said[3] != said[4] == said[5] != said[6] == said[7]
    assert "everybody" in said[0]
    assert "training" in said[4]


# ----------------------------------------------------------------------------------------------------------------- drafts


@cache
def drafted(family: str, index: int, attempt: int = 0) -> tuple[str, Scenario]:
    """A member before its goal is known."""
    name = member_name(family, index)
    draft = FAMILIES[family].draw(Lot(f"{name}/{attempt}"))
    text = written(draft, MemberGoal(attempt, STAND_IN.get(draft.metric, 1e6), 25, 1e4))
    return text, parse(text, name=name, origin=Path(f"{name}.toml"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_draw_is_a_scenario_and_differs_from_the_others(family: str) -> None:
    texts = {drafted(family, index)[0] for index in range(30)}
    assert len(texts) == 30
    assert drafted.__wrapped__(family, 3) == drafted(family, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_settings_are_in_the_space(family: str) -> None:
    for index in range(0, 40, 4):
        draft = FAMILIES[family].draw(Lot(f"{member_name(family, index)}/0"))
        space = job(drafted(family, index)[1]).space
        admitted = 0
        for values in draft.good:
            try:
                space.check(space.setting(values))
            except Rejected:
                continue
            admitted += 1
        assert admitted >= min(3, len(draft.good))


def knobs(family: str, index: int) -> set[str]:
    return {k.name.partition("/")[0] for k in drafted(family, index)[1].knobs}


def test_families_free_what_they_are_about() -> None:
    for index in range(30):
        assert {"learning_rate", "policy"} <= knobs("learning", index)
        assert knobs("placement", index) <= {"worker_count", "role", "load"}
        assert knobs("policies", index) == {"policy", "staleness"}
        assert knobs("elastic", index) == {"role"}
        assert {"role", "learning_rate", "policy", "batch_size"} <= knobs("mixed", index)
        assert "block" in knobs("hotkeys", index)
        assert {"local_steps", "outer_rate", "outer_momentum"} <= knobs("localsteps", index)
        assert knobs("ages", index) == {"policy", "staleness"}
        assert knobs("preempted", index) in ({"role"}, {"role", "learning_rate"}, {"checkpoint_seconds"})
    assert all(drafted(f, i)[1].rules.install_policies for f in ("policies", "localsteps") for i in range(5))
    assert all(drafted("preempted", i)[1].conditions.losses for i in range(30))
    assert {drafted("preempted", i)[1].target.minimise for i in range(30)} == {"seconds", "usd"}
    assert all(drafted("elastic", i)[1].conditions.nodes for i in range(30))
    assert {frozenset(knobs("placement", i)) for i in range(30)} == {
        frozenset({"worker_count"}),
        frozenset({"role"}),
        frozenset({"role", "load"}),
    }


def test_blocks_can_be_moved_from_a_start_with_uneven_shares() -> None:
    """Blocks that are placed one by one are the shares: uneven ones of the start, which are held, do not forbid a move."""
    text, scenario = next(d for i in range(40) if "model_shares" in (d := drafted("hotkeys", i))[0] and "role/" not in d[0])
    space = job(scenario).space
    moved = space.setting({"block/0": scenario.start.servers[-1]})
    space.check(moved)
    assert moved.owners(128)[0] == scenario.start.servers[-1]
    assert "block/*" in text


def test_every_lost_node_is_lost_once() -> None:
    for index in range(50):
        nodes = [f"n{i}" for i in range(9)]
        found = losses(Lot(str(index)), nodes, 1000.0, most=4)
        gone = [n for change in found for n in change["nodes"]]
        assert len(gone) == len(set(gone)) == 4
        assert [c["seconds"] for c in found] == sorted(c["seconds"] for c in found)


def test_ranges_of_troubles_are_those_of_the_recordings() -> None:
    """Those of `traces/data`, which ship; `fitted.toml` names the others."""
    spread = {name: compute_spread(name) for name in ("heterogeneous", "stragglers")}
    assert spread["heterogeneous"]["cv"].median() == pytest.approx(0.33, abs=0.01)
    assert spread["stragglers"]["cv"].median() == pytest.approx(fitted()["jitter"][1], abs=0.01)
    slow = spread["stragglers"].group_by("worker").agg(pl.col("tail").median())["tail"].max()
    assert slow == pytest.approx(fitted()["episode_factor"][1], rel=0.1)


def compute_spread(name: str) -> pl.DataFrame:
    """Of each worker and setting of a recording: variation of compute times, and their .95 quantile over the median."""
    folder = ROOT / "traces" / "data" / name
    rows, begun = scan(folder, "iterations").collect(), scan(folder, "settings").collect()["seconds"].sort().to_numpy()
    setting = pl.Series("setting", np.searchsorted(begun, rows["seconds"].to_numpy(), side="right"))
    seconds = pl.col("compute_seconds")
    grouped = rows.with_columns(setting).group_by("setting", "worker")
    made = grouped.agg(pl.len(), cv=seconds.std() / seconds.mean(), tail=seconds.quantile(0.95) / seconds.median())
    return made.filter(pl.col("len") >= 20)


# ------------------------------------------------------------------------------------------------------ members that ship


def shipped_names() -> list[str]:
    return [member_name(family, i) for family in FAMILIES for i in range(SHIPPED[family])]


def digests() -> dict[str, str]:
    texts = drawn.texts(shipped_names())
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in zip(shipped_names(), texts, strict=True)}


def test_members_are_the_same_files_for_ever() -> None:
    kept = dict(line.split() for line in DIGESTS.read_text("utf-8").splitlines())
    assert digests() == kept


@pytest.mark.parametrize(
    "name",
    [
        slow("placement-v1-0000"),
        "learning-v1-0007",
        slow("elastic-v1-0002"),
        slow("hotkeys-v1-0002"),
        slow("preempted-v1-0007"),
    ],
)
def test_goals_that_ship_are_those_of_the_rule(name: str) -> None:
    """Of each kind of rule, a member whose reference runs are short: few reference settings, a small model."""
    family, index = parse_name(name)
    assert index < SHIPPED[family]  # a goal that does not ship would be held against itself
    (kept,) = drawn.goals([name])
    draft = FAMILIES[family].draw(Lot(f"{name}/{kept.attempt}"))
    assert reference.goal_of(draft, kept.attempt) == kept


SHORT = {"placement": (0, 1), "elastic": (0, 1), "hotkeys": (2, 5), "localsteps": (1, 3)}
"""Two members of each family whose runs are short: of their families, these have small models or few reference settings."""


@pytest.mark.parametrize(
    "family",
    ["placement", *(slow(f) for f in ("elastic", "hotkeys", "localsteps"))],
)
def test_a_start_is_late_and_a_reference_setting_is_in_time(family: str) -> None:
    for index in SHORT[family]:
        scenario = load(f"drawn:{family}[{index}]")
        draft = FAMILIES[family].draw(Lot(f"{scenario.name}/{next(drawn.goals([scenario.name])).attempt}"))
        space = job(scenario).space
        settings = [space.setting(values) for values in draft.good]
        best = min(completion(scenario, setting) for setting in settings)
        assert best < scenario.budget.seconds / 2
        assert completion(scenario, None) > 1.15 * best  # another seed than that of the reference run


def completion(scenario: Scenario, setting: object) -> float:
    made = system(scenario, 0, setting)  # type: ignore[arg-type]
    window = made.perform(Run(seconds=scenario.budget.seconds))
    return window.end_seconds if made.status == "target" else float("inf")


# ------------------------------------------------------------------------------------------------------- goals that do not


def test_a_goal_does_not_depend_on_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "kept" / "programs"))
    name = member_name("placement", 1000)
    first = list(drawn.goals([name]))
    (file,) = (tmp_path / "kept" / "families").glob(f"{name}-*.json")
    assert list(drawn.goals([name])) == first
    file.write_text("{ damaged")
    monkeypatch.setattr(
        drawn,
        "_played",
        lambda names: (
            reference.goal_of(FAMILIES["placement"].draw(Lot(f"{n}/{first[0].attempt}")), first[0].attempt) for n in names
        ),
    )
    assert list(drawn.goals([name])) == first


def test_the_goals_of_a_comparison_are_made_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (some, *_) = drawn.goals(["placement-v1-0000"])
    asked: list[list[str]] = []

    def played(names: list[str]) -> Iterator[object]:
        asked.append(names)
        return (some for _ in names)

    monkeypatch.setattr(drawn, "_played", played)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "programs"))
    given = ["drawn:placement[1000:1003]", "drawn:elastic[1000]"]
    made = planned(given, (resolve("fixed"),), 1, "simulated", 0, record=False)
    names = ["placement-v1-1000", "placement-v1-1001", "placement-v1-1002", "elastic-v1-1000"]
    assert [s.name for s in made.scenarios] == names
    assert asked == [names]
    monkeypatch.setenv("HARNESS_CACHE", "off")
    drawn.keep_goals(names)  # there is nowhere to keep them
    assert asked == [names]


# ------------------------------------------------------------------------------------------------------- the command line


@pytest.mark.usefixtures("kept_processes")
def test_members_are_written_as_they_are_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "placement", "--first", "2", "--count", "2", "--out", str(tmp_path / "files")]) == 0
    written_files = sorted((tmp_path / "files").iterdir())
    assert [p.name for p in written_files] == ["placement-v1-0002.toml", "placement-v1-0003.toml"]
    assert capsys.readouterr().out.split() == [str(p) for p in written_files]
    compare(["drawn:placement[2:4]"], ["fixed"], out=tmp_path / "out", seeds=1)
    for path in written_files:
        assert (tmp_path / "out" / "scenarios" / path.name).read_text() == path.read_text()
        assert load(path).summary == load(f"drawn:placement[{int(path.stem[-4:])}]").summary
    assert set(store.load_results(tmp_path / "out").scores["scenario"]) == {p.stem for p in written_files}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["draw", "lerning"], "harness: No family 'lerning': did you mean learning?"),
        (
            ["draw", "learning", "--first", "999999", "--count", "2"],
            "harness: Cannot draw 'learning[999999:1000001]': members are numbered from 0 to 999999",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "files")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(reason)
    assert said.count("\n") == 1
    assert not (tmp_path / "files").exists()


def test_a_comparison_of_members_that_do_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "drawn:placement[9:3]", "--tuners", "fixed", "--out", str(tmp_path / "out")]) == 2
    assert "Cannot draw 'placement[9:3]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "placement-v1-0001.toml").write_text("mine")
    assert main(["draw", "placement", "--count", "2", "--out", str(tmp_path)]) == 2
    assert "it is there already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["placement-v1-0001.toml"]


def test_families_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "families"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FAMILIES)


if __name__ == "__main__":
    DIGESTS.write_text("".join(f"{name} {digest}\n" for name, digest in digests().items()))
