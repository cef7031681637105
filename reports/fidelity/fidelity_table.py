"""The tables of `harness fidelity` for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from reports.fidelity.errors import HELD_OUT_KIND, KINDS, Errors, ceilings, coverage, errors
from reports.fidelity.findings import (
    ablations,
    choices,
    covered,
    fit_errors,
    fitted_to,
    groups,
    misses,
    share_text,
    simulation_error,
    tau_text,
    undivided,
    untold_noise,
    verdict_sentences,
)
from simulators.calibration.fit import NO_FREEDOM
from simulators.calibration.predictions import COMPLETION
from simulators.calibration.spread import LEVEL_PERCENT
from simulators.calibration.validation import Check

__all__ = ["tables", "text"]


def text(checks: Sequence[Check]) -> str:
    """What a terminal shows: the verdict in sentences, then a table per recording."""
    why = [said for made in checks for said in misses(made)]
    return "\n".join([*verdict_sentences(checks), *why, "", *tables(checks)])


def tables(checks: Sequence[Check]) -> list[str]:
    """Order and errors as plain text for a terminal, one table per recording."""
    found = []
    for made in checks:
        head = f"{'':34}{'rows':>6}{'tau':>7}{'median':>9}{'95th %':>9}{f'in {LEVEL_PERCENT} %':>17}"
        lines = [f"{made.origin.source} ({made.origin.of})", *fitted_to(made), head]
        for group, rows in groups(made):
            lines.append(group)
            for name, which in KINDS:
                found_errors = errors(rows, which)
                if found_errors.rows or name == HELD_OUT_KIND:
                    inside = covered(coverage(rows)) if name == HELD_OUT_KIND else ""
                    lines.append(f"  {name:32}{_cells(found_errors)}{inside:>17}".rstrip())
            if not rows[0].group.endswith(COMPLETION):
                lines += [f"  {of.name:32}{_cells(of.errors)}" for of in ceilings(rows)]
        for row in ablations(made)[1:]:
            lines.append(f"without {row.lacks}: tau {row.tau}, median {row.median}, 95th {row.p95} of all cycles not fitted")
        notes = [
            *fit_errors(made),
            *choices(made),
            *simulation_error(made),
            *_without_interval(made),
            *undivided(made),
            *untold_noise(made),
            *made.caveats,
        ]
        found.append("\n".join([*lines, *(f"note: {why}" for why in notes), ""]))
    return found


def _cells(e: Errors) -> str:
    return f"{e.rows:>6}{tau_text(e):>7}{share_text(e.median):>9}{share_text(e.p95):>9}"


def _without_interval(made: Check) -> list[str]:
    unsure = [(job, name) for job, fit in made.fits.items() for name in fit.unsure]
    return [f"{job}, {name}: fitted without an interval, {NO_FREEDOM}" for job, name in unsure]
