"""Downloads the files of a public recording from its repository, checks their digests, and imports them.

A download that breaks off leaves NAME.part in the folder of downloads; the next one asks the server for the rest. Proxies
are those of the environment (`https_proxy`, `no_proxy`), as `urllib.request` reads them. A file whose digest we do not know
is imported only if the user names the digest that it must have.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from traces.importers import import_trace, source_named
from traces.importers.source import Imported, RemoteFile, Source
from traces.plausible import TraceError

__all__ = ["ADDRESS", "DigestUnknownError", "download", "fetch"]

ADDRESS = "https://raw.githubusercontent.com"
"""Where GitHub serves files: ADDRESS/OWNER/NAME/COMMIT/PATH. A mirror has the same paths below another address."""

_CHUNK_BYTES = 1 << 16
_MOST_BYTES = 1 << 30
_TIMEOUT_SECONDS = 60.0
_PARTIAL, _RANGE_NOT_SATISFIABLE = 206, 416


class DigestUnknownError(ValueError):
    """Files were downloaded whose digests we do not know: the user must say that they are the right ones."""


def fetch(
    name: str,
    out: Path,
    *,
    made_by: str,
    address: str = ADDRESS,
    accepted: Mapping[str, str] = {},
    told: Callable[[str], None] = lambda _: None,
) -> Imported:
    """Download the files of the source `name`, import them as a trace at `out`, and delete the downloads.

    `accepted` has digests for files whose digest we do not know, by path. `told` gets a line per file. Downloads are in
    `out`.download until the import is complete. Raises ValueError for an unknown source, one that has to be fetched by hand,
    and if `out` exists; DigestUnknownError; TraceError for a file with another digest; OSError for a failed download.
    """
    source = source_named(name)
    if not source.files:
        raise ValueError(
            f"Cannot fetch {name}: it is fetched by hand from {source.address}, {source.size or 'size not known'}; "
            f"then `harness trace import {name} PATH`."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"Cannot write to {out}: it is there already. Name another folder.")
    known = {f.path for f in source.files}
    if wrong := sorted(accepted.keys() - known):
        raise ValueError(f"Cannot accept a digest for {wrong[0]!r}: the files are {', '.join(sorted(known))}.")
    folder = out.absolute().with_name(f"{out.absolute().name}.download")
    folder.mkdir(parents=True, exist_ok=True)
    unknown = []
    for file in source.files:
        path = folder / file.path
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            told(f"{file.path}: from {_url(source, file, address)}")
            download(_url(source, file, address), path)
        digest, expected = _digest(path), file.sha256 or accepted.get(file.path, "")
        if not expected:
            unknown.append(f"{file.path}={digest}")
        elif digest != expected:
            path.unlink()
            raise TraceError(
                f"Cannot use {file.path} from {_url(source, file, address)}: its SHA-256 is {digest}, and {expected} is "
                "expected. It was deleted; fetch it again, or from another address."
            )
    if unknown:
        raise DigestUnknownError(
            f"Cannot import {name} yet: the digests of these files are not known to this program. They are in {folder}; if "
            f"you have reason to trust them, repeat the command with --accept {' --accept '.join(unknown)}"
        )
    made = import_trace(name, folder, out, made_by=made_by)
    shutil.rmtree(folder)
    return made


def _url(source: Source, file: RemoteFile, address: str) -> str:
    path = f"{source.repository}/{source.commit}/{source.folder + '/' if source.folder else ''}{file.path}"
    return f"{address.rstrip('/')}/{urllib.parse.quote(path)}"


def download(url: str, path: Path) -> None:
    """Write what `url` serves to `path`; after a failure, PATH.part has the beginning, and the next call asks for the rest.

    Raises OSError, naming the address, where the server does not answer, refuses, or breaks off.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"Cannot download {url!r}: give an address that begins with https:// or http://.")
    part = path.with_name(f"{path.name}.part")
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})  # noqa: S310 (checked above)
    try:
        # An opener of our own, because the library's reads the proxies of the environment only once.
        with urllib.request.build_opener().open(request, timeout=_TIMEOUT_SECONDS) as answer:
            # A server that does not know ranges sends the whole file again.
            resumed = answer.status == _PARTIAL and str(answer.headers.get("Content-Range", "")).startswith(f"bytes {have}-")
            _save(answer, part, have if resumed else 0)
    except urllib.error.HTTPError as error:
        if error.code != _RANGE_NOT_SATISFIABLE:
            raise OSError(f"Cannot download {url}: the server answers {error.code} {error.reason}.") from None
        # We have as many bytes as there are, or more; the digest tells whether they are the right ones.
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        why = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise OSError(f"Cannot download {url}: {why}. Try again: what has come is kept in {part}.") from None
    part.replace(path)


def _save(answer: http.client.HTTPResponse, part: Path, have: int) -> None:
    """Append the answer to the first `have` bytes of `part`."""
    said = answer.headers.get("Content-Length")
    with part.open("r+b" if have else "wb") as out:
        out.seek(have)
        while chunk := answer.read(_CHUNK_BYTES):
            out.write(chunk)
            if out.tell() > _MOST_BYTES:
                raise OSError(f"Cannot download {answer.url}: it has more than {_MOST_BYTES} bytes.")
        out.truncate()
        out.flush()
        os.fsync(out.fileno())
        if said is not None and out.tell() != have + int(said):
            raise http.client.IncompleteRead(b"", have + int(said) - out.tell())


def _digest(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
