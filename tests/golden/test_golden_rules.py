"""Hand-derived values, one row or more a rule; the derivation stands beside each."""

from __future__ import annotations

import pytest

from ebbflow.rules.base import StepContext
from ebbflow.rules.registry import make_rule, table

# (rule, batch, samples committed before the step) -> multiplier; reference batch 100, epochs of 1000 samples
ROWS = [
    ("constant", 400, 0, 1.0),
    ("linear", 400, 0, 4.0),  # 400/100
    ("linear", 50, 0, 0.5),  # below the reference batch the rate falls
    ("sqrt", 400, 0, 2.0),  # sqrt(4)
    ("sqrt", 25, 0, 0.5),  # sqrt(1/4)
    ("power(0.5)", 900, 0, 3.0),  # 9^0.5
    ("power(p=0.25)", 1600, 0, 2.0),  # 16^(1/4)
    ("power", 1600, 0, 8.0),  # 16^(3/4)
    # warm-up over 2 epochs = 2000 samples, from 1 to 4. The middle of the first step is at sample 200: a tenth of the
    # way, so 1 + 3/10.
    ("linear+warmup(2ep)", 400, 0, 1.3),
    ("linear+warmup(2ep)", 400, 800, 2.5),  # middle at sample 1000, half the way: 1 + 3/2
    ("linear+warmup(2ep)", 400, 1900, 4.0),  # middle at 2100, past the end
    ("linear+warmup(2ep)", 400, 2000, 4.0),
    ("linear+warmup(20steps)", 400, 800, 2.5),  # 20 reference steps = 2000 samples
    ("linear+warmup(2000samples)", 400, 800, 2.5),
    ("linear+warmup(2ep, start=0)", 400, 800, 2.0),  # from 0 to 4, half the way
    ("linear+warmup(2ep)", 50, 0, 0.5),  # below the start: at once, a warm-up never raises the rate
    ("linear+warmup(0ep)", 400, 0, 4.0),  # an empty warm-up is none
]


@pytest.mark.parametrize(("rule", "batch", "samples", "expected"), ROWS)
def test_multiplier(rule: str, batch: int, samples: int, expected: float) -> None:
    made = make_rule(rule)
    context = StepContext(step=0, batch=batch, ref_batch=100, samples=samples, epoch_samples=1000)
    scaling, _ = made.scale(context, made.init())
    assert scaling.lr == pytest.approx(expected, rel=1e-12)
    assert scaling.gradient == 1.0


def test_every_registered_name_has_a_golden_row() -> None:
    text = " ".join(row[0] for row in ROWS)
    assert [entry.name for entry in table() if entry.name not in text] == []
