"""Which rules suit an optimizer: those that scale by the gradient (SGD) and those that normalise it (Adam and others).

What is known about it is in docs/evidence and in the page of each rule; `ebbflow choose` compares these rules on the
user's own model and trace.
"""

from __future__ import annotations

import logging
import os
from typing import Literal

__all__ = [
    "OptimizerFamily", "candidate_rules", "default_rule", "fallback_rule", "known_optimizer", "name_of_optimizer",
    "optimizer_family", "tell_default_rule",
]  # fmt: skip

_LOG = logging.getLogger(__name__)

OptimizerFamily = Literal["sgd", "adam"]
_SGD = ("sgd", "asgd", "lars")
_ADAM = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "lamb", "lion", "muon", "nadam", "radam", "rmsprop",
    "rprop", "signsgd", "sparseadam",
)  # fmt: skip
_WARM_UP = 0.05
"""Length of a warm-up of a fixed length, as a part of the run."""


def optimizer_family(optimizer: str) -> OptimizerFamily:
    """The family of an optimizer, given its text form or the name of its class; whatever is not SGD counts as Adam.

    >>> [optimizer_family(text) for text in ("sgd(momentum=0.9)", "SGD", "lars", "adamw", "Muon", "signsgd")]
    ['sgd', 'sgd', 'sgd', 'adam', 'adam', 'adam']
    """
    return "sgd" if _short(optimizer) in _SGD else "adam"


def known_optimizer(name: str) -> bool:
    """Whether the name itself says to which family an optimizer belongs."""
    return _short(name) in (*_SGD, *_ADAM)


def name_of_optimizer(kind: type) -> str:
    """The name by which the family of an optimizer class is known: that of the class, or of one that it derives from.

    >>> name_of_optimizer(type("Mine", (type("SGD", (), {}),), {})), name_of_optimizer(type("Other", (), {}))
    ('SGD', 'Other')
    """
    names = [base.__name__ for base in kind.__mro__]
    return next((name for name in names if known_optimizer(name)), names[0])


def default_rule(optimizer: str, *, ends: bool = True, grows: bool = False, unmeasured: str = "") -> tuple[str, str]:
    """The rule of a run that names none; and what keeps it from being the best fixed one of the family, in words.

    `ends`: whether it is known how long the run is, of which a warm-up is a part; without an end there is none.
    `grows`: whether a growing policy decides the batch in the place of a falling rate; the rate then stays.
    `unmeasured`: why noise and signal are not measured; SGD then takes the root, the best rule that measures nothing.

    >>> default_rule("sgd"), default_rule("AdamW", unmeasured="there is one micro-batch")
    (('adascale+statewarmup(0.05)', ''), ('sqrt+statewarmup(0.05, by=multiplier)', ''))
    >>> default_rule("sgd", unmeasured="there is one micro-batch")
    ('sqrt+statewarmup(0.05, by=multiplier)', 'there is one micro-batch')
    >>> default_rule("sgd", ends=False)[0], default_rule("Mine")[0], default_rule("sgd", grows=True)[0]
    ('adascale', 'sqrt+statewarmup(0.05, by=multiplier)', 'constant')
    """
    if grows:
        return "constant", "the batch grows in the place of a falling rate"
    family = optimizer_family(optimizer)
    found = []
    if not known_optimizer(optimizer):
        found.append(f"{optimizer} is not known to be related to SGD or Adam")
    if unmeasured and family == "sgd":
        family = "adam"
        found.append(unmeasured)
    rule = fallback_rule(family)
    if not ends:
        rule = rule.partition("+")[0]
        found.append("the run has no end, of which a warm-up would be a part (give epochs)")
    return rule, "; ".join(found)


def tell_default_rule(rule: str, why: str) -> str:
    """Say in one line which rule is used and why, if there is a reason; only rank 0 does. Returns the rule."""
    if why and os.environ.get("RANK", "0") == "0":
        level = logging.INFO if rule == "constant" else logging.WARNING
        _LOG.log(level, "no rule was named: %s is used, because %s", rule, why)
    return rule


def _short(optimizer: str) -> str:
    """The name in a text form, in small letters."""
    return optimizer.partition("(")[0].strip().lower()


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
