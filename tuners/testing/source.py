"""Read the source of a tuner: an action that is made and not yielded is an error that Python does not tell."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from tuners.actions import Action, TunerFactory

__all__ = ["actions_in", "check_source"]


def check_source(factory: TunerFactory) -> bool:
    """Raise AssertionError where ``yield from`` is missing before an action or a generator: Python itself says nothing then.

    Reads, of the factory's module, the factory and what it calls there; the whole module where the factory is none of its
    functions. Returns False for a factory without source, which passes.
    """
    plain = inspect.unwrap(factory.func if isinstance(factory, functools.partial) else factory)
    module = sys.modules.get(getattr(plain, "__module__", ""), None)
    try:
        source = textwrap.dedent(inspect.getsource(module if module is not None else plain))
    except (OSError, TypeError):
        return False
    known = vars(module) if module is not None else {}
    for node in _used_nodes(_parsed(source), getattr(plain, "__name__", "")):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = _named(node.value.func, known)
            lazy = isinstance(called, type) and issubclass(called, Action)
            if lazy or inspect.isgeneratorfunction(called):
                text = ast.unparse(node.value)
                raise AssertionError(
                    f"Line {node.lineno} of {plain.__module__} makes {text} and drops it: write `yield from {text}`."
                )
    return True


def actions_in(factory: TunerFactory) -> set[str]:
    """The actions that the factory's own source names; none if there is no source."""
    plain = inspect.unwrap(factory.func if isinstance(factory, functools.partial) else factory)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    except (OSError, TypeError, SyntaxError):
        return set()
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} & {kind.__name__ for kind in Action.__subclasses__()}


@functools.lru_cache(maxsize=64)
def _parsed(source: str) -> ast.Module:
    """A tuner is checked on many toys."""
    return ast.parse(source)


def _used_nodes(module: ast.Module, name: str) -> Iterator[ast.AST]:
    """The nodes of the function or class `name` at the top of a module, and of those there that it names, and so on; all
    nodes where there is no such function."""
    parts = {n.name: n for n in module.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    if name not in parts:
        yield from ast.walk(module)
        return
    todo, seen = [name], {name}
    while todo:
        for node in ast.walk(parts[todo.pop()]):
            yield node
            if isinstance(node, ast.Name) and node.id in parts.keys() - seen:
                seen.add(node.id)
                todo.append(node.id)


def _named(expression: ast.expr, known: Mapping[str, Any]) -> Any:
    """The object that a dotted name has in a module, or None."""
    if isinstance(expression, ast.Name):
        return known.get(expression.id)
    if isinstance(expression, ast.Attribute):
        return getattr(_named(expression.value, known), expression.attr, None)
    return None
