"""MobileNet (Howard et al. 2017, arXiv 1704.04861), with a stem of stride 1 for images of 32x32."""

from __future__ import annotations

from torch import Tensor, nn

from ebbflow.workloads.models.init import kaiming

__all__ = ["MobileNet"]

# (channels for each unit of width, stride) of the thirteen separable convolutions.
_LAYERS = ((2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *[(16, 1)] * 5, (32, 2), (32, 1))


def _convolution(before: int, after: int, *, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(before, after, size, stride=stride, padding=size // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(after), nn.ReLU()]


class MobileNet(nn.Module):
    """Each layer looks at every channel alone (3x3, depthwise), then mixes the channels of each position (1x1)."""

    def __init__(self, *, width: int, classes: int) -> None:
        super().__init__()
        layers = _convolution(3, width, size=3)
        before = width
        for factor, stride in _LAYERS:
            layers += _convolution(before, before, size=3, stride=stride, groups=before)
            layers += _convolution(before, width * factor, size=1)
            before = width * factor
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, classes)
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(samples, classes)`."""
        logits: Tensor = self.classifier(self.features(x).mean(dim=(2, 3)))
        return logits
