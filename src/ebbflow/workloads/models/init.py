"""He initialisation, which the published training recipes of these networks start from."""

from __future__ import annotations

import math

from torch import nn

__all__ = ["kaiming"]


def kaiming(model: nn.Module) -> None:
    """Draw every convolution anew: normal with variance 2/fan_out, so that gradients keep their size (He et al. 2015).

    Biases of convolutions become zero. Linear layers and norms keep what torch gives them.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            # What one input reaches: torch's own fan_out forgets the groups, and makes depthwise weights far too small.
            fan_out = module.out_channels // module.groups * math.prod(module.kernel_size)
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
