"""The notebooks in reports/examples run from top to bottom, and print what is stored in them.

``python tests/reports/test_examples.py`` runs them and stores what they show. No notebook software is needed: a cell is
Python, and the value of its last line is shown as a notebook shows it.
"""

from __future__ import annotations

import ast
import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import one_process

COLUMNS = "100"  # of a terminal too narrow for the column of thinking, which differs from run to run
EXAMPLES = Path(__file__).parents[2] / "reports" / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of its last line if that is an expression, else None."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)  # noqa: S102 (our own notebook)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None  # noqa: S307


def shown(value: Any) -> dict[str, Any]:
    """What a notebook stores of a value, by type of data."""
    data: dict[str, Any] = {"text/plain": lines(repr(value))}
    if hasattr(value, "_repr_html_"):
        found = value._repr_html_()
        data |= {"text/html": lines(found)} if found is not None else {}
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
    return data


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of every cell, run in order in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    made = []
    for number, cell in enumerate(cells(notebook), 1):
        value = run("".join(cell["source"]), names)
        result = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
        made.append([] if value is None else [result | {"data": shown(value)}])
    return made


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join("".join(output["data"]["text/plain"]) for output in found)


def test_there_is_one():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_shows_what_is_stored_in_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    notebook = json.loads(path.read_text())
    with one_process():
        printed = outputs(notebook)
    for cell, made in zip(cells(notebook), printed, strict=True):
        assert [sorted(o["data"]) for o in cell["outputs"]] == [sorted(o["data"]) for o in made]
        assert text_of(cell["outputs"]) == text_of(made), "".join(cell["source"])
    assert list(tmp_path.iterdir()) == []


if __name__ == "__main__":
    os.environ["COLUMNS"] = COLUMNS
    for file in NOTEBOOKS:
        read = json.loads(file.read_text())
        for each, (one, stored) in enumerate(zip(cells(read), outputs(read), strict=True), 1):
            one |= {"execution_count": each, "outputs": stored}
        file.write_text(json.dumps(read, indent=1, ensure_ascii=False) + "\n")
