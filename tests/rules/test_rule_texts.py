"""Texts, needs, aliases, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ebbflow.core.spec import Entry
from ebbflow.errors import ConfigError, EbbflowError, InputError, SpecError
from ebbflow.moments.estimate import Moments
from ebbflow.report.rule_pages import describe
from ebbflow.rules.rule import (
    RULES,
    Modifier,
    Rule,
    RuleChain,
    Scaling,
    State,
    StepContext,
    make_rule,
    register_rule,
    rule_entries,
)


def step(**more: object) -> StepContext:
    return StepContext(step=0, batch=400, ref_batch=100, samples=0, **more)  # type: ignore[arg-type]


def test_a_chain_needs_what_any_of_its_parts_needs() -> None:
    assert make_rule("linear+ramp").needs == frozenset()
    assert make_rule("adascale+warmup(5ep)+ramp").needs == {"moments"}
    assert make_rule("lena+statewarmup").needs == {"moments", "layers"}
    assert make_rule("linear+statewarmup").needs == {"moments"}
    assert make_rule("linear+statewarmup(by=multiplier)").needs == set()
    assert make_rule("lena+statewarmup(by=multiplier)").needs == {"moments", "layers"}


def test_an_alias_needs_what_it_stands_for() -> None:
    assert make_rule("dynamic").needs == make_rule("linear+ramp").needs
    assert make_rule("lsw(2ep)+ramp").needs == frozenset()


def test_needs_of_the_registry_and_of_the_rules_agree() -> None:
    for entry in rule_entries():
        assert make_rule(describe(entry).example).needs >= entry.needs


def test_a_rule_that_is_not_registered_may_say_itself_what_it_needs() -> None:
    @dataclass(frozen=True)
    class Mine(Rule):
        @property
        def needs(self) -> frozenset[str]:
            return frozenset({"moments"})

        def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
            return Scaling(), state

    assert make_rule(Mine()).needs == {"moments"}


def test_modifiers_can_follow_an_alias() -> None:
    rule = make_rule("lsw(5ep)+cap(2)")
    assert str(rule) == "lsw(5ep)+cap(2)"
    context = step(epoch_samples=10)
    assert rule.scale(context, rule.init())[0].lr == 2.0


def test_an_alias_keeps_a_long_span_to_the_last_digit() -> None:
    rule = RULES.make("lsw(1234567samples)")
    assert rule.stands_for == "linear+warmup(1234567samples)"  # type: ignore[union-attr]


def test_a_rule_cannot_need_what_is_not_measured() -> None:
    with pytest.raises(SpecError, match="needs hessian, which cannot be measured; known are layers, moments"):
        register_rule("curved", needs={"hessian"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adascale(progress=time)", r"adascale: progress is 'time'; .*Known: gain, samples"),
        ("noise(1.5)", "noise: a is 1.5; expected 0"),
        ("noise(-0.5)", "noise: a is -0.5; expected 0"),
        ("power(1.5)", "power: p is 1.5; expected"),
        ("power(-0.5)", "power: p is -0.5; expected"),
        ("lena(eps=-0.5)", "lena: eps is -0.5"),
        ("legw", "legw lacks warmup"),
        ("legw(5)", "legw: warmup: '5' has no unit"),
        ("linear+cap", "cap lacks x"),
        ("linear+cap(0.5)", "cap: x is 0.5; expected at least 1"),
        ("linear+statewarmup(1.5)", "statewarmup: alpha is 1.5; expected 0"),
        ("linear+statewarmup(0.05, by=noise)", "statewarmup: by is 'noise'; Known: gain, multiplier"),
        ("lena(fraction=1.5)", "lena: fraction is 1.5; expected 0"),
        ("linear+warmup(2ep, start=1.5)", "warmup: start is 1.5; expected 0"),
        ("linear+ramp(0)", "ramp: steps is 0; expected a positive number"),
        ("adamsde(beta1=maybe)", "adamsde: beta1 is 'maybe'; expected true or false"),
        ("ramp", "starts with the modifier 'ramp'; put a rule before it"),
        ("linear+dynamic", "'dynamic', a rule, after a"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_rule(text)


def test_a_context_knows_neither_epoch_nor_end_unless_told() -> None:
    for text, message in [("legw(1ep)", "size of an epoch is not known"), ("linear+statewarmup", "the run has no end")]:
        rule = make_rule(text)
        with pytest.raises(EbbflowError, match=message):
            rule.scale(step(), rule.init())


def test_a_state_aware_warm_up_needs_a_run_with_an_end() -> None:
    rule = make_rule("linear+statewarmup")
    with pytest.raises(ConfigError, match=r"the run has no end; .* warmup\(5ep\)"):
        rule.scale(step(total_samples=0), rule.init())


def test_a_model_that_changes_its_layers_is_refused() -> None:
    def layers(count: int) -> StepContext:
        one = (1.0,) * count
        moments = Moments(noise=count, signal=count, layer_noise=one, layer_signal=one)
        return step(total_samples=10**6, moments=moments)

    rule = make_rule("lena+statewarmup")
    _, state = rule.scale(layers(2), rule.init())
    with pytest.raises(ConfigError, match="has 2 layers, but the step has 3"):
        rule.scale(layers(3), state)


def test_a_docstring_is_read_in_its_parts() -> None:
    class Own(Rule):
        """m = 3: always.

        Some more
        about it.

        Suits: nobody.

        Example: own(3)
        """

    about = describe(Entry(name="own", kind="rule", make=Own))
    assert (about.formula, about.suits, about.example) == ("m = 3: always.", "nobody.", "own(3)")
    assert about.explanation == ("Some more about it.",)
    assert about.needs == ()


def test_a_rule_without_a_docstring_is_described_all_the_same() -> None:
    def bare() -> Rule:
        raise NotImplementedError

    about = describe(Entry(name="bare", kind="modifier", make=bare))
    assert (about.formula, about.suits, about.example) == ("", "", "linear+bare")


def test_a_rule_or_modifier_that_returns_something_else_is_refused_with_what_it_returned() -> None:
    class Bare(Rule):
        def scale(self, context: StepContext, state: State) -> Any:
            return context.ratio

    class Stateless(Modifier):
        def modify(self, context: StepContext, scaling: Scaling, state: State) -> Any:
            return scaling

    with pytest.raises(ConfigError, match=r"bare: scale\(\) returned 4.0; expected a pair: a Scaling, and the state"):
        RuleChain(Bare(), (), text="bare").scale(step(), [None])
    chain = RuleChain(make_rule("linear").rule, (Stateless(),), text="linear+mine")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"linear\+mine: modify\(\) returned Scaling\(.*; expected a pair"):
        chain.scale(step(), chain.init())


def test_a_rule_or_modifier_that_raises_is_named_with_the_line_that_did() -> None:
    class Broken(Rule):
        def init(self) -> State:
            return {}

        def scale(self, context: StepContext, state: State) -> Any:
            return state["missing"]

        def review(self, context: StepContext, loss: float, state: State) -> Any:
            raise OSError("no loss")

    class Late(Modifier):
        def init(self) -> State:
            raise RuntimeError("too late")

        def modify(self, context: StepContext, scaling: Scaling, state: State) -> Any:
            raise RuntimeError("too late")

    alone = RuleChain(Broken(), (), text="broken")
    with pytest.raises(
        ConfigError, match=rf"broken: scale\(\) raised KeyError: 'missing' \({__file__}:\d+, in scale\)"
    ):
        alone.scale(step(), alone.init())
    with pytest.raises(ConfigError, match=rf"broken: review\(\) raised OSError: no loss \({__file__}:\d+, in review\)"):
        alone.review(step(), 1.0, alone.init())
    chain = RuleChain(make_rule("linear").rule, (Late(),), text="linear+late")  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=rf"linear\+late: init\(\) raised RuntimeError: too late \({__file__}:\d+, in init"
    ):
        chain.init()
    with pytest.raises(ConfigError, match=rf"linear\+late: modify\(\) raised RuntimeError: too late \({__file__}:"):
        chain.scale(step(), [None, None])


def test_an_exception_in_a_rule_of_ebbflow_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = make_rule("linear")

    def scale(*_: Any) -> Any:
        raise KeyError("our own defect")

    monkeypatch.setattr(type(rule.rule), "scale", scale)  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match="our own defect"):
        rule.scale(step(), rule.init())
