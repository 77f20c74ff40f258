"""The figures of a report, one function each; `all_figures` yields those that the records have data for.

Most figures have one panel per trace, in the same order, with one line per rule; those that compare batches, over
updates, over times and of the schedules, have one panel per rule, with one line per trace. Runs that did not finish are
drawn as thin lines that end in a cross; as in the tables, they are not in the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ebbflow.report.plotting import (
    BAND,
    DOTTED,
    INK,
    MUTED,
    Drawing,
    RuleStyle,
    WorkloadArms,
    changes,
    drawing_style,
    envelope,
    legend,
    log_if_wide,
    outer_labels,
    over_seeds,
    panels,
    slugs,
    smooth,
    ticks_at_powers_of_two,
    time_unit,
)
from ebbflow.report.results import ArmResult, Results
from ebbflow.report.score_figures import scores, scores_by_batch, time_by_updates
from ebbflow.report.step_figures import layer_figures, over_epochs, statistic_figures
from ebbflow.report.summary import Summary, ended_well, outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

__all__ = ["all_figures"]

Array = npt.NDArray[np.float64]
Curve = Callable[[ArmResult], tuple[Array, Array]]


def all_figures(results: Results, summary: Summary) -> Iterator[Drawing]:
    """All figures of a study, one at a time, so that only one is in memory."""
    with_steps = [arm for arm in results.arms if arm.header is not None and arm.steps]
    style = RuleStyle(summary.rules)
    for workload, name in slugs(summary.workloads).items():
        arms = [arm for arm in with_steps if arm.workload == workload]
        traces = [trace for trace in summary.traces_of(workload) if any(arm.trace == trace for arm in arms)]
        of = WorkloadArms(workload=workload, name=name, arms=arms, traces=traces, style=style)
        if not arms:
            continue
        targets = summary.targets_of(workload)
        makers: list[Callable[[WorkloadArms], Drawing | None]] = [
            partial(_validation, targets=targets),
            partial(scores, summary=summary),
            partial(scores_by_batch, summary=summary),
        ]
        axes = _axes_of(of, fitted=workload in summary.fitted, measured=workload in summary.measured)
        makers += [partial(_over, by=by, targets=targets) for by in axes]
        makers.append(partial(time_by_updates, summary=summary))
        for make in (*makers, _training, _loss, _schedules, _batch, _rate, _multiplier):
            with drawing_style():
                drawing = make(of)
            if drawing is not None:
                yield drawing
        yield from statistic_figures(of)
        yield from layer_figures(of)
    with drawing_style():
        drawing = _traces(with_steps, summary.traces)
    if drawing is not None:
        yield drawing


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """What is drawn in the panels of a figure, from which the range of the vertical axis is chosen."""

    means: list[Array] = field(default_factory=list)
    bands: list[Array] = field(default_factory=list)
    crosses: list[Line2D] = field(default_factory=list)


def _draw_rules(axis: Axes, arms: Sequence[ArmResult], style: RuleStyle, curve: Curve, drawn: _Drawn) -> None:
    """Draw the mean and band of each rule over its finished seeds, and a thin line with a cross for every other run.

    Of each trace if the style is that of traces.
    """
    for rule in style.rules:
        mine = [arm for arm in arms if getattr(arm, style.kind) == rule]
        x, mean, low, high = over_seeds([curve(arm) for arm in mine if ended_well(arm)])
        if x.size:
            axis.plot(x, mean, **style.line(rule), marker="o" if x.size == 1 else None)
            drawn.means.append(mean)
            if np.any(high > low):
                axis.fill_between(x, low, high, **style.fill(rule))
                drawn.bands.extend([low, high])
        for arm in mine:
            if not ended_well(arm):
                _draw_unfinished(axis, curve(arm), style.line(rule), drawn)


def _draw_unfinished(axis: Axes, curve: tuple[Array, Array], line: dict[str, Any], drawn: _Drawn) -> None:
    """Draw the line of a run that did not finish, up to its last finite value."""
    x, y = (values[np.isfinite(curve[1])] for values in curve)
    if x.size:
        axis.plot(x, y, **{**line, "linewidth": 0.9, "alpha": 0.75})
        cross = {"marker": "x", "markersize": 7, "markeredgewidth": 1.8, "color": line["color"], "gid": line["gid"]}
        drawn.crosses.extend(axis.plot(x[-1:], y[-1:], **cross, clip_on=False))


_DWARFED = 50
"""How many times larger than the values of the finished runs an axis is on which they look all the same."""


def _zoom(axes: Sequence[Axes], drawn: _Drawn) -> bool:
    """Restrict the axis to later values if the first ones would make differences invisible; True if it did so.

    Or to the runs that finished, where others that diverged would.

    Crosses outside of the axis are put on its edge.
    """
    if not drawn.means:
        return False
    everything = np.concatenate(drawn.means)
    # What matters is where the curves end: the last three quarters of each, with their bands.
    late = np.concatenate([values[values.size // 4 :] for values in (*drawn.means, *drawn.bands)])
    low, high = float(late.min()), float(late.max())
    if high <= low or log_if_wide(axes, [late], wide=1e6):
        return False
    if float(np.ptp(everything)) < 2 * (high - low):
        low, high = (float(limit(np.concatenate([everything, *drawn.bands]))) for limit in (np.min, np.max))
        shown = max(abs(end - start) for start, end in (axis.get_ylim() for axis in axes))
        if shown < _DWARFED * (high - low):
            return False
    pad = 0.08 * (high - low)
    for axis in axes:
        axis.set_ylim(low - pad, high + pad)
    for cross in drawn.crosses:
        cross.set_ydata(np.clip(np.asarray(cross.get_ydata(), dtype=float), low - pad, high + pad))
    return True


def _band_text(arms: Sequence[ArmResult]) -> str:
    many = len({arm.seed for arm in arms}) > 1
    unfinished = not all(map(ended_well, arms))
    text = " Line: mean over seeds; band: from the lowest to the highest seed, not an interval." if many else ""
    return text + (" A thin line with a cross: a run that diverged, failed or is unfinished." if unfinished else "")


def _validation(of: WorkloadArms, *, targets: Sequence[float]) -> Drawing | None:
    if not any(arm.values.size for arm in of.arms):
        return None
    metric, factor, unit = _metric(of)
    figure, axes = panels(of.traces, height=2.7)
    drawn = _Drawn()
    for axis, trace in zip(axes, of.traces, strict=True):
        _draw_rules(axis, of.on_trace(trace), of.style, lambda arm: (arm.epochs, arm.values * factor), drawn)
    zoomed = _zoom(axes, drawn)
    goal = _draw_targets(axes, [target * factor for target in targets])
    outer_labels(axes, "epoch", f"validation {metric}{unit}")
    legend(figure, axes)
    outside = "The vertical axis shows where the curves end; first epochs, and runs that diverged, may lie outside."
    note = f" {outside}" if zoomed else ""
    caption = f"Validation {metric} over the epochs on each trace.{goal}{_band_text(of.arms)}{note}"
    return of.drawing("validation", f"Validation {metric}", caption, figure)


def _metric(of: WorkloadArms) -> tuple[str, float, str]:
    """The metric of a workload, the factor of its values in figures, and its unit on an axis."""
    metric = of.arms[0].metric
    return (metric, 100.0, " (%)") if metric == "accuracy" else (metric, 1.0, "")


def _draw_targets(axes: Sequence[Axes], targets: Sequence[float]) -> str:
    """Draw a dotted line at each target; returns what it is, in words."""
    for axis in axes:
        for target in targets:
            axis.axhline(target, **DOTTED)
    return " Dotted: the target." if targets else ""


# -- over updates and time ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _ProgressAxis:
    """A horizontal axis other than the epochs."""

    kind: str
    title: str
    """Follows "Validation accuracy over"."""
    caption: str
    values: Callable[[ArmResult], Array]
    """The position of each validation."""
    seconds: bool = True


def _axes_of(of: WorkloadArms, *, fitted: bool, measured: bool) -> list[_ProgressAxis]:
    """Updates, wall-clock time, the time of the trace unless it was fitted to it, and each simulated clock.

    Without a trace, the time is that of the real workers.
    """
    found = [
        _ProgressAxis(
            kind="updates", title="updates", values=lambda arm: arm.updates, seconds=False,
            caption="over the updates of the weights, as in Figure 4 of Holt and Sievert (2021).",
        ),
        _ProgressAxis(
            kind="wall", title="wall-clock time", values=lambda arm: arm.walls,
            caption="over the time that the run itself took to compute, its validations included.",
        ),
    ]  # fmt: skip
    if not fitted:
        title = "the time of the workers" if measured else "the time of the trace"
        clock = "as the workers measured it" if measured else "on the clock of the trace"
        found.append(
            _ProgressAxis(
                kind="time", title=title, values=lambda arm: arm.times, caption=f"over the time {clock}."
            )
        )  # fmt: skip
    names = dict.fromkeys(name for arm in of.arms for name in arm.simulated)
    return found + [
        _ProgressAxis(
            kind=f"simulated-{slug_}", title=f"simulated time ({name})", values=partial(_clock, name=name),
            caption=f"over simulated time: the steps of the records, priced with the step model {name}, as in Figures "
            f"4, 6 and 8 to 10 of Holt and Sievert (2021).",
        )
        for name, slug_ in slugs(names).items()
    ]  # fmt: skip


def _clock(arm: ArmResult, name: str) -> Array:
    return arm.simulated[name]


def _panels_by_rule(of: WorkloadArms) -> tuple[dict[str, list[ArmResult]], RuleStyle]:
    """The arms of each rule, and the style of the traces, so that a panel compares batches; of one trace, its rules."""
    if len(of.traces) == 1:
        return {of.traces[0]: list(of.arms)}, of.style
    rules = [rule for rule in of.style.rules if any(arm.rule == rule for arm in of.arms)]
    return {rule: [arm for arm in of.arms if arm.rule == rule] for rule in rules}, RuleStyle(of.traces, "trace")


def _over(of: WorkloadArms, *, by: _ProgressAxis, targets: Sequence[float]) -> Drawing | None:
    """The metric over updates or over a time, with one panel per rule and one line per trace."""
    scored = [arm for arm in of.arms if arm.values.size]
    if not scored:
        return None
    metric, factor, unit = _metric(of)
    end = max(float(by.values(arm)[-1]) for arm in scored)
    name, length = time_unit(end) if by.seconds else (by.title, 1.0)
    groups, style = _panels_by_rule(of)
    figure, axes = panels(list(groups), height=2.7)
    drawn = _Drawn()

    def curve(arm: ArmResult) -> tuple[Array, Array]:
        """Seeds with the same validations share their mean position: their wall-clock times differ."""
        mine = [other for other in of.arms if (other.rule, other.trace) == (arm.rule, arm.trace)]
        same = [o for o in mine if outcome(o) == "finished" and np.array_equal(o.epochs, arm.epochs)] or [arm]
        return np.mean([by.values(other) for other in same], axis=0) / length, arm.values * factor

    for axis, arms in zip(axes, groups.values(), strict=True):
        _draw_rules(axis, [arm for arm in arms if arm.values.size], style, curve, drawn)
    zoomed = _zoom(axes, drawn)
    goal = _draw_targets(axes, [target * factor for target in targets])
    for axis in axes:
        axis.set_xlim(left=0)
    outer_labels(axes, name, f"validation {metric}{unit}")
    legend(figure, axes)
    note = " The vertical axis shows where the curves end." if zoomed else ""
    lines = "" if style is of.style else " One line per trace."
    caption = f"Validation {metric} {by.caption}{lines}{goal}{_band_text(of.arms)}{note}"
    return of.drawing(f"validation-{by.kind}", f"Validation {metric} over {by.title}", caption, figure)


def _schedules(of: WorkloadArms) -> Drawing:
    """Learning rate and batch over the epochs: a panel of the rate for each rule, and one of the batch."""
    groups, style = _panels_by_rule(of)
    one = len(groups) == 1
    figure, axes = panels([*(["learning rate"] if one else groups), "batch"], height=2.4, sharey=False)
    *rates, batches = axes
    drawn = [over_epochs(axis, arms, style, "lr") for axis, arms in zip(rates, groups.values(), strict=True)]
    log_if_wide(rates, [line for lines in drawn for line in lines], wide=50)
    low, high = min(axis.get_ylim()[0] for axis in rates), max(axis.get_ylim()[1] for axis in rates)
    for axis in rates:
        axis.set_ylim(max(low, high / 2000) if axis.get_yscale() == "log" else low, high)
        axis.set_ylabel("learning rate")
    log_if_wide([batches], over_epochs(batches, of.arms, style, "batch"), wide=8)
    batches.set_ylabel("samples per step")
    for axis in axes:
        outer_labels([axis], "epoch", axis.get_ylabel())
    legend(figure, axes)
    lines = "One line per rule" if style is of.style else "One line per trace, one panel of the rate per rule"
    caption = f"Learning rate and batch over the epochs, as in Figure 2 of Holt and Sievert (2021). {lines}; one seed."
    return of.drawing("schedules", "Schedules of rate and batch", caption, figure)


def _training(of: WorkloadArms) -> Drawing | None:
    """The metric on training samples, with that of the validation behind it."""
    if not any(arm.train_values.size for arm in of.arms):
        return None
    metric, factor, unit = _metric(of)
    figure, axes = panels(of.traces, height=2.7)
    drawn = _Drawn()

    def curve(arm: ArmResult) -> tuple[Array, Array]:
        known = np.isfinite(arm.train_values)
        return arm.epochs[known], arm.train_values[known] * factor

    for axis, trace in zip(axes, of.traces, strict=True):
        arms = [arm for arm in of.on_trace(trace) if arm.train_values.size]
        _draw_rules(axis, arms, of.style, curve, drawn)
        for rule in of.style.rules:
            mine = [
                (arm.epochs, arm.values * factor) for arm in arms if arm.rule == rule and outcome(arm) == "finished"
            ]
            x, mean, *_ = over_seeds(mine)
            if x.size:
                look = {
                    **of.style.line(rule),
                    "label": None,
                    "linewidth": 1.0,
                    "alpha": 0.55,
                    "linestyle": (0, (1, 1.5)),
                }
                axis.plot(x, mean, **look)
                drawn.means.append(mean)
    zoomed = _zoom(axes, drawn)
    outer_labels(axes, "epoch", f"{metric}{unit}")
    legend(figure, axes)
    note = " The vertical axis shows where the curves end." if zoomed else ""
    caption = (
        f"The {metric} on training samples without augmentation, as in Figure 5 of Andre et al. (2022); dotted: that "
        f"of the validation.{_band_text(of.arms)}{note}"
    )
    return of.drawing("training", f"Training {metric}", caption, figure)


def _loss(of: WorkloadArms) -> Drawing | None:
    if not any(np.isfinite(arm.columns["loss"]).any() for arm in of.arms):
        return None
    end = max(float(arm.columns["position"][-1]) for arm in of.arms)
    figure, axes = panels(of.traces, height=2.5)
    drawn = _Drawn()

    def curve(arm: ArmResult) -> tuple[Array, Array]:
        return smooth(arm.columns["position"], arm.columns["loss"], end=end)

    for axis, trace in zip(axes, of.traces, strict=True):
        _draw_rules(axis, of.on_trace(trace), of.style, curve, drawn)
    everything = [np.asarray(line.get_ydata(), dtype=float) for axis in axes for line in axis.lines]
    if not log_if_wide(axes, drawn.means, wide=20):
        log_if_wide(axes, everything, wide=1e4)  # the losses of a run that diverged
    outer_labels(axes, "epoch", "training loss")
    legend(figure, axes)
    caption = f"Training loss, averaged over neighbouring steps.{_band_text(of.arms)}"
    return of.drawing("loss", "Training loss", caption, figure)


def _batch(of: WorkloadArms) -> Drawing:
    """Batch sizes over time. Arms of one trace mostly share them; each distinct sequence is drawn once."""
    figure, axes = panels(of.traces, height=2.1)
    for axis, trace in zip(axes, of.traces, strict=True):
        sequences: dict[bytes, ArmResult] = {}
        for arm in sorted(of.on_trace(trace), key=lambda arm: -arm.steps):
            sequence = arm.whole_steps("batch")[0].tobytes()
            if not any(longer.startswith(sequence) for longer in sequences):  # a run that stopped early begins like one
                sequences[sequence] = arm
        for arm in sequences.values():
            times, batches = _with_idle(arm)
            x, y = envelope(*changes(times / 60, batches))
            look = {"color": INK} if len(sequences) == 1 else of.style.line(arm.rule)
            axis.plot(x, y, drawstyle="steps-post", **{**look, "linewidth": 1.1})
        if (ref := of.arms[0].ref_batch) is not None:
            axis.axhline(ref, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
    for axis in axes:  # only after all are drawn: they share this axis, and setting one end fixes the other
        axis.set_ylim(bottom=0)
    outer_labels(axes, "minutes of the trace", "samples per step")
    legend(figure, axes)
    caption = (
        "Global batch size over time. The dashed line is the reference batch, at which every rule leaves the learning "
        "rate unchanged. The last step of an epoch, which takes the remaining samples, is not shown."
    )
    return of.drawing("batch", "Batch size", caption, figure)


def _with_idle(arm: ArmResult) -> tuple[Array, Array]:
    """Times and batch sizes of the steps up to the end of the last, with a zero where the trace has no workers."""
    times, batches = arm.whole_steps("time_s", "batch")
    times, batches = np.append(times, max(arm.end_s, *times[-1:])), np.append(batches, batches[-1:])
    trace = arm.header.trace if arm.header else {}
    idle = [
        float(t) for t, workers in zip(trace.get("times", []), trace.get("workers", []), strict=True) if not workers
    ]
    end = float(trace.get("end") or 0)
    if not idle or end <= 0:
        return times, batches
    rounds = int((arm.offset_s + times[-1]) // end) + 1  # a trace that is too short is repeated
    starts = np.concatenate([np.array(idle) + k * end for k in range(rounds)]) - arm.offset_s
    starts = starts[(starts > times[0]) & (starts < times[-1])]
    order = np.argsort(np.concatenate([times, starts]), kind="stable")
    return (
        np.concatenate([times, starts])[order],
        np.concatenate([batches, np.zeros_like(starts)])[order],
    )


def _rate(of: WorkloadArms) -> Drawing:
    figure, axes = panels(of.traces, height=2.4)
    drawn: list[Array] = []
    for axis, trace in zip(axes, of.traces, strict=True):
        drawn += over_epochs(axis, of.on_trace(trace), of.style, "lr")
    wide = log_if_wide(axes, drawn, wide=50)
    if wide:  # a cosine ends at almost nothing; three decades are enough
        top = max(float(np.nanmax(values)) for values in drawn)
        axes[0].set_ylim(bottom=max(axes[0].get_ylim()[0], top / 1000))
    outer_labels(axes, "epoch", "learning rate")
    legend(figure, axes)
    caption = "The learning rate of each rule: base rate of the schedule times multiplier (one seed)."
    caption += " Logarithmic, down to a thousandth of the highest." if wide else ""
    return of.drawing("rate", "Learning rate", caption, figure)


def _multiplier(of: WorkloadArms) -> Drawing | None:
    """The multiplier of each rule by the batch; there is nothing to show if all batches are the same."""
    pairs_of: dict[str, dict[str, Array]] = {trace: {} for trace in of.traces}
    for arm in of.arms:
        if arm.ref_batch and arm.steps:
            batch, multiplier = arm.whole_steps("batch", "multiplier")
            pairs = np.column_stack([batch / arm.ref_batch, multiplier])
            before = pairs_of[arm.trace].get(arm.rule, np.empty((0, 2)))
            pairs_of[arm.trace][arm.rule] = np.unique(np.concatenate([before, pairs.round(4)]), axis=0)
    ratios = {trace: {pair[0] for pairs in rules.values() for pair in pairs} for trace, rules in pairs_of.items()}
    shown = [trace for trace in of.traces if len(ratios[trace]) > 1]
    if not shown:
        return None
    figure, axes = panels(shown, height=2.7)
    for axis, trace in zip(axes, shown, strict=True):
        for rule in of.style.rules:
            pairs = pairs_of[trace].get(rule, np.empty((0, 2)))
            pairs = pairs[np.isfinite(pairs).all(axis=1) & (pairs > 0).all(axis=1)]
            pairs = pairs[:: len(pairs) // 400 + 1]
            if len(pairs):
                look = {
                    **of.style.line(rule),
                    "linestyle": "",
                    "marker": of.style.marker(rule),
                    "markersize": 4.5,
                    "alpha": 0.75,
                }
                axis.plot(pairs[:, 0], pairs[:, 1], markeredgewidth=0, **look)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        for which in (axis.xaxis, axis.yaxis):
            ticks_at_powers_of_two(which)
    outer_labels(axes, "batch / reference batch", "learning rate multiplier")
    legend(figure, axes)
    caption = (
        "Learning rate multiplier against the batch relative to the reference batch, both logarithmic; one point for "
        "each pair that occurred."
    )
    return of.drawing("multiplier", "Multiplier by batch", caption, figure)


def _traces(arms: Sequence[ArmResult], traces: Sequence[str]) -> Drawing | None:
    """Workers over time of each trace; the part that training used is shaded."""
    shown: dict[str, Mapping[str, Any]] = {}
    for arm in arms:
        if arm.header is not None and arm.header.trace.get("times"):
            shown.setdefault(arm.trace, arm.header.trace)
    names = [trace for trace in traces if trace in shown]
    if not names:
        return None
    figure, axes = panels(names, height=2.1, sharey=False)
    repeated = False
    for axis, name in zip(axes, names, strict=True):
        trace = shown[name]
        times, workers = np.array(trace["times"], dtype=float), np.array(trace["workers"], dtype=float)
        end = float(trace.get("end") or times[-1])
        used = [arm for arm in arms if arm.trace == name]
        first = min(arm.offset_s % end + float(arm.columns["time_s"].min()) for arm in used)
        last = max(arm.offset_s % end + arm.end_s for arm in used)
        unit, per = time_unit(end)
        x, y = envelope(*changes(np.append(times, end) / per, np.append(workers, workers[-1])))
        for start, stop in ((first, min(last, end)), (0.0, min(last - end, first))):
            if stop > start:  # the second one is of a run that begins within the trace and goes on at its beginning
                axis.axvspan(start / per, stop / per, color=BAND, alpha=0.35, linewidth=0)
        axis.plot(x, y, drawstyle="steps-post", color=INK, linewidth=1.2)
        axis.set_ylim(0, max(float(workers.max()) * 1.12, 1))
        axis.set_xlim(0, end / per)
        axis.set_xlabel(unit)
        over = (last - first) / end
        repeated |= last > end * (1 + 1e-9)  # the end of a step that fills the trace is rounded
        if over > 1 + 1e-9:
            times_over = f"{over:.1f} times over" if over >= 1.1 else "a little more than once"
            axis.set_title(f"{name} (used {times_over})")
    axes[0].set_ylabel("workers")
    text = "Available workers over time; the part that training used is shaded."
    return Drawing(
        stem="traces",
        kind="trace",
        title="The traces",
        caption=text + (" A trace shorter than the run was repeated." if repeated else ""),
        figure=figure,
    )
