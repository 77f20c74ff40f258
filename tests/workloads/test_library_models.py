"""Networks of timm, torchvision and transformers by name, on folders, saved data sets and token files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ebbflow
from ebbflow.core.spec import Call, parse_call
from ebbflow.errors import ConfigError, DataError
from ebbflow.workloads import build
from ebbflow.workloads.image_files import decode_image
from ebbflow.workloads.saved_datasets import SavedImages, read_saved
from ebbflow.workloads.torchvision_import import import_timm
from workloads.png_files import COLOURS, GREY, png

for package in ("timm", "transformers"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

import_timm(needed_for="these tests")  # before anything else imports torchvision

CLASSES = 3


def image(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Noise around a grey that depends on the class, number % 3."""
    level = 60 + 60 * (number % CLASSES)
    return np.random.default_rng(number).integers(level - 40, level + 40, (40, 40, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pil = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("photographs")
    for part, count in (("train", 24), ("val", 6)):
        for number in range(count):
            path = folder / part / f"class{number % CLASSES}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pil.fromarray(image(number)).save(path)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images as a DatasetDict, and blocks of tokens as two others."""
    datasets = pytest.importorskip("datasets")
    pil = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("saved")
    splits = {
        part: datasets.Dataset.from_dict(
            {"image": [pil.fromarray(image(n)) for n in range(count)], "label": [n % CLASSES for n in range(count)]},
            features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(CLASSES)}),
        )
        for part, count in (("train", 24), ("validation", 6))
    }
    datasets.DatasetDict(splits).save_to_disk(folder / "images")
    blocks = [[(7 * row + place) % 50 for place in range(9)] for row in range(20)]
    rows = {part: datasets.Dataset.from_dict({"input_ids": blocks}) for part in ("train", "test")}
    datasets.DatasetDict(rows).save_to_disk(folder / "blocks")
    uneven = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2]]})
    datasets.DatasetDict({"train": uneven, "test": uneven}).save_to_disk(folder / "uneven")
    uneven.save_to_disk(folder / "one")
    return folder


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "train.bin"
    (np.arange(400) % 50).astype("<u2").tofile(path)
    return path


def test_the_name_after_a_colon_is_the_first_argument() -> None:
    assert parse_call("timm:resnet18.a1_in1k(size=64)") == Call("timm", ("resnet18.a1_in1k",), (("size", "64"),))
    assert parse_call("hf:gpt2") == parse_call("hf(gpt2)")


def loss_after_an_epoch(workload: str, data: Path, folder: Path) -> float:
    config = ebbflow.RunConfig(
        workload=workload,
        data=str(data),
        trace="constant(workers=2)",
        local_batch=4,
        ref_batch=8,
        epochs=1,
        rule="sqrt",
    )
    loss = ebbflow.train(config, folder).validations[-1].metrics["loss"]
    assert loss is not None
    return loss


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "workload",
    ["timm:resnet10t(size=32)", "timm:vit_tiny_patch16_224(size=32, depth=1)", "torchvision:resnet18(size=32)"],
)
def test_networks_for_images_train_on_folders(workload: str, photographs: Path, tmp_path: Path) -> None:
    assert np.isfinite(loss_after_an_epoch(workload, photographs, tmp_path / "run"))


@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_a_micro_batch_that_is_too_small_for_a_batch_norm_is_explained(
    photographs: Path, tmp_path: Path, engine: str
) -> None:
    """The last layers of a ResNet-18 see a single pixel of an image of 32x32."""
    config = ebbflow.RunConfig(
        workload="folder-resnet18(size=32)", data=photographs, local_batch=1, trace="0s:2 40s", engine=engine,
        loader_workers=0,
    )  # fmt: skip
    says = r"a batch norm gets a single value per channel, .*\(1, 3, 32, 32\)\); expected .* larger local_batch, or mic"
    with pytest.raises(ConfigError, match=says):
        ebbflow.train(config, tmp_path / "run")


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_saved_data_set_holds_the_images_of_the_folder(photographs: Path, saved: Path) -> None:
    """In another order: the folder's is by class. Validation images are not cropped at random."""
    folder, dataset = (build("timm:resnet10t(size=32)", data=path) for path in (photographs, saved / "images"))
    assert folder.valid is not None
    assert dataset.valid is not None
    (x, y), (other, labels) = (source.batch(np.arange(6), train=False) for source in (folder.valid, dataset.valid))
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # by class
    assert torch.equal(x, other[order])
    assert torch.equal(y, labels[order])
    assert folder.describe()["parameters"] == dataset.describe()["parameters"]


@pytest.mark.parametrize(
    ("image", "says"),
    [
        ({"bytes": b"no image", "path": None}, "image 1: not a readable image"),
        (None, "image 1 is empty"),
    ],
)
def test_validation_images_of_a_saved_data_set_that_are_none_are_named_before_training(
    tmp_path: Path, image: object, says: str
) -> None:
    datasets = pytest.importorskip("datasets")
    pil = pytest.importorskip("PIL.Image")
    good = [pil.new("RGB", (8, 8))] * 2
    splits = {
        part: datasets.Dataset.from_dict({"image": images, "label": [0, 1]}).cast_column("image", datasets.Image())
        for part, images in (("train", good), ("test", [good[0], image]))
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=says):
        build("timm:resnet10t(size=32)", data=tmp_path / "saved")


def save_training_images(folder: Path, images: list[bytes]) -> SavedImages:
    """Save these files as training images, and return a reader of them."""
    datasets = pytest.importorskip("datasets")
    rows = {"image": [{"bytes": image, "path": None} for image in images], "label": [*range(len(images))]}
    part = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(folder)
    return SavedImages(read_saved(folder).train, np.asarray)


@pytest.mark.parametrize(
    ("bits", "colours", "says"), [(16, GREY, "pixels of type I;16"), (16, COLOURS, "16 bits per channel")]
)
def test_training_images_of_a_saved_data_set_with_more_than_eight_bits_are_refused(
    tmp_path: Path, bits: int, colours: int, says: str
) -> None:
    numbers = np.full((8, 8, 3) if colours == COLOURS else (8, 8), 300)
    images = save_training_images(tmp_path / "saved", [png(numbers, bits=bits, colours=colours)])
    with pytest.raises(DataError, match=f"saved, split train, column image, image 0: {says}; expected 8 bits per"):
        images[0]


def test_images_of_a_saved_data_set_are_turned_as_viewers_turn_them(tmp_path: Path) -> None:
    """As the page on workloads says; images in folders and shards are not."""
    pil = pytest.importorskip("PIL.Image")
    exif = pil.Exif()
    exif[0x0112] = 6
    pil.new("RGB", (8, 4)).save(tmp_path / "turned.png", exif=exif)
    images = save_training_images(tmp_path / "saved", [(tmp_path / "turned.png").read_bytes()])
    assert images[0][0].shape == (8, 4, 3)
    assert decode_image(tmp_path / "turned.png", "turned.png").size == (8, 4)


def test_a_saved_image_that_cannot_be_decoded_or_transformed_is_named(tmp_path: Path) -> None:
    def fails(image: object) -> torch.Tensor:
        raise ZeroDivisionError("division by zero")

    whole = png(image(0).astype(int), bits=8, colours=COLOURS)
    images = save_training_images(tmp_path / "saved", [whole, whole[: len(whole) // 2]])
    with pytest.raises(DataError, match=r"split train, column image, image 1 cannot be decoded: .*; get it again"):
        images[1]
    images.transform = fails
    with pytest.raises(DataError, match=r"column image, image 0: the transform of this image raised ZeroDivisionErr"):
        images[0]


def test_a_column_of_a_saved_data_set_without_images_is_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"image": ["a.png", "b.png"], "label": [0, 1]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    says = r"saved, split train, column image: it holds Value.*; expected images .* cast the column to datasets\.Image"
    with pytest.raises(DataError, match=says):
        build("timm:resnet10t(size=32)", data=tmp_path / "saved")


@pytest.mark.parametrize(
    ("part", "labels", "says"),
    [
        ("train", [0, None, 1], r"row 1 has no label \(of 1 without one\)"),
        ("test", ["a", "b", "c"], "labels of type string; expected whole numbers: encode"),
        ("test", [0.0, 1.0, 1.5], "labels of type double; expected whole numbers"),
        ("train", [[0], [1], [0]], "labels of type list.*; expected whole numbers"),
        ("test", [-1, -1, -1], "row 0 has the label -1, but labels are numbers from 0 on"),
        ("train", [1, 2, 3], "row 0 has the label 1, but no row has 0; expected 0, 1, 2, ... without gaps"),
        ("train", [0, 1, 3], "row 2 has the label 3, but no row has 2"),
        ("test", [0, 2, 1], "row 1 has the label 2, but the split for training has 0 to 1"),
    ],
)
def test_wrong_labels_of_a_saved_data_set_are_named_with_split_column_and_row(
    tmp_path: Path, part: str, labels: list[object], says: str
) -> None:
    datasets = pytest.importorskip("datasets")
    pil = pytest.importorskip("PIL.Image")
    images = [pil.new("RGB", (8, 8))] * 3
    splits = {
        name: datasets.Dataset.from_dict(
            {"image": images, "label": labels if name == part else [0, 1, 1]},
        ).cast_column("image", datasets.Image())
        for name in ("train", "test")
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=f"saved, split {part}, column label: {says}"):
        build("timm:resnet10t(size=32)", data=tmp_path / "saved")


def test_a_saved_data_set_whose_column_declares_its_classes_need_not_have_all_of_them(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pil = pytest.importorskip("PIL.Image")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(7)})
    rows = {"image": [pil.new("RGB", (8, 8))] * 2, "label": [1, 4]}
    part = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "saved")
    assert build("timm:resnet10t(size=32)", data=tmp_path / "saved").model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_splits_that_cannot_be_used_are_named(saved: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    both = datasets.load_from_disk(saved / "images")
    stored = both["train"].cast_column("image", datasets.Image(decode=False))
    for name, splits, says in (
        ("encoded", {**both, "train": stored}, r"encoded, split train, column image: it holds Image\(.*decode=False\)"),
        ("unlabelled", {**both, "validation": both["validation"].remove_columns("label")}, "split validation: the col"),
        ("empty", {**both, "validation": both["validation"].select([])}, "empty, split validation: "),
        (
            "named",
            {"train": both["train"], "dev": both["train"]},
            "named: the splits are train, dev; expected train and",
        ),
    ):
        datasets.DatasetDict(splits).save_to_disk(tmp_path / name)
        with pytest.raises(DataError, match=says):
            build("timm:resnet10t(size=32)", data=tmp_path / name)
    datasets.DatasetDict({**both, "test": stored}).save_to_disk(tmp_path / "three")
    for arrow in (tmp_path / "three" / "test").glob("*.arrow"):
        arrow.write_bytes(b"damaged")  # the split validation goes before test, which is then not read
    assert len(build("timm:resnet10t(size=32)", data=tmp_path / "three").train) == len(both["train"])
    for arrow in (tmp_path / "three" / "train").glob("*.arrow"):
        arrow.write_bytes(b"damaged")
    with pytest.raises(DataError, match="three, split train: cannot be opened"):
        build("timm:resnet10t(size=32)", data=tmp_path / "three")
    (tmp_path / "three" / "dataset_dict.json").write_text("{")
    with pytest.raises(DataError, match=r"dataset_dict\.json: not a readable list of splits"):
        build("timm:resnet10t(size=32)", data=tmp_path / "three")


SMALL = "n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16"


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_language_model_of_transformers_trains_on_token_files_and_on_saved_blocks(
    tokens: Path, saved: Path, tmp_path: Path
) -> None:
    assert np.isfinite(loss_after_an_epoch(f"hf:gpt2({SMALL}, context=8)", tokens, tmp_path / "tokens"))
    assert np.isfinite(loss_after_an_epoch(f"hf:gpt2({SMALL})", saved / "blocks", tmp_path / "blocks"))


def test_an_image_classifier_of_transformers(photographs: Path) -> None:
    small = "hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32"
    task = build(f"hf:vit({small}, size=32)", data=photographs)
    assert task.evaluate(task.model).keys() == {"accuracy", "loss"}


def test_a_folder_with_a_configuration_is_a_network(tokens: Path, tmp_path: Path) -> None:
    import transformers

    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    folder = tmp_path / "mine"
    transformers.GPT2Config(**shape).save_pretrained(folder)
    by_type = build(f"hf:gpt2({SMALL}, context=8)", data=tokens)
    by_folder = build(f"hf({folder}, context=8)", data=tokens)
    assert by_folder.describe()["parameters"] == by_type.describe()["parameters"]


def test_the_weights_and_outputs_are_those_of_the_library(photographs: Path) -> None:
    """Separating batch norm and activation changes the names of modules, and nothing else."""
    task = build("timm:mobilenetv1_100(size=32)", data=photographs, seed=3)
    torch.manual_seed(3)
    network = import_timm(needed_for="this test").create_model("mobilenetv1_100", num_classes=CLASSES)
    ours, theirs = (list(model.eval().state_dict().values()) for model in (task.model, network))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    x = torch.rand(2, 3, 32, 32)
    assert torch.allclose(task.model(x), network(x), atol=1e-6)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ("timm", "which network"),
        ("timm:resnet81", "similar names: .*resnet"),
        ("torchvision:resnet81", "similar names: .*resnet"),
        ("torchvision:inception_v3", "auxiliary"),
        ("timm:resnet10t(depth=3)", "cannot be made with these arguments"),
        ("hf:gpt22", "similar names: .*gpt2"),
        ("hf:openai/gpt", "nothing is downloaded"),
        ("hf:gpt2(n_layr=1)", "no argument 'n_layr'; did you mean 'n_layer'"),
        ("hf:wav2vec2", "neither a causal language model nor an image classifier"),
    ],
)
def test_wrong_names_and_arguments_are_explained(workload: str, message: str, photographs: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build(workload, data=photographs)


def test_wrong_blocks_are_explained(tokens: Path, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="16 positions"):
        build(f"hf:gpt2({SMALL}, context=17)", data=tokens)
    task = build(f"hf:gpt2({SMALL})", data=saved / "uneven")
    with pytest.raises(DataError, match="row 1 has 2 tokens"):
        task.train.batch(np.array([1]), train=True)
    with pytest.raises(DataError, match="one Dataset; expected a DatasetDict"):
        build(f"hf:gpt2({SMALL})", data=saved / "one")
    with pytest.raises(DataError, match="blocks, split train: the columns are input_ids"):
        build("timm:resnet10t(size=32)", data=saved / "blocks")
    for wrong in ([None, [1, 2, 3]], [[1.5, 2.0, 3.0]], ["a text"], [1, 2], [[1, None, 3]]):
        datasets = pytest.importorskip("datasets")
        datasets.DatasetDict(
            {
                "train": datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]]}),
                "test": datasets.Dataset.from_dict({"input_ids": wrong}),
            }
        ).save_to_disk(tmp_path / "wrong")
        with pytest.raises(DataError, match="split test, column input_ids: row 0 is no list of whole numbers"):
            build(f"hf:gpt2({SMALL})", data=tmp_path / "wrong")
    small = SMALL.replace("vocab_size=50", "vocab_size=9")
    with pytest.raises(DataError, match="vocabulary of 9"):
        build(f"hf:gpt2({small})", data=saved / "blocks").train.batch(np.array([1]), train=True)
