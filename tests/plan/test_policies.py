from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.errors import ConfigError, EbbflowError, PlanError, SpecError
from ebbflow.plan.policies import POLICIES, Capped, FixedTotal, Follow, Policy, make_policy, sizes_of

EXAMPLES = {
    "follow": "follow(32)",
    "fixed": "fixed(256)",
    "capped": "capped(32, max_batch=200)",
    "drop": "drop(32, parts=6)",
}
COUNTS = np.array([0, 1, 2, 5, 8, 300])


def test_sizes_derived_by_hand() -> None:
    workers, samples = Follow(32).sizes(COUNTS)
    assert workers.tolist() == [0, 1, 2, 5, 8, 300]
    assert samples.tolist() == [0, 32, 64, 160, 256, 9600]
    workers, samples = FixedTotal(256).sizes(COUNTS)
    assert workers.tolist() == [0, 1, 2, 5, 8, 128]  # 128 workers take two samples each; 172 idle
    assert samples.tolist() == [0, 256, 256, 256, 256, 256]
    workers, samples = Capped(32, max_batch=200).sizes(COUNTS)
    assert workers.tolist() == [0, 1, 2, 5, 6, 6]  # six whole local batches of 32 fit into 200
    assert samples.tolist() == [0, 32, 64, 160, 192, 192]
    assert Capped(32, max_batch=200, max_workers=4).sizes(COUNTS)[0].tolist() == [0, 1, 2, 4, 4, 4]


@pytest.mark.parametrize(
    "answer",
    [
        COUNTS, (COUNTS,), (COUNTS, COUNTS[1:]), (COUNTS, COUNTS * 0.5), (COUNTS, 8), (COUNTS, COUNTS.tolist()),
        (COUNTS, COUNTS > 0), (COUNTS, COUNTS, COUNTS), None,
    ],
    ids=["one array", "one in a pair", "short", "floats", "a number", "a list", "truth values", "three", "nothing"],
)  # fmt: skip
def test_what_sizes_returns_is_checked(answer: Any) -> None:
    class Own(Policy):
        def sizes(self, workers: Any) -> Any:
            return answer

        def __str__(self) -> str:
            return "own"

    with pytest.raises(PlanError, match=r"own: sizes\(\) returned .* for 6 counts .*pair of integer arrays"):
        sizes_of(Own(), COUNTS)


@pytest.mark.parametrize(
    ("workers", "samples"),
    [([0, 3], [0, 12]), ([0, -2], [0, 8]), ([0, 2], [0, -8]), ([0, 2], [0, 0]), ([0, 0], [0, 8]), ([0, 2], [4, 8])],
    ids=["more workers", "negative workers", "negative samples", "no samples", "no workers", "samples of nobody"],
)
def test_sizes_that_no_fleet_can_have_are_refused(workers: list[int], samples: list[int]) -> None:
    class Own(Policy):
        def sizes(self, workers_there: Any) -> Any:
            return np.array(workers), np.array(samples)

        def __str__(self) -> str:
            return "own"

    with pytest.raises(PlanError, match=r"own: sizes\(\) returned .* available workers; expected at most as many"):
        sizes_of(Own(), np.array([0, 2]))


def test_a_step_that_64_bits_cannot_count_is_refused() -> None:
    with pytest.raises(PlanError, match=r"returned 3 workers and -\d+ samples .*above 2\^63 is negative"):
        sizes_of(Follow(2**62), np.array([3]))


def test_an_exception_in_sizes_is_an_error_of_a_policy_of_ones_own_alone() -> None:
    class Own(Policy):
        def sizes(self, workers: Any) -> Any:
            return workers, workers["x"]

        def __str__(self) -> str:
            return "own"

    with pytest.raises(ConfigError, match=r"own: sizes\(\) raised IndexError: .*test_policies.py:\d+, in sizes"):
        sizes_of(Own(), COUNTS)
    with pytest.raises(TypeError):  # a defect of Ebbflow keeps its traceback
        sizes_of(Follow(32), cast(Any, object()))
    with pytest.raises(PlanError, match="does not say how many samples"):  # what Ebbflow raises on purpose stays
        sizes_of(make_policy("geo"), COUNTS)


def test_a_fixed_total_of_one_sample_has_one_worker() -> None:
    assert FixedTotal(1).sizes(np.array([0, 3]))[0].tolist() == [0, 1]


@pytest.mark.parametrize("name", POLICIES.names("fleet"))
@given(counts=st.lists(st.integers(0, 10_000), min_size=1, max_size=20))
def test_every_policy_uses_at_most_the_available_workers_and_waits_only_without_any(
    name: str, counts: list[int]
) -> None:
    available = np.array(counts, np.int64)
    workers, samples = make_policy(EXAMPLES[name]).sizes(available)
    assert (workers <= available).all()
    assert ((workers == 0) == (available == 0)).all()
    assert ((samples == 0) == (available == 0)).all()
    assert (samples >= 2 * workers).all()  # no worker with a single sample


@pytest.mark.parametrize("name", POLICIES.names("fleet"))
def test_every_policy_reads_its_own_text(name: str) -> None:
    policy = make_policy(EXAMPLES[name])
    assert isinstance(policy, Policy)
    assert make_policy(str(policy)) == policy


def test_the_local_batch_is_filled_in_where_the_text_leaves_it_out() -> None:
    assert make_policy("follow", 128) == Follow(128)
    assert make_policy("follow(32)", 128) == make_policy("follow(local_batch=32)", 128) == Follow(32)
    assert make_policy("capped(max_batch=4096)", 128) == Capped(128, max_batch=4096)
    assert make_policy("fixed(8192)", 128) == FixedTotal(8192)
    assert make_policy(Follow(7), 128) == Follow(7)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("folow", SpecError, "did you mean 'follow'"),
        ("follow", SpecError, "lacks local_batch"),
        ("follow(0)", PlanError, "local_batch is 0"),
        ("follow(1.5)", SpecError, "expected a whole number"),
        ("fixed(0)", PlanError, "total is 0"),
        ("capped(32)", PlanError, r"capped has no limit; write capped\(max_batch=4096\)"),
        ("capped(32, max_batch=16)", PlanError, "one worker alone would exceed it"),
        ("capped(32, max_workers=0)", PlanError, "max_workers is 0"),
    ],
)
def test_a_bad_policy_is_refused(text: str, kind: type[EbbflowError], message: str) -> None:
    with pytest.raises(kind, match=message):
        make_policy(text)
