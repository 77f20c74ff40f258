from __future__ import annotations

import math

import pytest

from ebbflow.errors import ConfigError, SpecError
from ebbflow.optim.schedules import SCHEDULES, TrainingProgress, make_schedule

TOTAL = 1000


def at(text: str, samples: float, *, total: float = TOTAL) -> float:
    progress = TrainingProgress(samples=samples, epoch_samples=100, total_samples=total, ref_batch=10)
    return make_schedule(text).value(progress)


@pytest.mark.parametrize(
    ("text", "samples", "expected"),
    [
        ("constant", 500, 1.0),
        ("multistep(3ep, 6ep, factor=0.1)", 299, 1.0),
        ("multistep(3ep, 6ep, factor=0.1)", 300, 0.1),
        ("multistep(3ep, 6ep, factor=0.1)", 600, 0.01),
        ("cosine", 0, 1.0),
        ("cosine", 500, 0.5),  # the middle of half a cosine
        ("cosine", 1000, 0.0),
        ("cosine(end=0.2)", 500, 0.6),  # 0.2 + 0.8/2
        ("cosine(5ep)", 250, 0.5),
        ("cosine(5ep)", 900, 0.0),  # past its span it stays
        ("exponential(factor=0.01)", 500, 0.1),  # 0.01^(1/2)
        ("polynomial", 250, 0.75),
        ("polynomial(power=2)", 500, 0.25),
        ("polynomial(power=2, end=0.2)", 500, 0.4),  # 0.2 + 0.8/4
        ("warmup(2ep)", 100, 0.5),
        ("warmup(2ep, start=0.5)", 100, 0.75),
        ("warmup(20steps)", 100, 0.5),  # 20 reference steps of 10
        ("warmup(2ep)+multistep(3ep, factor=0.1)", 100, 0.5),
        ("warmup(2ep)+multistep(3ep, factor=0.1)", 400, 0.1),
        ("warmup(0ep)", 0, 1.0),
    ],
)
def test_values(text: str, samples: float, expected: float) -> None:
    assert at(text, samples) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_every_schedule_is_finite_and_not_negative_over_the_run(name: str) -> None:
    text = {"multistep": "multistep(3ep)", "warmup": "warmup(2ep)"}.get(name, name)
    values = [at(text, samples) for samples in range(0, TOTAL + 1, 50)]
    assert all(math.isfinite(value) and 0 <= value <= 1 for value in values)


def test_a_schedule_over_the_whole_run_needs_an_end() -> None:
    with pytest.raises(ConfigError, match="the run has no end"):
        at("cosine", 5, total=0)


def test_wrong_schedules() -> None:
    with pytest.raises(SpecError, match="did you mean 'cosine'"):
        make_schedule("cosin")
    with pytest.raises(SpecError, match="lacks at"):
        make_schedule("multistep")
    with pytest.raises(SpecError, match="above 0"):
        make_schedule("exponential(factor=0)")


@pytest.mark.parametrize(
    "text",
    [
        "multistep(3ep, factor=-0.1)", "cosine(end=-1)", "polynomial(power=-1)", "polynomial(end=-3)",
        "warmup(5ep, start=-2)",
    ],
)  # fmt: skip
def test_a_schedule_of_negative_rates_is_refused(text: str) -> None:
    """It would train uphill; a negative power divides by zero in the last step of the run."""
    with pytest.raises(SpecError, match=r"is -[0-9.]+; expected a number of 0 or more"):
        make_schedule(text)
