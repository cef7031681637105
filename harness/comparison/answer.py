"""What a comparison found, for programs and notebooks: its tables as Polars frames, its answer as text, its figures."""

from __future__ import annotations

import html
import io
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from harness.comparison import results
from traces import store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Comparison", "ComparisonPlots", "comparison_in", "temporary_folder"]

_COLUMNS = 110  # characters per line of the answer in a notebook, and as text where no terminal says otherwise


@dataclass(frozen=True, eq=False)
class Comparison:
    """The results of `harness.compare`. A notebook shows the answer; ``print`` prints it."""

    scores: pl.DataFrame  # one row per run; columns: `traces.schema.SCORES`
    evaluations: pl.DataFrame  # loss and accuracy over simulated seconds; columns: `traces.schema.EVALUATIONS`
    settings: pl.DataFrame  # the setting over simulated seconds; columns: `traces.schema.SETTINGS`
    host: pl.DataFrame  # thinking and wall seconds of this machine; columns: `traces.schema.HOST`
    folder: Path  # all files
    temporary: bool = False  # the folder is deleted with this object: `out` named none

    def __post_init__(self) -> None:
        if self.temporary:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle. The files of a temporary folder come along: the folder may be gone when they are needed."""
        files = {str(p.relative_to(self.folder)): p.read_bytes() for p in self.folder.rglob("*") if p.is_file()}
        return {**self.__dict__, "files": files if self.temporary else {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        files: dict[str, bytes] = state.pop("files")
        self.__dict__.update(state)
        if self.temporary:
            self.__dict__["folder"] = temporary_folder()
            for name, content in files.items():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).write_bytes(content)
        self.__post_init__()

    def summary(self) -> pl.DataFrame:
        """One row per scenario and tuner: medians, 95 % intervals, ratios to `fixed` (`reports.verdicts.summary`)."""
        from reports.verdicts.summary import summary

        return summary(store.load_results(self.folder))

    @property
    def unit(self) -> str:
        """The unit of a job's time, in words: seconds, or simulated ones."""
        return store.time_unit(store.read_manifest(self.folder))

    @property
    def plot(self) -> ComparisonPlots:
        """The figures."""
        return ComparisonPlots(self)

    def report(self, path: str | Path) -> Path:
        """Write the page to `path`, one HTML file that needs nothing else; return the path.

        With several scenarios it is an overview, and a page per scenario is written to the folder `pages` beside it.
        """
        from reports.pages import page

        shutil.copyfile(page.write(self.folder), path)
        if (self.folder / "pages").is_dir():
            shutil.copytree(self.folder / "pages", Path(path).parent / "pages", dirs_exist_ok=True)
        return Path(path)

    def __repr__(self) -> str:
        """The answer as text."""
        return self._answer(as_html=False)

    def _repr_html_(self) -> str:
        """The answer for a notebook: what a terminal shows, and the completion times of every scenario."""
        from reports.figures.completion import completion_times

        table = self.summary().filter(pl.col("role") != "same")
        drawings, unit = [], self.unit
        for number, (name, rows) in enumerate(table.group_by("scenario", maintain_order=True)):
            scores = self.scores.filter(pl.col("scenario") == name[0])
            drawings.append(completion_times(rows, scores, f"times-{number}", unit).svg)
        return f"<div>{self._answer(as_html=True)}{''.join(drawings)}</div>"

    def _answer(self, *, as_html: bool) -> str:
        from rich.console import Console

        from reports.output import terminal

        out = io.StringIO()
        columns = _COLUMNS if as_html else max(80, shutil.get_terminal_size((_COLUMNS, 24)).columns)
        console = Console(file=out, width=columns, record=as_html, force_jupyter=False, color_system=None)
        terminal.show(store.load_results(self.folder), console)
        if not as_html:
            return out.getvalue().rstrip()
        return f"<pre>{html.escape(console.export_text().rstrip())}</pre>"


@dataclass(frozen=True, slots=True)
class ComparisonPlots:
    """The figures of a comparison, as on its page. `scenario` may be left out if there is only one."""

    _of: Comparison

    def times(self, scenario: str | None = None) -> Figure:
        """Completion times: every run, and each tuner's median with its 95 % interval."""
        from reports.figures.completion import completion_times

        name = self._scenario(scenario)
        rows = self._of.summary().filter((pl.col("scenario") == name) & (pl.col("role") != "same"))
        return completion_times(rows, self._here(self._of.scores, name), "times", self._of.unit).figure

    def curves(self, scenario: str | None = None, *, metric: str | None = None) -> Figure:
        """Validation `metric`, "accuracy" or "loss", over time, one panel per tuner.

        The default is accuracy if the workload has one. Raises ValueError if no run has been evaluated.
        """
        from reports.figures.progress import learning_curves
        from reports.pages.facts import target_of
        from reports.pages.page import texts

        name = self._scenario(scenario)
        evaluations = self._here(self._of.evaluations, name)
        if metric is None:
            metric = "accuracy" if evaluations["accuracy"].is_finite().any() else "loss"
        if metric not in ("accuracy", "loss"):
            raise ValueError(f"Cannot draw {metric!r} over time: choose accuracy or loss.")
        tuners = self._here(self._of.summary(), name)["tuner"].to_list()  # the best first
        known = target_of(texts(self._of.folder)[name])
        target = known[1] if known is not None and known[0] == metric else None
        drawing = learning_curves(evaluations, tuners, metric, "curves", target, self._of.unit)
        if drawing is None:
            raise ValueError(f"Cannot draw {metric} over time: no run on {name!r} has one. Its job may be timing-only.")
        return drawing.figure

    def gantt(self, tuner: str | None = None, scenario: str | None = None, *, seed: int | None = None) -> Figure:
        """When every worker computes, transfers and waits during one run: by default, of the leader, the run with the median
        time. Raises ValueError for a run that does not exist or has no push, and where no tuner leads and none is named.
        """
        from reports.figures.settings_over_time import typical_seed
        from reports.figures.workers import workers_of_run

        name = self._scenario(scenario)
        scores = self._here(self._of.scores, name)
        names = scores["tuner"].unique(maintain_order=True).to_list()
        chosen = self._leader(name) if tuner is None and len(names) > 1 else _only("tuner", tuner, names)
        mine = scores.filter(pl.col("tuner") == chosen)
        number = typical_seed(mine) if seed is None else seed
        drawing = workers_of_run(self._of.folder, name, chosen, number, "workers", self._of.unit)
        if drawing is None:
            raise ValueError(
                f"Cannot draw the workers of {chosen!r} on {name!r}, seed {number}: there is no push in it. "
                f"Seeds: {', '.join(map(str, mine['seed']))}."
            )
        return drawing.figure

    def _leader(self, scenario: str) -> str:
        from reports.verdicts.summary import winner

        return winner(self._of.summary(), scenario)

    def _scenario(self, name: str | None) -> str:
        return _only("scenario", name, self._of.scores["scenario"].unique(maintain_order=True).to_list())

    @staticmethod
    def _here(frame: pl.DataFrame, scenario: str) -> pl.DataFrame:
        return frame.filter(pl.col("scenario") == scenario)


def comparison_in(folder: Path, *, temporary: bool = False) -> Comparison:
    """The comparison in a results folder, which is deleted with the object if it is `temporary`."""
    if (folder / "runs").is_dir():
        results.assemble(folder)
    found = store.load_results(folder)
    return Comparison(found.scores, found.evaluations, found.settings, found.host, folder, temporary)


def temporary_folder() -> Path:
    """A new folder for results, where the caller has named none."""
    return Path(tempfile.mkdtemp(prefix="harness-"))


def _only(what: str, wanted: str | None, names: list[str]) -> str:
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted not in names:
        said = "name one" if wanted is None else f"there is no {what} {wanted!r}"
        raise ValueError(f"Cannot choose a {what}: {said} of {', '.join(names)}.")
    return wanted
