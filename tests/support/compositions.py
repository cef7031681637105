"""All ways to write a number as a sum: what brute force tries in place of a search."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["compositions"]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every tuple of `parts` whole numbers, 0 or more, whose sum is `total`."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)
