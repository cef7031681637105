"""What is in a folder."""

from pathlib import Path

__all__ = ["contents"]


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file in a folder, at any depth, by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
