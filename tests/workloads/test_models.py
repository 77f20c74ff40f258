"""The models: sizes derived by hand, shapes, initialisation, and no biases that a norm would cancel."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ebbflow.errors import ConfigError
from ebbflow.workloads.models import MobileNet, WideResNet, resnet18, resnet50, vgg11, vgg16_bn


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def conv(before: int, after: int, side: int = 3) -> int:
    """Weights of a convolution."""
    return before * after * side**2


def conv_bn(before: int, after: int, side: int = 3) -> int:
    """Weights of a convolution and the two vectors of its norm."""
    return conv(before, after, side) + 2 * after


def test_resnet_18_has_11_17_million_parameters():
    total = conv_bn(3, 64)
    for before, after in ((64, 64), (64, 128), (128, 256), (256, 512)):
        total += conv_bn(before, after) + 3 * conv_bn(after, after)  # two blocks of two convolutions
        total += conv_bn(before, after, 1) if before != after else 0  # the shortcut
    total += 512 * 10 + 10
    assert total == 11_173_962  # 11.17 M, as reported for this network on CIFAR-10
    assert size(resnet18(classes=10)) == total


@pytest.mark.parametrize(("classes", "expected"), [(10, 23_520_842), (100, 23_705_252)])
def test_resnet_50_has_23_5_million_parameters(classes, expected):
    total, before = conv_bn(3, 64), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            total += conv_bn(before, width, 1) + conv_bn(width, width) + conv_bn(width, 4 * width, 1)
            total += conv_bn(before, 4 * width, 1) if block == 0 else 0  # every first block changes the channels
            before = 4 * width
    total += 2048 * classes + classes
    assert total == expected  # Ko et al. (2022): 23 M
    assert size(resnet50(classes=classes)) == total


def test_wrn_16_4_has_2_75_million_parameters():
    # Norms precede convolutions: 2 x input channels each; (16 - 4)/6 = 2 blocks per stage, 16 x 4 = 64 channels.
    total, before = conv(3, 16), 16
    for width in (64, 128, 256):
        total += 2 * before + conv(before, width) + 2 * width + conv(width, width) + conv(before, width, 1)
        total += 2 * (2 * width + conv(width, width))
        before = width
    total += 2 * 256 + 256 * 10 + 10
    assert total == 2_748_890  # Holt and Sievert (2021): about 2.75 million
    assert size(WideResNet(depth=16, width=64, classes=10)) == total


def test_vgg_11_has_9_2_million_parameters_and_vgg_16_with_batch_norm_14_7():
    channels = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    plain = sum(conv(a, b) + b for a, b in itertools.pairwise(channels)) + 512 * 10 + 10
    assert plain == 9_225_610
    assert size(vgg11(classes=10)) == plain
    channels = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    normed = sum(conv_bn(a, b) for a, b in itertools.pairwise(channels)) + 512 * 10 + 10
    # 14.73 M in implementations whose 13 convolutions also have biases, 4,224 in all, which the norms cancel.
    assert normed == 14_728_266 - 4_224
    assert size(vgg16_bn(classes=10)) == normed


def test_mobilenet_has_3_2_million_parameters():
    channels = [32, 64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024]
    total = conv_bn(3, 32) + 1024 * 10 + 10
    for before, after in itertools.pairwise(channels):
        total += conv_bn(1, before) + conv_bn(before, after, 1)  # depthwise: one 3x3 filter per channel
    assert total == 3_217_226  # the paper's 4.2 M less the 1.0 M of the head for 1,000 classes
    assert size(MobileNet(width=32, classes=10)) == total


SMALL = {
    "resnet18": lambda: resnet18(classes=7, width=4),
    "resnet50": lambda: resnet50(classes=7, width=4),
    "wrn": lambda: WideResNet(depth=16, width=4, stem=2, classes=7),
    "vgg11": lambda: vgg11(classes=7, width=4),
    "vgg16_bn": lambda: vgg16_bn(classes=7, width=4),
    "mobilenet": lambda: MobileNet(width=4, classes=7),
}


@pytest.mark.parametrize("name", SMALL)
def test_there_is_one_logit_per_class_and_every_parameter_has_a_gradient(name):
    torch.manual_seed(0)
    model = SMALL[name]()
    logits = model(torch.randn(6, 3, 32, 32))
    assert logits.shape == (6, 7)
    nn.functional.cross_entropy(logits, torch.arange(6)).backward()
    # The gradient of a bias before a norm would consist of rounding errors; rules that measure layers could not use it.
    for label, parameter in model.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.norm() > 1e-6, label


@pytest.mark.parametrize("name", SMALL)
def test_the_last_stage_gets_a_small_image_and_samples_do_not_affect_each_other(name):
    model = SMALL[name]().eval()
    x = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-5)
    sides = []
    hooks = [m.register_forward_hook(lambda m, i, o: sides.append(o.shape[-1])) for m in model.modules()
             if isinstance(m, nn.Conv2d | nn.MaxPool2d)]  # fmt: skip
    model(x)
    for hook in hooks:
        hook.remove()
    # Three halvings for the residual networks (WRN: two), five for VGG, four for MobileNet; none in the stem.
    expected = {"wrn": 8, "vgg11": 1, "vgg16_bn": 1, "mobilenet": 2}.get(name, 4)
    assert (sides[0], min(sides)) == (32, expected)


def test_convolutions_start_with_variance_two_by_fan_out():
    torch.manual_seed(0)
    convolutions = [m for m in MobileNet(width=32, classes=10).modules() if isinstance(m, nn.Conv2d)]
    depthwise, mixing = convolutions[-2], convolutions[-1]
    assert (depthwise.groups, depthwise.kernel_size, mixing.kernel_size) == (1024, (3, 3), (1, 1))
    assert depthwise.weight.var().item() == pytest.approx(2 / 9, rel=0.1)  # one channel, nine positions
    assert mixing.weight.var().item() == pytest.approx(2 / 1024, rel=0.1)
    biases = [m.bias for m in vgg11(classes=10, width=8).modules() if isinstance(m, nn.Conv2d)]
    assert all(bias is not None and not bias.any() for bias in biases)


def test_a_depth_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"depth 17 does not exist; expected 6n \+ 4"):
        WideResNet(depth=17, width=8, classes=10)


def test_dropout_of_a_wide_resnet_acts_in_training_and_not_in_evaluation() -> None:
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain, dropping = (WideResNet(depth=10, width=8, stem=2, classes=3, dropout=rate) for rate in (0.0, 0.3))
    dropping.load_state_dict(plain.state_dict())
    assert torch.equal(plain.eval()(images), dropping.eval()(images))
    assert not torch.equal(plain.train()(images), dropping.train()(images))
