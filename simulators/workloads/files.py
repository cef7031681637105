"""Data from the user's files: MNIST (IDX), CIFAR-10 (binary batches), libsvm, arrays of NumPy.

Nothing is downloaded. A missing file raises FileNotFoundError; a truncated, corrupt or wrong file raises ValueError. Both
name the file, what is wrong with it, and what is expected.
"""

from __future__ import annotations

import gzip
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulators.workloads.datasets import Dataset, split

__all__ = ["cifar10", "libsvm", "mnist", "npz", "read_idx"]

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CIFAR_ROW = 1 + 3 * 32 * 32
_DENSE_BYTES = 2**31  # limit for the features as dense float32, so that a proxy fits in memory


def mnist(folder: Path | str) -> Dataset:
    """MNIST, or other data in the same four IDX files (.gz or not): pixels in [0, 1]; the t10k files are for validation."""
    folder = _folder(folder, "MNIST")
    parts = []
    for stem in ("train", "t10k"):
        images = read_idx(_find(folder, f"{stem}-images-idx3-ubyte", f"{stem}-images.idx3-ubyte"))
        labels = read_idx(_find(folder, f"{stem}-labels-idx1-ubyte", f"{stem}-labels.idx1-ubyte"))
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not len(labels):
            raise ValueError(
                f"Cannot use the {stem} files in {folder}: images {images.shape}, labels {labels.shape}; "
                "expected n images of height x width and n labels."
            )
        pixels = images.reshape(len(images), -1).astype(np.float32) / np.float32(255)
        parts.append((pixels, labels.astype(np.int32), images.shape[1:]))
    (x, y, shape), (x_valid, y_valid, shape_valid) = parts
    if shape != shape_valid:
        raise ValueError(f"Cannot use {folder}: training images are {shape}, test images {shape_valid}; expected one size.")
    return Dataset((x, y), (x_valid, y_valid), int(max(y.max(), y_valid.max())) + 1, (*shape, 1))


def read_idx(path: Path | str) -> NDArray[np.generic]:
    """One IDX file (Y. LeCun's format: magic number, sizes, values; big-endian), gzipped or not."""
    path = Path(path)
    content = _read(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES or not content[3]:
        raise ValueError(
            f"Cannot read {path}: it begins with {content[:4].hex() or 'nothing'}; an IDX file begins with 0000."
        )
    kind, rank = np.dtype(_IDX_TYPES[content[2]]), content[3]
    begin = 4 + 4 * rank
    if len(content) < begin:
        raise ValueError(f"Cannot read {path}: it ends after {len(content)} bytes, inside its header; fetch it again.")
    sizes = tuple(int(n) for n in np.frombuffer(content, ">u4", rank, 4))
    wanted = begin + kind.itemsize * int(np.prod(sizes, dtype=object))
    if len(content) != wanted:
        raise ValueError(f"Cannot read {path}: {len(content)} bytes, but its sizes {sizes} need {wanted}; fetch it again.")
    values = np.frombuffer(content, kind, offset=begin).reshape(sizes)
    return values.astype(kind.newbyteorder("="))


def cifar10(folder: Path | str) -> Dataset:
    """CIFAR-10's binary version (data_batch_1..5.bin, test_batch.bin): 32x32x3 in [0, 1], channels last, 50,000 + 10,000."""
    folder = _folder(folder, "CIFAR-10")
    batches = [_read_cifar10_batch(_find(folder, f"data_batch_{i}.bin")) for i in range(1, 6)]
    train = tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))
    return Dataset(train, _read_cifar10_batch(_find(folder, "test_batch.bin")), 10, (32, 32, 3))


def _read_cifar10_batch(path: Path | str) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """One binary batch: rows of a label and 3,072 pixels, planes of red, green and blue."""
    path = Path(path)
    content = _read(path)
    if not content or len(content) % _CIFAR_ROW:
        raise ValueError(
            f"Cannot read {path}: {len(content)} bytes are no whole rows of {_CIFAR_ROW}; fetch the binary version again."
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, _CIFAR_ROW)
    labels = rows[:, 0].astype(np.int32)
    if labels.max() > 9:
        raise ValueError(f"Cannot read {path}: it has a label {labels.max()}, CIFAR-10 has 0 to 9; is it CIFAR-100?")
    planes = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return planes.reshape(len(rows), -1).astype(np.float32) / np.float32(255), labels


def libsvm(path: Path | str, *, valid_share: float = 0.2, seed: int = 0) -> Dataset:
    """A classification file of "label index:value ..." lines, gzipped or not, as dense float32; labels become 0, 1, ...

    A share of each class, drawn by `seed`, is held out for validation. Features are not scaled; scale them beforehand.
    """
    from sklearn.datasets import load_svmlight_file

    path = _file(path, "a libsvm file")
    try:
        table, raw = load_svmlight_file(str(path))
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"Cannot read {path} as libsvm: {error}; expected lines of `label index:value ...`.") from error
    n, d = table.shape
    if 4 * n * d > _DENSE_BYTES:
        raise ValueError(
            f"Cannot use {path}: {n} samples of {d} features fill {4 * n * d} bytes; sample it or hash features."
        )
    return _classified(path, table.toarray(), raw, (d,), valid_share, seed)


def npz(path: Path | str, *, valid_share: float = 0.2, seed: int = 0) -> Dataset:
    """The arrays `x` [n, ...] and `y` [n] of a file that `numpy.savez` wrote: features, as float32, and classes. Images are
    [n, height, width, channels]. Labels become 0, 1, ...

    A share of each class, drawn by `seed`, is held out for validation. Features are not scaled; scale them beforehand.
    """
    path = _file(path, "an .npz file")
    how = "write it by numpy.savez(path, x=features, y=labels)"
    if not zipfile.is_zipfile(path):  # NumPy would take any other file for a pickle, and advise to load it unsafely
        raise ValueError(f"Cannot read {path} as .npz: it is no archive of arrays; {how}.")
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in ("x", "y") if name in found.files}
            names = ", ".join(found.files) or "nothing"
    except (ValueError, EOFError, OSError, zlib.error, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"Cannot read {path} as .npz: {error}; {how}.") from error
    if len(arrays) < 2:
        raise ValueError(f"Cannot use {path}: it has {names}; expected x, the features, and y, the labels.")
    x, y = arrays["x"], arrays["y"]
    numbers = np.issubdtype(x.dtype, np.integer) or np.issubdtype(x.dtype, np.floating) or x.dtype == bool
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or not numbers:
        raise ValueError(
            f"Cannot use {path}: x is {x.shape} of {x.dtype}, y is {y.shape}; expected n samples of real numbers, "
            "[n, ...], and n labels."
        )
    if not x.size:
        raise ValueError(f"Cannot use {path}: x is {x.shape}, which holds no numbers; expected n samples, [n, ...].")
    return _classified(path, x.reshape(len(x), -1), y, x.shape[1:], valid_share, seed)


def _classified(
    path: Path,
    features: NDArray[np.generic],
    raw: NDArray[np.generic],
    shape: tuple[int, ...],
    valid_share: float,
    seed: int,
) -> Dataset:
    """Features [n, d] and labels [n] of any type as a data set. Raises ValueError where the labels are no classes."""
    n, (kinds, labels) = len(raw), np.unique(raw, return_inverse=True)
    if len(kinds) < 2 or len(kinds) > max(2, n // 2):
        raise ValueError(f"Cannot use {path}: {len(kinds)} different labels in {n} samples; expected classes, at least 2.")
    features = features.astype(np.float32)
    if not np.isfinite(features).all():
        raise ValueError(f"Cannot use {path}: some features are not finite; clean them first.")
    return split(features, labels, shape, valid_samples=max(1, int(valid_share * n)), seed=seed)


def _file(path: Path | str, what: str) -> Path:
    path = Path(path)
    if path.is_dir():
        raise FileNotFoundError(f"Cannot read {path}: it is a folder; give {what}.")
    if not path.is_file():
        raise FileNotFoundError(f"Cannot read {path}: there is no such file; give {what}.")
    return path


def _folder(folder: Path | str, what: str) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"Cannot read {what} from {folder}: there is no such folder; give the one that holds its files."
        )
    return folder


def _find(folder: Path, *names: str) -> Path:
    """The first of `names`, plain or gzipped, that exists in the folder."""
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise FileNotFoundError(f"Cannot find {names[0]} (or {names[0]}.gz) in {folder}: put the data set's own files there.")


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"Cannot read {path}: there is no such file.")
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b" and path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"Cannot unpack {path}: {error}; fetch it again.") from error
