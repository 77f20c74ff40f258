"""COCO: what is read, what is refused or left out and by which name, augmentation, and mean average precision."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ebbflow.errors import DataError
from ebbflow.workloads.coco import CocoImages, CocoMetric, CocoSplit, check_headers, collate_detection, read_coco
from ebbflow.workloads.prefetch import Request, SampleReader

for package in ("torchvision", "pycocotools"):
    if importlib.util.find_spec(package) is None:  # torchvision itself is imported by import_torchvision only
        pytest.skip(f"{package} is not installed (the extra 'vision')", allow_module_level=True)


def content() -> dict[str, Any]:
    """Three images of 40x30 pixels: two boxes and a crowd, one box, none."""
    return {
        "images": [{"id": i, "file_name": f"{i}.jpg", "width": 40, "height": 30} for i in (7, 3, 9)],
        "categories": [{"id": 90, "name": "last"}, {"id": 2, "name": "first"}],
        "annotations": [
            {"id": 11, "image_id": 7, "category_id": 90, "bbox": [10, 5, 20, 10], "area": 150.0, "iscrowd": 0},
            {"id": 12, "image_id": 3, "category_id": 2, "bbox": [0, 0, 40, 30], "area": 1200.0, "iscrowd": 0},
            {"id": 13, "image_id": 7, "category_id": 2, "bbox": [1, 2, 3, 4], "area": 12.0, "iscrowd": 1},
            {"id": 14, "image_id": 7, "category_id": 2, "bbox": [4, 4, 8, 8], "area": 64.0, "iscrowd": 0},
        ],
    }


def write_annotations(folder: Path, annotations: Any, split: str = "train2017") -> None:
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(annotations))


def write(folder: Path, annotations: Any, split: str = "train2017") -> Path:
    write_annotations(folder, annotations, split)
    (folder / split).mkdir(exist_ok=True)
    pixels = np.add.outer(np.arange(30), 4 * np.arange(40)).astype(np.uint8)  # brighter from left to right
    for image in (7, 3, 9):
        Image.fromarray(np.repeat(pixels[:, :, None], 3, axis=2)).save(folder / split / f"{image}.jpg", quality=95)
    return folder


def test_boxes_and_labels_are_read_in_the_order_of_the_images(tmp_path):
    split = read_coco(write(tmp_path, content()), "train2017")
    assert split.ids.tolist() == [7, 3, 9]
    assert split.sizes.tolist() == [[30, 40]] * 3
    assert split.first.tolist() == [0, 3, 4, 4]
    assert split.boxes.tolist() == [[10, 5, 30, 15], [1, 2, 4, 6], [4, 4, 12, 12], [0, 0, 40, 30]]
    assert split.labels.tolist() == [2, 1, 1, 1]  # ids 2 and 90 become 1 and 2
    assert split.crowd.tolist() == [False, True, False, False]
    assert split.categories == {2: "first", 90: "last"}
    assert split.left_out == {}


def test_training_leaves_out_crowds_and_images_without_boxes_and_counts_them(tmp_path):
    split = read_coco(write(tmp_path, content()), "train2017").without_empty_images()
    assert split.ids.tolist() == [7, 3]
    assert split.first.tolist() == [0, 2, 3]
    assert split.boxes.tolist() == [[10, 5, 30, 15], [4, 4, 12, 12], [0, 0, 40, 30]]
    assert split.left_out == {"images without boxes": 1, "crowd boxes": 1}


def test_an_image_with_nothing_but_a_crowd_is_not_trained_on(tmp_path):
    annotations = content()
    annotations["annotations"][1]["iscrowd"] = 1
    split = read_coco(write(tmp_path, annotations), "train2017").without_empty_images()
    assert split.ids.tolist() == [7]
    assert split.left_out == {"images without boxes": 2, "crowd boxes": 2}


def test_boxes_that_leave_the_image_by_a_pixel_are_clipped_and_counted(tmp_path):
    annotations = content()
    annotations["annotations"][1]["bbox"] = [-0.5, 0, 41, 30.9]
    split = read_coco(write(tmp_path, annotations), "train2017")
    assert split.boxes[-1].tolist() == [0, 0, 40, 30]
    assert split.left_out == {"boxes clipped to the image": 1}


def test_images_in_the_folder_that_the_annotations_do_not_name_are_counted(tmp_path):
    folder = write(tmp_path, content()) / "train2017"
    for name in ("x.JPG", "8.png", ".7.jpg", "list.txt"):
        (folder / name).touch()
    assert read_coco(tmp_path, "train2017").left_out == {"images on disk without an entry": 2}


def test_images_in_folders_below_are_counted_if_the_annotations_have_others_there(tmp_path):
    folder = write(tmp_path, content()) / "train2017"
    for name in ("part1/x.jpg", "part1/.y.jpg", "part1/list.txt", "part2/z.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    annotations = content()
    (folder / "9.jpg").rename(folder / "part1" / "9.jpg")
    annotations["images"][2]["file_name"] = "part1/9.jpg"
    write_annotations(tmp_path, annotations)
    assert read_coco(tmp_path, "train2017").left_out == {"images on disk without an entry": 1}


def test_files_are_the_same_however_the_annotations_write_their_names(tmp_path):
    annotations = content()
    folder = write(tmp_path / "data", annotations) / "train2017"
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    (folder / "9.jpg").rename(tmp_path / "elsewhere" / "9.jpg")
    names = [f"{tmp_path}/link/train2017/7.jpg", "../train2017/./3.jpg", f"{tmp_path}/elsewhere/9.jpg"]
    for image, name in zip(annotations["images"], names, strict=True):
        image["file_name"] = name
    write_annotations(tmp_path / "data", annotations)
    split = read_coco(tmp_path / "data", "train2017")
    assert split.names.tolist() == [b"7.jpg", b"3.jpg", os.fsencode(names[2])]
    assert split.left_out == {}  # no file is counted as one without an entry
    check_headers(split.folder, split.names, split.ids, split.sizes)


@pytest.mark.parametrize("alias", ["./7.jpg", "../train2017/7.jpg", "{folder}/train2017/7.jpg"])
def test_a_file_that_two_images_name_differently_is_refused(tmp_path, alias):
    annotations = content()
    annotations["images"][2]["file_name"] = alias.format(folder=tmp_path)
    with pytest.raises(DataError, match=r"image 9: file_name is .*7\.jpg', as of image 7; expected each file once"):
        read_coco(write(tmp_path, annotations), "train2017")


@pytest.mark.parametrize("name", ["./a\0/b.jpg", "/a\0.jpg", "./\ud800/b.jpg"])
def test_a_name_that_no_file_can_have_is_that_of_a_missing_image(tmp_path, name):
    annotations = content()
    annotations["images"][2]["file_name"] = name
    with pytest.raises(DataError, match=r"1 of the 3 images of instances_train2017\.json are not there; .*image 9"):
        read_coco(write(tmp_path, annotations), "train2017")


def test_a_folder_or_a_link_to_nothing_is_a_missing_image_before_training(tmp_path):
    folder = write(tmp_path, content()) / "train2017"
    (folder / "3.jpg").unlink()
    (folder / "3.jpg").mkdir()
    (folder / "9.jpg").unlink()
    (folder / "9.jpg").symlink_to(tmp_path / "gone.jpg")
    with pytest.raises(DataError, match=r"train2017: 2 of the 3 images .* are not there; the first is '3\.jpg'"):
        read_coco(tmp_path, "train2017")


# pycocotools would not count such an object, whatever is detected.
@pytest.mark.parametrize("area", [-1, 1.1e10])
def test_an_area_with_which_an_object_would_not_be_counted_is_an_error(tmp_path, area):
    annotations = content()
    annotations["annotations"][1]["area"] = area
    with pytest.raises(
        DataError, match=r"annotation 12 \(image 3\): area is .*; expected a finite number, from 0 to 10"
    ):
        read_coco(write(tmp_path, annotations), "train2017")


# The last one has a width, but in 32 bits it ends where it begins.
@pytest.mark.parametrize("box", [[10, 5, 0, 10], [10, 5, 5, -2], [30, 5, 20, 10], [50, 5, 5, 5], [30, 5, 1e-6, 10]])
def test_a_bad_box_is_named_left_out_and_counted(tmp_path, caplog, box):
    annotations = content()
    annotations["annotations"][3]["bbox"] = box
    with caplog.at_level(logging.WARNING):
        split = read_coco(write(tmp_path, annotations), "train2017")
    assert split.left_out == {"bad boxes": 1}
    assert len(split.boxes) == 3
    assert (
        "instances_train2017.json: 1 of 4 boxes are empty or outside of their images (annotation 14: x" in caplog.text
    )


def test_a_box_that_is_outside_because_the_size_of_its_image_is_wrong_is_an_error(tmp_path):
    annotations = content()
    annotations["images"][1]["width"] = 20  # image 3, whose file has 40x30 pixels and whose only box is as wide
    with pytest.raises(DataError, match=r"3\.jpg \(image 3 of the annotations\): 40x30 pixels; expected 20x30"):
        read_coco(write(tmp_path, annotations), "train2017")


@pytest.mark.parametrize(
    ("fractions", "within"),
    [
        ([[0.25, 0.17, 0.5, 0.33], [0, 0, 1, 1], [0.03, 0.07, 0.07, 0.13], [0.1, 0.13, 0.2, 0.27]], 4),
        # Both sums are above 1 by rounding: 0.005 and 0.995, and 0.335 and 0.665.
        ([[0.01, 0.34, 1.0, 0.67], [0, 0, 1, 1], [0.03, 0.07, 0.07, 0.13], [0.1, 0.13, 0.2, 0.27]], 4),
        ([[0.25, 0.17, 0.5, 0.33], [0, 0, 1, 1], [0.03, 0.07, 0.07, 0.13], [4, 4, 8, 8]], 3),
    ],
    ids=["exactly", "rounded", "all but one"],
)
def test_boxes_that_are_fractions_of_their_images_are_an_error(tmp_path, fractions, within):
    annotations = content()
    for annotation, box in zip(annotations["annotations"], fractions, strict=True):
        annotation["bbox"] = box
    says = rf"instances_train2017\.json: {within} of 4 boxes end within the first pixel .* in pixels: correct"
    with pytest.raises(DataError, match=says):
        read_coco(write(tmp_path, annotations), "train2017")


def test_tiny_boxes_in_the_corner_of_their_images_are_boxes(tmp_path):
    annotations = content()
    for annotation in annotations["annotations"][:2]:
        annotation["bbox"] = [0, 0, 1, 1]
    assert len(read_coco(write(tmp_path, annotations), "train2017").boxes) == 4


def test_an_image_that_only_viewers_turn_is_said_to_be_one(tmp_path):
    folder = write(tmp_path, content())
    path = folder / "train2017" / "9.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(path).save(path, exif=exif)
    split = read_coco(folder, "train2017")
    check_headers(split.folder, split.names, split.ids, split.sizes)  # its pixels are those of the annotations
    last = slice(2, 3)
    with pytest.raises(DataError, match=r"9\.jpg .*: 40x30 pixels; expected 30x40: viewers turn it as its EXIF"):
        check_headers(split.folder, split.names[last], split.ids[last], split.sizes[last, ::-1])


def test_headers_of_images_are_checked_and_the_others_counted(tmp_path):
    folder = write(tmp_path, content())
    split = read_coco(folder, "train2017")
    check_headers(split.folder, split.names, split.ids, split.sizes)
    (folder / "train2017" / "3.jpg").write_bytes(b"no image")
    (folder / "train2017" / "9.jpg").write_bytes(b"")
    message = r"3\.jpg \(image 3 of the annotations\): not a readable image .*; 1 other images have problems, too"
    with pytest.raises(DataError, match=message):
        check_headers(split.folder, split.names, split.ids, split.sizes)


def test_many_bad_boxes_are_an_error_since_the_format_is_another_one(tmp_path):
    annotations = content()
    for annotation in annotations["annotations"]:
        x, y, w, h = annotation["bbox"]
        annotation["bbox"] = [x + 20, y, x + w + 20, y + h]  # x1, y1, x2, y2
    with pytest.raises(DataError, match=r"4 of 4 boxes .*annotation 11: .*expected bbox = x, y, width, height"):
        read_coco(write(tmp_path, annotations), "train2017")


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one entry, such as annotations.0.bbox; with ... as the value it is removed."""

    def apply(annotations: dict[str, Any]) -> None:
        target: Any = annotations
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
        for key in parents:
            target = target[key]
        if value is ...:
            del target[last]
        else:
            target[last] = value

    return apply


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (change("images", ...), "it has no list 'images' of objects; expected COCO's instances file"),
        (change("annotations", {}), "it has no list 'annotations' of objects"),
        (change("categories", [1]), "it has no list 'categories' of objects"),
        (change("annotations", []), "it has no annotations; expected boxes"),
        (change("categories", []), "it has no categories"),
        (change("images", []), "it has no images"),
        (change("images.0.id", ...), "image number 1 has the id None; expected a whole number"),
        (change("images.1.id", 7), "two entries have the image id 7; expected each id once"),
        (change("images.1.file_name", ...), "image 3: file_name is None; expected the name of its file"),
        (change("images.1.width", 0), "image 3: width is 0; expected a whole number of pixels, from 1 to 1,000,000"),
        (change("images.1.height", "30"), "image 3: height is '30'; expected a whole number"),
        (
            change("images.1.file_name", "no.jpg"),
            r"1 of the 3 images .* are not there; the first is 'no.jpg' \(image 3\)",
        ),
        (change("images.1.file_name", "a" * 5000), r"the first is 'a+\.\.\.a+' \(image 3\); get the missing images"),
        (change("images.1.file_name", "\0"), r"the first is '\\x00' \(image 3\)"),
        (
            change("images.1.file_name", "7.jpg"),
            "image 3: file_name is '7.jpg', as of image 7; expected each file once",
        ),
        (change("categories.0.id", 2), "two entries have the category id 2"),
        (change("annotations.1.id", 11), "two entries have the annotation id 11"),
        (change("annotations.1.id", "12"), "annotation number 2 has the id '12'"),
        (change("annotations.1.image_id", 8), "annotation 12: image_id is 8, which no image has; correct or remove"),
        (change("annotations.1.category_id", 3), "annotation 12: category_id is 3; expected one of the 2 categories"),
        (change("annotations.1.image_id", [3]), r"annotation 12: image_id is \[3\], which no image has"),
        (change("annotations.1.category_id", {}), "annotation 12: category_id is {}; expected one of the 2 categories"),
        (change("annotations.1.bbox", ...), r"annotation 12 \(image 3\): bbox is None; expected four finite numbers"),
        (change("annotations.1.bbox", [1, 2, 3]), r"annotation 12 .* bbox is \[1, 2, 3\]; expected four"),
        (change("annotations.1.bbox", [1, 2, math.nan, 3]), r"annotation 12 .* bbox is \[1, 2, nan, 3\]"),
        (change("annotations.1.area", math.inf), r"annotation 12 .* area is inf; expected a finite number"),
        (change("annotations.1.area", 10**400), r"annotation 12 .* area is 10+\.\.\.0+; expected a finite number"),
        (change("annotations.1.bbox", [1, 2, 10**400, 3]), r"annotation 12 .* bbox is \[1, 2, 10+\.\.\.0+, 3\]"),
        (change("annotations.1.id", 10**30), "annotation number 2 has the id 10+; expected .* at most 15 digits"),
        (change("images.1.id", 10**15), "image number 2 has the id 10+; expected a whole number of at most 15 digits"),
        (change("categories.0.id", 10**400), r"category number 1 has the id 10+\.\.\.0+; expected a whole number"),
        (change("images.1.width", 10**30), "image 3: width is 10+; expected .* from 1 to 1,000,000"),
        (change("annotations.1.iscrowd", "no"), r"annotation 12 \(image 3\): iscrowd is 'no'; expected 0 or 1"),
        (change("annotations.1.iscrowd", None), r"annotation 12 .* iscrowd is None; expected 0 or 1"),
        (change("annotations.1.iscrowd", 2), r"annotation 12 .* iscrowd is 2; expected 0 or 1"),
        (change("categories.0.id", True), "category number 1 has the id True"),
    ],
)
def test_a_broken_annotation_file_is_refused_with_the_file_and_the_id(tmp_path, broken, message):
    annotations = content()
    broken(annotations)
    with pytest.raises(DataError, match=message) as error:
        read_coco(write(tmp_path, annotations), "train2017")
    assert "train2017" in str(error.value)


@pytest.mark.parametrize("key", ["image_id", "category_id"])
def test_true_is_not_the_id_1(tmp_path, key):
    annotations = content()
    annotations["images"][0]["id"] = annotations["categories"][0]["id"] = 1
    for annotation in annotations["annotations"]:
        annotation["image_id"] = annotation["category_id"] = 1
    annotations["annotations"][1][key] = True
    with pytest.raises(DataError, match=f"instances_train2017.json: annotation 12: {key} is True"):
        read_coco(write(tmp_path, annotations), "train2017")


def test_a_box_as_large_as_numbers_are_is_outside_and_has_no_area(tmp_path):
    annotations = content()
    annotations["annotations"][1] |= {"bbox": [0, 0, 10**300, 10**300], "area": 1.0}
    assert read_coco(write(tmp_path, annotations), "train2017").left_out == {"bad boxes": 1}
    del annotations["annotations"][1]["area"]
    with pytest.raises(DataError, match=r"annotation 12 .* area is inf; expected a finite number"):
        read_coco(write(tmp_path, annotations), "train2017")


def test_json_that_is_too_deep_is_named(tmp_path):
    write(tmp_path, content())
    path = tmp_path / "annotations" / "instances_train2017.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(DataError, match=r"instances_train2017\.json: lists or objects inside of too many others"):
        read_coco(tmp_path, "train2017")


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"instances_train2017.json: there is no such file; expected COCO's layout"):
        read_coco(tmp_path, "train2017")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"instances_train2017.json: there is no such file; expected COCO's layout"):
        read_coco(tmp_path / "file", "train2017")
    folder = write(tmp_path, content(), "train2014")
    with pytest.raises(DataError, match=r"there are instances_train2014.json: give their year"):
        read_coco(folder, "train2017")
    path = folder / "annotations" / "instances_train2014.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(DataError, match=r"instances_train2014.json: not a readable JSON file \(.*get the file again"):
        read_coco(folder, "train2014")
    path.write_text(json.dumps(content()))
    (folder / "train2014").rename(folder / "elsewhere")
    with pytest.raises(DataError, match=r"train2014: cannot be read .*expected the folder of the images"):
        read_coco(folder, "train2014")


def test_a_damaged_image_or_one_of_another_size_is_named_when_it_is_decoded(tmp_path):
    images = CocoImages(read_coco(write(tmp_path, content()), "train2017"), size=64, augment=False)
    path = tmp_path / "train2017" / "3.jpg"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"3\.jpg \(image 3 of the annotations\): not a readable image"):
        images[1]
    Image.new("RGB", (41, 30)).save(path)
    with pytest.raises(DataError, match=r"3\.jpg \(image 3 of the annotations\): 41x30 pixels; expected 40x30"):
        images[1]


def test_without_augmentation_boxes_are_scaled_with_their_image(tmp_path):
    images = CocoImages(read_coco(write(tmp_path, content()), "train2017"), size=80, augment=False)
    batch, targets = collate_detection([images[0], images[2]])
    assert batch.shape == (2, 3, 80, 80)
    assert batch.dtype == torch.uint8
    # 40x30 becomes 80x80: x times 2, y times 8/3.
    torch.testing.assert_close(targets[0]["boxes"][0], torch.tensor([20, 40 / 3, 60, 40]))
    assert targets[0]["size"].tolist() == [30, 40]
    assert targets[0]["image_id"] == 7
    assert targets[1]["boxes"].shape == (0, 4)


@pytest.mark.parametrize(("width", "height"), [(2, 1), (2, 2), (3, 3), (30, 3), (4, 4)])
def test_images_of_a_few_pixels_are_augmented_without_an_error(tmp_path, width, height):
    annotations = content()
    annotations["images"] = [{"id": 7, "file_name": "7.jpg", "width": width, "height": height}]
    box = {"image_id": 7, "category_id": 2, "bbox": [0, 0, width, height]}
    annotations["annotations"] = [{"id": 11, **box}, {"id": 12, **box}]
    write(tmp_path, annotations)
    Image.new("RGB", (width, height), (9, 200, 3)).save(tmp_path / "train2017" / "7.jpg")
    images = CocoImages(read_coco(tmp_path, "train2017"), size=64, augment=True)
    torch.manual_seed(0)
    for _ in range(60):
        assert images[0][0].shape == (3, 64, 64)


def test_an_error_in_a_transform_names_the_image(tmp_path):
    def fails(image, target):
        raise ZeroDivisionError("division by zero")

    images = CocoImages(read_coco(write(tmp_path, content()), "train2017"), size=64, augment=False)
    images.transform = fails
    with pytest.raises(DataError, match=r"3\.jpg \(image 3 of the annotations\): the transform of this image raised Z"):
        images[1]


def test_augmented_boxes_are_inside_the_image_and_never_empty(shared):
    split = read_coco(shared / "data" / "coco_tiny", "train2017").without_empty_images()
    assert split.left_out == {"crowd boxes": 2}
    images = CocoImages(split, size=64, augment=True)
    torch.manual_seed(0)
    counts = set()
    for index in range(12):
        image, target = images[index]
        assert image.shape == (3, 64, 64)
        boxes = target["boxes"]
        assert len(boxes) == len(target["labels"]) <= split.first[index + 1] - split.first[index]
        assert ((boxes >= 0) & (boxes <= 64)).all()
        assert (boxes[:, 2:] > boxes[:, :2]).all()
        counts.add(len(boxes) == split.first[index + 1] - split.first[index])
    assert counts == {True, False}  # crops leave boxes out


@pytest.mark.process
def test_augmentation_does_not_depend_on_the_number_of_loader_processes(tmp_path):
    """So torchvision draws from the global generators only, which are seeded for every request."""
    split = read_coco(write(tmp_path, content()), "train2017").without_empty_images()
    request = Request(5, (0, 1) * 18)
    batches = []
    for loader_workers in (0, 1):
        reader = SampleReader(
            CocoImages(split, size=64, augment=True),
            loader_workers=loader_workers,
            prefetch=64,
            collate_fn=collate_detection,
        )
        torch.manual_seed(loader_workers)  # what the caller drew before does not matter
        batches.append(reader.read(request)[0])
        reader.close()
    torch.testing.assert_close(batches[0], batches[1], rtol=0, atol=0)


# Mean average precision ----------------------------------------------------------------------------------------------


class Answers(torch.nn.Module):
    """Detects what it is told to, in pixels of an 80x80 input, for each image of the batch."""

    def __init__(self, answers: list[list[tuple[list[float], int, float]]]) -> None:
        super().__init__()
        self.answers = answers

    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        return [
            {
                "boxes": torch.tensor([box for box, _, _ in found]).reshape(-1, 4),
                "labels": torch.tensor([label for _, label, _ in found], dtype=torch.int64),
                "scores": torch.tensor([score for _, _, score in found]),
            }
            for found in self.answers
        ]


def measure(split: CocoSplit, answers: list[list[tuple[list[float], int, float]]]) -> dict[str, float]:
    images = CocoImages(split, size=80, augment=False)
    metric = CocoMetric(split, size=80)
    metric.update(Answers(answers), *collate_detection([images[i] for i in range(len(images))]))
    return metric.compute()


# The boxes of `content` in pixels of the input: x times 2, y times 8/3.
BIG, WHOLE, SMALL, CROWD = [20.0, 40 / 3, 60, 40], [0.0, 0, 80, 80], [8.0, 32 / 3, 24, 32], [2.0, 16 / 3, 8, 16]


def test_perfect_detections_have_the_precision_1(tmp_path, capsys):
    split = read_coco(write(tmp_path, content()), "train2017")
    found = measure(split, [[(BIG, 2, 0.9), (SMALL, 1, 0.8)], [(WHOLE, 1, 0.9)], []])
    assert found == pytest.approx({"map": 1, "map50": 1, "map75": 1, "map_small": 1, "map_medium": 1})
    assert capsys.readouterr().out == ""  # pycocotools prints


def test_the_precision_of_a_case_by_hand(tmp_path):
    """Category 2: its one box is found, after a wrong one with a higher score: precision 1/2 at every recall.

    Category 1 has two boxes. One is found with an overlap of 0.72, which counts up to 0.70, that is at 5 of the 10
    thresholds; the other one is missed. At 5 thresholds precision is 1 for the recalls 0, 0.01, ... 0.50, which are 51
    of the 101 that are averaged, and 0 for the others.
    """
    split = read_coco(write(tmp_path, content()), "train2017")
    part = [0.0, 0, 80, 80 * 0.72]  # of WHOLE
    found = measure(split, [[(BIG, 2, 0.5)], [(part, 1, 0.9), ([0.0, 0, 9, 9], 2, 0.8)], []])
    assert found["map50"] == pytest.approx((1 / 2 + 51 / 101) / 2)
    assert found["map75"] == pytest.approx((1 / 2 + 0) / 2)
    assert found["map"] == pytest.approx((1 / 2 + 51 / 101 / 2) / 2)


def test_a_detection_of_a_crowd_is_neither_right_nor_wrong(tmp_path):
    split = read_coco(write(tmp_path, content()), "train2017")
    right = [[(BIG, 2, 0.9), (SMALL, 1, 0.8)], [(WHOLE, 1, 0.9)], []]
    right[0].append((CROWD, 1, 0.99))
    assert measure(split, right)["map"] == pytest.approx(1)


def test_detections_on_an_image_without_boxes_are_wrong(tmp_path):
    split = read_coco(write(tmp_path, content()), "train2017")
    found = measure(split, [[(BIG, 2, 0.9), (SMALL, 1, 0.8)], [(WHOLE, 1, 0.9)], [(WHOLE, 2, 0.95)]])
    assert found["map"] == pytest.approx((1 + 1 / 2) / 2)  # of category 2, the second of two detections is right


def test_no_detection_at_all_has_the_precision_0(tmp_path):
    split = read_coco(write(tmp_path, content()), "train2017")
    assert measure(split, [[], [], []]) == {"map": 0, "map50": 0, "map75": 0, "map_small": 0, "map_medium": 0}
