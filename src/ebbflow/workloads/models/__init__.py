"""The models that workloads train, one family a file. Plain torch modules: nothing here knows of workers or rules."""

from __future__ import annotations

from ebbflow.workloads.models.gpt import GPT
from ebbflow.workloads.models.mobilenet import MobileNet
from ebbflow.workloads.models.resnet import ResNet, resnet18, resnet50
from ebbflow.workloads.models.small import MLP, SmallCNN
from ebbflow.workloads.models.vgg import VGG, vgg11, vgg16_bn
from ebbflow.workloads.models.wideresnet import WideResNet

__all__ = [
    "GPT",
    "MLP",
    "VGG",
    "MobileNet",
    "ResNet",
    "SmallCNN",
    "WideResNet",
    "resnet18",
    "resnet50",
    "vgg11",
    "vgg16_bn",
]
