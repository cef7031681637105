"""`harness trace fetch` against a server on this machine: digests, broken downloads, proxies, and what it refuses."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.main import main
from tests.support.recordings import MADE
from traces.fetch import DigestUnknownError, download, fetch
from traces.importers import SOURCES, RemoteFile
from traces.parts import check_trace, digest_of, origin

BAMBOO = MADE["bamboo-spot"]()["p9-trace.csv"]


class LocalServer(http.server.ThreadingHTTPServer):
    """Serves `files` by path; breaks off after `most_bytes` of an answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.most_bytes = 1 << 30
        self.knows_ranges = True
        self.asked: list[tuple[str, str]] = []  # path and range

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LocalServer

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.server.asked.append((self.path, wanted))
        data = self.server.files.get(self.path)
        if data is None:
            self.send_error(404)
            return
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.knows_ranges else 0
        if first >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        self.wfile.write(data[first : first + self.server.most_bytes])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with LocalServer() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def path(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The source bamboo-spot with one small file of our own making; its path on the server."""
    source = replace(SOURCES["bamboo-spot"], files=(RemoteFile("p9-trace.csv", digest_of(BAMBOO)),))
    monkeypatch.setitem(SOURCES, "bamboo-spot", source)
    path = f"/{source.repository}/{source.commit}/traces/p9-trace.csv"
    server.files[path] = BAMBOO
    return path


def test_a_source_is_downloaded_checked_and_imported(server, path, tmp_path, capsys):
    out = tmp_path / "bamboo"
    assert main(["trace", "fetch", "bamboo-spot", "--out", str(out), "--address", server.address]) == 0
    printed = capsys.readouterr().out
    assert f"p9-trace.csv: from {server.address}{path}" in printed
    assert "Licence: MIT" in printed
    assert check_trace(out)["node_events"] == 4
    assert origin(out).inputs == (("p9-trace.csv", digest_of(BAMBOO)),)
    assert [p.name for p in tmp_path.iterdir()] == ["bamboo"]


def test_another_digest_is_refused_and_the_file_deleted(server, path, tmp_path, capsys):
    server.files[path] = BAMBOO.replace(b"node3", b"node4")
    found = digest_of(server.files[path])
    arguments = ["trace", "fetch", "bamboo-spot", "--out", str(tmp_path / "b"), "--address", server.address]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert f"its SHA-256 is {found}, and {digest_of(BAMBOO)} is expected" in said
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    server.files[path] = BAMBOO
    assert main(arguments) == 0


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_download_that_breaks_off_goes_on(server, path, tmp_path, knows_ranges):
    server.most_bytes, server.knows_ranges = 20, knows_ranges
    with pytest.raises(OSError, match=r"Try again: what has come is kept in .*p9-trace\.csv\.part"):
        fetch("bamboo-spot", tmp_path / "b", made_by="test", address=server.address)
    (part,) = tmp_path.rglob("*.part")
    assert part.read_bytes() == BAMBOO[:20]
    assert not (tmp_path / "b").exists()
    server.most_bytes = 1 << 30
    fetch("bamboo-spot", tmp_path / "b", made_by="test", address=server.address)
    assert server.asked == [(path, ""), (path, "bytes=20-")]
    assert check_trace(tmp_path / "b")["node_events"] == 4


def test_files_that_are_there_already_are_not_downloaded_again(server, path, tmp_path):
    (tmp_path / "b.download").mkdir()
    (tmp_path / "b.download/p9-trace.csv").write_bytes(BAMBOO)
    fetch("bamboo-spot", tmp_path / "b", made_by="test", address=server.address)
    assert server.asked == []


def test_a_part_that_is_whole_already(server, path, tmp_path):
    (tmp_path / "x.part").write_bytes(BAMBOO)
    download(server.address + path, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == BAMBOO


def test_a_file_of_unknown_digest_needs_the_users_word(server, path, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(SOURCES, "bamboo-spot", replace(SOURCES["bamboo-spot"], files=(RemoteFile("p9-trace.csv"),)))
    arguments = ["trace", "fetch", "bamboo-spot", "--out", str(tmp_path / "b"), "--address", server.address]
    assert main(arguments) == 2
    given = f"p9-trace.csv={digest_of(BAMBOO)}"
    assert f"repeat the command with --accept {given}" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    with pytest.raises(DigestUnknownError):
        fetch("bamboo-spot", tmp_path / "b", made_by="test", address=server.address)
    assert main([*arguments, "--accept", given]) == 0
    assert len(server.asked) == 1
    with pytest.raises(ValueError, match=r"Cannot accept a digest for 'p8\.csv': the files are p9-trace\.csv"):
        fetch("bamboo-spot", tmp_path / "c", made_by="test", address=server.address, accepted={"p8.csv": ""})


def test_it_works_behind_a_proxy(server, path, tmp_path, monkeypatch):
    """The proxy is asked for the whole address; the host of the address is never looked up."""
    server.files[f"http://source.invalid{path}"] = BAMBOO
    monkeypatch.setenv("http_proxy", server.address)
    fetch("bamboo-spot", tmp_path / "b", made_by="test", address="http://source.invalid")
    assert server.asked == [(f"http://source.invalid{path}", "")]


@pytest.mark.parametrize(
    ("address", "said"),
    [("{}/elsewhere", "the server answers 404"), ("http://127.0.0.1:1", "Cannot download .*: .*refused")],
)
def test_a_server_that_does_not_have_it(server, path, tmp_path, address, said):
    with pytest.raises(OSError, match=said):
        fetch("bamboo-spot", tmp_path / "b", made_by="test", address=address.format(server.address))
    assert not (tmp_path / "b").exists()


def test_what_cannot_be_fetched(server, path, tmp_path):
    with pytest.raises(ValueError, match="begins with https:// or http://"):
        fetch("bamboo-spot", tmp_path / "b", made_by="test", address="file:elsewhere")
    with pytest.raises(ValueError, match=r"fetched by hand from https://github\.com/Azure/.*, 284 MB in 776 files"):
        fetch("azure-vm-noise", tmp_path / "b", made_by="test")
    with pytest.raises(ValueError, match="No importer is called 'bamboo'"):
        fetch("bamboo", tmp_path / "b", made_by="test")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x").write_text("")
    with pytest.raises(ValueError, match="it is there already"):
        fetch("bamboo-spot", tmp_path / "d", made_by="test")
    assert server.asked == []


def test_a_list_tells_address_licence_size_and_citation(capsys):
    assert main(["list", "sources"]) == 0
    printed = capsys.readouterr().out
    for name, source in SOURCES.items():
        about = printed[printed.index(f"{name} ") :]
        told = (source.summary, source.address, source.licence, source.cite, *([source.size] if source.size else []))
        at = [about.index(text) for text in told]
        assert at == sorted(at)
    assert "394 kB as shipped; shipped:sync-switch or fetch by hand" in printed
    assert "download of unknown size; harness trace fetch selftf" in printed
    assert "size not known" not in printed
    assert "258 kB; shipped:uta-ec2-tokenbucket or harness trace fetch uta-ec2-tokenbucket" in printed


def test_known_digests_are_those_of_the_recordings():
    folder = Path(os.environ.get("HARNESS_RECORDINGS", "nowhere"))
    if not folder.is_dir():
        pytest.skip("HARNESS_RECORDINGS names no folder of recordings")
    found = {digest_of(p.read_bytes()) for p in folder.rglob("*") if p.is_file()}
    known = {f.sha256 for source in SOURCES.values() for f in source.files if f.sha256}
    assert len(known) == 12
    assert known <= found
