"""The conclusions of a comparison, in sentences: no more than its intervals and tests support, and what they cannot show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from reports.verdicts.numbers import count, interval_text, quantity
from reports.verdicts.statistics import LEAST_BLOCKS, LEVEL, coverage_limit
from reports.verdicts.summary import ORACLE, REFERENCE, side_of_reference
from traces.store import drawn_scenarios

if TYPE_CHECKING:
    from traces.store import Results

__all__ = [
    "NOTHING_TO_TUNE",
    "WORDS",
    "Answer",
    "Words",
    "against_reference",
    "answer",
    "coverage",
    "few",
    "identical",
    "limits",
    "listed",
    "missing_runs",
    "not_applicable",
    "not_run",
    "tally",
    "undecided_opening",
]

NOTHING_TO_TUNE = "No tuner has anything to tune here"
"""The answer where every tuner is not applicable, so that none was run."""


class Answer(NamedTuple):
    """The first line of a page and of the terminal: which tuner to use. Its text is `before` + `tuner` + `after`."""

    before: str
    tuner: str  # to be set in bold; "" where there is no advice
    after: str

    def __str__(self) -> str:
        return f"{self.before}{self.tuner}{self.after}"


class Words(NamedTuple):
    """What a scenario minimises, in words."""

    what: str
    better: str
    worse: str


WORDS = {"seconds": Words("time", "faster", "slower"), "usd": Words("cost", "cheaper", "dearer")}


def answer(rows: pl.DataFrame) -> Answer:
    """Which tuner to use, how sure that is and what it costs, from one scenario's rows of `summary.summary`."""
    contestants = rows.filter(pl.col("standing") != "")
    led = [r for r in contestants.iter_rows(named=True) if r["standing"] == "leader"]
    if rows.is_empty():
        return Answer("Nothing is compared: there is no run.", "", "")
    if led and contestants.height < 2:
        only = f": {_measured(led[0])}. Nothing is compared: there is only one kind of run."
        return Answer("", str(led[0]["tuner"]), only)
    if not led:
        if rows["failed"].sum() == rows["runs"].sum():
            return Answer("Every run failed, so nothing can be said.", "", "")
        budget = quantity(float(rows["budget_seconds"].to_numpy().max()))
        usd = float(rows["budget_usd"][0])
        # Without a limit of its own, no run can cost more than the budget of time allows.
        money = f" and {usd:g} USD" if rows["usd"].fill_nan(0.0).to_numpy().max() > usd * (1 + 1e-9) else ""
        # The oracle is no tuner that one could use.
        once = rows.filter(pl.col("tuner") != ORACLE)["reached"].sum()
        but = " in any run without failing in another" if once else " in any run"
        return Answer(f"No tuner reached the target within {budget} s{money}{but}.", "", "")
    leader = led[0]
    close = [str(t) for t, s in contestants.select("tuner", "standing").iter_rows() if s == "not told apart"]
    rest = [f": {_measured(leader)}"]
    if ORACLE in rows["tuner"]:
        oracle = rows.row(by_predicate=pl.col("tuner") == ORACLE, named=True)
        rest.append(f"; oracle {_amount(oracle)}")
    rest.append(".")
    undecided = REFERENCE in close  # whether to tune at all
    sides = [side_of_reference(r) for r in contestants.iter_rows(named=True)]
    if leader["tuner"] == REFERENCE:
        before, why = "Keep ", f" No tuner is {WORDS[leader['minimise']].better}."
    elif undecided:
        before, why = undecided_opening(contestants["tuner"], sides, str(leader["minimise"])), ""
    else:
        before, why = "Use ", ""
    others = [t for t in close if t != REFERENCE or "faster" in sides]
    apart = [t for t, s in contestants.select("tuner", "standing").iter_rows() if s in ("behind", "ahead")]
    if int(leader["seeds"]) < LEAST_BLOCKS:
        why += " Fewer than three seeds tell nothing apart."
    elif others:
        why += f" Not told apart from it: {few(others)}."
    elif apart:
        why += f" All others{f' but {REFERENCE}' if undecided else ''} are told apart from it."
    if undecided:
        why += _more_seeds(leader)
    return Answer(before, str(leader["tuner"]), "".join(rest) + why)


def undecided_opening(tuners: Iterable[str], sides: Sequence[str], minimise: str = "seconds") -> str:
    """How the answer begins where the leader is not told apart from the reference, up to the leader's name. `sides` says of
    each tuner whether it is "faster" or "slower" than the reference; "" where tests do not tell."""
    words = WORDS[minimise]
    if better := [t for t, side in zip(tuners, sides, strict=True) if side == "faster"]:
        said = f"{words.better.capitalize()} than {REFERENCE}: {few(better)}"
    elif "slower" in sides:
        said = f"No tuner is told to be {words.better} than {REFERENCE}"
    else:
        said = f"No tuner is told apart from {REFERENCE}"
    return f"{said}. The least mean {words.what} has "


def _more_seeds(leader: dict[str, Any]) -> str:
    """What to do where tuners are not told apart by few seeds; "" from as many on as 95 % intervals need."""
    seeds = int(leader["seeds"])
    return (
        ""
        if seeds < LEAST_BLOCKS or coverage_limit(seeds) >= LEVEL
        else f" {seeds} seeds tell only large, steady differences apart; give six."
    )


def _measured(row: dict[str, Any]) -> str:
    """Time, ratio to the reference, changes and overhead of a row."""
    parts = [_amount(row)]
    shown, interval = interval_text(row, "ratio", "ratio")
    if row["role"] != "reference" and not math.isnan(row["ratio"]):
        what = "the cost of " if row["minimise"] == "usd" else ""
        parts.append(f"{shown}x of {what}{REFERENCE}{f' ({interval})' if interval else ''}")
    changes = count(row["reconfigurations"])
    parts.append(f"{changes} change{'' if changes == '1' else 's'}")
    parts.append(f"{quantity(row['overhead_seconds'])} s overhead")
    return ", ".join(parts)


def _amount(row: dict[str, Any]) -> str:
    """Time and, where it is known, cost of a row; first what the scenario minimises."""
    seconds = f"{interval_text(row, 'completion_seconds', 'completion')[0]} s"
    if math.isnan(row["usd"]):
        return seconds
    usd = f"{interval_text(row, 'usd', 'usd')[0]} USD"
    return f"{usd} in {seconds}" if row["minimise"] == "usd" else f"{seconds} for {usd}"


def against_reference(rows: pl.DataFrame) -> list[str]:
    """Which tuners are faster or slower than the reference, and which are not told apart from it."""
    if REFERENCE not in rows["tuner"]:
        return [f"The reference {REFERENCE} was not run, so there are no ratios."]
    others = [r for r in rows.iter_rows(named=True) if r["role"] == "contestant"]
    untimed = [r for r in others if r["failed"] == r["runs"]]
    timed = [r for r in others if r not in untimed]
    sentences = []
    words = WORDS[rows["minimise"][0]]
    for word, side in ((words.better.capitalize(), "faster"), (words.worse.capitalize(), "slower")):
        found = [r for r in timed if side_of_reference(r) == side]
        if found:
            sentences.append(f"{word} than {REFERENCE}: {listed(map(_with_ratio, found))}.")
    unclear = [r for r in timed if not side_of_reference(r)]
    if unclear:
        why = " (fewer than three seeds tell nothing apart)" if all(r["seeds"] < LEAST_BLOCKS for r in unclear) else ""
        sentences.append(f"Not told apart from {REFERENCE}{why}: {listed(map(_with_ratio, unclear))}.")
    if untimed:
        sentences.append(f"Every run failed: {listed(r['tuner'] for r in untimed)}.")
    return sentences


def tally(rows: pl.DataFrame) -> str:
    """How many runs there were and how they ended; runs that are identical to another tuner's count once."""
    mine = rows.filter(pl.col("role") != "same")
    runs, reached, failed = (int(mine[c].sum()) for c in ("runs", "reached", "failed"))
    rest = runs - reached - failed
    sentences = [f"{reached} of {runs} runs reached the target"]
    if rest:
        causes = {"the loss was no longer finite": "diverged", "no worker was left that could push": "deadlocked"}
        why = [f"in {n}, {cause}" for cause, column in causes.items() if (n := int(mine[column].sum()))]
        sentences.append(f"{rest} ended without reaching it" + (f" ({'; '.join(why)})" if why else ""))
    if failed:
        sentences.append(f"{failed} failed")
    return f"{listed(sentences)}."


def limits(rows: pl.DataFrame) -> list[str]:
    """Sentences on what these runs cannot show."""
    runs = int(rows["runs"].to_numpy().max())
    sentences = []
    if runs == 1:
        sentences.append("With one seed there are no intervals, and a difference may be due to random draws alone.")
    elif coverage_limit(runs) < LEVEL:
        best = 100 * coverage_limit(runs)
        sentences.append(
            f"With {runs} seeds, the range from the lowest to the highest run covers the true median only {best:.3g} % of "
            "the time; a 95 % interval needs at least six seeds."
        )
    contestants = rows.filter(pl.col("role") != "oracle")
    fewest = int(contestants["runs"].to_numpy().min()) if contestants.height else runs
    if fewest < runs:
        sentences.append(
            f"Some tuners were run with only {fewest} of {runs} seeds; a pair is compared on the seeds of both."
        )
    sentences.append(
        "Seeds vary the random draws within this scenario: these runs say nothing about other clusters, jobs or targets."
    )
    return sentences


def _with_ratio(row: dict[str, Any]) -> str:
    shown, interval = interval_text(row, "ratio", "ratio")
    if math.isnan(row["ratio"]):
        return str(row["tuner"])
    return f"{row['tuner']} ({shown}{', ' + interval if interval else ''})"


def listed(words: Iterable[str]) -> str:
    """Words with commas, and "and" before the last."""
    found = list(words)
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}" if found else "none"


def few(words: Sequence[str]) -> str:
    """Words with commas; of more than eight the first six, and how many others there are."""
    return ", ".join(words) if len(words) <= 8 else f"{', '.join(words[:6])} and {len(words) - 6} others"


def not_applicable(results: Results) -> list[str]:
    """A sentence per scenario that names the tuners which had nothing to tune there, with their reasons; no row has them."""
    said: list[str] = []
    for (scenario,), rows in results.not_applicable.group_by(["scenario"], maintain_order=True):
        each = "; ".join(f"{', '.join(names)} ({reason.rstrip('.')})" for reason, names in _by_reason(rows).items())
        said.append(f"{scenario}: not applicable, and not run: {each}.")
    return said


def missing_runs(results: Results, scenario: str = "", simulated: Results | None = None) -> list[str]:
    """Sentences on the runs that a comparison was to have, of all scenarios or of this one, and that are not there: it was
    interrupted, or is still running. `simulated` are runs beside live ones."""
    by_runs: dict[str, list[str]] = {}
    tuners, oracles = (results.manifest.get(key, []) for key in ("tuners", "oracles"))
    for name, lacks in results.missing.items():
        if scenario in ("", name):
            by_seeds: dict[tuple[int, ...], list[str]] = {}
            for tuner, seeds in lacks.items():
                by_seeds.setdefault(seeds, []).append(tuner)
            each = ", ".join(f"{listed(names)} ({_seeds(seeds)})" for seeds, names in by_seeds.items())
            played = len(tuners) - (len(oracles) if name in drawn_scenarios(results.manifest) else 0)
            count, runs = sum(map(len, lacks.values())), results.manifest["seeds_of"][name] * played
            by_runs.setdefault(f"{count} of {runs} runs {'is' if count == 1 else 'are'} missing: {each}.", []).append(name)
    said = [f"{listed(names)}: {lacking}" for lacking, names in by_runs.items()]
    return said + ([f"In simulation, {each}" for each in missing_runs(simulated, scenario)] if simulated else [])


def _seeds(seeds: Sequence[int]) -> str:
    """Seeds in words; three and more that follow each other by their ends."""
    parts: list[str] = []
    for _, group in groupby(enumerate(seeds), lambda pair: pair[1] - pair[0]):
        run = [seed for _, seed in group]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return f"seed{'' if len(seeds) == 1 else 's'} {listed(parts)}"


def not_run(rows: pl.DataFrame) -> list[str]:
    """The tuners that were not run on one scenario, from its rows of `Results.not_applicable`: a sentence per reason."""
    return [f"Not applicable, and not run: {', '.join(names)}. {reason}" for reason, names in _by_reason(rows).items()]


def _by_reason(rows: pl.DataFrame) -> dict[str, list[str]]:
    """The tuners that have nothing to tune, by the reason for that."""
    reasons: dict[str, list[str]] = {}
    for tuner, reason in rows.select("tuner", "reason").unique(maintain_order=True).iter_rows():
        reasons.setdefault(str(reason), []).append(str(tuner))
    return reasons


def identical(rows: pl.DataFrame) -> list[str]:
    """Sentences on the tuners of one scenario whose runs are identical to others', which count once."""
    said = []
    for (one,), mine in rows.filter(pl.col("role") == "same").group_by(["same_as"], maintain_order=True):
        why = ", which changes nothing" if one == REFERENCE else ""
        said.append(f"Same runs as {one}{why}: {', '.join(mine['tuner'])}.")
    return said


def coverage(rows: pl.DataFrame) -> str:
    """What the intervals of one scenario's rows are worth, in words."""
    runs = int(rows["runs"].to_numpy().max())
    best = coverage_limit(runs)
    if runs == 1:
        return "none of one seed"
    return "95 % intervals" if best >= LEVEL else f"intervals cover the true median {100 * best:.3g} % of the time at best"
