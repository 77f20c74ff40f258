"""Readers of image files, single ones and published sets; each checks what it reads, and its errors name the file.

    decode_image        one image of any of the usual formats, in RGB
    read_mnist_folder   MNIST and data sets in its format: idx files, plain or gzip
    read_cifar10        the original batches, python or binary, or one npz file of JPEGs, whichever is found
    read_cifar100       the same for CIFAR-100, with its 100 fine labels

The npz file has three arrays for each of `train` and `test`: `{split}_jpeg` (the bytes of all images, concatenated),
`{split}_offsets` (image i is bytes offsets[i]:offsets[i+1]) and `{split}_labels`. A further array
`classes` may name the classes.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ebbflow.core.extras import require
from ebbflow.core.files import unpacked
from ebbflow.errors import DataError
from ebbflow.workloads.disk_cache import disk_cached

__all__ = [
    "IMAGENET_MEAN", "IMAGENET_STD", "IMAGE_SUFFIXES", "TURNED", "Images", "check_all", "check_header",
    "decode_image", "decode_jpegs", "is_turned", "open_image", "png_format", "read_cifar10", "read_cifar100",
    "read_idx", "read_mnist_folder", "transformed",
]  # fmt: skip

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
"""How the name of an image ends, in lower or upper case."""

IMAGENET_MEAN = torch.tensor((123.675, 116.28, 103.53))[:, None, None]
"""Mean of ImageNet's pixels, as bytes, for red, green and blue; the shape `(3, 1, 1)` is what DatasetSource takes."""
IMAGENET_STD = torch.tensor((58.395, 57.12, 57.375))[:, None, None]
"""Their standard deviation."""

TURNED = (
    "viewers turn it as its EXIF orientation says, and here pixels are read as they are stored: store it as it is shown"
)
"""What to do about an image whose annotations were made as viewers show it."""

_PNG_FORMAT = 24  # where the bit depth is in a PNG, and after it the colour type; Pillow tells neither
_ORIENTATION = 0x0112  # the number of the tag in EXIF
_IDX_BYTES = 0x08  # the idx code of unsigned bytes, the only type that the image sets use
_ZIP = b"PK\x03\x04"  # how a zip file begins; what makes it one for Python is the directory at its end
_CIFAR_SIDE = 32
_CIFAR_PIXELS = 3 * _CIFAR_SIDE * _CIFAR_SIDE


class Images(NamedTuple):
    """The training or test images of a data set: pixels `(samples, channels, height, width)` and class indices."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


def _checked(where: Path | str, pixels: NDArray[np.uint8], labels: NDArray[Any], *, classes: int) -> Images:
    """Return images and labels that belong together; raise DataError if there is anything wrong with the labels."""
    if labels.ndim != 1 or len(labels) != len(pixels):
        raise DataError(f"{where}: {len(pixels)} images but labels of shape {labels.shape}; expected one per image")
    if len(labels) == 0:
        raise DataError(f"{where}: no images")
    if labels.dtype.kind not in "iu":
        raise DataError(f"{where}: labels of type {labels.dtype}; expected whole numbers")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(f"{where}: label {labels[wrong[0]]} of image {wrong[0]}; expected 0 to {classes - 1}")
    # An array that shares the bytes of a file is read-only, which torch does not support.
    return Images(np.require(pixels, requirements=["C", "W"]), labels.astype(np.int64))


def _concatenate(batches: list[Images]) -> Images:
    return Images(*(np.concatenate(arrays) for arrays in zip(*batches, strict=True)))


def _read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is gzip."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    return unpacked(raw, path, error=DataError)


# ---- single images ----


@contextmanager
def open_image(file: Path | BinaryIO, where: Path | str) -> Iterator[Any]:
    """Open an image with Pillow, which reads its header; the pixels are decoded when they are asked for.

    A file that is no image, or a damaged one, raises DataError, which names it as `where`.
    """
    image_module = require("PIL.Image", extra="vision", needed_for="reading images", package="pillow")
    try:
        with image_module.open(file) as image:
            yield image
    except (DataError, MemoryError):
        raise
    except image_module.UnidentifiedImageError:  # its text has the path again, or the address of an object in memory
        raise DataError(f"{where}: not a readable image (of no known format); get it again") from None
    except Exception as error:  # Pillow raises nearly anything for a damaged file, and its own error for a huge one
        raise DataError(f"{where}: not a readable image ({error}); get it again") from None


def decode_image(file: Path | BinaryIO, where: Path | str, *, size: tuple[int, int] | None = None) -> Any:
    """Return an image of Pillow in RGB; greyscale, palette and CMYK images are converted, transparency is dropped.

    Pixels are as they are stored: an orientation in EXIF is not followed, as in torchvision's data sets.
    An image that cannot be read, or whose width and height are not `size`, raises DataError, which names it as `where`.
    Damage that the decoder passes over is not seen: bytes that were overwritten in the middle of a JPEG are usually
    decoded as other pixels.
    """
    with open_image(file, where) as image:
        _check(image, where, size)  # by the header, so that nothing huge is decoded
        return image.convert("RGB")


def check_header(file: Path | BinaryIO, where: Path | str, *, size: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return width and height by the header; what `decode_image` refuses by the header raises DataError here, too."""
    with open_image(file, where) as image:
        _check(image, where, size)
        width, height = image.size
        return width, height


def png_format(image: Any) -> tuple[int, int] | None:
    """Return bits per number and colour type (0: grey) of a PNG by its header, before it is decoded; else None."""
    if image.format != "PNG":
        return None
    position = image.fp.tell()
    image.fp.seek(_PNG_FORMAT)
    bits, colours = image.fp.read(2)
    image.fp.seek(position)
    return bits, colours


def transformed(where: Path | str, transform: Callable[..., Any], *parts: Any) -> Any:
    """Return the transform of an image, perhaps with more parts; an error in it raises DataError, which names `where`.

    It is the transform's error, and not the file's, which was decoded; but an odd image may be its cause.
    """
    try:
        return transform(*parts)
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise DataError(
            f"{where}: the transform of this image raised {type(error).__name__}: {error}; correct the transform, or "
            f"replace the image"
        ) from error


def is_turned(image: Any) -> bool:
    """Whether the file says that a viewer should turn the image by a quarter, as those of cameras do."""
    return image.getexif().get(_ORIENTATION) in (5, 6, 7, 8)


def check_all(problem: Callable[[int], str | None], count: int, what: str) -> None:
    """Call `problem` for the numbers below `count`, several at once; raise DataError with the first that it returns."""
    with ThreadPoolExecutor(8) as pool:
        wrong = [found for found in pool.map(problem, range(count)) if found is not None]
    if wrong:
        more = f"; {len(wrong) - 1} other {what} have problems, too" if len(wrong) > 1 else ""
        raise DataError(f"{wrong[0]}{more}")


def _check(image: Any, where: Path | str, size: tuple[int, int] | None) -> None:
    if size is not None and image.size != size:
        found, expected = ("{}x{}".format(*sides) for sides in (image.size, size))
        cure = TURNED if image.size[::-1] == size and is_turned(image) else "get the original image"
        raise DataError(f"{where}: {found} pixels; expected {expected}: {cure}")
    # Of channels with 16 bits Pillow would keep the upper 8, and of single numbers cut every value above 255.
    bits, _ = png_format(image) or (8, None)
    single = image.mode.startswith(("I", "F"))
    if single or bits > 8:
        found = f"pixels of type {image.mode}" if single else f"{bits} bits per channel"
        raise DataError(f"{where}: {found}; expected 8 bits per channel, convert the image")


# ---- idx: MNIST, Fashion-MNIST ----


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes with this number of dimensions, plain or gzip.

    The format: two zero bytes, the type, the number of dimensions, the size of each as a big-endian 32-bit number, and
    the values.
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
    """Read training and test images from the four idx files of a folder, each plain or with .gz.

    `source` says where a user can get the files; it ends the message about missing ones.
    """
    names = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    found = {name: path for name in names for path in (folder / f"{name}.gz", folder / name) if path.is_file()}
    missing = [name for name in names if name not in found]
    if missing:
        lacks = f"has no {', '.join(missing)} (with or without .gz)" if folder.is_dir() else "is not a folder"
        raise DataError(f"{folder} {lacks}; expected the idx files {', '.join(names)}; {source}")
    splits = []
    for split in ("train", "t10k"):
        path = found[f"{split}-images-idx3-ubyte"]
        pixels = read_idx(path, dimensions=3)
        if pixels.shape[1:] != (side, side):
            raise DataError(f"{path}: images of {pixels.shape[1]}x{pixels.shape[2]} pixels; expected {side}x{side}")
        labels = found[f"{split}-labels-idx1-ubyte"]
        splits.append(_checked(labels, pixels[:, None], read_idx(labels, dimensions=1), classes=classes))
    return splits[0], splits[1]


# ---- CIFAR-10 and CIFAR-100 ----


@dataclass(frozen=True, kw_only=True)
class _CifarFormat:
    """How the files of CIFAR-10 and CIFAR-100 are named and organised."""

    name: str
    archive: str
    """Beginning of the archives' names."""
    classes: int
    train: tuple[str, ...]
    """Names of the files with training images."""
    test: str
    """Name of the file with test images."""
    folders: tuple[str, str]
    """Names of the folders in the python and in the binary archive."""
    labels: str
    """Key of the labels in a python batch."""
    label_bytes: int
    """Number of label bytes before each image of a binary batch; the last of them is used."""


_CIFAR10 = _CifarFormat(
    name="CIFAR-10",
    archive="cifar-10",
    classes=10,
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    folders=("cifar-10-batches-py", "cifar-10-batches-bin"),
    labels="labels",
    label_bytes=1,
)
_CIFAR100 = _CifarFormat(
    name="CIFAR-100",
    archive="cifar-100",
    classes=100,
    train=("train",),
    test="test",
    folders=("cifar-100-python", "cifar-100-binary"),
    labels="fine_labels",
    label_bytes=2,  # the coarse label, then the fine one
)


def read_cifar10(data: Path) -> tuple[Images, Images]:
    """Read training and test images of CIFAR-10.

    `data` is the folder of the original batches, or the folder above it, or an npz file.
    """
    return _read_cifar(data, _CIFAR10)


def read_cifar100(data: Path) -> tuple[Images, Images]:
    """Read training and test images of CIFAR-100 with their fine labels; `data` is as for `read_cifar10`."""
    return _read_cifar(data, _CIFAR100)


_BatchReader = Callable[[Path, _CifarFormat], Images]


def _read_cifar(data: Path, kind: _CifarFormat) -> tuple[Images, Images]:
    if data.is_file() and zipfile.is_zipfile(data):
        return _cifar_npz(data, "train", kind), _cifar_npz(data, "test", kind)
    for read, paths in _cifar_places(data, kind):
        missing = [path.name for path in paths if not path.is_file()]
        if len(missing) == len(paths):
            continue
        if missing:
            folder = paths[0].parent
            raise DataError(f"{folder} lacks {', '.join(missing)} of {kind.name}'s {len(paths)} batches; add them")
        train = _concatenate([read(path, kind) for path in paths[:-1]])
        _check_classes(paths[0], train.labels, kind)
        return train, read(paths[-1], kind)
    if data.is_file() and _read_bytes(data).startswith(_ZIP):
        raise DataError(
            f"{data}: cut short: it begins as an npz file does, but has no directory at its end; get it again"
        )
    found = "is a file of another kind" if data.is_file() else "has none of it" if data.is_dir() else "does not exist"
    for other in (_CIFAR10, _CIFAR100):
        if any(path.is_file() for _, paths in _cifar_places(data, other) for path in paths):
            found = f"has batches of {other.name}, that is {other.classes} classes instead of {kind.classes}"
    raise DataError(
        f"no {kind.name} at {data}: it {found}; expected a folder with the unpacked original batches "
        f"({kind.train[0]}{' to 5' if len(kind.train) > 1 else ''} and {kind.test} of {kind.archive}-python.tar.gz, or "
        f"with .bin those of {kind.archive}-binary.tar.gz), or an npz of JPEGs"
    )


def _cifar_places(data: Path, kind: _CifarFormat) -> Iterator[tuple[_BatchReader, list[Path]]]:
    """Where the batches of a set may lie: the reader, and the paths of the training batches and of the test batch."""
    readers: list[tuple[str, _BatchReader]] = [("", _cifar_python), (".bin", _cifar_binary)]
    for inner, (suffix, read) in zip(kind.folders, readers, strict=True):
        for folder in (data, data / inner):
            yield read, [folder / (name + suffix) for name in (*kind.train, kind.test)]


def _check_classes(
    where: Path | str, labels: NDArray[Any], kind: _CifarFormat, names: NDArray[Any] | None = None
) -> None:
    """Raise DataError if the training labels, or the names of the classes, are those of a set with other classes.

    A small set need not have every class, so only labels that would all fit the smaller set are taken for its labels.
    """
    if names is not None and names.size != kind.classes:
        found = f"it names {names.size} classes"
    elif labels.size and labels.dtype.kind in "iu" and labels.max() < _CIFAR10.classes < kind.classes:
        found = f"no label is above {labels.max()}, as in {_CIFAR10.name}"
    else:
        return
    raise DataError(
        f"{where}: {found}; expected the {kind.classes} classes of {kind.name}: give its file, or choose a workload "
        f"for this one"
    )


def _cifar_python(path: Path, kind: _CifarFormat) -> Images:
    batch = load_pickle(path)
    if not isinstance(batch, dict):
        raise DataError(f"{path}: holds a {type(batch).__name__}; expected a dictionary with data and {kind.labels}")
    # The original files, written by Python 2, have bytes as keys; files that were written again may have text.
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
    # Checked before they become an array of 64 bits: a huge number is out of range, not an overflow.
    wrong = [label for label in labels if not 0 <= label < kind.classes]
    if wrong:
        raise DataError(f"{path}: label {wrong[0]}; expected 0 to {kind.classes - 1}")
    return _checked(path, rows.reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE), np.array(labels), classes=kind.classes)


def _cifar_binary(path: Path, kind: _CifarFormat) -> Images:
    raw = np.frombuffer(_read_bytes(path), dtype=np.uint8)
    record = kind.label_bytes + _CIFAR_PIXELS
    if raw.size == 0 or raw.size % record:
        raise DataError(
            f"{path}: {raw.size} bytes, not a multiple of {record} (label and image of {kind.name}); get it again"
        )
    rows = raw.reshape(-1, record)
    pixels = rows[:, kind.label_bytes :].reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE)
    return _checked(path, pixels, rows[:, kind.label_bytes - 1], classes=kind.classes)


def _cifar_npz(path: Path, split: str, kind: _CifarFormat) -> Images:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            blob, offsets, labels = (arrays[f"{split}_{name}"] for name in ("jpeg", "offsets", "labels"))
            names = arrays.get("classes")
    except KeyError as error:
        raise DataError(f"{path}: {error.args[0]}; expected the arrays {split}_jpeg, _offsets and _labels") from None
    except Exception as error:  # zipfile and numpy raise nearly anything for a damaged file, also a MemoryError
        raise DataError(f"{path}: damaged npz file ({type(error).__name__}: {error}); get it again") from None
    where = f"{path}, {split}"
    if split == "train":
        _check_classes(where, labels, kind, names)
    try:
        pixels = disk_cached("jpeg", [blob, offsets], lambda: decode_jpegs(blob, offsets))
        return _checked(where, pixels, labels, classes=kind.classes)
    except DataError as error:
        raise DataError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


def decode_jpegs(blob: NDArray[Any], offsets: NDArray[Any], *, side: int = _CIFAR_SIDE) -> NDArray[np.uint8]:
    """Decode square RGB images on all cores; the JPEG of image i is `blob[offsets[i]:offsets[i + 1]]`."""
    if blob.ndim != 1 or blob.dtype != np.uint8:
        raise DataError(f"the JPEGs are of type {blob.dtype} and shape {blob.shape}; expected a vector of bytes")
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 1:
        raise DataError(
            f"the offsets are of type {offsets.dtype} and shape {offsets.shape}; expected a vector of integers"
        )
    bounds: list[int] = offsets.tolist()
    if bounds[0] < 0 or bounds[-1] > len(blob) or sorted(bounds) != bounds:
        raise DataError(f"the offsets do not increase from 0 to at most {len(blob)}, the number of bytes")
    result = np.empty((len(bounds) - 1, 3, side, side), dtype=np.uint8)

    def decode(numbers: range) -> None:
        for number in numbers:
            jpeg = io.BytesIO(blob[bounds[number] : bounds[number + 1]].tobytes())
            image = decode_image(jpeg, f"image {number}", size=(side, side))
            result[number] = np.asarray(image).transpose(2, 0, 1)

    numbers = range(len(result))
    with ThreadPoolExecutor() as pool:
        list(pool.map(decode, (numbers[start : start + 1000] for start in numbers[::1000])))
    return result


# ---- pickles of unknown origin ----
#
# A pickle is a program, and numpy's own reconstruction of arrays is code, too. This reader knows containers, numbers,
# text and bytes. Where the pickle names one of the few numpy functions by which arrays are stored, a method of ours
# notes the arguments, and the array is made afterwards from checked bytes. Every other name is refused before anything
# is called.


class _PickledType:
    """A numpy type. Only its code is used; its state (byte order, alignment) does not matter for single bytes."""

    __slots__ = ("code",)

    def __init__(self, code: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


class PickledBytes:
    """An array of bytes as the pickle describes it; nothing is checked before `array`."""

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
        """Return the array; raise DataError unless it holds unsigned bytes, as many as its shape says."""
        shape = self.shape
        if not (isinstance(shape, tuple) and all(isinstance(side, int) and side >= 0 for side in shape)):
            raise DataError("an array without a proper shape")
        code = self.type.code if isinstance(self.type, _PickledType) else self.type
        if code not in ("u1", b"u1"):
            raise DataError(f"an array of type {code!r}, expected unsigned bytes (u1)")
        if self.order not in ("C", "F") or not isinstance(self.raw, (bytes, bytearray)):
            raise DataError("an array without bytes")
        flat = np.frombuffer(self.raw, dtype=np.uint8)
        if flat.size != int(np.prod(shape, dtype=object)):
            raise DataError(f"an array of shape {shape} with {flat.size} bytes")
        return flat.reshape(shape, order=self.order)


class _RestrictedUnpickler(pickle.Unpickler):
    """Looks every name up in a table; the functions in it are bound methods, which a pickle cannot change."""

    def find_class(self, module: str, name: str, /) -> Any:
        table: dict[tuple[str, str], Any] = {
            ("numpy", "ndarray"): "ndarray",  # it is only used as an argument of _reconstruct
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

    def _dtype(self, code: object, _align: object = None, _copy: object = None) -> _PickledType:
        return _PickledType(code)

    def _encode(self, text: object, encoding: object) -> bytes:
        if not (isinstance(text, str) and encoding == "latin1"):
            raise DataError("it stores bytes in an unusual way; the file is not trusted")
        return text.encode("latin1")


def load_pickle(path: Path) -> Any:
    """Return the content of a pickle of containers, numbers, text and byte arrays (as `PickledBytes`).

    Text that Python 2 wrote is returned as bytes. Anything else in the file raises DataError; nothing is executed.
    """
    try:
        with path.open("rb") as file:
            return _RestrictedUnpickler(file, encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # damaged pickles raise nearly anything: EOFError, KeyError, ValueError, TypeError, ...
        raise DataError(
            f"{path}: not a readable pickle ({type(error).__name__}: {error}); get the file again"
        ) from None
