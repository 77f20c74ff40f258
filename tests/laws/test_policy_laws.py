"""Laws that every growing policy passes; a new one gets them by being registered."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawing_examples import examples
from ebbflow.plan.batch_plan import StepSize
from ebbflow.plan.growing import Growth, allow
from ebbflow.plan.policies import POLICIES, GrowingPolicy, Observation, make_policy

NAMES = [*POLICIES.names("passive"), *POLICIES.names("adaptive")]
REF_BATCH, EPOCH = 32, 1000
FAST = "dwell=3, wait=5"
"""So that an adaptive policy changes the batch within a short history."""

numbers = st.one_of(st.none(), st.just(0.0), st.floats(1e-12, 1e12), st.floats(-1e6, -1e-12))
steps = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 5000), "loss": numbers, "norm_sq": numbers, "noise": numbers, "signal": numbers,
        "workers": st.integers(0, 50), "seconds": numbers,
    }
)  # fmt: skip
histories = st.lists(st.one_of(steps, steps.map(lambda shown: {**shown, "batch": 64, "workers": 2})), max_size=25)
"""Half of the steps are of one kind, since durations are compared among equal steps."""


def policy_of(name: str, **limits: int) -> GrowingPolicy:
    given = [FAST] * (POLICIES.entry(name).kind == "adaptive") + [f"{key}={value}" for key, value in limits.items()]
    policy = make_policy(f"{name}({', '.join(given)})")
    assert isinstance(policy, GrowingPolicy)
    return policy


def replay(policy: GrowingPolicy, history: list[dict[str, Any]], *, through_json: bool = False) -> list[int]:
    """What the policy requests before each step of a history, and after it."""
    seen = Observation(step=0, samples=0, epoch_samples=EPOCH, ref_batch=REF_BATCH)
    state, requested = policy.init(), []
    for shown in [*history, None]:
        state = json.loads(json.dumps(state)) if through_json else state
        batch, state = policy.requested(seen, state)
        requested.append(batch)
        if shown is not None:
            seen = replace(seen, step=seen.step + 1, samples=seen.samples + shown["batch"], **shown)
    return requested


@pytest.mark.parametrize("name", NAMES)
@examples(30)
@given(history=histories)
def test_every_batch_is_a_whole_number_and_none_is_below_the_first(name: str, history: list[dict[str, Any]]) -> None:
    requested = replay(policy_of(name), history)
    assert all(type(batch) is int and batch >= REF_BATCH for batch in requested)
    assert requested[0] == REF_BATCH


@pytest.mark.parametrize("name", NAMES)
@examples(30)
@given(history=histories)
def test_replay_is_deterministic_and_the_state_survives_json(name: str, history: list[dict[str, Any]]) -> None:
    policy = policy_of(name, initial=10)
    assert replay(policy, history) == replay(policy, history) == replay(policy, history, through_json=True)


@pytest.mark.parametrize("name", NAMES)
@examples(30)
@given(history=histories)
def test_asking_does_not_change_the_state_that_was_given(name: str, history: list[dict[str, Any]]) -> None:
    policy, state = policy_of(name), None
    seen = Observation(step=0, samples=0, epoch_samples=EPOCH, ref_batch=REF_BATCH)
    for shown in history:
        before = json.dumps(state)
        _, following = policy.requested(seen, state)
        assert json.dumps(state) == before
        state = following
        seen = replace(seen, step=seen.step + 1, samples=seen.samples + shown["batch"], **shown)


@pytest.mark.parametrize("name", POLICIES.names("passive"))
@examples(30)
@given(history=histories)
def test_a_passive_policy_looks_at_the_position_only_and_never_shrinks(
    name: str, history: list[dict[str, Any]]
) -> None:
    requested = replay(policy_of(name), history)
    silent = [{"batch": shown["batch"], "loss": None} for shown in history]
    assert requested == sorted(requested) == replay(policy_of(name), silent)


@pytest.mark.parametrize("name", POLICIES.names("adaptive"))
def test_an_adaptive_policy_that_is_shown_nothing_does_not_grow(name: str) -> None:
    assert set(replay(policy_of(name), [{"batch": 32}] * 30)) == {REF_BATCH}


@pytest.mark.parametrize("name", NAMES)
@examples(30)
@given(history=histories, workers=st.integers(1, 50), limit=st.integers(REF_BATCH, 500))
def test_no_step_exceeds_the_limit_or_the_workers(
    name: str, history: list[dict[str, Any]], workers: int, limit: int
) -> None:
    growth = Growth(policy_of(name, max_batch=limit), ref_batch=REF_BATCH, epoch_samples=EPOCH)
    there = StepSize(workers=workers, samples=8 * workers, time_s=0.0, duration_s=1.0)
    for shown in history:
        size = growth.allow(there)
        assert 1 <= size.samples <= min(limit, there.samples, growth.requested)
        assert 1 <= size.workers <= workers
        assert size.samples <= 8 * size.workers, "no worker takes more than a local batch"
        assert size.shortfall == (size.samples / growth.requested if growth.policy.damps else 1)
        growth.observe(**{key: value for key, value in shown.items() if value is not None})


@pytest.mark.parametrize("name", NAMES)
@examples(30)
@given(history=st.lists(steps, min_size=1, max_size=25), data=st.data())
def test_a_run_that_goes_on_from_a_checkpoint_wants_the_same(
    name: str, history: list[dict[str, Any]], data: st.DataObject
) -> None:
    def run(begin: Growth, part: list[dict[str, Any]]) -> list[int]:
        requested = []
        for shown in part:
            begin.observe(**{key: value for key, value in shown.items() if value is not None})
            requested.append(begin.requested)
        return requested

    cut = data.draw(st.integers(0, len(history)))
    first, second, whole = (Growth(policy_of(name), ref_batch=REF_BATCH, epoch_samples=EPOCH) for _ in range(3))
    before = run(first, history[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + run(second, history[cut:]) == run(whole, history)


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_reads_its_own_text(name: str) -> None:
    policy = policy_of(name, initial=64, max_batch=4096, local_batch=16)
    assert make_policy(str(policy)) == policy
    assert POLICIES.entry(name).summary
    assert POLICIES.entry(name).cite


@examples(30)
@given(requested=st.integers(1, 10_000), workers=st.integers(1, 60), local=st.integers(1, 100))
def test_a_step_is_the_smaller_of_requested_and_possible(requested: int, workers: int, local: int) -> None:
    size = allow(StepSize(workers=workers, samples=workers * local, time_s=0.0, duration_s=1.0), requested)
    assert size.samples == min(requested, workers * local)
    assert (size.requested is None) == (requested <= workers * local)
