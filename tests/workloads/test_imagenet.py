"""The ImageNet workloads on small sets of real photographs, in folders and in shards."""

from __future__ import annotations

import dataclasses
import io
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn

from ebbflow import workloads
from ebbflow.errors import ConfigError, DataError, MissingExtra
from ebbflow.record import Run, StepRow
from ebbflow.run.config import RunConfig
from ebbflow.run.loop import Callbacks
from ebbflow.run.training import train
from ebbflow.workloads import DatasetSource, Recipe, Task, image_shards
from ebbflow.workloads.imagenet import _inception_loss
from workloads.fresh_process import unpickled_in_a_fresh_process

IMAGENET = ["imagenet-resnet50", "imagenet-vgg16bn", "imagenet-mobilenet", "imagenet-inceptionv3"]
SIZES = {"imagenet-inceptionv3": 299}
"""The image size of a test; the others take 32 pixels."""


def photographs(part: str) -> list[tuple[str, Image.Image]]:
    """Parts of scikit-learn's photographs of a temple and a flower: eight of each for training, four for validation."""
    found = []
    for name, pixels in zip(("temple", "flower"), load_sample_images().images, strict=True):
        for number in range(12):
            left, upper = 110 * (number % 4), 120 * (number // 4)
            if (number % 3 == 2) == (part == "val"):
                found.append((name, Image.fromarray(pixels).crop((left, upper, left + 200, upper + 150))))
    return found


def make_folder(folder: Path, *, every: int = 1) -> Path:
    for part in ("train", "val"):
        for number, (name, image) in enumerate(photographs(part)[::every]):
            path = folder / part / name / f"{number:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
    return folder


def make_shards(folder: Path, *, images_per_shard: int = 6) -> Path:
    folder.mkdir(exist_ok=True)
    # In the order of the folders: flower is class 0.
    for part in ("train", "val"):
        images = sorted(enumerate(photographs(part)), key=lambda item: (item[1][0], item[0]))
        for shard, start in enumerate(range(0, len(images), images_per_shard)):
            with tarfile.open(folder / f"imagenet-{part}-{shard:06}.tar", "w") as tar:
                for number, (name, image) in images[start : start + images_per_shard]:
                    content = io.BytesIO()
                    image.save(content, "JPEG")
                    for suffix, data in (("jpg", content.getvalue()), ("cls", str(int(name == "temple")).encode())):
                        member = tarfile.TarInfo(f"{name}_{number}.{suffix}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return make_shards(tmp_path_factory.mktemp("shards"))


class Killed(BaseException):
    """A kill -9, as far as the run is concerned."""


def build(name: str, data: Path) -> Task:
    return workloads.build(f"{name}(size={SIZES.get(name, 32)})", data=data)


def run(data: Path, out: Path, *, kill_at: int | None = None, **settings: object) -> Run:
    def kill(row: StepRow) -> None:
        if row.step == kill_at:
            raise Killed

    chosen = {
        "workload": "imagenet-mobilenet(size=32)", "data": str(data), "epochs": 2, "local_batch": 4,
        "trace": "constant(workers=2)", "loader_workers": 0, "lr": 0.01, "schedule": "constant",
    }  # fmt: skip
    every = {} if kill_at is None else {"checkpoint_every_s": 0}
    return train(RunConfig(**chosen | settings), out, callbacks=Callbacks(on_step=kill), **every)


# ---- networks and recipes ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As published for 1,000 classes, less the 998 that are not here in each of the last linear layers.
        ("imagenet-resnet50", 25_557_032 - 998 * 2049),
        ("imagenet-vgg16bn", 138_365_992 - 998 * 4097),
        ("imagenet-mobilenet", 4_231_976 - 998 * 1025),
        ("imagenet-inceptionv3", 27_161_264 - 998 * (2049 + 769)),  # one of them is the auxiliary classifier's
        ("folder-resnet18", 11_689_512 - 998 * 513),
        ("folder-resnet50", 25_557_032 - 998 * 2049),
    ],
)
def test_the_networks_are_those_of_the_papers_and_train_on_real_photographs(name, parameters, folder):
    task = build(name, folder)
    assert task.describe()["parameters"] == parameters
    x, y = task.train.batch(np.array([0, 9]), train=True)
    loss = task.require_loss()(task.model, x, y)
    loss.backward()
    assert torch.isfinite(loss)
    for label, parameter in task.model.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.isfinite().all(), label
    assert task.model.eval()(x).shape == (2, 2)


@pytest.mark.parametrize(
    ("name", "blocks"), [("folder-resnet18", 8), ("folder-resnet50", 16), ("imagenet-resnet50", 16)]
)
def test_residual_blocks_begin_with_nothing_if_asked_for(name, blocks, folder):
    for text, expected in ((f"{name}(size=32)", 0), (f"{name}(size=32, zero_init_residual=true)", blocks)):
        norms = [
            module
            for module in workloads.build(text, data=folder).model.modules()
            if isinstance(module, nn.BatchNorm2d)
        ]
        assert sum(not norm.weight.any() for norm in norms) == expected


def test_the_recipes_are_those_of_the_papers():
    # Lin et al. start from 1,024 samples on 8 GPUs at 0.4; Andre et al. from 256 at 0.1.
    for name in IMAGENET:
        recipe = workloads.recipe(name)
        lin = name in ("imagenet-mobilenet", "imagenet-inceptionv3")
        assert (recipe.ref_batch, recipe.lr, recipe.local_batch) == ((1024, 0.4, 128) if lin else (256, 0.1, 32))
        assert recipe.epochs == 90
        assert ("decay_norms=false" in recipe.optimizer) == lin


def test_the_loss_of_inception_adds_four_tenths_of_the_auxiliary_one(folder):
    class Outputs(nn.Module):
        """Twice the same logits in training, as Inception's two classifiers would give them."""

        def forward(self, x: torch.Tensor) -> object:
            from torchvision.models.inception import InceptionOutputs

            return InceptionOutputs(x, x) if self.training else x

    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    plain = nn.functional.cross_entropy(x, y)
    workloads.build("imagenet-mobilenet(size=32)", data=folder)  # imports torchvision
    torch.testing.assert_close(_inception_loss(Outputs(), x, y), 1.4 * plain)
    torch.testing.assert_close(_inception_loss(Outputs().eval(), x, y), plain)


@pytest.mark.parametrize(("name", "least"), [("imagenet-inceptionv3", 299), ("imagenet-vgg16bn", 32)])
def test_images_that_are_too_small_for_a_network_are_refused(name, least, folder):
    with pytest.raises(ConfigError, match=rf"{name}: size is {least - 1}; expected {least} or more"):
        workloads.build(f"{name}(size={least - 1})", data=folder)


# ---- images ----


def test_validation_images_are_the_centre_and_are_standardised_after_they_are_read(folder):
    task = build("imagenet-mobilenet", folder)
    assert isinstance(task.valid, DatasetSource)
    raw = task.valid.dataset[0][0].float()
    assert raw.shape == (3, 32, 32)
    with Image.open(sorted((folder / "val" / "flower").iterdir())[0]) as image:
        # 200 x 150: the shorter side becomes 32 * 256/224 = 37, so that 32 of 37 rows are 130 of 150.
        centre = image.resize((32, 32), Image.Resampling.BILINEAR, box=(35, 10, 165, 140))
    assert (raw - torch.from_numpy(np.array(centre)).permute(2, 0, 1).float()).abs().mean() < 6
    mean, std = (torch.tensor(v)[:, None, None] for v in ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)))
    torch.testing.assert_close(task.valid.batch(np.array([0]), train=False)[0][0], (raw - mean) / std)


def test_training_images_are_cropped_at_random_and_half_of_them_mirrored(tmp_path):
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            # Brighter from left to right and from top to bottom.
            rising = np.add.outer(np.arange(90), np.arange(120)).astype(np.uint8)
            Image.fromarray(np.stack([rising] * 3, axis=-1)).save(tmp_path / part / name / "0.png")
    task = build("imagenet-mobilenet", tmp_path)
    assert isinstance(task.train, DatasetSource)
    pixels = torch.stack([task.train.dataset[0][0][0].float() for _ in range(200)])
    mirrored = int((pixels[:, 16, 0] > pixels[:, 16, -1]).sum())
    assert 70 < mirrored < 130
    assert bool((pixels[:, 0].mean(1) < pixels[:, -1].mean(1)).all())  # never upside down
    widths = (pixels[:, 16].amax(1) - pixels[:, 16].amin(1)) / 120
    # 8 to 100 % of the area at aspect ratios from 3:4 to 4:3: widths from 0.08 * 90 * 120 * 3/4 = 25 of 120 pixels.
    assert 0.15 < widths.min() < 0.5
    assert 0.8 < widths.max() <= 1


def test_shards_hold_the_same_samples_as_folders(folder, shards):
    one, two = (build("imagenet-mobilenet", data) for data in (folder, shards))
    assert (len(one.train), len(one.valid)) == (len(two.train), len(two.valid)) == (16, 8)
    for source, other in ((one.train, two.train), (one.valid, two.valid)):
        for a, b in zip(*(s.batch(np.arange(8), train=False) for s in (source, other)), strict=True):
            assert torch.equal(a, b)


# ---- runs ----


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "fused"])
@pytest.mark.parametrize(
    "name",
    [
        "imagenet-resnet50",
        "imagenet-inceptionv3",
        pytest.param("imagenet-vgg16bn", marks=pytest.mark.long),  # 138 M parameters
    ],
)
def test_every_network_is_trained_for_an_epoch(name, engine, tmp_path):
    data = make_folder(tmp_path, every=4)  # four images
    chosen = f"{name}(size={SIZES.get(name, 32)})"
    finished = run(data, tmp_path / "run", workload=chosen, engine=engine, epochs=1, local_batch=2)
    assert finished.status == "finished"
    assert [row.samples for row in finished.steps] == [4]
    assert set(finished.validations[-1].metrics) == {"accuracy", "loss"}


def plain_mobilenet(data: Path | None, recipe: Recipe) -> Task:
    """Without augmentation, which draws other numbers if workers are fused, and in double precision."""
    assert data is not None
    # At 64 pixels, the last batch norm sees 2 x 2 positions of four images; with fewer, it magnifies rounding errors.
    task = workloads.build("imagenet-mobilenet(size=64)", data=data)
    assert isinstance(task.valid, DatasetSource)
    images = dataclasses.replace(task.valid, mean=task.valid.mean.double(), std=task.valid.std.double())
    return dataclasses.replace(task, model=task.model.double(), train=images, valid=images, recipe=recipe)


if "test-plain-mobilenet" not in workloads.WORKLOADS.names():
    workloads.register("test-plain-mobilenet", recipe=workloads.recipe("imagenet-mobilenet"))(plain_mobilenet)


@pytest.mark.slow
def test_fused_workers_on_shards_agree_with_the_loop_on_folders(folder, shards, tmp_path):
    loop, fused = (
        run(data, tmp_path / engine, workload="test-plain-mobilenet", engine=engine, epochs=3)
        for engine, data in (("loop", folder), ("fused", shards))
    )
    assert [row.samples for row in loop.steps] == [8, 16, 24]
    assert [row.loss for row in fused.steps] == pytest.approx([row.loss for row in loop.steps], rel=1e-6)
    assert fused.validations[-1].metrics == pytest.approx(loop.validations[-1].metrics, rel=1e-6)


@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_an_interrupted_run_on_shards_is_resumed_exactly(engine, shards, tmp_path):
    whole = run(shards, tmp_path / "whole", engine=engine)
    with pytest.raises(Killed):
        run(shards, tmp_path / "killed", engine=engine, kill_at=2)
    resumed = run(shards, tmp_path / "killed", engine=engine)
    assert [event.what for event in resumed.events] == ["resumed"]
    assert resumed.end is not None and whole.end is not None
    assert resumed.end.weights_sha256 == whole.end.weights_sha256
    assert [row.loss for row in resumed.steps] == [row.loss for row in whole.steps]


@pytest.mark.process
def test_a_run_is_the_same_with_and_without_loader_processes(shards, tmp_path):
    ends = [run(shards, tmp_path / str(workers), loader_workers=workers, epochs=1).end for workers in (0, 2)]
    assert ends[0] is not None and ends[1] is not None
    assert ends[0].weights_sha256 == ends[1].weights_sha256


@pytest.mark.process
@pytest.mark.parametrize("name", ["folder-resnet18", "imagenet-mobilenet"])
def test_samples_and_model_can_be_sent_to_a_process_that_has_not_imported_torchvision(name, shards, tmp_path):
    """The first network is one of torchvision, as most are, the other one of timm."""
    assert unpickled_in_a_fresh_process(build(name, shards), tmp_path, "model(sample).shape") == "[3, 32, 32] [1, 2]"


@pytest.mark.long
@pytest.mark.process
def test_the_workers_of_a_dask_cluster_train_like_those_of_one_process(folder):
    pytest.importorskip("distributed", reason="dask.distributed is not installed (the extra 'dask')")
    from engines.dask_helpers import local_client, trained_weights

    def task() -> Task:
        # Validation images are not augmented: on a cluster, augmentation draws other numbers.
        made = build("imagenet-resnet50", folder)
        return dataclasses.replace(made, train=made.valid)

    with local_client(2) as client:
        found = trained_weights(task(), client)
    torch.testing.assert_close(found, trained_weights(task(), None), rtol=1e-3, atol=1e-4)


def test_photographs_of_coco_are_read_from_shards(shared, tmp_path):
    images = sorted((shared / "data" / "coco_tiny" / "train2017").glob("*.jpg"))[:16]
    for part, files in (("train", images[:12]), ("val", images[12:])):
        with tarfile.open(tmp_path / f"coco-{part}-000000.tar", "w") as tar:
            for number, path in enumerate(files):
                tar.add(path, f"{path.stem}.jpg")
                label = str(number % 2).encode()
                member = tarfile.TarInfo(f"{path.stem}.cls")
                member.size = len(label)
                tar.addfile(member, io.BytesIO(label))
    task = build("imagenet-resnet50", tmp_path)
    x, y = task.train.batch(np.arange(12), train=True)
    assert x.shape == (12, 3, 32, 32)
    assert y.tolist() == [0, 1] * 6


# ---- wrong input ----


def test_missing_data_and_missing_layouts_are_explained(tmp_path):
    with pytest.raises(DataError, match=r"imagenet-vgg16bn needs its data: give with data= .* the folder that holds"):
        workloads.build("imagenet-vgg16bn")
    with pytest.raises(DataError, match="nowhere: cannot be read"):
        build("imagenet-mobilenet", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no folder train, and 0 train shards, 0 val shards; expected train/CLASS/"):
        build("imagenet-mobilenet", tmp_path)
    (tmp_path / "i-train-0.tar").touch()
    with pytest.raises(DataError, match="no folder train, and 1 train shards, 0 val shards"):
        build("imagenet-mobilenet", tmp_path)


def test_shards_beside_folders_are_refused_and_the_archives_of_the_folders_are_not(tmp_path):
    make_folder(tmp_path)
    for name in ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_train_t3.tar", "val.tar.gz"):
        (tmp_path / name).touch()
    assert len(build("imagenet-mobilenet", tmp_path).train) == 16
    (tmp_path / "i-val-000000.tar").touch()
    with pytest.raises(DataError, match=r"i-val-000000\.tar: a shard beside the folder train; expected one of both"):
        build("imagenet-mobilenet", tmp_path)


@pytest.mark.parametrize(("part", "other"), [("val", "train"), ("train", "val")])
def test_a_class_of_one_part_only_is_named(part, other, tmp_path):
    make_folder(tmp_path)
    (tmp_path / part / "bird").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / part / "bird" / "0.png")
    with pytest.raises(DataError, match=rf"{part}/bird: .*/{other} lacks this class; expected it in both"):
        build("imagenet-mobilenet", tmp_path)


def test_a_validation_label_that_training_does_not_have_is_named(tmp_path):
    make_shards(tmp_path)
    with tarfile.open(tmp_path / "imagenet-val-000001.tar", "a") as tar:
        for name, content in (("x.jpg", b"?"), ("x.cls", b"2")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(DataError, match=r"val-000001\.tar: x\.jpg: its label is 2, but the training samples have"):
        build("imagenet-mobilenet", tmp_path)


def test_a_run_ends_at_a_damaged_image_and_names_it(tmp_path):
    data = make_folder(tmp_path / "data")
    damaged = sorted((data / "train" / "temple").iterdir())[3]
    damaged.write_bytes(damaged.read_bytes()[:2000])
    with pytest.raises(DataError, match=rf"temple/{damaged.name}: not a readable image .*truncated"):
        run(data, tmp_path / "run")


def test_validation_images_that_are_none_are_named_before_training(tmp_path):
    data = make_folder(tmp_path / "data")
    damaged = sorted((data / "val").glob("*/*"))[3:5]
    for path in damaged:
        path.write_bytes(b"no image")
    with pytest.raises(
        DataError, match=rf"val/flower/{damaged[0].name}: not a readable image .*; 1 other images have problems, too"
    ):
        build("imagenet-mobilenet", data)
    deep = Image.fromarray(np.full((9, 9), 1000, dtype=np.uint16))
    for path in damaged:
        deep.save(path, "PNG")
    with pytest.raises(DataError, match=rf"val/flower/{damaged[0].name}: pixels of type I.*; expected 8 bits"):
        build("imagenet-mobilenet", data)


def test_validation_images_of_shards_that_are_none_are_named_before_training(tmp_path):
    shard = make_shards(tmp_path, images_per_shard=3) / "imagenet-val-000001.tar"
    member = next(iter(image_shards.index_shard(shard)))
    with shard.open("r+b") as file:
        file.seek(member.offset)
        file.write(b"no image")
    with pytest.raises(DataError, match=rf"val-000001\.tar: {member.member}: not a readable image"):
        build("imagenet-mobilenet", tmp_path)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(package, folder, monkeypatch):
    build("imagenet-mobilenet", folder)
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"needs {package}, which is not installed; run: pip install 'ebbflow\[vis"):
        build("imagenet-mobilenet", folder)
