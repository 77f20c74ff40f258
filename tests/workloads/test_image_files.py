"""Readers of published image files, on tiny files that the tests write, and their errors about wrong files."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ebbflow.core import files
from ebbflow.errors import DataError
from ebbflow.workloads.image_files import (
    check_header,
    decode_image,
    decode_jpegs,
    read_cifar10,
    read_cifar100,
    read_idx,
    read_mnist_folder,
)

RNG = np.random.default_rng(7)


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, *, zipped: bool = False) -> dict[str, np.ndarray]:
    arrays = {}
    for part, count in (("train", 6), ("t10k", 3)):
        arrays[f"{part}-images-idx3-ubyte"] = RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = np.arange(count, dtype=np.uint8)
    for name, array in arrays.items():
        raw = idx_bytes(array)
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(raw) if zipped else raw)
    return arrays


# ---- idx ----


@pytest.mark.parametrize("zipped", [False, True])
def test_the_four_idx_files_of_a_folder_are_read_plain_or_zipped(tmp_path, zipped):
    arrays = write_mnist(tmp_path, zipped=zipped)
    train, test = read_mnist_folder(tmp_path, source="")
    assert train.pixels.shape == (6, 1, 28, 28)
    assert train.pixels.dtype == np.uint8
    assert train.labels.dtype == np.int64
    np.testing.assert_array_equal(train.pixels[:, 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(test.labels, [0, 1, 2])


def test_missing_idx_files_are_named_with_the_place_to_get_them(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"has no t10k-labels-idx1-ubyte \(with or without .gz\).*ask Debian"):
        read_mnist_folder(tmp_path, source="ask Debian")


def test_a_folder_that_does_not_exist_is_reported(tmp_path):
    with pytest.raises(DataError, match="is not a folder"):
        read_mnist_folder(tmp_path / "nowhere", source="")


def test_an_idx_file_with_another_magic_number_is_refused(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(idx_bytes(np.zeros(4, np.uint8)))
    with pytest.raises(DataError, match="starts with 00000801, expected 00000803"):
        read_idx(path, dimensions=3)


@pytest.mark.parametrize(
    ("length", "says"), [(0, "nothing"), (6, "shorter than the header"), (17, "9 bytes of values")]
)
def test_a_truncated_idx_file_says_how_much_is_there(tmp_path, length, says):
    path = tmp_path / "labels"
    path.write_bytes(idx_bytes(np.zeros(12, np.uint8))[:length])  # header 8 bytes, values 12
    with pytest.raises(DataError, match=says):
        read_idx(path, dimensions=1)


def test_a_truncated_gzip_file_is_refused(tmp_path):
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.zeros(100, np.uint8)))[:-10])
    with pytest.raises(DataError, match=r"labels\.gz: the gzip data is damaged or cut short"):
        read_idx(path, dimensions=1)


def test_a_gzip_file_that_unpacks_to_too_much_is_refused_without_unpacking_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MOST_UNPACKED", 3 << 20)
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.zeros(4 << 20, np.uint8))))  # 4 kB
    with pytest.raises(DataError, match=r"labels.gz: unpacks to more than 3 MB; .* unpack it first \(gunzip\)"):
        read_idx(path, dimensions=1)


def test_a_label_out_of_range_is_named_with_its_image(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.array([0, 1, 2, 3, 10, 5], np.uint8)))
    with pytest.raises(DataError, match="train-labels-idx1-ubyte: label 10 of image 4; expected 0 to 9"):
        read_mnist_folder(tmp_path, source="")


def test_fewer_labels_than_images_are_refused(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(5, np.uint8)))
    with pytest.raises(DataError, match="6 images but labels of shape"):
        read_mnist_folder(tmp_path, source="")


# ---- CIFAR-10 ----


def cifar_rows(count: int) -> tuple[np.ndarray, list[int]]:
    return RNG.integers(0, 256, (count, 3072), dtype=np.uint8), [int(label) for label in RNG.integers(0, 10, count)]


def write_cifar(folder: Path, kind: str, *, protocol: int = 2) -> dict[str, tuple[np.ndarray, list[int]]]:
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        rows, labels = written[name] = cifar_rows(4)
        if kind == "python":
            (folder / name).write_bytes(pickle.dumps({b"data": rows, b"labels": labels}, protocol=protocol))
        else:
            (folder / f"{name}.bin").write_bytes(np.column_stack([np.uint8(labels), rows]).tobytes())
    return written


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(("kind", "name"), [("python", "cifar-10-batches-py"), ("binary", "cifar-10-batches-bin")])
def test_both_originals_are_found_in_the_folder_or_below_it(tmp_path, kind, name, inner):
    written = write_cifar(tmp_path / name, kind)
    train, test = read_cifar10(tmp_path if inner else tmp_path / name)
    assert train.pixels.shape == (20, 3, 32, 32)
    assert test.pixels.shape == (4, 3, 32, 32)
    rows, labels = written["data_batch_2"]  # the second batch holds images 4 to 7; planes are red, green, blue
    np.testing.assert_array_equal(train.pixels[5, 1].ravel(), rows[1, 1024:2048])
    assert train.labels[4:8].tolist() == labels
    assert test.labels.tolist() == written["test_batch"][1]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_python_batches_of_every_pickle_protocol_are_read(tmp_path, protocol):
    written = write_cifar(tmp_path, "python", protocol=protocol)
    np.testing.assert_array_equal(read_cifar10(tmp_path)[1].pixels.reshape(4, -1), written["test_batch"][0])


def test_a_batch_as_python_2_wrote_it_is_read(tmp_path):
    write_cifar(tmp_path, "python")
    # What cPickle of Python 2 writes for {'data': array of shape (1, 3072), 'labels': [7]}: texts are byte strings
    # (opcode U, or T with a 4-byte length), and numpy's function lives in numpy.core.
    pixels = bytes(range(256)) * 12
    (tmp_path / "test_batch").write_bytes(
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        b"K\x00tb\x89T\x00\x0c\x00\x00" + pixels + b"tbU\x06labels]K\x07au."
    )
    test = read_cifar10(tmp_path)[1]
    assert test.pixels.tobytes() == pixels
    assert test.labels.tolist() == [7]


class Runs:
    """Unpickling this would create a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_batch_with_code_in_it_is_refused_before_it_runs(tmp_path, protocol):
    write_cifar(tmp_path, "python")
    marker = tmp_path / "it_ran"
    evil = pickle.dumps({b"data": Runs(marker), b"labels": []}, protocol=protocol)
    (tmp_path / "data_batch_3").write_bytes(evil)
    with pytest.raises(DataError, match=r"data_batch_3: it asks for .* not trusted"):
        read_cifar10(tmp_path)
    assert not marker.exists()
    pickle.loads(evil)
    assert marker.exists(), "the pickle must be one that runs elsewhere, or the test proves nothing"


@pytest.mark.parametrize("name", [b"builtins\neval", b"os\nsystem", b"numpy\nload", b"numpy.core.multiarray\nscalar"])
def test_a_pickle_that_names_anything_else_is_refused(tmp_path, name):
    write_cifar(tmp_path, "python")
    (tmp_path / "data_batch_1").write_bytes(b"c" + name + b"\n.")
    with pytest.raises(DataError, match="not trusted"):
        read_cifar10(tmp_path)


def test_an_array_with_fewer_bytes_than_its_shape_is_refused(tmp_path):
    write_cifar(tmp_path, "python")
    rows, labels = cifar_rows(2)
    honest = pickle.dumps({b"data": rows, b"labels": labels}, protocol=2)
    lying = honest.replace(b"K\x02M\x00\x0c", b"K\x09M\x00\x0c")  # the shape (2, 3072) becomes (9, 3072)
    assert lying != honest
    (tmp_path / "data_batch_1").write_bytes(lying)
    with pytest.raises(DataError, match=r"shape \(9, 3072\) with 6144 bytes"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([1, 2], "holds a list"),
        ({b"labels": [0]}, "no array 'data'"),
        ({b"data": np.zeros((1, 3072), np.uint8)}, "no list 'labels'"),
        ({b"data": np.zeros((1, 3072), np.float32), b"labels": [0]}, "type 'f4', expected unsigned bytes"),
        ({b"data": np.zeros((1, 100), np.uint8), b"labels": [0]}, r"shape \(1, 100\)"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, "label 10"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [2**80]}, "label 1208925819614629174706176"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}, "2 images but labels"),
    ],
)
def test_a_python_batch_of_another_form_says_what_is_wrong(tmp_path, content, says):
    write_cifar(tmp_path, "python")
    (tmp_path / "data_batch_4").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=f"data_batch_4: .*{says}"):
        read_cifar10(tmp_path)


def test_truncated_batches_are_refused(tmp_path):
    for kind, name, says in (
        ("python", "data_batch_5", "not a readable pickle"),
        ("binary", "data_batch_5.bin", "12287"),
    ):
        folder = tmp_path / kind
        write_cifar(folder, kind)
        path = folder / name
        path.write_bytes(path.read_bytes()[:12287])
        with pytest.raises(DataError, match=says):
            read_cifar10(folder)


def test_a_binary_label_out_of_range_is_refused(tmp_path):
    write_cifar(tmp_path, "binary")
    (tmp_path / "test_batch.bin").write_bytes(bytes([11]) + bytes(3072))
    with pytest.raises(DataError, match=r"test_batch.bin: label 11 of image 0"):
        read_cifar10(tmp_path)


def test_a_missing_batch_is_named(tmp_path):
    write_cifar(tmp_path, "binary")
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"lacks data_batch_3.bin of CIFAR-10's 6"):
        read_cifar10(tmp_path)


def write_cifar100(folder: Path, kind: str) -> dict[str, tuple[np.ndarray, list[int], list[int]]]:
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, count in (("train", 6), ("test", 3)):
        rows = RNG.integers(0, 256, (count, 3072), dtype=np.uint8)
        coarse, fine = ([int(label) for label in RNG.integers(0, top, count)] for top in (20, 100))
        written[name] = rows, coarse, fine
        if kind == "python":
            batch = {b"data": rows, b"fine_labels": fine, b"coarse_labels": coarse, b"filenames": [b"a.png"] * count}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        else:  # the coarse label comes first
            (folder / f"{name}.bin").write_bytes(np.column_stack([np.uint8(coarse), np.uint8(fine), rows]).tobytes())
    return written


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(("kind", "name"), [("python", "cifar-100-python"), ("binary", "cifar-100-binary")])
def test_both_originals_of_cifar_100_are_read_with_their_fine_labels(tmp_path, kind, name, inner):
    written = write_cifar100(tmp_path / name, kind)
    train, test = read_cifar100(tmp_path if inner else tmp_path / name)
    assert train.pixels.shape == (6, 3, 32, 32)
    np.testing.assert_array_equal(train.pixels[4, 2].ravel(), written["train"][0][4, 2048:])
    assert train.labels.tolist() == written["train"][2]
    assert test.labels.tolist() == written["test"][2]


def test_one_set_is_not_taken_for_the_other(tmp_path):
    write_cifar100(tmp_path / "hundred", "python")
    with pytest.raises(DataError, match=r"no CIFAR-10 at .*hundred: it has batches of CIFAR-100, .*instead of 10;"):
        read_cifar10(tmp_path / "hundred")
    write_cifar(tmp_path / "ten", "binary")
    with pytest.raises(
        DataError, match=r"no CIFAR-100 at .*ten: it has batches of CIFAR-10, .*cifar-100-python.tar.gz"
    ):
        read_cifar100(tmp_path / "ten")


@pytest.mark.parametrize("names", [False, True])
def test_an_npz_of_one_set_is_not_taken_for_the_other(tmp_path, names):
    images = [jpeg((9 * number, 0, 0)) for number in range(20)]
    for classes in (10, 100):
        arrays = {**npz_arrays(images, "train"), **npz_arrays(images, "test")}
        arrays["train_labels"] = arrays["test_labels"] = np.arange(20) * classes // 20
        if names:
            arrays["classes"] = np.array([f"class {number}" for number in range(classes)])
        np.savez(tmp_path / f"{classes}.npz", **arrays)
    assert len(read_cifar10(tmp_path / "10.npz")[0].labels) == len(read_cifar100(tmp_path / "100.npz")[0].labels) == 20
    found = "it names 10 classes" if names else "no label is above 9, as in CIFAR-10"
    with pytest.raises(DataError, match=rf"10\.npz, train: {found}; expected the 100 classes of CIFAR-100"):
        read_cifar100(tmp_path / "10.npz")
    found = "it names 100 classes; expected the 10" if names else "label 10 of image 2; expected 0 to 9"
    with pytest.raises(DataError, match=rf"100\.npz, train: {found}"):
        read_cifar10(tmp_path / "100.npz")


def test_fine_labels_that_are_all_of_ten_classes_are_refused(tmp_path):
    write_cifar100(tmp_path, "python")
    rows, labels = cifar_rows(50)
    (tmp_path / "train").write_bytes(pickle.dumps({b"data": rows, b"fine_labels": labels}, protocol=2))
    with pytest.raises(DataError, match=r"train: no label is above 9, as in CIFAR-10; expected the 100 classes"):
        read_cifar100(tmp_path)


def test_wrong_files_of_cifar_100_are_named(tmp_path):
    write_cifar100(tmp_path, "python")
    rows, labels = cifar_rows(2)
    (tmp_path / "train").write_bytes(pickle.dumps({b"data": rows, b"labels": labels}, protocol=2))
    with pytest.raises(DataError, match=r"train: has no list 'fine_labels' .*is it CIFAR-100"):
        read_cifar100(tmp_path)
    (tmp_path / "train").write_bytes(pickle.dumps({b"data": rows, b"fine_labels": [99, 100]}, protocol=2))
    with pytest.raises(DataError, match="label 100; expected 0 to 99"):
        read_cifar100(tmp_path)
    (tmp_path / "train").unlink()
    with pytest.raises(DataError, match="lacks train of CIFAR-100's 2 batches"):
        read_cifar100(tmp_path)
    write_cifar100(tmp_path / "bin", "binary")
    (tmp_path / "bin" / "test.bin").write_bytes(bytes(3073))
    with pytest.raises(DataError, match=r"test.bin: 3073 bytes, not a multiple of 3074"):
        read_cifar100(tmp_path / "bin")


def test_a_wrong_path_says_what_is_there(tmp_path):
    (tmp_path / "note.txt").write_text("hello")
    for path, says in (
        (tmp_path, "has none"),
        (tmp_path / "no", "does not exist"),
        (tmp_path / "note.txt", "another"),
    ):
        with pytest.raises(DataError, match=says):
            read_cifar10(path)


# ---- npz of JPEGs ----


def jpeg(colour: tuple[int, int, int], side: int = 32) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(buffer, format="JPEG", quality=95)
    return buffer.getvalue()


def npz_arrays(images: list[bytes], split: str) -> dict[str, np.ndarray]:
    return {
        f"{split}_jpeg": np.frombuffer(b"".join(images), np.uint8),
        f"{split}_offsets": np.cumsum([0, *map(len, images)]),
        f"{split}_labels": np.arange(len(images), dtype=np.uint8),
    }


def test_an_npz_of_jpegs_is_decoded_in_order(tmp_path):
    colours = [(250, 10, 10), (10, 250, 10), (10, 10, 250)]
    images = [jpeg(colour) for colour in colours]
    path = tmp_path / "set.npz"
    np.savez_compressed(path, **npz_arrays(images, "train"), **npz_arrays(images[:1], "test"))
    train, test = read_cifar10(path)
    assert train.pixels.shape == (3, 3, 32, 32)
    for image, colour in zip(train.pixels, colours, strict=True):  # JPEG loses a little
        assert np.abs(image.mean(axis=(1, 2)) - colour).max() < 5
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1, 2], [0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train_labels": None}, "train_labels"),
        ({"train_labels": np.array([0, 99], np.uint8)}, "label 99 of image 1"),
        ({"train_offsets": np.array([0, 100, 10**9])}, "offsets do not increase"),
        ({"train_offsets": np.array([0.0, 1.0])}, "vector of integers"),
        ({"train_jpeg": np.zeros(2000, np.uint8)}, "image 0: not a readable image"),
    ],
)
def test_a_damaged_npz_says_what_is_wrong(tmp_path, change, says):
    images = [jpeg((0, 0, 0)), jpeg((9, 9, 9))]
    arrays = {**npz_arrays(images, "train"), **npz_arrays(images, "test"), **change}
    path = tmp_path / "set.npz"
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(DataError, match=rf"set.npz.*{says}"):
        read_cifar10(path)


def test_a_truncated_npz_is_refused(tmp_path):
    path = tmp_path / "set.npz"
    images = [jpeg((0, 0, 0))]
    np.savez(path, **npz_arrays(images, "train"), **npz_arrays(images, "test"))
    raw = bytearray(path.read_bytes())
    raw[200:260] = bytes(60)  # the directory at the end is whole, the content is not
    path.write_bytes(raw)
    with pytest.raises(DataError, match="damaged npz"):
        read_cifar10(path)


def test_an_npz_that_is_cut_short_is_said_to_be(tmp_path):
    path = tmp_path / "set.npz"
    np.savez(path, **npz_arrays([jpeg((0, 0, 0))], "train"), **npz_arrays([jpeg((0, 0, 0))], "test"))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"set\.npz: cut short: it begins as an npz file does, .*; get it again"):
        read_cifar10(path)


def overwrite(found: bytes, by: bytes, after: int = 0) -> Callable[[bytearray], None]:
    def change(raw: bytearray) -> None:
        start = raw.rindex(found) + after
        raw[start : start + len(by)] = by

    return change


# The first three are in the directory at the end, and end in NotImplementedError, RuntimeError and BadZipFile; the
# others are in the description of an array.
@pytest.mark.parametrize(
    "change",
    [
        overwrite(b"PK\x01\x02", b"\x63", after=10),  # an unknown compression
        overwrite(b"PK\x01\x02", b"\x01", after=8),  # encrypted
        overwrite(b"PK\x01\x02", b"\x63", after=16),  # another checksum
        overwrite(b"{'descr'", b"('descr'"),
        overwrite(b"{'descr'", b"{'descr\n"),
        overwrite(b"'shape': (1,)", b"'shape': (9**", after=0),
    ],
)
def test_a_damaged_npz_is_named_whatever_it_makes_zipfile_and_numpy_raise(tmp_path, change):
    path = tmp_path / "set.npz"
    np.savez(path, **npz_arrays([jpeg((0, 0, 0))], "train"), **npz_arrays([jpeg((0, 0, 0))], "test"))
    raw = bytearray(path.read_bytes())
    change(raw)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"set\.npz: damaged npz file \(\w+: .*\); get it again"):
        read_cifar10(path)


def test_a_damaged_npz_that_would_need_all_memory_is_named(tmp_path):
    path = tmp_path / "set.npz"
    arrays = {**npz_arrays([jpeg((0, 0, 0))], "train"), **npz_arrays([jpeg((0, 0, 0))], "test")}
    del arrays["test_labels"]
    np.savez(path, **arrays)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**17,)})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("test_labels.npy", header.getvalue())
    with pytest.raises(DataError, match=r"set\.npz: damaged npz file \(\w*MemoryError: .*\); get it again"):
        read_cifar10(path)


def test_a_jpeg_of_another_size_is_refused():
    image = jpeg((0, 0, 0), side=48)
    with pytest.raises(DataError, match="image 0: 48x48 pixels; expected 32x32"):
        decode_jpegs(np.frombuffer(image, np.uint8), np.array([0, len(image)]))


@pytest.mark.parametrize(
    ("kind", "damage", "noticed"),
    [
        ("JPEG", "beginning", "header"),
        ("JPEG", "end", "pixels"),
        ("JPEG", "middle", "never"),
        ("PNG", "beginning", "header"),
        ("PNG", "end", "pixels"),
        ("PNG", "middle", "pixels"),
        ("WEBP", "beginning", "header"),
        ("WEBP", "end", "header"),
        ("WEBP", "middle", "never"),
        ("BMP", "beginning", "header"),
        ("BMP", "end", "pixels"),
        ("BMP", "middle", "never"),
    ],
)
def test_damage_is_noticed_as_the_page_on_workloads_says(kind, damage, noticed):
    from PIL import Image

    buffer = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format=kind)
    raw = bytearray(buffer.getvalue())
    if damage == "end":
        del raw[len(raw) * 9 // 10 :]
    else:
        start = 0 if damage == "beginning" else len(raw) // 2
        raw[start : start + 16] = bytes(16)

    def refused(read) -> bool:
        try:
            read(io.BytesIO(bytes(raw)), "image")
        except DataError:
            return True
        return False

    assert refused(check_header) == (noticed == "header")
    assert refused(decode_image) == (noticed != "never")


def test_images_of_the_real_npz_file_are_decoded(shared):
    with np.load(shared / "data" / "cifar10_jpeg.npz") as arrays:
        blob, offsets, labels = arrays["test_jpeg"], arrays["test_offsets"], arrays["test_labels"]
    assert (len(labels), len(offsets)) == (10_000, 10_001)
    images = decode_jpegs(blob, offsets[:9])
    assert images.shape == (8, 3, 32, 32)
    assert images.std() > 20  # they are pictures, not blank images
