"""Small networks for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["MLP", "SmallCNN"]


class MLP(nn.Module):
    """Two hidden layers of equal width, ReLU, no normalisation."""

    def __init__(self, *, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(samples, classes)`."""
        logits: Tensor = self.layers(x)
        return logits


class SmallCNN(nn.Module):
    """3x3 convolutions with batch norm; each one after the first halves the image before it looks at it."""

    def __init__(self, *, channels: int, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        before = channels
        for depth, width in enumerate(widths):
            if depth:
                blocks.append(nn.MaxPool2d(2))
            blocks += [
                nn.Conv2d(before, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            before = width
        self.features = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(samples, classes)`."""
        logits: Tensor = self.classifier(self.features(x))
        return logits
