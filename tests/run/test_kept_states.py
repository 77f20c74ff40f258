from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from ebbflow.rules.rule import StepContext
from ebbflow.run.kept_states import KeptStates


def test_the_average_of_a_branch_of_a_model_of_few_bits_is_summed_in_float32() -> None:
    """From 256 on a number of bfloat16 does not change if 1 is added: the sum of 300 weights of 1 would be 256."""
    net = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(net.weight)
    run: Any = SimpleNamespace(
        engine=SimpleNamespace(model=net, sync=lambda: None), optimizer=SimpleNamespace(review=lambda *_: "average")
    )
    kept = KeptStates()
    for step in range(300):
        kept.review(run, StepContext(step=step, batch=1, ref_batch=1, samples=step), 0.0)
    assert kept.branches is not None
    assert kept.branches["count"] == 300
    assert kept.branches["sum"]["weight"].item() == 300
