"""Readers of published data files. numpy only; every reader checks what it reads and says which file is wrong.

    read_mnist_folder   idx files, plain or gzip: MNIST and what imitates it
    read_cifar10        the original batches, python or binary, or one npz of JPEGs; told apart by what is there
    read_cifar100       the same of CIFAR-100, with its 100 fine labels

The npz holds, for `train` and `test`: `{split}_jpeg` (all images, one after the other, as bytes), `{split}_offsets`
(image i is bytes offsets[i]:offsets[i+1]) and `{split}_labels`.
"""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ebbflow.errors import DataError, MissingExtra
from ebbflow.workloads.disk_cache import disk_cached

__all__ = ["Images", "decode_jpegs", "read_cifar10", "read_cifar100", "read_idx", "read_mnist_folder"]

_IDX_BYTES = 0x08  # the idx code of unsigned bytes, the only type that the image sets use
_CIFAR_SIDE = 32
_CIFAR_PIXELS = 3 * _CIFAR_SIDE * _CIFAR_SIDE


class Images(NamedTuple):
    """One part of an image set: pixels as bytes `(samples, channels, height, width)` and class numbers."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


def _images(where: Path | str, pixels: NDArray[np.uint8], labels: NDArray[Any], *, classes: int) -> Images:
    if labels.ndim != 1 or len(labels) != len(pixels):
        raise DataError(f"{where}: {len(pixels)} images but labels of shape {labels.shape}; expected one an image")
    if len(labels) == 0:
        raise DataError(f"{where}: no images")
    if labels.dtype.kind not in "iu":
        raise DataError(f"{where}: labels of type {labels.dtype}; expected whole numbers")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(f"{where}: label {labels[wrong[0]]} of image {wrong[0]}; expected 0 to {classes - 1}")
    # Arrays over the bytes of a file are read-only, which torch does not support.
    return Images(np.require(pixels, requirements=["C", "W"]), labels.astype(np.int64))


def _join(parts: list[Images]) -> Images:
    return Images(np.concatenate([part.pixels for part in parts]), np.concatenate([part.labels for part in parts]))


def _read_bytes(path: Path) -> bytes:
    """The content of a file, unzipped when it is gzip."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); get it again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


# ---- idx: MNIST, Fashion-MNIST ----


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """An idx file of unsigned bytes with that many dimensions, plain or gzip.

    The form: two zero bytes, the type, the number of dimensions, each size as a big-endian 32-bit number, the values.
    """
    raw = _read_bytes(path)
    expected = bytes([0, 0, _IDX_BYTES, dimensions])
    header = 4 + 4 * dimensions
    if raw[:4] != expected:
        raise DataError(
            f"{path}: starts with {raw[:4].hex() or 'nothing'}, expected {expected.hex()}, the magic number of an idx "
            f"file of bytes with {dimensions} dimension(s)"
        )
    if len(raw) < header:
        raise DataError(f"{path}: {len(raw)} bytes, shorter than the header of {header}; it is truncated, get it again")
    shape = tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(4, header, 4))
    size = int(np.prod(shape, dtype=object))
    if len(raw) - header != size:
        raise DataError(
            f"{path}: {len(raw) - header} bytes of values, but its header says {shape}, that is {size}; get it again"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)


def read_mnist_folder(folder: Path, *, side: int = 28, classes: int = 10, source: str) -> tuple[Images, Images]:
    """Training and test images from the four idx files of a folder, each plain or with .gz.

    `source` ends the message about missing files: where a user gets them.
    """
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    found = {name: path for name in names for path in (folder / f"{name}.gz", folder / name) if path.is_file()}
    missing = [name for name in names if name not in found]
    if missing:
        lacks = f"has no {', '.join(missing)} (with or without .gz)" if folder.is_dir() else "is not a folder"
        raise DataError(f"{folder} {lacks}; expected the idx files {', '.join(names)}; {source}")
    parts = []
    for part in ("train", "t10k"):
        path = found[f"{part}-images-idx3-ubyte"]
        pixels = read_idx(path, dimensions=3)
        if pixels.shape[1:] != (side, side):
            raise DataError(f"{path}: images of {pixels.shape[1]}x{pixels.shape[2]} pixels; expected {side}x{side}")
        labels = found[f"{part}-labels-idx1-ubyte"]
        parts.append(_images(labels, pixels[:, None], read_idx(labels, dimensions=1), classes=classes))
    return parts[0], parts[1]


# ---- CIFAR-10 and CIFAR-100 ----


@dataclass(frozen=True, kw_only=True)
class _Cifar:
    """What tells the files of the two sets apart."""

    name: str
    stem: str
    """Of the archives, and with an ending of the folders in them."""
    classes: int
    train: tuple[str, ...]
    test: str
    folders: tuple[str, str]
    """In the python and in the binary archive."""
    labels: str
    """Key of the labels in a python batch."""
    label_bytes: int
    """Before each image of a binary batch; the last of them is the label."""


_CIFAR10 = _Cifar(
    name="CIFAR-10",
    stem="cifar-10",
    classes=10,
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    folders=("cifar-10-batches-py", "cifar-10-batches-bin"),
    labels="labels",
    label_bytes=1,
)
_CIFAR100 = _Cifar(
    name="CIFAR-100",
    stem="cifar-100",
    classes=100,
    train=("train",),
    test="test",
    folders=("cifar-100-python", "cifar-100-binary"),
    labels="fine_labels",
    label_bytes=2,  # the coarse label, then the fine one
)


def read_cifar10(data: Path) -> tuple[Images, Images]:
    """Training and test images of CIFAR-10: a folder of original batches (or the folder above it), or an npz file."""
    return _read_cifar(data, _CIFAR10)


def read_cifar100(data: Path) -> tuple[Images, Images]:
    """Training and test images of CIFAR-100 with their fine labels, from the same kinds of places."""
    return _read_cifar(data, _CIFAR100)


def _read_cifar(data: Path, kind: _Cifar) -> tuple[Images, Images]:
    if data.is_file() and zipfile.is_zipfile(data):
        return _cifar_npz(data, "train", kind), _cifar_npz(data, "test", kind)
    readers: tuple[tuple[str, Callable[[Path, _Cifar], Images]], ...] = (("", _cifar_python), (".bin", _cifar_binary))
    for inner, (suffix, read) in zip(kind.folders, readers, strict=True):
        for folder in (data, data / inner):
            paths = [folder / (name + suffix) for name in (*kind.train, kind.test)]
            missing = [path.name for path in paths if not path.is_file()]
            if len(missing) == len(paths):
                continue
            if missing:
                raise DataError(f"{folder} lacks {', '.join(missing)} of {kind.name}'s {len(paths)} batches; add them")
            return _join([read(path, kind) for path in paths[:-1]]), read(paths[-1], kind)
    found = "is a file of another kind" if data.is_file() else "holds none of it" if data.is_dir() else "does not exist"
    raise DataError(
        f"no {kind.name} at {data}: it {found}; expected a folder with the unpacked original batches "
        f"({kind.train[0]}{' to 5' if len(kind.train) > 1 else ''} and {kind.test} of {kind.stem}-python.tar.gz, or "
        f"with .bin those of {kind.stem}-binary.tar.gz), or an npz of JPEGs"
    )


def _cifar_python(path: Path, kind: _Cifar) -> Images:
    batch = load_pickle(path)
    if not isinstance(batch, dict):
        raise DataError(f"{path}: holds a {type(batch).__name__}; expected a dictionary with data and {kind.labels}")
    # Written by Python 2 the keys are bytes; a copy that was written again may have text.
    pixels, labels = (batch.get(key.encode(), batch.get(key)) for key in ("data", kind.labels))
    if not isinstance(pixels, PickledBytes):
        raise DataError(f"{path}: has no array 'data'; expected one of shape (images, {_CIFAR_PIXELS})")
    if not (isinstance(labels, list) and all(type(label) is int for label in labels)):
        raise DataError(f"{path}: has no list '{kind.labels}' of whole numbers; is it {kind.name}?")
    try:
        rows = pixels.array()
    except DataError as error:
        raise DataError(f"{path}: 'data' is {error}") from None
    if rows.ndim != 2 or rows.shape[1] != _CIFAR_PIXELS:
        raise DataError(f"{path}: 'data' has the shape {rows.shape}; expected (images, {_CIFAR_PIXELS})")
    # Before they become an array of 64 bits: a huge number is out of range, not an overflow.
    wrong = [label for label in labels if not 0 <= label < kind.classes]
    if wrong:
        raise DataError(f"{path}: label {wrong[0]}; expected 0 to {kind.classes - 1}")
    known = np.array(labels, dtype=np.int64)
    return _images(path, rows.reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE), known, classes=kind.classes)


def _cifar_binary(path: Path, kind: _Cifar) -> Images:
    raw = np.frombuffer(_read_bytes(path), dtype=np.uint8)
    record = kind.label_bytes + _CIFAR_PIXELS
    if raw.size == 0 or raw.size % record:
        raise DataError(
            f"{path}: {raw.size} bytes, not a multiple of {record} (label and image of {kind.name}); get it again"
        )
    rows = raw.reshape(-1, record)
    pixels = rows[:, kind.label_bytes :].reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE)
    return _images(path, pixels, rows[:, kind.label_bytes - 1], classes=kind.classes)


def _cifar_npz(path: Path, split: str, kind: _Cifar) -> Images:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            blob, offsets, labels = (arrays[f"{split}_{part}"] for part in ("jpeg", "offsets", "labels"))
    except KeyError as error:
        raise DataError(f"{path}: {error.args[0]}; expected the arrays {split}_jpeg, _offsets and _labels") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged npz file ({error}); get it again") from None
    where = f"{path}, {split}"
    try:
        pixels = disk_cached("jpeg", [blob, offsets], lambda: decode_jpegs(blob, offsets))
        return _images(where, pixels, labels, classes=kind.classes)
    except DataError as error:
        raise DataError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


def decode_jpegs(blob: NDArray[Any], offsets: NDArray[Any], *, side: int = _CIFAR_SIDE) -> NDArray[np.uint8]:
    """Square RGB images from JPEGs that lie one after the other in an array of bytes; uses all cores.

    Image i is `blob[offsets[i]:offsets[i + 1]]`.
    """
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("pillow", extra="vision", needed_for="an npz file of JPEGs") from None
    if blob.ndim != 1 or blob.dtype != np.uint8:
        raise DataError(f"the JPEGs are an array of type {blob.dtype} and shape {blob.shape}; expected a row of bytes")
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 1:
        raise DataError(
            f"the offsets are of type {offsets.dtype} and shape {offsets.shape}; expected a row of integers"
        )
    bounds: list[int] = offsets.tolist()
    if bounds[0] < 0 or bounds[-1] > len(blob) or sorted(bounds) != bounds:
        raise DataError(f"the offsets do not rise from 0 to at most {len(blob)}, the number of bytes")
    result = np.empty((len(bounds) - 1, 3, side, side), dtype=np.uint8)

    def decode(chunk: range) -> None:
        for number in chunk:
            piece = blob[bounds[number] : bounds[number + 1]].tobytes()
            try:
                with Image.open(io.BytesIO(piece), formats=["JPEG"]) as image:
                    if image.size != (side, side):  # known from the header: nothing huge is ever decoded
                        raise DataError(f"image {number} is {image.width}x{image.height}; expected {side}x{side}")
                    result[number] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
            except (OSError, SyntaxError) as error:
                raise DataError(f"image {number} is not a readable JPEG ({error})") from None

    chunks = [range(start, min(start + 1000, len(result))) for start in range(0, len(result), 1000)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(decode, chunks))
    return result


# ---- pickles ----


class _Type:
    """A numpy type: its code counts; its state (byte order, alignment) means nothing for single bytes."""

    __slots__ = ("code",)

    def __init__(self, code: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


class PickledBytes:
    """An array of bytes as the pickle described it; nothing of it is trusted before `array`."""

    __slots__ = ("order", "raw", "shape", "type")

    def __init__(self) -> None:
        self.shape: Any = None
        self.type: Any = None
        self.order: Any = "C"
        self.raw: Any = None

    def __setstate__(self, state: Any) -> None:
        _version, self.shape, self.type, fortran, self.raw = state
        self.order = "F" if fortran else "C"

    def array(self) -> NDArray[np.uint8]:
        """The array, when it is one of unsigned bytes and as long as its shape says."""
        shape = self.shape
        if not (isinstance(shape, tuple) and all(isinstance(side, int) and side >= 0 for side in shape)):
            raise DataError("an array without a proper shape")
        code = self.type.code if isinstance(self.type, _Type) else self.type
        if code not in ("u1", b"u1"):
            raise DataError(f"an array of type {code!r}, expected unsigned bytes (u1)")
        if self.order not in ("C", "F") or not isinstance(self.raw, (bytes, bytearray)):
            raise DataError("an array without bytes")
        flat = np.frombuffer(self.raw, dtype=np.uint8)
        if flat.size != int(np.prod(shape, dtype=object)):
            raise DataError(f"an array of shape {shape} with {flat.size} bytes")
        return flat.reshape(shape, order=self.order)


class _Restricted(pickle.Unpickler):
    """Looks every name up in a table. Its stand-ins are bound methods, which a pickle cannot alter."""

    def find_class(self, module: str, name: str, /) -> Any:
        table: dict[tuple[str, str], Any] = {
            ("numpy", "ndarray"): "ndarray",  # only ever an argument of reconstruct
            ("numpy", "dtype"): self._dtype,
            ("_codecs", "encode"): self._encode,
        }
        for core in ("numpy.core", "numpy._core"):  # numpy 1 and 2
            table[core + ".multiarray", "_reconstruct"] = self._reconstruct
            table[core + ".numeric", "_frombuffer"] = self._frombuffer
        found: Callable[..., Any] | str | None = table.get((module, name))
        if found is None:
            raise DataError(f"it asks for {module}.{name}, which is not part of an array; the file is not trusted")
        return found

    def _reconstruct(self, _subtype: object, _shape: object, _code: object) -> PickledBytes:
        return PickledBytes()

    def _frombuffer(self, raw: object, code: object, shape: object, order: object) -> PickledBytes:
        array = PickledBytes()
        array.raw, array.type, array.shape, array.order = raw, code, shape, order
        return array

    def _dtype(self, code: object, _align: object = None, _copy: object = None) -> _Type:
        return _Type(code)

    def _encode(self, text: object, encoding: object) -> bytes:
        if not (isinstance(text, str) and encoding == "latin1"):
            raise DataError("it stores bytes in an unusual way; the file is not trusted")
        return text.encode("latin1")


def load_pickle(path: Path) -> Any:
    """The content of a pickle made of containers, numbers, text and byte arrays (as `PickledBytes`).

    Texts of Python 2 come as bytes. Anything else in the file is a DataError, and none of it has been executed.
    """
    try:
        with path.open("rb") as file:
            return _Restricted(file, encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # damaged pickles raise nearly anything: EOFError, KeyError, ValueError, TypeError, ...
        raise DataError(
            f"{path}: not a readable pickle ({type(error).__name__}: {error}); get the file again"
        ) from None
