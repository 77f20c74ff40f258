"""Residual networks (He et al., CVPR 2016), with the stem that is used for images of 32x32: no pooling, stride 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ResNet", "resnet18"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Features, at 1/stride of the resolution."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """A 3x3 stem and four stages of basic blocks; each stage after the first halves the image and doubles the width."""

    def __init__(self, *, blocks: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        before = width
        for stage, count in enumerate(blocks):
            after = width * 2**stage
            for block in range(count):
                stages.append(BasicBlock(before, after, stride=2 if stage and block == 0 else 1))
                before = after
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(samples, classes)`."""
        out = self.stages(F.relu(self.bn1(self.conv1(x))))
        logits: Tensor = self.fc(out.mean(dim=(2, 3)))
        return logits


def resnet18(*, classes: int, width: int = 64) -> ResNet:
    """ResNet-18 for small images: 11.2 million parameters at the width of the paper."""
    return ResNet(blocks=(2, 2, 2, 2), width=width, classes=classes)
