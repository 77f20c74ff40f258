"""Which rules suit an optimizer: those that scale by the gradient (SGD) and those that normalise it (Adam and others).

What is known about it is in docs/evidence and in the page of each rule; `ebbflow choose` compares these rules on the
user's own model and trace.
"""

from __future__ import annotations

from typing import Literal

from ebbflow.core.spec import parse_call

__all__ = ["OptimizerFamily", "candidate_rules", "fallback_rule", "optimizer_family"]

OptimizerFamily = Literal["sgd", "adam"]
_SGD = ("sgd", "asgd", "lars")
_WARM_UP = 0.05
"""Length of a warm-up of a fixed length, as a part of the run."""


def optimizer_family(optimizer: str) -> OptimizerFamily:
    """The family of an optimizer, given its text form or the name of its class; whatever is not SGD counts as Adam.

    >>> [optimizer_family(text) for text in ("sgd(momentum=0.9)", "SGD", "lars", "adamw", "Muon", "signsgd")]
    ['sgd', 'sgd', 'sgd', 'adam', 'adam', 'adam']
    """
    return "sgd" if parse_call(optimizer).name.lower() in _SGD else "adam"


def fallback_rule(family: OptimizerFamily) -> str:
    """The rule to use where nothing else is known: the best fixed one in the recorded runs."""
    return candidate_rules(family, epochs=1)[0]


def candidate_rules(family: OptimizerFamily, *, epochs: int) -> tuple[str, ...]:
    """The rules, warm-ups included, that are worth comparing for a run of so many epochs; the fallback is the first.

    >>> candidate_rules("sgd", epochs=30)[2:]
    ('linear+warmup(1.5ep, start=0)', 'sqrt+warmup(1.5ep, start=0)')
    """
    fixed = f"warmup({_WARM_UP * epochs:.6g}ep, start=0)"
    if family == "sgd":
        return ("adascale+statewarmup(0.05)", "lena+statewarmup(0.05)", f"linear+{fixed}", f"sqrt+{fixed}")
    by = "statewarmup(0.05, by=multiplier)"
    return (f"sqrt+{by}", "adascale+statewarmup(0.05)", "noise(a=0.5)+statewarmup(0.05)", f"linear+{by}")
