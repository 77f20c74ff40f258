"""Residual networks (He et al., CVPR 2016), with the paper's stem or one for images of 32x32: stride 1, no pooling."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ebbflow.workloads.models.init import kaiming

__all__ = ["ResNet", "resnet18", "resnet50"]


def _shortcut(before: int, after: int, stride: int) -> nn.Module:
    """Nothing, or a 1x1 convolution where the shape changes."""
    if stride == 1 and before == after:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1
    """Channels of its output for each unit of width."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(before, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Features, at 1/stride of the resolution."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the stride is the 3x3's, as in every later code of this network."""

    expansion = 4

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = width * self.expansion
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.shortcut = _shortcut(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Features, at 1/stride of the resolution."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """A 3x3 stem and stages of blocks; each stage after the first halves the image and doubles the width.

    `large`: a 7x7 stem and pooling, which leave a fourth of the resolution.
    """

    def __init__(
        self,
        *,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        width: int,
        classes: int,
        large: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = (
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
            if large
            else (nn.Conv2d(3, width, 3, padding=1, bias=False))
        )
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        stages: list[nn.Module] = []
        before = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stages.append(block(before, width * 2**stage, stride=2 if stage and number == 0 else 1))
                before = width * 2**stage * block.expansion
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(before, classes)
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(samples, classes)`."""
        out = self.stages(self.pool(F.relu(self.bn1(self.conv1(x)))))
        logits: Tensor = self.fc(out.mean(dim=(2, 3)))
        return logits


def resnet18(*, classes: int, width: int = 64, large: bool = False) -> ResNet:
    """ResNet-18 for small or `large` images: 11.2 million parameters at the width of the paper, and its classes'."""
    return ResNet(block=BasicBlock, blocks=(2, 2, 2, 2), width=width, classes=classes, large=large)


def resnet50(*, classes: int, width: int = 64, large: bool = False) -> ResNet:
    """ResNet-50 for small or `large` images: 23.5 million parameters at the width of the paper, and its classes'."""
    return ResNet(block=Bottleneck, blocks=(3, 4, 6, 3), width=width, classes=classes, large=large)
