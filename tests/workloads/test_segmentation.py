"""Segmentation: folders of images and masks, crops, the loss over pixels, the metrics, and errors about wrong files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ebbflow import workloads
from ebbflow.errors import ConfigError, DataError
from ebbflow.workloads.segmentation import (
    VOID,
    MaskClasses,
    ResizeImage,
    SegmentationFolder,
    SegmentationMetric,
    pixel_cross_entropy,
    random_scale_crop,
)
from ebbflow.workloads.torchvision_import import import_torchvision
from workloads.fresh_process import unpickled_in_a_fresh_process
from workloads.png_files import COLOURS, png

CAMVID = MaskClasses(classes=11, void=11)


def save_image(path: Path, *, width: int = 40, height: int = 30) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Brighter from left to right, so that a mirrored image can be recognised.
    pixels = np.zeros((height, width, 3), dtype=np.uint8) + np.arange(width, dtype=np.uint8)[None, :, None]
    Image.fromarray(pixels).save(path)


def save_mask(path: Path, *, width: int = 40, height: int = 30, value: int | None = None) -> None:
    """Save the mask of `save_image`: the class of a pixel is its column modulo 4, or `value`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = np.tile(np.arange(width, dtype=np.uint8) % 4, (height, 1)) if value is None else None
    Image.fromarray(np.full((height, width), value, dtype=np.uint8) if numbers is None else numbers).save(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    for part, count in (("train", 4), ("val", 2)):
        for i in range(count):
            save_image(tmp_path / part / "images" / f"{i}.{['jpg', 'png'][i % 2]}", width=40 + i)
            save_mask(tmp_path / part / "masks" / f"{i}.png", width=40 + i)
    return tmp_path


def opened(folder: Path, values: MaskClasses = CAMVID, size: int = 32) -> SegmentationFolder:
    part = folder / "train"
    return SegmentationFolder(part / "images", part / "masks", values=values, transform=ResizeImage(size))


# ---- reading ----


def test_images_and_masks_are_paired_by_their_names(folder):
    samples = opened(folder)
    assert len(samples) == 4
    for i, (image, mask) in enumerate(samples[i] for i in range(4)):
        assert image.dtype == mask.dtype == torch.uint8
        assert type(image) is type(mask) is torch.Tensor
        # The shorter side of 30 becomes 32 x 520/480 = 34.67, rounded to 35; the longer side follows.
        assert image.shape == (3, 35, int(35 * (40 + i) / 30))
        assert mask.shape == (30, 40 + i)
        assert mask[0].tolist() == [column % 4 for column in range(40 + i)]


@pytest.mark.parametrize(
    ("classes", "void", "numbers", "expected"),
    [
        (150, 0, [0, 1, 2, 150], [VOID, 0, 1, 149]),  # ADE20K
        (11, 11, [0, 10, 11], [0, 10, VOID]),  # camvid_tiny
        (21, 255, [0, 20, 255], [0, 20, VOID]),  # Pascal VOC
        (3, 1, [0, 1, 2, 3], [0, VOID, 1, 2]),
    ],
)
def test_the_numbers_of_a_mask_become_indices_of_classes(classes, void, numbers, expected):
    assert MaskClasses(classes=classes, void=void).indices(np.array(numbers), "a.png").tolist() == expected


@pytest.mark.parametrize(
    ("mode", "dtype"), [("palette", np.uint8), ("16 bits", np.uint16), ("black and white", np.bool_)]
)
def test_masks_of_every_kind_with_one_number_per_pixel_are_read(folder, mode, dtype):
    numbers = np.tile(np.arange(40) % 2, (30, 1)).astype(dtype)
    image = Image.fromarray(numbers)
    if mode == "palette":
        image.putpalette([200, 0, 0, 0, 200, 0])
        assert image.mode == "P"
    image.save(folder / "train" / "masks" / "0.png")
    assert opened(folder)[0][1].tolist() == numbers.astype(int).tolist()


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_the_numbers_of_a_grey_mask_are_those_in_the_file_whatever_its_bit_depth(folder, bits):
    numbers = np.tile(np.arange(40) % min(2**bits, 12), (30, 1))
    (folder / "train" / "masks" / "0.png").write_bytes(png(numbers, bits=bits))
    mask = opened(folder)[0][1]
    assert mask.where(mask != VOID, 11).tolist() == numbers.tolist()


def test_the_published_layout_of_ade20k_is_found_with_its_150_classes(tmp_path):
    for part in ("training", "validation"):
        root = tmp_path / "ADEChallengeData2016"
        save_image(root / "images" / part / "ADE_1.jpg")
        save_mask(root / "annotations" / part / "ADE_1.png", value=150)
    for data in (tmp_path, root):
        task = workloads.build("ade20k-fcn(size=32)", data=data)
        assert task.train.dataset.values.values == list(range(1, 151))
        assert set(task.valid.batch(np.array([0]), train=False)[1].unique().tolist()) == {149}
        assert task.model.classifier[-1].out_channels == 150


def test_the_network_has_as_many_parameters_as_the_page_says(folder):
    # Only the last layers of the two heads, with 512 and 256 inputs, know the number of classes.
    model = workloads.build("ade20k-fcn(classes=11, void=11, size=32)", data=folder).model
    parameters = sum(tensor.numel() for tensor in model.parameters()) + (150 - 11) * (512 + 1 + 256 + 1)
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()
    assert f"({parameters / 1e6:.1f} million parameters for 150 classes" in page


def test_real_street_scenes_are_read(shared):
    part = shared / "data" / "camvid_tiny" / "val"
    samples = SegmentationFolder(part / "images", part / "masks", values=CAMVID, transform=ResizeImage(96))
    assert len(samples) == 12
    counts = sum(torch.bincount(samples[i][1].flatten(), minlength=256) for i in range(12))
    # The numbers of pixels of each class, counted with numpy in the files.
    assert counts[:11].tolist() == [47935, 136408, 2873, 148452, 46217, 84005, 4253, 14799, 9893, 3756, 11392]
    assert counts[VOID] == 8417


# ---- wrong files ----


def remove(name: str):
    return lambda folder: (folder / "train" / name).unlink()


def write(name: str, content: bytes):
    return lambda folder: (folder / "train" / name).write_bytes(content)


def in_colours(mode: str):
    return lambda folder: Image.new(mode, (40, 30)).save(folder / "train" / "masks" / "0.png")


def emptied(name: str):
    return lambda folder: [file.unlink() for file in (folder / "train" / name).iterdir()]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (remove("masks/1.png"), r"images: 1 file\(s\) without a mask in .*masks: 1\.png; add what is missing"),
        (remove("images/2.jpg"), r"masks: 1 file\(s\) without an image in .*images: 2\.png; add what is missing"),
        (emptied("images"), r"train.images: the folder is empty; expected files \*\.jpg"),
        (emptied("masks"), r"train.masks: the folder is empty; expected files \*\.png"),
        (lambda folder: shutil.rmtree(folder / "train" / "masks"), r"masks: cannot be read \(No such file.*\*\.png"),
        (
            write("images/9.tif", b""),
            r"images: 1 file\(s\) of another kind; expected files \*\.jpg.*: 9\.tif; .*elsewh",
        ),
        (write("masks/0.jpg", b""), r"masks: 1 file\(s\) of another kind; expected files \*\.png: 0\.jpg"),
        (write("images/0.png", b""), r"images: 0\.jpg and 0\.png have the same name; expected one of them"),
        (write("images/0.jpg", b"no image"), r"images.0\.jpg: not a readable image .*get it again"),
        (write("masks/0.png", b""), r"masks.0\.png: not a readable image .*get it again"),
        (in_colours("RGB"), r"masks.0\.png: an image in colours \(Pillow's mode RGB\); expected one number per pixel"),
        (
            lambda folder: Image.new("I;16", (40, 30)).save(folder / "train" / "images" / "0.jpg", format="PNG"),
            r"images.0\.jpg: pixels of type I;16; expected 8 bits per channel, convert the image",
        ),
        (
            lambda folder: (folder / "train" / "images" / "1.png").write_bytes(
                png(np.zeros((30, 41, 3), np.uint16), bits=16, colours=COLOURS)
            ),
            r"images.1\.png: 16 bits per channel; expected 8 bits per channel, convert the image",
        ),
        (
            lambda folder: Image.new("L", (40, 30)).save(folder / "train" / "masks" / "0.png", format="JPEG"),
            r"masks.0\.png: it is a JPEG by its content; expected a PNG, since other formats may change numbers: make",
        ),
        (
            lambda folder: os.mkfifo(folder / "train" / "images" / "9.jpg"),
            r"images: 1 file\(s\) that are folders, pipes or broken links; expected files \*\.jpg.*: 9\.jpg; add",
        ),
        (
            lambda folder: (folder / "train" / "masks" / "9.png").symlink_to("gone.png"),
            r"masks: 1 file\(s\) that are folders, pipes or broken links; expected files \*\.png: 9\.png; add",
        ),
        (in_colours("LA"), r"masks.0\.png: an image in colours \(Pillow's mode LA\)"),
        (
            lambda folder: save_mask(folder / "train" / "masks" / "0.png", width=30, height=40),
            r"images.0\.jpg has 40x30 pixels, but .*masks.0\.png has 30x40; expected a mask of the image's own size",
        ),
    ],
)
def test_wrong_files_are_named_before_training(folder, change, says):
    change(folder)
    with pytest.raises(DataError, match=says):
        workloads.build("ade20k-fcn(classes=11, void=11, size=32)", data=folder)


def test_an_image_that_only_viewers_turn_is_said_to_be_one(folder):
    path, mask = folder / "train" / "images" / "0.jpg", folder / "train" / "masks" / "0.png"
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.open(path).save(path, exif=exif)
    opened(folder)
    Image.open(mask).transpose(Image.Transpose.ROTATE_90).save(mask)
    with pytest.raises(DataError, match=r"0\.jpg has 40x30 pixels, but .*0\.png has 30x40; .*: viewers turn it as its"):
        opened(folder)


def test_hidden_files_are_ignored_and_several_problems_are_counted(folder):
    write("images/.DS_Store", b"")(folder)
    assert len(opened(folder)) == 4
    for name in ("0.png", "2.png"):
        write(f"masks/{name}", b"no image")(folder)
    with pytest.raises(DataError, match=r"0\.png: not a readable image .*; 1 other samples have problems, too"):
        opened(folder)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        (
            np.full((30, 40), 12, np.uint8),
            r"0\.png: 1200 pixels have the value 12; expected the classes 0 to 10, and 11",
        ),
        (np.full((30, 40), 260, np.uint16), r"1200 pixels have the value 260; .*the arguments classes= and void="),
        (
            np.arange(1200, dtype=np.uint16).reshape(30, 40),
            r"1188 pixels have the value 12, 13, 14, 15, 16, \.\.\.; exp",
        ),
    ],
)
def test_unknown_classes_are_named_when_the_mask_is_read(folder, numbers, says):
    Image.fromarray(numbers).save(folder / "train" / "masks" / "0.png")
    source = workloads.DatasetSource(opened(folder))
    with pytest.raises(DataError, match=says):
        source.batch(np.array([0]), train=True)


@pytest.mark.parametrize("part", ["train", "val"])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (12, "pixels have the value 12; expected the classes 0 to 10"),
        (11, r"masks that were read have the value 11, v"),
    ],
)
def test_classes_that_do_not_fit_the_masks_are_named_before_training(folder, part, value, says):
    for mask in (folder / part / "masks").iterdir():
        save_mask(mask, width=40 + int(mask.stem), value=value)
    with pytest.raises(DataError, match=rf"{part}/masks.*{says}"):
        workloads.build("ade20k-fcn(classes=11, void=11, size=32)", data=folder)


def with_40_samples(folder, part):
    for i in range(4, 40):
        save_image(folder / part / "images" / f"{i:02}.png")
        save_mask(folder / part / "masks" / f"{i:02}.png", value=11)


def test_of_many_training_masks_some_are_read_the_last_one_too(folder):
    with_40_samples(folder, "train")
    samples = opened(folder)
    samples.check_masks(16)  # some of the first four have classes
    save_mask(folder / "train" / "masks" / "39.png", value=12)
    with pytest.raises(DataError, match=r"39\.png: 1200 pixels have the value 12"):
        samples.check_masks(16)


@pytest.mark.parametrize("number", range(4, 40, 5))
def test_each_of_many_validation_masks_is_read_before_training(folder, number):
    with_40_samples(folder, "val")
    save_mask(folder / "val" / "masks" / f"{number:02}.png", value=12)
    with pytest.raises(DataError, match=rf"val/masks/{number:02}\.png: 1200 pixels have the value 12"):
        workloads.build("ade20k-fcn(classes=11, void=11, size=32)", data=folder)


@pytest.mark.parametrize("name", ["images/0.jpg", "masks/0.png"])
def test_a_file_that_is_cut_short_is_named_when_it_is_read(folder, name):
    pixels = np.random.default_rng(0).integers(0, 11, (90, 120)).astype(np.uint8)  # noise: much longer than a header
    for other in ("images/0.jpg", "masks/0.png"):
        Image.fromarray(pixels).save(folder / "train" / other)
    path = folder / "train" / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    samples = opened(folder)
    with pytest.raises(DataError, match=rf"{name}: not a readable image .*get it again"):
        samples[0]


def test_an_error_in_a_transform_names_the_image(folder):
    def fails(image, mask):
        raise ZeroDivisionError("division by zero")

    part = folder / "train"
    samples = SegmentationFolder(part / "images", part / "masks", values=CAMVID, transform=fails)
    with pytest.raises(DataError, match=r"1\.png: the transform of this image raised ZeroDivisionError: division by"):
        samples[1]


def test_a_mask_that_changes_its_size_during_training_is_named(folder):
    samples = opened(folder)
    save_mask(folder / "train" / "masks" / "0.png", width=20)
    with pytest.raises(DataError, match=r"0\.jpg has 40x30 pixels, but .*0\.png has 20x30"):
        samples[0]


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (
            "ade20k-fcn",
            ConfigError,
            r"do not say what the numbers in the masks mean; .*ade20k-fcn\(classes=11, void=11\)",
        ),
        ("ade20k-fcn(classes=11)", ConfigError, "do not say what the numbers"),
        ("ade20k-fcn(classes=1, void=0)", ConfigError, "classes is 1; expected 2 to 254"),
        ("ade20k-fcn(classes=300, void=0)", ConfigError, "classes is 300; expected 2 to 254"),
        ("ade20k-fcn(classes=2, void=-1)", ConfigError, "void is -1; expected 0 to 255"),
        ("ade20k-fcn(classes=11, void=11, size=8)", ConfigError, "size is 8; expected 32 or more"),
    ],
)
def test_wrong_arguments_are_explained(folder, text, kind, says):
    with pytest.raises(kind, match=says):
        workloads.build(text, data=folder)


def test_a_folder_of_another_layout_is_told_which_are_read(tmp_path):
    with pytest.raises(DataError, match=r"neither train/images nor images/training .*\{train,val\}/images/\*\.jpg"):
        workloads.build("ade20k-fcn", data=tmp_path)
    with pytest.raises(DataError, match=r"ade20k-fcn needs its data: .*ADEChallengeData2016"):
        workloads.build("ade20k-fcn")


@pytest.mark.slow
def test_the_backbone_begins_with_the_weights_of_a_file(folder, tmp_path):
    weights = import_torchvision(needed_for="this test").models.resnet50(weights=None).state_dict()
    torch.save(weights, tmp_path / "resnet50.pth")
    text = f"ade20k-fcn(classes=11, void=11, size=32, backbone={tmp_path}/"
    model = workloads.build(f"{text}resnet50.pth)", data=folder).model
    assert torch.equal(model.backbone.conv1.weight, weights["conv1.weight"])
    assert torch.equal(model.backbone.layer4[2].conv3.weight, weights["layer4.2.conv3.weight"])

    del weights["layer4.2.conv3.weight"]
    torch.save(weights, tmp_path / "incomplete.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "text.pth").write_text("no weights")
    for name, says in (
        ("missing", "backbone is .*missing.pth, which is not there; expected the file of a state dict"),
        ("incomplete", r"incomplete.pth: 'layer4\.2\.conv3\.weight' is missing"),
        ("list", "list.pth: holds a list; expected a state dict"),
        ("text", "text.pth: not a readable state dict"),
    ):
        with pytest.raises(DataError, match=says):
            workloads.build(f"{text}{name}.pth)", data=folder)


@pytest.mark.process
def test_samples_and_model_can_be_sent_to_a_process_that_has_not_imported_torchvision(folder, tmp_path):
    task = workloads.build("ade20k-fcn(classes=11, void=11, size=32)", data=folder)
    assert unpickled_in_a_fresh_process(task, tmp_path, "model(sample)['out'].shape") == "[3, 32, 32] [1, 11, 35, 46]"


def test_the_recipe_is_the_paper_s():
    recipe = workloads.recipe("ade20k-fcn")
    # Lin et al. 2019, section 5.3: batch 16 of eight GPUs, batch norm over 16, rate 0.1, cosine.
    assert (recipe.ref_batch, recipe.local_batch, recipe.lr, recipe.schedule) == (16, 16, 0.1, "cosine")
    assert recipe.metric == "miou"
    assert recipe.higher_is_better


# ---- crops ----


def test_training_crops_have_one_size_and_image_and_mask_stay_together(folder):
    samples = SegmentationFolder(
        folder / "train" / "images", folder / "train" / "masks", values=CAMVID, transform=random_scale_crop(32)
    )
    # Class 1 where the image is bright, so that a mask that was moved against its image is noticed. The image is grey.
    bright = np.zeros((60, 80), np.uint8)
    bright[:, 20:50] = 1
    Image.fromarray(np.stack([50 + 150 * bright] * 3, axis=2)).save(folder / "train" / "images" / "1.png")
    Image.fromarray(bright).save(folder / "train" / "masks" / "1.png")
    torch.manual_seed(0)
    padded, whole = 0, 0
    for _ in range(60):
        image, mask = samples[1]
        assert image.shape == (3, 32, 32)
        assert mask.shape == (32, 32)
        assert set(mask.unique().tolist()) <= {0, 1, VOID}
        void = mask == VOID
        assert (image[:, void] == 0).all(), "what was added to a small image is black"
        # Only at an edge between classes may interpolation give a pixel of the other side's brightness.
        assert ((image[0] > 125) == (mask == 1)).float().mean() > 0.9
        padded += bool(void.any())
        whole += not void.any()
    # The shorter side is drawn from 17 to 69; below 32 there is void: 15 of 53 draws, 0.28.
    assert 5 < padded < 30
    assert whole > 25


def test_half_of_the_crops_are_mirrored_and_draws_depend_on_the_seed_only(folder):
    samples = SegmentationFolder(
        folder / "train" / "images", folder / "train" / "masks", values=CAMVID, transform=random_scale_crop(32)
    )
    torch.manual_seed(0)
    lit = [image[0].float().sum(0) for image, _ in (samples[1] for _ in range(60))]
    rising = [float(row[row > 0][-1]) > float(row[row > 0][0]) for row in lit]
    assert 15 < sum(rising) < 45

    source = workloads.DatasetSource(samples)
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(source.batch(np.array([0, 1, 2]), train=True))
    for first, second in zip(*draws, strict=True):
        assert torch.equal(first, second)


# ---- loss and metrics ----


class Fixed(nn.Module):
    """Returns the logits that it was given, whatever the images are."""

    def __init__(self, **logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.ParameterDict({name: nn.Parameter(value) for name, value in logits.items()})

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(self.logits)


def test_the_loss_sums_over_the_pixels_that_are_not_void():
    # One image of 1x3 pixels, two classes. The probabilities of class 0 are 0.5, 0.8 (odds 4) and anything at void.
    out = torch.tensor([[0.0, 4.0, 7.0], [0.0, 1.0, 1.0]]).log()
    out[:, 0] = 0.0
    model = Fixed(out=out[None, :, None, :])
    masks = torch.tensor([[[1, 0, VOID]]], dtype=torch.uint8)
    loss = pixel_cross_entropy(model, torch.zeros(1), masks)
    # -ln 0.5 - ln 0.8 = ln 2 + ln 1.25 = ln 2.5
    assert loss.total.item() == pytest.approx(np.log(2.5), rel=1e-6)
    assert int(loss.count) == 2

    # The auxiliary head says 0.5 everywhere: 0.5 x (ln 2 + ln 2) = ln 2 more.
    model = Fixed(out=out[None, :, None, :], aux=torch.zeros(1, 2, 1, 3))
    loss = pixel_cross_entropy(model, torch.zeros(1), masks)
    assert loss.total.item() == pytest.approx(np.log(5), rel=1e-6)
    assert int(loss.count) == 2


def test_an_image_that_is_all_void_counts_nothing():
    model = Fixed(out=torch.randn(1, 2, 4, 4))
    loss = pixel_cross_entropy(model, torch.zeros(1), torch.full((1, 4, 4), VOID, dtype=torch.uint8))
    loss.total.backward()
    assert loss.total.item() == int(loss.count) == 0
    assert not model.logits["out"].grad.any()


def logits_of(classes: list[list[int]], count: int) -> torch.Tensor:
    return nn.functional.one_hot(torch.tensor(classes), count).permute(2, 0, 1)[None].float()


def test_accuracy_and_iou_are_those_of_the_whole_set():
    metric = SegmentationMetric(4)
    # First image: two pixels of class 0, both right; one of class 1, taken for 0; one void, predicted as 3.
    metric.update(Fixed(out=logits_of([[0, 0], [0, 3]], 4)), None, torch.tensor([[[0, 0], [1, VOID]]]))
    # Second image: one of class 1, right; one of class 0, taken for 2.
    metric.update(Fixed(out=logits_of([[1, 2]], 4)), None, torch.tensor([[[1, 0]]]))
    # Right: 3 of 5 pixels. IoU of 0: 2 hits, 3 in the masks, 3 predicted: 2/4. Of 1: 1 hit, 2 in the masks, 1
    # predicted: 1/2. Of 2: no hit, in no mask, 1 predicted: 0/1. Class 3 is predicted only at void: it is left out.
    # The mean of 1/2, 1/2 and 0 is 1/3. (The mean of the two images' own values would be another: 7/12 and 1/3.)
    assert metric.compute() == pytest.approx({"pixel_accuracy": 3 / 5, "miou": 1 / 3})


def test_the_metric_does_not_depend_on_the_batches():
    torch.manual_seed(0)
    logits, masks = torch.randn(6, 5, 8, 8), torch.randint(0, 5, (6, 8, 8))
    masks[torch.rand(6, 8, 8) < 0.2] = VOID
    results = []
    for size in (1, 2, 6):
        metric = SegmentationMetric(5)
        for part, mask in zip(logits.split(size), masks.split(size), strict=True):
            metric.update(Fixed(out=part), None, mask.to(torch.uint8))
        results.append(metric.compute())
    assert results[0] == results[1] == results[2]


def test_predictions_are_compared_at_the_size_of_the_mask():
    # Logits for 1x2 pixels, a mask of 2x4: each prediction covers its half of the mask.
    metric = SegmentationMetric(2)
    metric.update(Fixed(out=logits_of([[0, 1]], 2)), None, torch.tensor([[[0, 0, 1, 1], [0, 0, 1, 0]]]))
    # Of 8 pixels 7 are right. Class 0: 4 hits of 5; class 1: 3 hits of 4.
    assert metric.compute() == pytest.approx({"pixel_accuracy": 7 / 8, "miou": (4 / 5 + 3 / 4) / 2})


def test_a_validation_set_without_any_class_is_refused():
    metric = SegmentationMetric(2)
    with pytest.raises(DataError, match="all pixels of the validation masks are void"):
        metric.compute()
    metric.update(Fixed(out=logits_of([[0, 1]], 2)), None, torch.full((1, 1, 2), VOID))
    with pytest.raises(DataError, match="all pixels of the validation masks are void"):
        metric.compute()
