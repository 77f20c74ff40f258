"""Workloads on ImageNet, and on any other images in one of three layouts.

    DIR/train/CLASS/*.jpg, DIR/val/CLASS/*.jpg                   (`image_folders.py`)
    DIR/NAME-train-000000.tar, ..., DIR/NAME-val-000000.tar, ... (`image_shards.py`)
    DIR/dataset_dict.json, ...                                   (`saved_datasets.py`)

The networks are those of torchvision, and timm's MobileNet. Training images are random crops of 8 to 100 % of the area,
mirrored with probability 1/2; of a validation image, the shorter side is resized to 8/7 of the crop, which is taken
from the centre (Goyal et al. 2017). The papers of the recipes do not describe their augmentation. Colours are not
changed, and labels are not smoothed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from ebbflow.engines.replica_step import Loss
from ebbflow.errors import ConfigError, DataError
from ebbflow.workloads.image_files import IMAGENET_MEAN, IMAGENET_STD
from ebbflow.workloads.image_folders import ImageFolder, Transform
from ebbflow.workloads.image_shards import ImageShards, find_shards
from ebbflow.workloads.prefetch import DatasetSource
from ebbflow.workloads.saved_datasets import SavedImages, is_saved, read_saved
from ebbflow.workloads.torchvision_import import import_timm, import_torchvision, pickle_with_torchvision
from ebbflow.workloads.workload import Recipe, Task, cross_entropy, missing_data, register_workload

__all__ = [
    "GOYAL", "folder_resnet18", "folder_resnet50", "image_task", "imagenet_inceptionv3", "imagenet_mobilenet",
    "imagenet_resnet50", "imagenet_vgg16bn", "plain_batch_norms",
]  # fmt: skip

_LAYOUTS = (
    "train/CLASS/*.jpg and val/CLASS/*.jpg, shards train-000000.tar and val-000000.tar (or NAME-train-...), or a "
    "DatasetDict that Hugging Face datasets saved"
)

# The warm-up of five epochs has no effect at the reference batch; at other batches it belongs to the rule:
# linear+warmup(5ep).
GOYAL = Recipe(
    ref_batch=256,
    local_batch=32,
    lr=0.1,
    optimizer="sgd(momentum=0.9, weight_decay=1e-4)",
    schedule="multistep(30ep, 60ep, 80ep, factor=0.1)",
    epochs=90,
    metric="accuracy",
)
_LIN = Recipe(
    ref_batch=1024,
    local_batch=128,
    lr=0.4,
    optimizer="sgd(momentum=0.9, weight_decay=1e-4, decay_norms=false)",
    schedule="warmup(5ep)+cosine",
    epochs=90,
    metric="accuracy",
)


@register_workload("folder-resnet18", recipe=GOYAL, cite="Goyal et al. 2017 (recipe)")
def folder_resnet18(data: Path | None, recipe: Recipe, size: int = 224, zero_init_residual: bool = False) -> Task:
    """ResNet-18 on images in folders, one per class, or in tar shards; arguments as for `imagenet-resnet50`."""
    return _resnet("folder-resnet18", "resnet18", data, recipe, size, zero_init_residual)


@register_workload("folder-resnet50", recipe=GOYAL, cite="Goyal et al. 2017 (recipe)")
def folder_resnet50(data: Path | None, recipe: Recipe, size: int = 224, zero_init_residual: bool = False) -> Task:
    """ResNet-50 on images in folders, one per class, or in tar shards; arguments as for `imagenet-resnet50`."""
    return _resnet("folder-resnet50", "resnet50", data, recipe, size, zero_init_residual)


_ANDRE = "Andre, Strati, Klimovic 2022 (recipe, from Goyal et al. 2017)"


@register_workload("imagenet-resnet50", recipe=GOYAL, cite=_ANDRE)
def imagenet_resnet50(data: Path | None, recipe: Recipe, size: int = 224, zero_init_residual: bool = False) -> Task:
    """ResNet-50 on ImageNet, in folders or tar shards.

    With `zero_init_residual` the last batch norm of each residual block begins with a weight of 0, as in Goyal et al.
    """
    return _resnet("imagenet-resnet50", "resnet50", data, recipe, size, zero_init_residual)


@register_workload("imagenet-vgg16bn", recipe=GOYAL, cite=_ANDRE)
def imagenet_vgg16bn(data: Path | None, recipe: Recipe, size: int = 224) -> Task:
    """VGG-16 with batch norm and dropout on ImageNet, in folders or tar shards.

    `size` is at least 32. Andre et al. use lr 0.1 with the square root rule, and 0.0177 with linear and AdaScale.
    """
    return image_task(
        "imagenet-vgg16bn", lambda classes: _torchvision("vgg16_bn", classes), data, recipe, size, least=32
    )


@register_workload("imagenet-mobilenet", recipe=_LIN, cite="Lin et al. 2019 (recipe)")
def imagenet_mobilenet(data: Path | None, recipe: Recipe, size: int = 224) -> Task:
    """MobileNet 1.0 (the first version) on ImageNet, in folders or tar shards."""

    def model(classes: int) -> nn.Module:
        timm = import_timm(needed_for="imagenet-mobilenet")
        network: nn.Module = timm.create_model("mobilenetv1_100", num_classes=classes)
        plain_batch_norms(network)
        # timm's initial logits are the larger the fewer classes there are; torch's are as timm's for 1,000 classes.
        network.get_submodule("classifier").reset_parameters()  # type: ignore[operator]
        return network

    return image_task("imagenet-mobilenet", model, data, recipe, size)


@register_workload("imagenet-inceptionv3", recipe=_LIN, cite="Lin et al. 2019 (recipe)")
def imagenet_inceptionv3(data: Path | None, recipe: Recipe, size: int = 299) -> Task:
    """Inception V3 with its auxiliary classifier on ImageNet, in folders or tar shards.

    `size` is at least 299. The loss is the cross-entropy plus 0.4 times that of the auxiliary classifier, as in the
    published training code of this network. Lin et al. do not say whether they used it.
    """

    def model(classes: int) -> nn.Module:
        # `init_weights` is the initialisation of the paper, a truncated normal distribution.
        return _torchvision("inception_v3", classes, aux_logits=True, init_weights=True)

    return image_task("imagenet-inceptionv3", model, data, recipe, size, least=299, loss=_inception_loss)


def _inception_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = model(x)
    if isinstance(outputs, Tensor):  # in eval mode, the auxiliary classifier is not used
        return F.cross_entropy(outputs, y)
    return F.cross_entropy(outputs.logits, y) + 0.4 * F.cross_entropy(outputs.aux_logits, y)


def _resnet(name: str, model: str, data: Path | None, recipe: Recipe, size: int, zero_init_residual: bool) -> Task:
    return image_task(
        name, lambda classes: _torchvision(model, classes, zero_init_residual=zero_init_residual), data, recipe, size
    )


def _torchvision(model: str, classes: int, **settings: bool) -> nn.Module:
    models = import_torchvision("models", needed_for=f"the model {model}")
    network: nn.Module = getattr(models, model)(num_classes=classes, **settings)
    return network


def plain_batch_norms(network: nn.Module) -> None:
    """Separate norm and activation where timm computes both in one module.

    The batch norm of such a module could not be fused over virtual workers.
    """
    timm = import_timm(needed_for="a network of timm")
    for name, module in list(network.named_modules()):
        if isinstance(module, timm.layers.BatchNormAct2d):
            norm = nn.BatchNorm2d(module.num_features, eps=module.eps, momentum=module.momentum)
            norm.load_state_dict(module.state_dict())
            network.set_submodule(name, nn.Sequential(norm, module.drop, module.act))


def image_task(
    name: str,
    model: Callable[[int], nn.Module],
    data: Path | None,
    recipe: Recipe,
    size: int,
    *,
    least: int = 1,
    loss: Loss = cross_entropy,
) -> Task:
    """Return the task; `model` maps the number of classes to the network, which takes images of `least` or more."""
    if data is None:
        raise missing_data(name, f"the folder that holds {_LAYOUTS}")
    if size < least:
        raise ConfigError(f"{name}: size is {size}; expected {least} or more")
    (train, valid), classes = _read_images(data, size)
    valid.check_headers()  # a damaged image would otherwise end the run after its first epoch
    return Task(
        model=pickle_with_torchvision(model(classes)),
        train=DatasetSource(train, mean=IMAGENET_MEAN, std=IMAGENET_STD),
        valid=DatasetSource(valid, mean=IMAGENET_MEAN, std=IMAGENET_STD),
        recipe=recipe,
        loss=loss,
        eval_batch=100,  # a forward pass of VGG-16 needs about 40 MB per image
    )


Images = tuple[ImageFolder, ImageFolder] | tuple[ImageShards, ImageShards] | tuple[SavedImages, SavedImages]


def _read_images(data: Path, size: int) -> tuple[Images, int]:
    """Return the training and validation images and the number of classes."""
    random, central = _transforms(size)
    if is_saved(data):  # asked first: its splits are folders, too
        saved = read_saved(data)
        images = SavedImages(saved.train, random)
        return (images, SavedImages(saved.valid, central, classes=images.classes)), images.classes
    shards = find_shards(data)
    if (data / "train").is_dir():
        for path in (*shards["train"], *shards["val"]):
            raise DataError(f"{path}: a shard beside the folder train; expected one of both: move the other elsewhere")
        train, valid = ImageFolder(data / "train", random), ImageFolder(data / "val", central)
        for part, others in ((train, valid), (valid, train)):
            for name in sorted({*part.classes} - {*others.classes}):
                raise DataError(f"{part.folder / name}: {others.folder} lacks this class; expected it in both")
        return (train, valid), len(train.classes)
    if not (shards["train"] and shards["val"]):
        found = ", ".join(f"{len(paths)} {part} shards" for part, paths in shards.items())
        raise DataError(f"{data}: no folder train, and {found}; expected {_LAYOUTS}")
    training = ImageShards(shards["train"], random)
    return (training, ImageShards(shards["val"], central, classes=training.classes)), training.classes


def _transforms(size: int) -> tuple[Transform, Transform]:
    """Return the transforms of training and validation images."""
    transforms = import_torchvision("transforms", needed_for="cropping images")
    random = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    central = [transforms.Resize(round(size * 256 / 224)), transforms.CenterCrop(size)]
    random, central = (
        pickle_with_torchvision(transforms.Compose([*parts, transforms.PILToTensor()])) for parts in (random, central)
    )
    return random, central
