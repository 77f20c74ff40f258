from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from ebbflow.core.spec import Call, Registry, bind, param, parse_call, parse_calls, render
from ebbflow.core.units import Seconds, Span
from ebbflow.errors import SpecError, UnitError
from ebbflow.rules.rule import make_rule


@dataclass(frozen=True)
class Everything:
    """One field of each kind."""

    spans: tuple[Span, ...] = param((), doc="spans")
    number: float = param(0.5, doc="number")
    count: int = param(3, doc="count")
    on: bool = param(False, doc="switch")
    mode: Literal["fast", "slow"] = param("fast", doc="mode")
    wait: Seconds | None = param(None, doc="time")


def test_every_kind_of_argument_is_read_by_its_annotation() -> None:
    made = bind(parse_call("x(1ep, 2ep, number=1e-3, count=1e3, on=yes, mode=slow, wait=1.5min)"), Everything)
    assert made == Everything((Span(1, "ep"), Span(2, "ep")), 1e-3, 1000, True, "slow", Seconds(90.0))


def test_rendering_leaves_defaults_out_and_reads_back() -> None:
    made = Everything((Span(1, "ep"),), count=7)
    assert render("x", made) == "x(1ep, count=7)"
    assert bind(parse_call(render("x", made)), Everything) == made


def test_every_kind_of_value_is_rendered_as_it_is_read() -> None:
    made = Everything(number=0.25, on=True, mode="slow", wait=Seconds(90.0))  # a time has its unit, a number has none
    assert render("x", made) == "x(number=0.25, on=true, mode=slow, wait=90s)"
    assert bind(parse_call(render("x", made)), Everything) == made
    assert render("x", Everything()) == "x"


def test_an_exponent_with_a_plus_is_one_number() -> None:
    assert parse_calls("power(p=1e+0)+warmup(1e+3samples)")[1] == Call("warmup", ("1e+3samples",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty"),
        ("linear+", "a name was expected"),
        ("0,744", "the form is name or name.argument=value."),
        ("linear(", "1 opening and 0 closing"),
        ("linear)x(", "not of the form"),
        ("power(p=)", "empty argument"),
        ("power(p=1, 2)", "follows a named argument"),
        ("power(p=a)", "expected a number"),
        ("power(p=nan)", "expected a finite number"),
        ("linear+warmup(5ep, strt=0)", "unknown argument 'strt'; did you mean 'start'\\? The form is warmup"),
        ("power(q=1)", "unknown argument 'q'; the form is power"),
        ("power(1, 2)", "too many arguments"),
        ("power(1, p=1)", "gives 'p' twice"),
        ("power(p=7)", "from 0 .constant. to 1 .linear."),
        ("linear+warmup", "lacks length"),
        ("linear+warmup(2ep, start=5)", "expected 0"),
        ("lineer", "did you mean 'linear'"),
        ("linear+warmap(5ep)", "did you mean 'warmup'"),
        ("linear+sqrt", "only modifiers can follow a rule"),
        ("warmup(5ep)", "put a rule before it"),
    ],
)
def test_a_wrong_text_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_rule(text)


def test_a_warm_up_without_a_unit_names_the_units() -> None:
    with pytest.raises(UnitError, match=r"write 5ep .epochs., 5steps"):
        make_rule("linear+warmup(5)")


def test_a_second_entry_of_one_name_is_refused() -> None:
    registry: Registry[int] = Registry("thing")
    registry.register("one")(lambda: 1)
    with pytest.raises(SpecError, match="registered already"):
        registry.register("one")(lambda: 2)


def test_whole_numbers_stay_whole() -> None:
    with pytest.raises(SpecError, match="expected a whole number"):
        bind(parse_call("x(count=1.5)"), Everything)
    with pytest.raises(SpecError, match="did you mean 'slow'"):
        bind(parse_call("x(mode=slo)"), Everything)
    with pytest.raises(SpecError, match="true or false"):
        bind(parse_call("x(on=maybe)"), Everything)
