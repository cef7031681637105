"""What the tables of a comparison hold: column names with their units, types, and the version of the format."""

from __future__ import annotations

import msgspec
import polars as pl

from tuners.actions import Setting

__all__ = ["EVALUATIONS", "HOST", "KEYS", "SCORES", "SETTINGS", "VERSION", "setting_from", "setting_text"]

VERSION = 2
"""Of the results folder as a whole; a folder of another version is refused, never converted silently."""

KEYS = ("scenario", "tuner", "seed")
"""Which run a row belongs to: every table starts with these and is sorted by them."""

_RUN: dict[str, pl.DataType] = {"scenario": pl.String(), "tuner": pl.String(), "seed": pl.Int64()}

SCORES: dict[str, pl.DataType] = {
    **_RUN,
    "status": pl.String(),  # target | budget | diverged | deadlock | error
    "reason": pl.String(),  # a sentence where the run did not go well, else ""
    "completion_seconds": pl.Float64(),  # simulated; the budget where the target was not reached
    "budget_seconds": pl.Float64(),
    "reached": pl.Boolean(),  # whether the target was reached
    "reconfigurations": pl.Int64(),  # changes of the setting that were carried out, on any branch
    "overhead_seconds": pl.Float64(),  # of these, and of forks and switches between branches, when nobody trained
    "slow_seconds": pl.Float64(),  # of these, when training shared resources with the change
    "bytes_moved": pl.Float64(),  # by these
    "trial_seconds": pl.Float64(),  # training that did not become part of the final model
    "clocks": pl.Int64(),  # completed pushes, on all branches
    "rejected": pl.Int64(),  # actions that the system refused
    "final_loss": pl.Float64(),  # of the last evaluation of the final branch; nan if there was none
    "final_accuracy": pl.Float64(),
    "final_setting": pl.String(),  # as `setting_text`
    "branches_peak": pl.Int64(),  # branches that there were at once, at the most
    "branch_bytes_peak": pl.Float64(),  # their parameters and optimizer slots, at nominal size
}
"""One row per run."""

EVALUATIONS: dict[str, pl.DataType] = {
    **_RUN,
    "seconds": pl.Float64(),
    "clocks": pl.Int64(),
    "loss": pl.Float64(),
    "accuracy": pl.Float64(),
}
"""The validation curve of the branch that the run ended with, its ancestors included up to where it was forked."""

SETTINGS: dict[str, pl.DataType] = {**_RUN, "seconds": pl.Float64(), "setting": pl.String()}
"""The setting of that branch: one row at 0, then one per change, when the change is in force."""

HOST: dict[str, pl.DataType] = {**_RUN, "thinking_seconds": pl.Float64(), "wall_seconds": pl.Float64()}
"""What the host measured: never the same twice, so it stands apart from the rest (`host.csv`)."""


def setting_text(setting: Setting) -> str:
    """A setting as one line of JSON."""
    return msgspec.json.encode(setting, enc_hook=lambda value: value.item()).decode()


def setting_from(text: str) -> Setting:
    """The setting that `setting_text` wrote. Raises ValueError where `text` is no such line."""
    return msgspec.json.decode(text, type=Setting)
