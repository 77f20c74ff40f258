"""Workloads that detect objects: SSD (Liu et al., ECCV 2016) on COCO, with torchvision's parts.

The loss is summed over the anchors and divided by the number of matched anchors of the whole step, as `LossSum`: the
gradient of a step does not depend on how its images are shared by workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ebbflow.engines.loss_sum import LossSum
from ebbflow.errors import ConfigError, DataError
from ebbflow.workloads.coco import CocoImages, CocoMetric, Target, check_headers, collate_detection, read_coco
from ebbflow.workloads.image_files import IMAGENET_MEAN, IMAGENET_STD
from ebbflow.workloads.prefetch import DatasetSource
from ebbflow.workloads.torchvision_import import import_torchvision, load_backbone, pickle_with_torchvision
from ebbflow.workloads.workload import Recipe, Task, missing_data, register_workload

__all__ = ["Detector", "coco_ssd300", "coco_ssd512", "detection_loss", "ssd300", "ssd512"]

_CAFFE = (torch.tensor((123.0, 117.0, 104.0))[:, None, None], torch.ones(3, 1, 1))
"""Mean and standard deviation of inputs, as bytes, of VGG-16's original weights."""
_torchvision = functools.partial(import_torchvision, needed_for="object detection")
_RATIOS = [[2], [2, 3], [2, 3], [2, 3], [2], [2]]


class Detector(nn.Module):
    """A torchvision SSD for batches that are one tensor of standardised images, all of the network's size.

    torchvision's own forward pass resizes and standardises every image, and returns losses that are divided by the
    matched anchors of the batch. Here the data set and the device have done the former, and the latter is left to the
    step.
    """

    def __init__(self, ssd: nn.Module) -> None:
        super().__init__()
        self.ssd: Any = ssd

    def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> Any:
        """Return the loss as a LossSum, or without targets the detections: boxes, scores and labels per image."""
        features = [*self.ssd.backbone(images).values()]
        # Boxes and losses are computed in at least 32 bits: 16 cannot tell neighbouring pixels apart.
        heads: dict[str, Tensor] = self.ssd.head(features)
        outputs = {name: output.to(torch.promote_types(output.dtype, torch.float32)) for name, output in heads.items()}
        anchors = self._anchors(images, features)
        size = tuple(images.shape[-2:])
        if targets is None:
            return self.ssd.postprocess_detections(outputs, [anchors] * len(images), [size] * len(images))
        matches = [self._match(anchors, target["boxes"]) for target in targets]
        losses = self.ssd.compute_loss(targets, outputs, [anchors] * len(images), matches)
        count = sum((match >= 0).sum() for match in matches)
        assert isinstance(count, Tensor)
        return LossSum(sum(losses.values()) * count.clamp(min=1), count)  # torchvision has divided by it

    def _anchors(self, images: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return the anchors of one image; they are the same for all."""
        shapes = [torch.empty(1, 1, *feature.shape[-2:], device=images.device) for feature in features]
        one_image = _torchvision("models.detection").image_list.ImageList(images[:1], [tuple(images.shape[-2:])])
        anchors: Tensor = self.ssd.anchor_generator(one_image, shapes)[0]
        return anchors

    def _match(self, anchors: Tensor, boxes: Tensor) -> Tensor:
        """Return the index of the box of each anchor, -1 where there is none."""
        if not len(boxes):
            return torch.full((len(anchors),), -1, device=anchors.device)
        matches: Tensor = self.ssd.proposal_matcher(_torchvision("ops").box_iou(boxes, anchors))
        return matches


def detection_loss(model: nn.Module, images: Tensor, targets: Sequence[Target]) -> LossSum:
    """Return the loss of a `Detector`, summed over the anchors, and the number of matched anchors."""
    loss: LossSum = model(images, targets)
    return loss


# ---- networks ----


def ssd300(*, classes: int, network: str = "vgg16", size: int = 300, backbone: str = "") -> Detector:
    """Return torchvision's SSD300-VGG16, or the SSD300 of NVIDIA's examples with a ResNet, which Andre et al. trained.

    The ResNet is cut after its third stage, which keeps the resolution of the second (stride 8). `classes` includes
    the background. Only ResNets can have another `size` than 300.
    """
    if network == "vgg16":
        if size != 300:
            raise ConfigError(f"size is {size}, but SSD300 with VGG-16 has 300 only; use network=resnet18 or resnet50")
        models = _torchvision("models.detection")
        ssd = models.ssd300_vgg16(weights=None, weights_backbone=None, num_classes=classes)
        if backbone:
            # The convolutions of VGG-16 from the fourth pooling on are in `extra`.
            features = nn.ModuleList([*ssd.backbone.features, *ssd.backbone.extra[0][:-1]])
            load_backbone(nn.ModuleDict({"features": features}), backbone)
        return Detector(ssd)
    resnet = _resnet(network, backbone)
    for module in resnet.layer3[0].modules():
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
    widths = [512, 512, 256, 256, 256]
    # The last two lead from 5x5 to 3x3 to 1x1. The maps of smaller images have no room for that.
    unpadded = 2 if size == 300 else 0
    extra = _extra_layers(_channels(resnet.layer3), widths, narrow=2, side=-(-size // 8), unpadded=unpadded)
    return _resnet_detector(
        [_stem(resnet), *extra],
        [_channels(resnet.layer3), *widths],
        scales=[0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05],
        steps=[8, 16, 32, 64, 100, 300] if size == 300 else None,
        size=size,
        classes=classes,
    )


def ssd512(*, classes: int, network: str = "resnet50", size: int = 512, backbone: str = "") -> Detector:
    """Return SSD512 with a ResNet as GluonCV has it (`ssd_512_resnet50_v1_coco`), which Lin et al. trained.

    Feature maps are those of the third and fourth stage (strides 16 and 32) and of four more layers. torchvision's
    ResNet-50 has its strides in the 3x3 convolutions, GluonCV's in the 1x1.
    """
    resnet = _resnet(network, backbone)
    fourth = _channels(resnet.layer4)
    widths = [512, 512, 256, 256]
    extra = _extra_layers(fourth, widths, narrow=1, side=-(-size // 32), unpadded=0)
    return _resnet_detector(
        [_stem(resnet), resnet.layer4, *extra],
        [_channels(resnet.layer3), fourth, *widths],
        scales=[0.1, 0.26, 0.42, 0.58, 0.74, 0.9, 1.06],  # GluonCV's 51.2, 133.12, ... 542.72 pixels of 512
        steps=None,
        size=size,
        classes=classes,
    )


class _FeatureMaps(nn.Module):
    """Stages that follow each other, and the output of each as a feature map."""

    def __init__(self, stages: Sequence[nn.Module], out_channels: list[int]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.out_channels = out_channels

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = {}
        for number, stage in enumerate(self.stages):
            maps[str(number)] = x = stage(x)
        return maps


def _resnet(network: str, backbone: str) -> Any:
    models = _torchvision("models")
    if network not in ("resnet18", "resnet34", "resnet50"):
        raise ConfigError(f"network is {network!r}; expected resnet18, resnet34 or resnet50 (for SSD300 also vgg16)")
    resnet = getattr(models, network)(weights=None)
    if backbone:
        load_backbone(resnet, backbone)
    return resnet


def _stem(resnet: Any) -> nn.Sequential:
    """Return a ResNet up to its third stage."""
    return nn.Sequential(
        resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool, resnet.layer1, resnet.layer2, resnet.layer3
    )


def _channels(stage: nn.Module) -> int:
    """Return the output channels of a stage of a ResNet: those of its last convolution."""
    return [module for module in stage.modules() if isinstance(module, nn.Conv2d)][-1].out_channels


def _extra_layers(before: int, widths: Sequence[int], *, narrow: int, side: int, unpadded: int) -> list[nn.Module]:
    """Return pairs of a 1x1 convolution, with 1/narrow of the width, and a 3x3 convolution that halves the map.

    The last `unpadded` ones instead make it two pixels smaller. `side` is that of the map before them.
    """
    layers: list[nn.Module] = []
    for number, width in enumerate(widths, start=1):
        after, stride, padding = ((side + 1) // 2, 2, 1) if number <= len(widths) - unpadded else (side - 2, 1, 0)
        middle = width // narrow
        layers.append(
            nn.Sequential(
                nn.Conv2d(before, middle, 1, bias=False),
                _norm(middle, side),
                nn.ReLU(inplace=True),
                nn.Conv2d(middle, width, 3, stride=stride, padding=padding, bias=False),
                _norm(width, after),
                nn.ReLU(inplace=True),
            )
        )
        before, side = width, after
    for module in nn.ModuleList(layers).modules():
        if isinstance(module, nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
    return layers


def _norm(channels: int, side: int) -> nn.Module:
    """Return a batch norm, or nothing for a map of one pixel: a worker with one image has no variance there."""
    return nn.BatchNorm2d(channels) if side > 1 else nn.Identity()


def _resnet_detector(
    stages: Sequence[nn.Module],
    out_channels: list[int],
    *,
    scales: list[float],
    steps: list[int] | None,
    size: int,
    classes: int,
) -> Detector:
    models = _torchvision("models.detection")
    anchors = models.anchor_utils.DefaultBoxGenerator(_RATIOS, scales=scales, steps=steps)
    return Detector(models.ssd.SSD(_FeatureMaps(stages, out_channels), anchors, (size, size), classes))


# ---- workloads ----


# Andre et al., section 4.3: 65 epochs, 2.7e-3 at 32 images, decay at 43 and 54, a linear warm-up of 1000 steps.
# Momentum, and weight decay on neither biases nor norms: NVIDIA's examples, which the paper names as its source.
@register_workload(
    "coco-ssd300",
    recipe=Recipe(
        ref_batch=32,
        local_batch=32,
        lr=2.7e-3,
        optimizer="sgd(momentum=0.9, weight_decay=5e-4, decay_norms=false)",
        schedule="warmup(1000steps)+multistep(43ep, 54ep, factor=0.1)",
        epochs=65,
        metric="map",
    ),
    cite="Andre, Strati, Klimovic 2022 (recipe); Liu et al., ECCV 2016 (model)",
)
def coco_ssd300(
    data: Path | None,
    recipe: Recipe,
    network: str = "vgg16",
    backbone: str = "",
    size: int = 300,
    augment: bool = True,
    year: int = 2017,
) -> Task:
    """SSD300 on COCO, with VGG-16 or a ResNet.

    Andre et al. have `network=resnet50`. `backbone` is the file of a state dict, with which the network begins.
    """
    return _task("coco-ssd300", ssd300, data, recipe, network, backbone, size, augment, year)


# Lin et al., section 5.2: 0.008 at 256 images on 32 GPUs, cosine, 5 epochs of warm-up. It gives no number of epochs, no
# momentum and no weight decay: those of GluonCV's train_ssd.py.
@register_workload(
    "coco-ssd512",
    recipe=Recipe(
        ref_batch=256,
        local_batch=8,
        lr=8e-3,
        optimizer="sgd(momentum=0.9, weight_decay=5e-4)",
        schedule="warmup(5ep)+cosine",
        epochs=240,
        metric="map",
    ),
    cite="Lin et al. 2019 (recipe); Liu et al., ECCV 2016 (model)",
)
def coco_ssd512(
    data: Path | None,
    recipe: Recipe,
    network: str = "resnet50",
    backbone: str = "",
    size: int = 512,
    augment: bool = True,
    year: int = 2017,
) -> Task:
    """SSD512 on COCO, with a ResNet; `backbone` as for `coco-ssd300`."""
    return _task("coco-ssd512", ssd512, data, recipe, network, backbone, size, augment, year)


def _task(
    name: str,
    model: Callable[..., Detector],
    data: Path | None,
    recipe: Recipe,
    network: str,
    backbone: str,
    size: int,
    augment: bool,
    year: int,
) -> Task:
    if data is None:
        raise missing_data(name, f"the folder that holds annotations/instances_train{year}.json and train{year}/*.jpg")
    if size < 64:
        raise ConfigError(f"{name}: size is {size}; expected 64 or more")
    splits = [read_coco(data, f"{split}{year}") for split in ("train", "val")]
    if splits[0].categories != splits[1].categories:
        different = {*splits[0].categories.items()} ^ {*splits[1].categories.items()}
        raise DataError(f"{data}: train and val have different categories: {sorted(different)[0]} is in one of them")
    train, valid = splits[0].without_empty_images(), splits[1]
    if not len(train.ids) or not (~valid.crowd).any():
        raise DataError(f"{data}: {'no training' if not len(train.ids) else 'no validation'} image has a usable box")
    check_headers(valid.folder, valid.names, valid.ids, valid.sizes)
    # SSD's weights of VGG-16 (torchvision's VGG16_Weights.IMAGENET1K_FEATURES) are for bytes minus their mean.
    mean, std = _CAFFE if network == "vgg16" and backbone else (IMAGENET_MEAN, IMAGENET_STD)
    source = functools.partial(DatasetSource, mean=mean, std=std, collate_fn=collate_detection)
    return Task(
        model=pickle_with_torchvision(
            model(classes=len(train.categories) + 1, network=network, size=size, backbone=backbone)
        ),
        train=source(CocoImages(train, size=size, augment=augment)),
        valid=source(CocoImages(valid, size=size, augment=False)),
        recipe=recipe,
        loss=detection_loss,
        validation=lambda: CocoMetric(valid, size=size),
        eval_batch=32,
        left_out={name: dict(part.left_out) for name, part in (("train", train), ("val", valid)) if part.left_out},
    )
