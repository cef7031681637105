"""Lines of text on a terminal, as they are: what Rich would read as markup or emoji may be part of a name."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

__all__ = ["say"]


def say(console: Console, text: str, *, style: str = "", wraps: bool = False) -> None:
    """Print `text` as it is. A line that is longer than the terminal stays whole, to be copied, unless it `wraps`."""
    console.print(Text(text, style=style), soft_wrap=not wraps)
