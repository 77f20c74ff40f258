"""How the step scales: a rule turns the batch of a step into a multiplier of the learning rate.

A rule is a pure value: no torch, no clock, no file. To add one, write a module in this folder (or a plugin file) that
registers a class, and one row of hand-derived values in tests/golden; the laws, the command line, the documentation
and the report find it through the registry.
"""

from ebbflow.rules.base import Modifier, Rule, Scaling, StepContext
from ebbflow.rules.registry import RULES, make_rule, register, register_modifier

__all__ = ["RULES", "Modifier", "Rule", "Scaling", "StepContext", "make_rule", "register", "register_modifier"]
