"""The models that no library has: plain torch modules, independent of the rest of Ebbflow.

    MLP, SmallCNN          for images of 8x8 and 28x28
    resnet18, resnet50     for 32x32, of any width. torchvision and timm have these networks for 224x224 only, with a
                           7x7 stem of 64 channels; changing their stems afterwards would still leave one width.
    WideResNet             torchvision's wide ResNets are wider bottleneck networks for 224x224, not WRN-16-4.
    vgg11, vgg16_bn        for 32x32, with one linear layer instead of three with 124 million parameters
    MobileNet              for 32x32, of any width; timm's first convolution has stride 2
    GPT                    a few lines, of any size

`imagenet.py` uses the networks of torchvision and timm for large images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbflow.errors import ConfigError

__all__ = [
    "GPT", "MLP", "VGG", "MobileNet", "ResNet", "SmallCNN", "WideResNet", "resnet18", "resnet50", "vgg11", "vgg16_bn",
]  # fmt: skip


def _kaiming(model: nn.Module) -> None:
    """Initialise convolutions normally with variance 2/fan_out, which preserves the size of gradients (He et al. 2015).

    Biases of convolutions become zero. Linear layers and norms keep torch's initialisation.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            # The outputs that one input reaches. Torch's fan_out ignores groups: depthwise weights would be too small.
            fan_out = module.out_channels // module.groups * math.prod(module.kernel_size)
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)


# ---- small networks for small images ----


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
        """Return logits `(samples, classes)`."""
        logits: Tensor = self.layers(x)
        return logits


class SmallCNN(nn.Module):
    """3x3 convolutions with batch norm; before each of them but the first, pooling halves the image."""

    def __init__(self, *, channels: int, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        before = channels
        for depth, width in enumerate(widths):
            if depth:
                blocks.append(nn.MaxPool2d(2))
            blocks += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        self.features = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(samples, classes)`."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


# ---- residual networks (He et al., CVPR 2016) ----


def _shortcut(before: int, after: int, stride: int) -> nn.Module:
    """Return the identity, or a 1x1 convolution where the shape changes."""
    if stride == 1 and before == after:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1
    """Output channels divided by the width."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(before, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return features at 1/stride of the resolution."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the 3x3 has the stride, as in later versions of this network."""

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
        """Return features at 1/stride of the resolution."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """A 3x3 stem and stages of blocks; each stage after the first halves the image and doubles the width."""

    def __init__(
        self, *, block: type[BasicBlock] | type[Bottleneck], blocks: Sequence[int], width: int, classes: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        before = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stages.append(block(before, width * 2**stage, stride=2 if stage and number == 0 else 1))
                before = width * 2**stage * block.expansion
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(before, classes)
        _kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(samples, classes)`."""
        out = self.stages(F.relu(self.bn1(self.conv1(x))))
        logits: Tensor = self.fc(out.mean(dim=(2, 3)))
        return logits


def resnet18(*, classes: int, width: int = 64) -> ResNet:
    """Return a ResNet-18; it has 11.2 million parameters at the paper's width, plus those of the last layer."""
    return ResNet(block=BasicBlock, blocks=(2, 2, 2, 2), width=width, classes=classes)


def resnet50(*, classes: int, width: int = 64) -> ResNet:
    """Return a ResNet-50; it has 23.5 million parameters at the paper's width, plus those of the last layer."""
    return ResNet(block=Bottleneck, blocks=(3, 4, 6, 3), width=width, classes=classes)


# ---- wide residual networks (Zagoruyko and Komodakis, BMVC 2016) ----


class PreActBlock(nn.Module):
    """Two 3x3 convolutions, each after norm and ReLU, and a shortcut.

    If the number of channels changes, the shortcut is a 1x1 convolution that starts after the first norm and ReLU.
    Dropout is between the two convolutions.
    """

    def __init__(self, before: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(before, width, 1, stride=stride, bias=False) if before != width else None

    def forward(self, x: Tensor) -> Tensor:
        """Return features at 1/stride of the resolution."""
        out = F.relu(self.bn1(x))
        skipped = x if self.shortcut is None else self.shortcut(out)
        inner = F.dropout(self.conv1(out), self.dropout, self.training)
        added: Tensor = self.conv2(F.relu(self.bn2(inner))) + skipped
        return added


class WideResNet(nn.Module):
    """WRN-depth-k: a stem of 16 channels and three stages of (depth - 4)/6 blocks with 16k, 32k and 64k channels.

    `width` is 16k, the channels of the first stage. The paper does not widen the stem.
    """

    def __init__(self, *, depth: int, width: int, classes: int, stem: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ConfigError(f"a wide ResNet of depth {depth} does not exist; expected 6n + 4: 10, 16, 22, 28, ...")
        self.conv1 = nn.Conv2d(3, stem, 3, padding=1, bias=False)
        stages: list[nn.Module] = []
        before = stem
        for stage in range(3):
            for number in range((depth - 4) // 6):
                stride = 2 if stage and number == 0 else 1
                stages.append(PreActBlock(before, width * 2**stage, stride=stride, dropout=dropout))
                before = width * 2**stage
        self.stages = nn.Sequential(*stages)
        self.bn = nn.BatchNorm2d(before)
        self.fc = nn.Linear(before, classes)
        _kaiming(self)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(samples, classes)`."""
        out = F.relu(self.bn(self.stages(self.conv1(x))))
        logits: Tensor = self.fc(out.mean(dim=(2, 3)))
        return logits


# ---- VGG (Simonyan and Zisserman, ICLR 2015) ----


class VGG(nn.Module):
    """Five stages of 3x3 convolutions, each ending with pooling; channels double up to eight times `width`.

    With batch norm, the convolutions have no biases. The norm would cancel them, so that their gradients would be zero
    and useless for rules that measure the gradient of each layer. The head is one linear layer, as is usual for 32x32.
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
        _kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(samples, classes)`; images must be 32x32, of which the stages leave one position."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def vgg11(*, classes: int, width: int = 64) -> VGG:
    """Return a VGG-11 without batch norm; it has 9.2 million parameters at the paper's width."""
    return VGG(convolutions=(1, 1, 2, 2, 2), norm=False, width=width, classes=classes)


def vgg16_bn(*, classes: int, width: int = 64) -> VGG:
    """Return a VGG-16 with batch norm; it has 14.7 million parameters at the paper's width."""
    return VGG(convolutions=(2, 2, 3, 3, 3), norm=True, width=width, classes=classes)


# ---- MobileNet (Howard et al. 2017, arXiv 1704.04861) ----


# (channels divided by the width, stride) of the thirteen separable convolutions; the stem has stride 1, for 32x32.
_LAYERS = ((2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *[(16, 1)] * 5, (32, 2), (32, 1))


def _convolution(before: int, after: int, *, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(before, after, size, stride=stride, padding=size // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(after), nn.ReLU()]


class MobileNet(nn.Module):
    """Separable convolutions: each layer is a depthwise 3x3 convolution followed by a 1x1 convolution."""

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
        _kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(samples, classes)`."""
        logits: Tensor = self.classifier(self.features(x).mean(dim=(2, 3)))
        return logits


# ---- a decoder-only transformer ----


class TransformerBlock(nn.Module):
    """Causal attention and a perceptron, each applied to the normalised residual stream and added to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream `(samples, tokens, width)` after this block."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Predicts the next token at each position of a block of at most `context` tokens; positions are learned."""

    def __init__(
        self, *, vocabulary: int, context: int, layers: int, heads: int, width: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width={width} is not a multiple of heads={heads}; change one of them")
        self.dropout = dropout
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # GPT-2's initialisation: small weights, and smaller ones where a block writes to the residual stream.
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if writes else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(samples, tokens, vocabulary)` for token indices `(samples, tokens)`."""
        stream = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.head(self.norm(self.blocks(F.dropout(stream, self.dropout, self.training))))
        return logits
