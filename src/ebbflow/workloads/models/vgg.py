"""VGG (Simonyan and Zisserman, ICLR 2015), with one linear layer as its head, as it is used for images of 32x32."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ebbflow.workloads.models.init import kaiming

__all__ = ["VGG", "vgg11", "vgg16_bn"]


class VGG(nn.Module):
    """Five stages of 3x3 convolutions, each halving the image at its end; channels double up to eight times `width`.

    With batch norm the convolutions have no biases, which the norm would take out again: such a bias has no gradient,
    and a rule that looks at each layer's gradient could make nothing of it.
    """

    def __init__(self, *, convolutions: Sequence[int], norm: bool, width: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for stage, count in enumerate(convolutions):
            after = width * min(2**stage, 8)
            for _ in range(count):
                layers.append(nn.Conv2d(before, after, 3, padding=1, bias=not norm))
                layers += [nn.BatchNorm2d(after), nn.ReLU()] if norm else [nn.ReLU()]
                before = after
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, classes)
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(samples, classes)`; of a 32x32 image one position is left."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def vgg11(*, classes: int, width: int = 64) -> VGG:
    """VGG-11 without batch norm: 9.2 million parameters at the width of the paper."""
    return VGG(convolutions=(1, 1, 2, 2, 2), norm=False, width=width, classes=classes)


def vgg16_bn(*, classes: int, width: int = 64) -> VGG:
    """VGG-16 with batch norm: 14.7 million parameters at the width of the paper."""
    return VGG(convolutions=(2, 2, 3, 3, 3), norm=True, width=width, classes=classes)
