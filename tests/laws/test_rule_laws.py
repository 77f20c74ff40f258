"""Laws that every rule and every modifier passes; a new one gets them by being registered."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.rules.base import Chain, Rule, Scaling, StepContext
from ebbflow.rules.registry import RULES, make_rule, table

table()
# One text for each name: modifiers stand behind the rule that shows most of them, and get the arguments they demand.
REQUIRED_ARGUMENTS = {"warmup": "warmup(5ep)"}
TEXTS = {
    entry.name: REQUIRED_ARGUMENTS.get(entry.name, entry.name)
    if entry.kind == "rule"
    else f"linear+{REQUIRED_ARGUMENTS.get(entry.name, entry.name)}"
    for entry in table()
}


def context(batch: int, *, step: int = 0, samples: int = 0, ref_batch: int = 256) -> StepContext:
    return StepContext(
        step=step,
        batch=batch,
        ref_batch=ref_batch,
        samples=samples,
        workers=max(1, batch // 32),
        epoch_samples=10_000,
        total_samples=300_000,
    )


def run(rule: Rule, batches: list[int], state: object = None) -> tuple[list[Scaling], object]:
    state = rule.init() if state is None else state
    scalings, samples = [], 0
    for step, batch in enumerate(batches):
        scaling, state = rule.scale(context(batch, step=step, samples=samples), state)
        scalings.append(scaling)
        samples += batch
    return scalings, state


def law(name: str, title: str) -> Rule:
    if reason := RULES.entry(name).exempt.get(title):
        pytest.skip(reason)
    return make_rule(TEXTS[name])


batches = st.lists(st.integers(1, 100_000), min_size=1, max_size=30)


@pytest.mark.parametrize("name", TEXTS)
def test_the_reference_batch_changes_nothing(name: str) -> None:
    scalings, _ = run(law(name, "identity"), [256] * 50)
    assert all(scaling == Scaling() for scaling in scalings)


@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=50)
@given(history=batches)
def test_every_multiplier_is_finite_and_positive(name: str, history: list[int]) -> None:
    scalings, _ = run(law(name, "positive"), history)
    for scaling in scalings:
        assert math.isfinite(scaling.lr)
        assert scaling.lr > 0
        assert math.isfinite(scaling.gradient)
        assert scaling.gradient > 0


@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=25)
@given(history=batches)
def test_the_same_history_gives_the_same_scaling(name: str, history: list[int]) -> None:
    rule = law(name, "deterministic")
    assert run(rule, history) == run(rule, history)


@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=25)
@given(history=batches, cut=st.integers(0, 30))
def test_the_state_survives_json_in_the_middle_of_a_run(name: str, history: list[int], cut: int) -> None:
    rule = law(name, "json")
    cut = min(cut, len(history))
    straight, _ = run(rule, history)
    state, samples, resumed = rule.init(), 0, []
    for step, batch in enumerate(history):
        if step == cut:
            state = json.loads(json.dumps(state))
        scaling, state = rule.scale(context(batch, step=step, samples=samples), state)
        resumed.append(scaling)
        samples += batch
    assert resumed == straight


@pytest.mark.parametrize("name", TEXTS)
def test_a_multiplier_does_not_pile_up(name: str) -> None:
    """Each step starts from the base rate: a thousand changes leave the rule where a fresh one is."""
    rule = law(name, "no memory")
    away = [32, 8192] * 500
    after, _ = run(rule, [*away, *[256] * 4000])
    assert after[-1].lr == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_form_reads_back(name: str) -> None:
    rule = law(name, "text")
    assert isinstance(rule, Chain)
    assert make_rule(rule.text) == rule


@pytest.mark.parametrize("name", TEXTS)
def test_every_entry_explains_itself(name: str) -> None:
    entry = RULES.entry(name)
    assert len(entry.summary) > 10
    assert entry.cite
    assert all(doc for _, _, doc in entry.parameters), "every argument is documented"
