"""A rule of one's own: the cube root of the batch ratio.

ebbflow train digits-mlp --plugin examples/own_rule.py --rule "cuberoot+warmup(2ep)" --epochs 10
"""

from dataclasses import dataclass

from ebbflow import Scaling, register_rule
from ebbflow.rules import Rule


@register_rule("cuberoot", cite="this example")
@dataclass(frozen=True)
class CubeRoot(Rule):
    """m = (B/B0)^(1/3): more careful than the square root."""

    def scale(self, context, state):
        return Scaling(lr=context.ratio ** (1 / 3)), state
