"""Tar shards: found, indexed once, read by position, and errors that name the shard and the member."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ebbflow.errors import DataError
from ebbflow.workloads import image_shards
from ebbflow.workloads.disk_cache import disk_cached_in
from ebbflow.workloads.image_shards import ImageShards, ShardSample, find_shards, index_shard

Members = Iterable[tuple[str, bytes]]


def jpeg(colour: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), colour, dtype=np.uint8)).save(file, "JPEG")
    return file.getvalue()


def write(path: Path, members: Members) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def sample(key: str, label: int, colour: int) -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", jpeg(colour)), (f"{key}.cls", str(label).encode())]


def colour(image: Image.Image) -> torch.Tensor:
    return torch.tensor(np.asarray(image).mean())


@pytest.fixture
def shards(tmp_path) -> list[Path]:
    """Two shards of three samples: colours 10 to 60, classes 0, 1, 2, 0, 1, 2."""
    return [
        write(
            tmp_path / f"imagenet-train-{shard:06}.tar",
            [member for k in range(3) for member in sample(f"{shard}{k}", k, 10 * (3 * shard + k + 1))],
        )
        for shard in range(2)
    ]


# ---- samples ----


def test_samples_of_all_shards_are_read_in_any_order(shards):
    images = ImageShards(shards, colour)
    assert (len(images), images.classes) == (6, 3)
    assert [(round(float(images[i][0])), images[i][1]) for i in (5, 0, 4, 1, 3, 2)] == [
        (60, 2), (10, 0), (50, 1), (20, 1), (40, 0), (30, 2)
    ]  # fmt: skip


def test_labels_may_come_first_and_other_members_of_a_sample_are_not_used(tmp_path):
    path = write(
        tmp_path / "x.tar",
        [("./a/1.cls", b"4\n"), ("./a/._1.jpg", b"of a Mac"), ("./a/1.PNG", b"12345"), ("./a/1.json", b"{}")],
    )
    # Each member has a header of 512 bytes, and its content is padded to 512; the image is the third member.
    assert list(index_shard(path)) == [ShardSample(offset=5 * 512, size=5, label=4, member="./a/1.PNG")]


def test_shards_are_found_by_their_names_in_the_order_of_their_numbers(tmp_path):
    for name in (
        "i-train-1.tar",
        "i-train-0.tar",
        "i-validation-0.tar",
        "i-test-0.tar",
        "i-train.tar",
        "i-train-0.tar.idx",
    ):
        (tmp_path / name).touch()
    for number in range(2, 11):
        (tmp_path / f"i-train-{number}.tar").touch()
    found = find_shards(tmp_path)
    assert [path.name for path in found["train"]] == [f"i-train-{number}.tar" for number in range(11)]
    assert [path.name for path in found["val"]] == ["i-validation-0.tar"]


def test_shards_need_no_name_of_the_data_set(tmp_path):
    for name in ("train-000000.tar", "train-000001.tar", "val-000000.tar", "strain-000000.tar"):
        (tmp_path / name).touch()
    found = find_shards(tmp_path)
    assert [path.name for path in found["train"]] == ["train-000000.tar", "train-000001.tar"]
    assert [path.name for path in found["val"]] == ["val-000000.tar"]


# ---- the index ----


def test_the_index_is_made_once_and_again_if_a_shard_changes(shards, monkeypatch):
    ImageShards(shards, colour)
    made: list[Path] = []
    monkeypatch.setattr(
        "ebbflow.workloads.image_shards.index_shard", lambda path: made.append(path) or list(index_shard(path))
    )
    assert float(ImageShards(shards, colour)[5][0]) == pytest.approx(60, abs=1)
    assert made == []
    os.utime(shards[0], ns=(0, 0))
    ImageShards(shards, colour)
    assert made == shards


def labels(images: ImageShards) -> list[int]:
    return [images[i][1] for i in range(len(images))]


def test_a_shard_with_other_labels_is_read_again_even_if_its_size_and_time_are_the_same(shards):
    times = shards[0].stat()
    assert labels(ImageShards(shards, colour)) == [0, 1, 2, 0, 1, 2]
    write(shards[0], [member for k in range(3) for member in sample(f"0{k}", 2 - k, 10 * (k + 1))])
    os.utime(shards[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (shards[0].stat().st_size, shards[0].stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)
    assert labels(ImageShards(shards, colour)) == [2, 1, 0, 0, 1, 2]


def test_shards_of_two_folders_have_indices_of_their_own_in_one_cache(tmp_path):
    found = []
    with disk_cached_in(tmp_path / "cache"):
        for folder, order in (("a", (0, 1)), ("b", (1, 0))):
            (tmp_path / folder).mkdir()
            path = tmp_path / folder / "train-0.tar"
            write(path, [member for k in range(2) for member in sample(str(k), order[k], 50)])
            os.utime(path, ns=(0, 0))  # as tools do that write the same shards again bit for bit
            found.append(labels(ImageShards([path], colour)))
    assert found == [[0, 1], [1, 0]]


def test_the_index_is_in_the_disk_cache_of_the_run_if_there_is_one(shards, tmp_path):
    with disk_cached_in(tmp_path / "cache"):
        ImageShards(shards, colour)
    assert len(list((tmp_path / "cache").glob("shards-*.npy"))) == 1
    assert not list(tmp_path.glob("*.npy"))


# ---- wrong shards, at once ----


def test_a_missing_shard_and_a_mixture_of_data_sets_are_named(tmp_path):
    for name in ("i-train-000000.tar", "i-train-000002.tar"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"i-train-000002\.tar is there, but i-train-000001\.tar is not"):
        find_shards(tmp_path)
    (tmp_path / "i-train-000002.tar").rename(tmp_path / "j-train-000000.tar")
    with pytest.raises(DataError, match=r"shards of two data sets, i-train-\* and j-train-\*; expected one per"):
        find_shards(tmp_path)
    with pytest.raises(DataError, match="nowhere: cannot be read"):
        find_shards(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name",
    ["train_000002.tar", "train-000001.tar.gz", "train-000001-of-2.tar", "i-train-000001.tgz", "TRAIN-000001.tar",
     "train000001.tar", "valid-000000.tar", "i_validation_0.tar", "train-000001.tar.part"],
)  # fmt: skip
def test_a_shard_of_another_name_is_refused_instead_of_being_left_out(tmp_path, name):
    for path in ("train-000000.tar", "val-000000.tar", name):
        (tmp_path / path).touch()
    with pytest.raises(
        DataError,
        match=rf"1 file\(s\) that look like shards but would not be read: {name}; expected names such as train-",
    ):
        find_shards(tmp_path)


def test_a_shard_cut_short_anywhere_is_named(tmp_path):
    path = write(tmp_path / "x.tar", [member for k in range(3) for member in sample(f"{k}", k, 50)])
    content = path.read_bytes()
    ends = max(i for i in range(0, len(content), 512) if any(content[i : i + 512])) + 512
    for length in range(0, ends + 1, 128):  # in headers, in contents and between members
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=r"x\.tar: .*cut short"):
            list(index_shard(path))
    path.write_bytes(content[: ends + 1024])
    assert len(list(index_shard(path))) == 3


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path):
    path = write(tmp_path / "x.tar", [*sample("a", 0, 50), *sample("b", 1, 50)])
    offset = [s.offset for s in index_shard(path)][1] - 512
    content = bytearray(path.read_bytes())
    content[offset : offset + 10] = b"0123456789"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.tar: no end of the archive after a\.cls \(byte \d+\); the shard was cut"):
        list(index_shard(path))


@pytest.mark.parametrize("kind", [b"0", b"x", b"g", b"L", b"K", b"S"])
@pytest.mark.parametrize("size", [b"\x80" + b"\x7f" * 11, b"\xff" * 12, b"\x80" + b"\0" * 6 + b"\x7f" * 5])
def test_a_header_whose_size_no_file_has_is_that_of_a_damaged_shard(tmp_path, kind, size):
    path = write(tmp_path / "x.tar", sample("a", 0, 50))
    content = bytearray(path.read_bytes())
    content[156:157], content[124:136], content[148:156] = kind, size, b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])  # the checksum is right
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"x\.tar: .*; get or write the shard again|x\.tar: a\.jpg is a link or a special"
    ):
        list(index_shard(path))


def test_names_of_members_that_are_not_utf_8_are_read(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    (path,) = shards = [write(tmp_path / "train-0.tar", [*sample(name, 0, 50), *sample("b", 1, 50)])]
    for _ in range(2):  # the second is from the cache
        images = ImageShards(shards, colour)
        assert labels(images) == [0, 1]
        assert images._where(0) == f"{path}: {name}.jpg"


def test_members_after_the_end_of_an_archive_are_not_lost_without_notice(tmp_path):
    one, two = (write(tmp_path / f"{key}.tar", sample(key, 0, 50)) for key in "ab")
    one.write_bytes(one.read_bytes() + two.read_bytes())
    with pytest.raises(DataError, match=r"a\.tar: no end of the archive after a\.cls .* joined from several"):
        list(index_shard(one))


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("a.jpg", b"x")], r"a\.jpg is there, but its key has no label, KEY\.cls"),
        ([("a.cls", b"0")], r"a\.cls is there, but its key has no image"),
        ([*sample("a", 0, 9), ("b.json", b"{}")], r"b\.json is there, but its key has no image"),
        ([*sample("a", 0, 9), *sample("a", 1, 9)], r"a\.jpg repeats the key of a\.jpg; keys are unique"),
        ([*sample("a", 0, 9), ("a.png", b"x")], r"a\.png repeats the key of a\.jpg"),
        ([("a.jpg", b""), ("a.cls", b"0")], r"a\.jpg is empty"),
        ([("a.jpg", b"x"), ("a.cls", b"cat")], r"a\.cls is b'cat'; expected the number of a class, such as 7"),
        ([("a.jpg", b"x"), ("a.cls", b"-1")], r"a\.cls is b'-1'; expected the number of a class"),
        ([("a.jpg", b"x"), ("a.cls", b"")], r"a\.cls is b''; expected the number of a class"),
        ([], r"no samples; expected members KEY\.jpg and KEY\.cls"),
    ],
)
def test_a_wrong_member_is_named_with_its_shard(tmp_path, members, says):
    path = write(tmp_path / "x.tar", members)
    with pytest.raises(DataError, match=rf"x\.tar: {says}"):
        list(index_shard(path))


def test_files_that_are_no_tar_files_and_links_in_them_are_refused(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(b"\x1f\x8b" + bytes(range(256)) * 8)
    with pytest.raises(DataError, match=r"x\.tar: cut short, damaged, or not a tar file, after its beginning"):
        list(index_shard(path))
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("a.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(DataError, match=r"x\.tar: a\.jpg is a link or a special file"):
        list(index_shard(path))
    with pytest.raises(DataError, match="nowhere: cannot be read"):
        list(index_shard(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="nowhere: cannot be read"):
        ImageShards([tmp_path / "nowhere"], colour)


def test_a_label_that_is_no_class_is_named_with_its_shard_and_member(shards, tmp_path):
    gap = write(tmp_path / "imagenet-train-000002.tar", [*sample("x", 0, 9), *sample("y", 5, 9)])
    with pytest.raises(
        DataError, match=r"train-000002\.tar: y\.jpg: its label is 5, but no sample has 3; expected labels 0, 1, 2, \."
    ):
        ImageShards([*shards, gap], colour)
    with pytest.raises(DataError, match=r"train-000002\.tar: y\.jpg: its label is 5, but the training samples have 0 "):
        ImageShards([gap], colour, classes=3)
    one_based = write(tmp_path / "one-based.tar", [*sample("x", 1, 9), *sample("y", 2, 9)])
    with pytest.raises(DataError, match="its label is 1, but no sample has 0"):
        ImageShards([one_based], colour)


# ---- wrong images ----


def test_an_error_in_a_transform_names_shard_and_member(shards):
    def fails(image):
        raise ZeroDivisionError("division by zero")

    with pytest.raises(DataError, match=r"train-000001\.tar: 10\.jpg: the transform of this image raised ZeroDivision"):
        ImageShards(shards, fails)[3]


def test_headers_are_read_without_the_images_behind_them(tmp_path, monkeypatch):
    """Only a few kilobytes of an image of a megabyte; one whose shard is gone is named, and so is one that is none."""
    large = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)).save(large, "PNG")
    shard = write(tmp_path / "x.tar", [("a.png", large.getvalue()), ("a.cls", b"0"), *sample("b", 1, 50)])
    images = ImageShards([shard], colour)
    read: list[int] = []
    readinto = image_shards._Member.readinto
    monkeypatch.setattr(image_shards._Member, "readinto", lambda *args: read.append(readinto(*args)) or read[-1])
    images.check_headers()
    assert sum(read) < 1 << 17 < len(large.getvalue())
    content = bytearray(shard.read_bytes())
    content[int(images._index["offset"][1])] = 0
    shard.write_bytes(content)
    for use in (images.check_headers, lambda: images[1]):
        with pytest.raises(
            DataError, match=r"x\.tar: b\.jpg: not a readable image \(of no known format\); get it again"
        ):
            use()
    shard.unlink()
    with pytest.raises(DataError, match=r"x\.tar: a\.png: cannot be read \(No such .*; 1 other images have problems"):
        images.check_headers()


def test_a_damaged_image_and_a_shard_that_is_cut_after_indexing_are_named(shards):
    images = ImageShards(shards, colour)
    content = shards[1].read_bytes()
    offset = int(images._index["offset"][4])
    shards[1].write_bytes(content[: offset + 100])
    with pytest.raises(DataError, match=r"train-000001\.tar: 11\.jpg: not a readable image"):
        images[4]
    with pytest.raises(DataError, match=r"train-000001\.tar: 12\.jpg: not a readable image"):
        images[5]
    assert images[3][1] == 0
    shards[1].unlink()
    with pytest.raises(DataError, match=r"train-000001\.tar: 10\.jpg: cannot be read \(No such file"):
        images[3]
