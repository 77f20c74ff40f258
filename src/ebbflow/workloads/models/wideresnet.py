"""Wide residual networks (Zagoruyko and Komodakis, BMVC 2016): shallow and wide, norm and ReLU before each layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ebbflow.errors import ConfigError
from ebbflow.workloads.models.init import kaiming

__all__ = ["WideResNet"]


class PreActBlock(nn.Module):
    """Two 3x3 convolutions, each behind norm and ReLU; where the channels change, so does the shortcut's input."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(before, width, 1, stride=stride, bias=False) if before != width else None

    def forward(self, x: Tensor) -> Tensor:
        """Features, at 1/stride of the resolution."""
        out = F.relu(self.bn1(x))
        kept = x if self.shortcut is None else self.shortcut(out)
        added: Tensor = self.conv2(F.relu(self.bn2(self.conv1(out)))) + kept
        return added


class WideResNet(nn.Module):
    """WRN-depth-k: a stem of 16 channels and three stages of (depth - 4)/6 blocks with 16k, 32k and 64k channels.

    `width` is 16k, the channels of the first stage. `stem` is not widened in the paper.
    """

    def __init__(self, *, depth: int, width: int, classes: int, stem: int = 16) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ConfigError(f"a wide ResNet of depth {depth} does not exist; expected 6n + 4: 10, 16, 22, 28, ...")
        self.conv1 = nn.Conv2d(3, stem, 3, padding=1, bias=False)
        stages: list[nn.Module] = []
        before = stem
        for stage in range(3):
            for number in range((depth - 4) // 6):
                stages.append(PreActBlock(before, width * 2**stage, stride=2 if stage and number == 0 else 1))
                before = width * 2**stage
        self.stages = nn.Sequential(*stages)
        self.bn = nn.BatchNorm2d(before)
        self.fc = nn.Linear(before, classes)
        kaiming(self)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(samples, classes)`."""
        out = F.relu(self.bn(self.stages(self.conv1(x))))
        logits: Tensor = self.fc(out.mean(dim=(2, 3)))
        return logits
