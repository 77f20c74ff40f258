"""Folders of images: classes, crops, prefetching, and errors about wrong folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ebbflow import workloads
from ebbflow.errors import DataError
from ebbflow.run.config import RunConfig
from ebbflow.run.training import train
from ebbflow.workloads import DatasetSource
from ebbflow.workloads.image_folders import ImageFolder, center_crop, random_crop


def save(path: Path, colour: int, *, width: int = 40, height: int = 30) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Brighter from left to right, so that a mirrored image can be recognised.
    pixels = np.full((height, width, 3), colour, dtype=np.uint8) + np.arange(width, dtype=np.uint8)[None, :, None]
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    for i, (part, name) in enumerate([(part, name) for part in ("train", "val") for name in ("cat", "dog")]):
        for k in range(6):
            save(tmp_path / part / name / f"{k}.{['jpg', 'png', 'JPEG'][k % 3]}", 40 + 20 * i)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    return tmp_path


def test_classes_and_images_are_in_the_order_of_their_names(folder):
    images = ImageFolder(folder / "train", size=16, crop=center_crop)
    assert images.classes == ["cat", "dog"]
    assert [images[i][1] for i in range(len(images))] == [0] * 6 + [1] * 6
    pixels, _ = images[1]
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, 16, 16)
    # A png image with the value 40 + column: the central 26.25 of 40 columns begin at 6.875.
    assert pixels[:, :, 0].float().mean() == pytest.approx(40 + 6.875 + 26.25 / 16 / 2 - 0.5, abs=1)


def test_random_crops_are_inside_the_image_and_have_the_right_areas_and_aspect_ratios():
    torch.manual_seed(0)
    areas = []
    for _ in range(500):
        left, upper, right, lower = random_crop(400, 300)
        assert 0 <= left < right <= 400
        assert 0 <= upper < lower <= 300
        assert 0.74 < (right - left) / (lower - upper) < 1.35
        areas.append((right - left) * (lower - upper) / (400 * 300))
    assert min(areas) > 0.075
    assert max(areas) > 0.8
    # Uniform from 0.08 to 1, but large areas of the wrong aspect ratio do not fit: below the mean of 0.54.
    assert 0.4 < sum(areas) / len(areas) < 0.54


def test_an_image_that_no_random_crop_fits_into_is_cropped_to_its_centre():
    assert random_crop(1000, 10) == pytest.approx((500 - 20 / 3, 0, 500 + 20 / 3, 10))
    assert random_crop(10, 1000) == pytest.approx((0, 500 - 20 / 3, 10, 500 + 20 / 3))


def test_half_of_the_training_images_are_mirrored(folder):
    images = ImageFolder(folder / "train", size=8, crop=center_crop, mirror=True)
    torch.manual_seed(0)
    rising = [bool((pixels[:, :, -1] > pixels[:, :, 0]).all()) for pixels, _ in (images[1] for _ in range(60))]
    assert 15 < sum(rising) < 45


def test_images_are_standardised_after_they_are_read(folder):
    task = workloads.build("folder-resnet18(width=4, size=32)", data=folder)
    assert isinstance(task.valid, DatasetSource)
    raw = task.valid.dataset[0][0].float()
    mean, std = (torch.tensor(v)[:, None, None] for v in ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)))
    torch.testing.assert_close(task.valid.batch(np.array([0]), train=False)[0][0], (raw - mean) / std)


@pytest.mark.process
def test_a_run_is_the_same_with_and_without_loader_processes(folder, tmp_path):
    runs = [
        train(
            RunConfig(
                workload="folder-resnet18(width=4, size=32)", data=str(folder), epochs=2, local_batch=2,
                trace="constant(workers=2)", loader_workers=workers,
            ),
            tmp_path / str(workers),
        )
        for workers in (0, 2)
    ]  # fmt: skip
    assert runs[0].status == "finished"
    assert runs[0].end is not None
    assert runs[1].end is not None
    assert runs[0].end.weights_sha256 == runs[1].end.weights_sha256


def test_an_error_about_missing_images_names_the_folder(folder, tmp_path):
    with pytest.raises(DataError, match=r"needs its data: give with --data \(in a study: --set data=\) the folder"):
        workloads.build("folder-resnet18")
    with pytest.raises(DataError, match=r"nowhere/train: cannot be read \(No such file"):
        workloads.build("folder-resnet18", data=tmp_path / "nowhere")
    (tmp_path / "empty" / "train" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match=r"empty/train: no images in its 1 folders; expected CLASS/NAME\.jpg"):
        workloads.build("folder-resnet18", data=tmp_path / "empty")
    save(folder / "val" / "bird" / "1.png", 9)
    with pytest.raises(DataError, match="train and val have different classes: 'bird' is in one"):
        workloads.build("folder-resnet18", data=folder)


@pytest.mark.process
def test_an_error_about_a_damaged_image_names_its_file(folder):
    path = folder / "train" / "cat" / "0.jpg"
    path.write_bytes(path.read_bytes()[:200])
    source = DatasetSource(ImageFolder(folder / "train", size=8, crop=center_crop), loader_workers=1)
    with pytest.raises(DataError, match=r"sample 0 of ImageFolder cannot be read: .*cat/0\.jpg: not a readable image"):
        source.batch(np.array([2, 0]), train=True)
    source.close()
