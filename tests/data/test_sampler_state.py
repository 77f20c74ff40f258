"""The sampler's state is a few integers, and what is not its own is refused; so are impossible settings."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from ebbflow.data.sampler import ElasticSampler
from ebbflow.errors import CheckpointError, ConfigError, DataError, PlanError

# State --------------------------------------------------------------------------------------------------------------


def test_the_state_is_a_few_integers_at_the_last_complete_step() -> None:
    sampler = ElasticSampler(100, 4, local_batch=4, seed=9)
    for _ in range(6):  # a step and a half
        sampler.consume()
    expected = {"version": 1, "seed": 9, "shuffle": 1, "samples": 100, "epoch": 0, "position": 16, "step": 1}
    assert sampler.state_dict() == expected


def test_a_thousand_million_samples_start_in_the_middle_within_two_megabytes() -> None:
    state = {"version": 1, "seed": 0, "shuffle": 1, "samples": 10**9, "epoch": 3, "position": 5 * 10**8, "step": 7}
    tracemalloc.start()
    try:
        sampler = ElasticSampler(10**9, 8, local_batch=32)
        sampler.load_state_dict(state)
        batch = next(iter(sampler))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(batch) == 32
    assert peak < 2 * 2**20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 101}, "samples 101, this sampler has 100"),
        ({"seed": 1}, "seed 1, this sampler has 0"),
        ({"shuffle": 0}, "shuffle 0, this sampler has 1"),
        ({"version": 99}, "version 99"),
        ({"step": -1}, "step -1"),
        ({"step": "3"}, "step '3'"),
        ({"position": 100}, "damaged"),
        ({"epoch": None}, "epoch None"),
    ],
)
def test_a_state_of_another_run_or_a_damaged_one_is_refused(change: dict[str, Any], message: str) -> None:
    sampler = ElasticSampler(100, 2, local_batch=4)
    sampler.consume()
    before = sampler.peek()
    with pytest.raises(CheckpointError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert sampler.peek() == before


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, -3, TensorDataset(torch.empty(0))])
def test_no_samples_are_refused(samples: Any) -> None:
    with pytest.raises(DataError, match="expected a whole number from 1"):
        ElasticSampler(samples, 1, local_batch=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_batch": 0}, "local_batch is 0"),
        ({"local_batch": None}, "pass local_batch"),
        ({"rank": 2, "world_size": 2}, "rank is 2; expected a whole number from 0 to 1"),
        ({"rank": -1}, "rank is -1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticSampler(100, 2, **{"local_batch": 4, **options})


def test_a_plan_without_workers_is_refused() -> None:
    with pytest.raises(PlanError, match="workers is 0"):
        ElasticSampler(100, 0, local_batch=4)


def test_a_negative_epoch_is_refused() -> None:
    with pytest.raises(ConfigError, match="epoch is -1"):
        ElasticSampler(100, 2, local_batch=4).set_epoch(-1)
