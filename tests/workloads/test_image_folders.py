"""Folders of images: classes, decoding, and errors that name the file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ebbflow.errors import DataError
from ebbflow.workloads import DatasetSource
from ebbflow.workloads.image_files import check_header, decode_image
from ebbflow.workloads.image_folders import ImageFolder
from workloads.png_files import COLOURS, GREY_WITH_ALPHA, png


def as_bytes(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def save(path: Path, colour: int = 40, *, mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((30, 40, 3), colour, dtype=np.uint8)).convert(mode, palette=Image.Palette.ADAPTIVE).save(
        path
    )
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    for number, name in enumerate(("cat", "dog")):
        for k in range(6):
            save(tmp_path / name / f"{k}.{['jpg', 'png', 'JPEG'][k % 3]}", 40 + 20 * number)
    return tmp_path


def test_classes_and_images_are_in_the_order_of_their_names_and_hidden_files_are_left_out(folder):
    (folder / "cat" / ".0.jpg").write_bytes(b"of the file manager")
    (folder / ".cache").mkdir()
    images = ImageFolder(folder, as_bytes)
    assert images.classes == ["cat", "dog"]
    assert [images[i][1] for i in range(len(images))] == [0] * 6 + [1] * 6
    assert [images[i][0].unique().tolist() for i in (1, 7)] == [[40], [60]]
    assert images[1][0].dtype == torch.uint8


@pytest.mark.parametrize(
    ("mode", "name", "error"), [("L", "x.jpg", 0), ("CMYK", "x.jpg", 3), ("P", "x.png", 0), ("RGBA", "x.png", 0),
                                ("1", "x.png", 200), ("LA", "x.png", 0)]
)  # fmt: skip
def test_images_of_other_colour_models_are_converted(tmp_path, mode, name, error):
    image = decode_image(save(tmp_path / name, 200, mode=mode), "x")
    assert (image.mode, image.size) == ("RGB", (40, 30))
    # A grey of 200 stays one, up to the rounding of JPEG; one bit is dithered.
    assert np.abs(np.asarray(image).astype(int) - 200).max() <= error


def test_pixels_of_more_than_eight_bits_are_refused_instead_of_being_cut(tmp_path):
    path = tmp_path / "deep.png"
    Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16)).save(path)
    with pytest.raises(DataError, match=r"deep\.png: pixels of type I;16; expected 8 bits per channel"):
        decode_image(path, path)


@pytest.mark.parametrize(("colours", "channels"), [(COLOURS, 3), (GREY_WITH_ALPHA, 2), (6, 4)])
def test_channels_of_more_than_eight_bits_are_refused_instead_of_being_rounded(tmp_path, colours, channels):
    path = tmp_path / "deep.png"
    numbers = np.full((4, 4, channels), 40)
    path.write_bytes(png(numbers, bits=16, colours=colours))
    for read in (check_header, decode_image):
        with pytest.raises(DataError, match=r"deep\.png: 16 bits per channel; expected 8 bits per channel, convert"):
            read(path, path)
    path.write_bytes(png(numbers, bits=8, colours=colours))
    assert np.unique(decode_image(path, path)).tolist() == [40]


def test_greys_of_few_bits_are_images_from_black_to_white(tmp_path):
    (tmp_path / "few.png").write_bytes(png(np.array([[0, 1, 2, 3]]), bits=2))
    assert np.asarray(decode_image(tmp_path / "few.png", "few.png"))[0, :, 0].tolist() == [0, 85, 170, 255]


# ---- wrong folders, at once ----


def test_an_error_about_a_wrong_folder_names_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: cannot be read \(No such file"):
        ImageFolder(tmp_path / "nowhere", as_bytes)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no folders; expected CLASS/NAME\.jpg"):
        ImageFolder(tmp_path / "empty", as_bytes)


def test_a_class_that_cannot_be_opened_is_named(folder, monkeypatch):
    scandir = os.scandir

    def refuses(path):
        if path == folder / "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuses)
    with pytest.raises(
        DataError, match=r"/dog: cannot be read \(Permission denied\); expected a folder with one folder"
    ):
        ImageFolder(folder, as_bytes)


def test_a_class_without_images_is_named(folder):
    (folder / "eel").mkdir()
    (folder / "eel" / ".hidden.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="eel: no images in this class; add some, or remove the folder"):
        ImageFolder(folder, as_bytes)


@pytest.mark.parametrize("name", ["cat/notes.txt", "cat/0.jpg.part", "cat/0.tiff"])
def test_a_file_that_is_no_image_by_its_name_is_named_and_not_left_out(folder, name):
    (folder / name).write_text("no image")
    with pytest.raises(DataError, match=rf"{name}: expected only images \(\.jpg, .*\) in .*cat; move this elsewhere"):
        ImageFolder(folder, as_bytes)


@pytest.mark.parametrize("name", ["cat/9.jpg", "eel"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("gone.jpg")], ids=["pipe", "link"])
def test_a_pipe_or_a_link_to_nothing_is_named_before_it_is_opened(folder, name, make):
    make(folder / name)
    with pytest.raises(DataError, match=f"{name}: neither a file nor a folder, but a link to nothing, or a pipe; expe"):
        ImageFolder(folder, as_bytes)


def test_an_error_in_a_transform_names_the_image(folder):
    def fails(image):
        raise ZeroDivisionError("division by zero")

    images = ImageFolder(folder, fails)
    with pytest.raises(DataError, match=r"cat/1\.png: the transform of this image raised ZeroDivisionError: division "):
        images[1]


def test_images_beside_the_folders_of_classes_or_below_them_are_named(folder):
    save(folder / "cat" / "images" / "0.jpg")
    with pytest.raises(DataError, match="cat/images: expected only images"):
        ImageFolder(folder, as_bytes)
    save(folder / "cat.jpg")  # as in ImageNet's original validation set, which has no folders
    with pytest.raises(DataError, match=r"cat\.jpg: expected only folders with the images of one class each"):
        ImageFolder(folder, as_bytes)


# ---- damaged images, when they are read ----


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def truncate_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def replace(path: Path) -> None:
    path.write_text("<html>404</html>")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def huge(path: Path) -> None:
    # A header that says 65,000 x 65,000: height and width follow the mark of the frame and its length and depth.
    content = bytearray(path.read_bytes())
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = (65_000).to_bytes(2, "big") * 2
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, truncate_header, replace, empty, huge, Path.unlink])
def test_a_damaged_or_missing_image_ends_the_reading_with_its_name(folder, damage):
    images = ImageFolder(folder, as_bytes)
    damage(folder / "cat" / "0.jpg")
    with pytest.raises(DataError, match=r"cat/0\.jpg: not a readable image \("):
        images[0]


@pytest.mark.process
def test_loader_processes_name_a_damaged_image_too(folder):
    cut(folder / "cat" / "0.jpg")
    source = DatasetSource(ImageFolder(folder, as_bytes), loader_workers=1)
    with pytest.raises(DataError, match=r"sample 0 of ImageFolder cannot be read: .*cat/0\.jpg: not a readable image"):
        source.batch(np.array([2, 0]), train=True)
    source.close()
