"""A smaller study with the same structure: on other data (`with_stand_in`), or shorter and narrower (`scaled`).

`scaled` has fewer epochs and narrower models, and everything else in proportion:

    epochs                       times the factor, rounded, at least 1; the resulting ratio is used for the rest
    spans in rules, schedules    warmup(5ep), multistep(30ep, 60ep): times the ratio, also for defaults in epochs
    spans in policies            geo(60ep): as in rules; pada(rate=...) counts steps and is unchanged
    step_time                    divided by the ratio: the run covers the same part of its trace; fit does so by itself
    width of a workload          times the root of the factor, to a multiple of 8: a sample costs about the factor

Rules, traces, seeds, batches and rates are unchanged: a batch is the same fraction of the data set, and a rule sees the
same changes of workers. The number of steps does change, so whatever is counted in steps (momentum, a ramp, the memory
of an average) is a larger part of a smaller study.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ebbflow.core.plugins import load_plugins
from ebbflow.core.spec import Call, Registry, nearest, parse_call, parse_calls
from ebbflow.core.units import Span, parse_seconds, parse_span
from ebbflow.errors import ConfigError, UnitError
from ebbflow.plan.policies import POLICIES
from ebbflow.studies.grid import Study

__all__ = ["scaled", "with_stand_in"]

_WIDTH_STEP = 8
_BATCHES = ("total", "initial", "max_batch", "local_batch")
"""Arguments of policies that are numbers of samples in a step, or of a worker in a step."""


def with_stand_in(study: Study, name: str) -> Study:
    """The study on the data that its [stand_in.NAME] table names: other workloads, and batches divided by a number.

    If the table has `workloads`, those that are not in it are left out of the study. Every batch that the study sets
    (local, reference and micro-batch, and those of policies: fixed, initial, largest and local ones) is divided by
    `divide`, rounded, at least 1. All rates are multiplied by the same factor: 1 / divide, as by the linear rule, or
    what makes the rate of the study the `lr` of the stand-in. `traces` and `settings` replace those of the same name;
    overrides of the study take precedence over `settings`. The published values stay: they are those of the data that
    the paper used.
    """
    if name not in study.stand_ins:
        known = list(study.stand_ins)
        raise ConfigError(
            f"{study.source} has no stand-in {name!r}; "
            + (nearest(name, known) if known else "it has none: give data with --set data=PATH")
        )
    entry = study.stand_ins[name]
    divide, workloads = entry.get("divide", 1), entry.get("workloads") or {one: one for one in study.workloads}
    if "lr" in entry and "lr" not in study.settings:
        raise ConfigError(
            f"{study.source}: stand_in.{name} has an lr, but lr is missing from the settings of the study"
        )
    rate = entry["lr"] / study.settings["lr"] if "lr" in entry else 1 / divide

    def divided(name: str, value: str) -> str:
        """An argument of a policy; what is no number stays, such as none."""
        try:
            return str(max(1, round(float(value) / divide))) if name in _BATCHES else value
        except ValueError:
            return value

    def smaller(settings: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(settings)
        for key in ("local_batch", "ref_batch", "micro_batch"):
            if key in result:
                result[key] = max(1, round(result[key] / divide))
        if "lr" in result:
            result["lr"] = float(f"{result['lr'] * rate:.6g}")
        if "policy" in result:
            call = parse_call(result["policy"])
            names = [name for name, _, _ in POLICIES.entry(call.name).parameters] if call.name in POLICIES else []
            args = (divided(name, value) for name, value in zip(names, call.args, strict=False))
            kwargs = ((key, divided(key, value)) for key, value in call.kwargs)
            result["policy"] = str(Call(call.name, (*args, *call.args[len(names) :]), tuple(kwargs)))
        return result

    def renamed(entries: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The entries with the new names of workloads, without those that hold for none."""
        for found in entries:
            old = found.get("workload", list(workloads))
            new = [workloads[one] for one in (old if isinstance(old, list) else [old]) if one in workloads]
            if new:
                yield {**found, "workload": new} if "workload" in found else dict(found)

    chosen = tuple(workloads[workload] for workload in study.workloads if workload in workloads)
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"{study.source}: stand_in.{name} gives two workloads the same name: {', '.join(chosen)}")
    changed = replace(
        study,
        name=f"{study.name}-{name}",
        stand_in=name,
        workloads=chosen,
        traces={**study.traces, **entry["traces"]},
        settings={**smaller(study.settings), **entry["settings"]},
        override=tuple({**found, "set": smaller(found["set"])} for found in renamed(study.override)),
        skip=tuple(renamed(study.skip)),
        paper=tuple(
            replace(value, workload=workloads[value.workload]) for value in study.paper if value.workload in workloads
        ),
    )
    changed.arms()  # finds wrong settings now
    return changed


def scaled(study: Study, factor: float, *, same_models: bool = False) -> Study:
    """The study with its epochs multiplied by `factor`; 1 gives the study itself.

    With `same_models`, models keep their width. All runs shrink by the same ratio. It is a ConfigError if rounding
    would give runs of different lengths different ratios or two workloads the same width, or if a batch plan is a file,
    whose steps cannot be scaled.
    """
    if not (math.isfinite(factor) and 0 < factor <= 1):
        raise ConfigError(f"the scale is {factor:g}; expected a fraction of the study, above 0 and at most 1")
    if factor == 1:
        return study
    from ebbflow import workloads  # imports torch, as the schedules do
    from ebbflow.optim.schedules import SCHEDULES
    from ebbflow.rules.rule import RULES, rule_entries

    for arm in study.arms():
        load_plugins(arm.config.plugins)
        if arm.config.plan is not None:
            raise ConfigError(f"the plan {arm.config.plan} counts steps and cannot be scaled; give a trace instead")
    rule_entries()  # registers the rules
    ratio = _ratio({a.config.epochs or workloads.recipe(a.config.workload).epochs for a in study.arms()}, factor)

    def shorter(settings: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(settings)
        if "epochs" in result:
            result["epochs"] = round(result["epochs"] * ratio)
        for name, registry in (("schedule", SCHEDULES), ("policy", POLICIES)):
            if name in result:
                result[name] = _shorter(result[name], ratio, registry)
        if result.get("step_time", "fit") != "fit":
            time, slash, per = result["step_time"].partition("/")
            result["step_time"] = f"{parse_seconds(time) / ratio:.12g}s{slash}{per}"
        return result

    # The epochs and the schedule of a workload's recipe shrink if the study does not set them.
    own = [(name, workloads.recipe(name)) for name in study.workloads]
    defaults: list[tuple[str, dict[str, Any]]] = []
    for name, recipe in own:
        values = {"epochs": recipe.epochs, "schedule": recipe.schedule}
        defaults.append((name, shorter({key: value for key, value in values.items() if key not in study.settings})))
    names: dict[str, Mapping[str, str]] = {
        "rule": {rule: _shorter(rule, ratio, RULES) for rule in study.rules},
        "workload": {
            name: name if same_models else _narrower(name, factor, workloads.WORKLOADS) for name in study.workloads
        },
    }
    if len(set(names["workload"].values())) < len(study.workloads):
        # They would be trained as one, whose table then had the published values of either.
        equal = ", ".join(f"{old} becomes {new}" for old, new in names["workload"].items())
        raise ConfigError(
            f"scaled by {factor:g}, two workloads of the study are the same ({equal}); give a larger scale"
        )

    def renamed(entry: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(entry)
        for key in names.keys() & entry.keys():
            new, found = names[key], entry[key]
            result[key] = [new[name] for name in found] if isinstance(found, list) else new[found]
        return result

    return replace(
        study,
        name=f"{study.name}-x{factor:g}",
        scale=study.scale * factor,
        rules=tuple(names["rule"].values()),
        workloads=tuple(names["workload"].values()),
        settings=shorter(study.settings),
        override=(
            *({"workload": names["workload"][name], "set": values} for name, values in defaults if values),
            *({**renamed(entry), "set": shorter(entry["set"])} for entry in study.override),
        ),
        skip=tuple(renamed(entry) for entry in study.skip),
        paper=tuple(
            replace(value, rule=names["rule"][value.rule], workload=names["workload"][value.workload])
            for value in study.paper
        ),
    )


def _ratio(epochs: set[int], factor: float) -> float:
    """The ratio by which all runs shrink, with epochs rounded to whole numbers."""
    shorter = {before: max(1, round(before * factor)) for before in sorted(epochs)}
    ratios = [after / before for before, after in shorter.items()]
    if max(ratios) - min(ratios) > 1e-9:
        lengths = " and ".join(str(before) for before in shorter)
        raise ConfigError(
            f"runs of {lengths} epochs scaled by {factor:g} would take {' and '.join(map(str, shorter.values()))} "
            f"epochs, which is not the same fraction of each; choose a scale that gives whole epochs, such as "
            f"{1 / math.gcd(*shorter):.3g}"
        )
    return ratios[0]


def _shorter(text: str, ratio: float, registry: Registry[Any]) -> str:
    """The text with every span in it multiplied by the ratio, including defaults."""
    calls = []
    for call in parse_calls(text):
        parameters = registry.entry(call.name).parameters
        given = {name for name, _, _ in parameters[: len(call.args)]} | {key for key, _ in call.kwargs}
        defaults = [(name, default) for name, default, _ in parameters if name not in given and _span(default)]
        calls.append(
            Call(
                call.name,
                tuple(_times(value, ratio) for value in call.args),
                tuple((key, _times(value, ratio)) for key, value in (*call.kwargs, *defaults)),
            )
        )
    return "+".join(str(call) for call in calls)


def _span(text: str) -> Span | None:
    try:
        return parse_span(text)
    except UnitError:
        return None


def _times(text: str, ratio: float) -> str:
    """A span times the ratio, to six digits, since it is part of a name that tables show; other text is unchanged."""
    span = _span(text)
    return text if span is None else str(Span(float(f"{span.value * ratio:.6g}"), span.unit))


def _narrower(text: str, factor: float, registry: Registry[Any]) -> str:
    """The workload with a smaller width, if it has one; the work of a convolution grows with its square."""
    call = parse_call(text)
    parameters = [(name, default) for name, default, _ in registry.entry(call.name).parameters]
    position = next((i for i, (name, _) in enumerate(parameters) if name == "width"), None)
    if position is None:
        return text
    positional = position < len(call.args)
    given = call.args[position] if positional else dict(call.kwargs).get("width", parameters[position][1])
    width = int(float(given))
    smaller = min(width, max(_WIDTH_STEP, round(width * math.sqrt(factor) / _WIDTH_STEP) * _WIDTH_STEP))
    if smaller == width:
        return text
    if positional:
        args = (*call.args[:position], str(smaller), *call.args[position + 1 :])
        return str(replace(call, args=args))
    others = tuple((key, value) for key, value in call.kwargs if key != "width")
    return str(replace(call, kwargs=(*others, ("width", str(smaller)))))
