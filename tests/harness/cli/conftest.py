"""What tests of commands share."""

from pathlib import Path

import pytest

from tests.support import arena


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a small scenario that the real simulator plays."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(arena.TIMING)
    return tmp_path
