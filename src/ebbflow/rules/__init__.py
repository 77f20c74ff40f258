"""Rules: how a step scales. A rule turns the batch of a step into a multiplier of the learning rate.

A rule is a pure value: it uses no torch, no clock and no file. To add one, write a module in this folder (or a plugin
file) that registers a class, and one row of hand-derived values in tests/golden; the laws, the command line, the
documentation and the report find it through the registry.
"""

from ebbflow.rules.rule import (
    RULES,
    Modifier,
    Rule,
    Scaling,
    StepContext,
    make_rule,
    register_modifier,
    register_rule,
    rule_entries,
)

__all__ = [
    "RULES", "Modifier", "Rule", "Scaling", "StepContext", "make_rule", "register_modifier", "register_rule",
    "rule_entries",
]  # fmt: skip
