"""Laws that every rule and every modifier passes; a new one gets them by being registered.

A modifier follows the rule of its own example. Every context has a random history of noise and signal of three layers,
whether the rule needs it or not.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawing_examples import examples
from ebbflow.moments.estimate import Moments
from ebbflow.report.rule_pages import describe
from ebbflow.rules.rule import RULES, Rule, RuleChain, Scaling, StepContext, make_rule, rule_entries

LAYERS = 3
TEXTS = {
    entry.name: describe(entry).example for entry in rule_entries() if entry.make.__module__.startswith("ebbflow.")
}


@dataclass(frozen=True)
class Step:
    batch: int
    moments: Moments | None


def context(seen: Step, *, step: int = 0, samples: int = 0, ref_batch: int = 256) -> StepContext:
    return StepContext(
        step=step,
        batch=seen.batch,
        ref_batch=ref_batch,
        samples=samples,
        workers=max(1, seen.batch // 32),
        epoch_samples=10_000,
        total_samples=300_000,
        moments=seen.moments,
    )


def run(rule: Rule, history: list[Step], *, through_json_at: int = -1) -> tuple[list[Scaling], object]:
    state, samples, scalings = rule.init(), 0, []
    for step, seen in enumerate(history):
        if step == through_json_at:
            state = json.loads(json.dumps(state))
        scaling, state = rule.scale(context(seen, step=step, samples=samples), state)
        scalings.append(scaling)
        samples += seen.batch
    return scalings, state


def law(name: str, title: str) -> Rule:
    if reason := RULES.entry(name).exempt.get(title):
        pytest.skip(reason)
    return make_rule(TEXTS[name])


def numbers(scaling: Scaling) -> list[float]:
    """All factors and exponents of a scaling."""
    found: list[float] = []
    for value in (scaling.lr, scaling.gradient, scaling.weight_decay, scaling.betas, scaling.eps):
        found += value if isinstance(value, tuple) else [value]
    return found


def totals(scaling: Scaling) -> list[float]:
    """What each layer's step is multiplied by, outside and inside the momentum together."""
    inside = scaling.gradient if isinstance(scaling.gradient, tuple) else (scaling.gradient,)
    count = max(len(scaling.layers), len(inside))
    return [
        lr * gradient
        for lr, gradient in zip(
            scaling.layers * (count // len(scaling.layers)), inside * (count // len(inside)), strict=True
        )
    ]


def _moments(layers: list[tuple[float, float]]) -> Moments:
    noise, signal = zip(*layers, strict=True)
    return Moments(noise=sum(noise), signal=sum(signal), layer_noise=noise, layer_signal=signal)


# Noise is never negative (the mean of squares is at least the square of the mean); signal may be, as it is estimated
# without bias. Both may be zero: a layer without a gradient.
magnitudes = st.one_of(st.just(0.0), st.floats(1e-12, 1e12))
signals = st.one_of(magnitudes, st.floats(-1e6, -1e-12))
moments = st.lists(st.tuples(magnitudes, signals), min_size=LAYERS, max_size=LAYERS).map(_moments)


any_batch = st.integers(1, 100_000)


@st.composite
def histories(draw: st.DrawFn, batch: st.SearchStrategy[int] = any_batch, length: int = 15) -> list[Step]:
    """Batches with their averages; nothing is measured in the first steps of some histories."""
    unmeasured = draw(st.integers(0, 3))
    batches = draw(st.lists(batch, min_size=1, max_size=length))
    return [Step(size, None if i < unmeasured else draw(moments)) for i, size in enumerate(batches)]


@pytest.mark.parametrize("name", TEXTS)
@examples(30)
@given(history=histories(st.just(256)))
def test_the_reference_batch_changes_nothing(name: str, history: list[Step]) -> None:
    scalings, _ = run(law(name, "identity"), history)
    assert all(number == 1.0 for scaling in scalings for number in numbers(scaling))
    assert all(scaling.progress in (None, 1.0) for scaling in scalings)


@pytest.mark.parametrize("name", TEXTS)
@examples(50)
@given(history=histories())
def test_every_multiplier_is_finite_and_positive(name: str, history: list[Step]) -> None:
    scalings, _ = run(law(name, "positive"), history)
    for scaling in scalings:
        assert all(math.isfinite(number) and number > 0 for number in numbers(scaling))
        assert all(math.isfinite(value) for value in scaling.stats.values())
        assert scaling.progress is None or (math.isfinite(scaling.progress) and scaling.progress > 0)


@pytest.mark.parametrize("name", TEXTS)
@examples(50)
@given(history=histories(st.integers(256, 100_000)))
def test_no_multiplier_exceeds_linear(name: str, history: list[Step]) -> None:
    """At and above the reference batch."""
    scalings, _ = run(law(name, "no more than linear"), history)
    for seen, scaling in zip(history, scalings, strict=True):
        assert max(totals(scaling)) <= seen.batch / 256 * (1 + 1e-12)


@pytest.mark.parametrize("name", TEXTS)
@examples(50)
@given(history=histories(st.integers(256, 100_000)))
def test_a_larger_batch_never_gets_less_than_the_base_rate(name: str, history: list[Step]) -> None:
    scalings, _ = run(law(name, "no less than the base rate"), history)
    assert all(total >= 1 - 1e-12 for scaling in scalings for total in totals(scaling))


@pytest.mark.parametrize("name", TEXTS)
@examples(25)
@given(history=histories())
def test_a_layer_wise_rule_has_one_multiplier_a_layer(name: str, history: list[Step]) -> None:
    rule = law(name, "layers")
    scalings, _ = run(rule, history)
    for seen, scaling in zip(history, scalings, strict=True):
        expected = LAYERS if "layers" in rule.needs and seen.moments is not None else 1
        assert len(scaling.layers) == expected
        assert isinstance(scaling.lr, tuple) == (expected > 1)


@pytest.mark.parametrize("name", TEXTS)
@examples(25)
@given(history=histories())
def test_the_same_history_gives_the_same_scaling(name: str, history: list[Step]) -> None:
    rule = law(name, "deterministic")
    assert run(rule, history) == run(rule, history)


@pytest.mark.parametrize("name", TEXTS)
@examples(25)
@given(history=histories(), cut=st.integers(0, 14))
def test_the_state_survives_json_in_the_middle_of_a_run(name: str, history: list[Step], cut: int) -> None:
    rule = law(name, "json")
    assert run(rule, history, through_json_at=cut)[0] == run(rule, history)[0]


@pytest.mark.parametrize("name", TEXTS)
def test_a_multiplier_does_not_pile_up(name: str) -> None:
    """Each step starts from the base rate: a thousand changes leave the rule where a fresh one is."""
    rule = law(name, "no memory")
    known = _moments([(100.0, 1.0), (10.0, 0.1), (1000.0, 0.5)])
    history = [Step(batch, known) for batch in [*[32, 8192] * 500, *[256] * 4000]]
    after, _ = run(rule, history)
    assert numbers(after[-1]) == pytest.approx([1.0] * len(numbers(after[-1])), rel=1e-6)


@pytest.mark.parametrize("name", [name for name in TEXTS if RULES.entry(name).kind == "modifier"])
@examples(25)
@given(history=histories(), cut=st.integers(0, 14))
def test_a_modifier_can_follow_a_layer_wise_rule(name: str, history: list[Step], cut: int) -> None:
    rule = make_rule(f"lena+{TEXTS[name].partition('+')[2]}")
    scalings, _ = run(rule, history, through_json_at=cut)
    assert scalings == run(rule, history)[0]
    for seen, scaling in zip(history, scalings, strict=True):
        assert all(math.isfinite(number) and number > 0 for number in numbers(scaling))
        assert len(totals(scaling)) == (LAYERS if seen.moments is not None else 1)


class Nothing(Rule):
    """A rate of zero in every other step, as where a branch is scored."""

    def scale(self, context: StepContext, state: object) -> tuple[Scaling, object]:
        return Scaling(lr=float(context.step % 2)), state


@pytest.mark.parametrize("name", [name for name in TEXTS if RULES.entry(name).kind == "modifier"])
@examples(25)
@given(history=histories())
def test_a_rate_of_zero_stays_zero_behind_every_modifier(name: str, history: list[Step]) -> None:
    chain = make_rule(f"constant+{TEXTS[name].partition('+')[2]}")
    assert isinstance(chain, RuleChain)
    scalings, _ = run(replace(chain, rule=Nothing()), history)
    for step, scaling in enumerate(scalings):
        assert all(math.isfinite(number) for number in numbers(scaling))
        assert (scaling.lr == 0.0) == (step % 2 == 0)


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_form_reads_back(name: str) -> None:
    rule = law(name, "text")
    assert isinstance(rule, RuleChain)
    assert make_rule(rule.text) == rule


@pytest.mark.parametrize("name", TEXTS)
def test_every_entry_explains_itself(name: str) -> None:
    entry = RULES.entry(name)
    about = describe(entry)
    assert 10 < len(about.formula) <= 110
    assert len(about.suits) > 10
    assert entry.cite
    assert all(doc for _, _, doc in entry.parameters), "every argument is documented"
    assert all(len(reason) > 10 for reason in entry.exempt.values()), "every exemption has a reason"


def test_exemptions_name_laws_that_exist() -> None:
    laws = {
        "identity", "positive", "no more than linear", "no less than the base rate", "layers", "deterministic", "json",
        "no memory", "text",
    }  # fmt: skip
    assert {title for name in TEXTS for title in RULES.entry(name).exempt} <= laws
