"""The recordings that come with the harness: whole, licensed, found by name; a changed file is named with its digests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.scenario import load
from tests.support.ship_recordings import SHIPPED, ship
from traces.importers import SOURCES
from traces.parts import check_trace, digest_of, origin
from traces.plausible import TraceError
from traces.shipped import PUBLIC, check_shipped, locate, shipped

ROOT = Path(__file__).parents[2]
LICENCES = {
    "MIT": "Permission is hereby granted, free of charge",
    "Apache-2.0": "Apache License",
    "CC BY 4.0": "Attribution 4.0 International",
}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_public_recording_is_whole_and_names_origin_and_licence(name):
    folder = locate(f"shipped:{name}")
    assert check_shipped(PUBLIC, name) == sum(p.is_file() for p in folder.rglob("*"))
    assert check_trace(folder)["runs"] >= 1
    said, source = origin(folder), SOURCES[name]
    assert (said.source, said.of, said.licence, said.cite) == (name, source.of, source.licence, source.cite)
    text = (folder / "LICENSE").read_text()
    assert any(source.licence.startswith(kind) and words in text for kind, words in LICENCES.items())
    notice = (PUBLIC / "NOTICE").read_text()
    about = notice[notice.index(f"\n{name}\n") :].split("\n\n")[0]
    assert source.repository in about
    assert source.commit in about
    assert "Licence" in about
    assert f"`{name}`" in (PUBLIC / "README.md").read_text()


def test_all_of_them_are_listed_and_small():
    assert {p.name for p in PUBLIC.iterdir() if p.is_dir()} == set(SHIPPED)
    assert set(SHIPPED) < set(shipped())
    sizes = {p: p.stat().st_size for p in (ROOT / "traces/data").rglob("*") if p.is_file()}
    public = sum(size for p, size in sizes.items() if p.is_relative_to(PUBLIC))
    assert max(public, sum(sizes.values()) - public) <= 3e6


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(PUBLIC / "bamboo-spot", tmp_path / "bamboo-spot")
    shutil.copy(PUBLIC / "SHA256SUMS", tmp_path)
    assert check_shipped(tmp_path, "bamboo-spot") == 4
    return tmp_path


@pytest.mark.parametrize("name", ["trace.json", "runs/000000.parquet", "node_events/000000.parquet", "LICENSE"])
@pytest.mark.parametrize("harm", ["damaged", "cut short"])
def test_a_changed_file_is_named_with_its_digests(copied, name, harm):
    path = copied / "bamboo-spot" / name
    data = bytearray(path.read_bytes())
    expected = digest_of(bytes(data))
    data[len(data) // 2] ^= 1
    path.write_bytes(data if harm == "damaged" else data[:-7])
    found = digest_of(path.read_bytes())
    with pytest.raises(TraceError, match=f"{path}: it is damaged or cut short: .*{found}, and {expected} was shipped"):
        check_shipped(copied, "bamboo-spot")


def test_a_missing_file_and_a_file_too_many_are_named(copied):
    (copied / "bamboo-spot/runs/000001.parquet").write_bytes(b"")
    with pytest.raises(TraceError, match=r"000001\.parquet: it is not listed"):
        check_shipped(copied, "bamboo-spot")
    (copied / "bamboo-spot/runs/000000.parquet").unlink()
    with pytest.raises(TraceError, match=r"runs/000000\.parquet: it is missing; its SHA-256 was [0-9a-f]{64}"):
        check_shipped(copied, "bamboo-spot")


def test_a_name_stands_where_a_folder_may_stand(tmp_path, capsys):
    assert locate("here", tmp_path) == tmp_path / "here"
    assert locate("shipped:homogeneous") == ROOT / "traces/data/homogeneous"
    with pytest.raises(ValueError, match=r"No recording 'bambo-spot' .*: did you mean bamboo-spot"):
        locate("shipped:bambo-spot")
    text = load("replay-spot").text.replace("shipped:bamboo-spot", "shipped:bambo")
    (tmp_path / "my.toml").write_text(text)
    with pytest.raises(ValueError, match=r"my\.toml: \[conditions\] No recording 'bambo'"):
        load(tmp_path / "my.toml")
    assert main(["trace", "show", "shipped:bamboo-spot"]) == 0
    assert "MIT, Copyright (c) 2022 UCLASystem" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["trace", "show", "shipped:bambo"])
    assert stopped.value.code == 2
    assert "argument TRACE: No recording 'bambo'" in capsys.readouterr().err


def test_they_can_be_made_again_from_the_same_inputs(tmp_path):
    inputs = os.environ.get("HARNESS_RECORDINGS")
    if not inputs:
        pytest.skip("HARNESS_RECORDINGS names no folder of recordings")
    ship(Path(inputs), tmp_path)
    assert (tmp_path / "SHA256SUMS").read_text() == (PUBLIC / "SHA256SUMS").read_text()
