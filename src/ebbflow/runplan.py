"""From the settings of a run to its batch plan: the trace is read, the step time fitted, the length checked."""

from __future__ import annotations

from pathlib import Path

from ebbflow.config import RunConfig
from ebbflow.data.ledger import pieces
from ebbflow.errors import ConfigError
from ebbflow.plan import BatchPlan, fit_step_time, make_policy, make_step_time, plan_for
from ebbflow.traces import Trace
from ebbflow.traces import load as load_trace
from ebbflow.units import parse_seconds

__all__ = ["MAX_EPOCHS", "check_measurable", "make_plan"]

MAX_EPOCHS = 10
"""A run by gain may take so many times its epochs; one that would take more has too little gain ever to end."""


def make_plan(config: RunConfig, samples: int, *, by_gain: bool = False) -> tuple[BatchPlan, Trace | None]:
    """The batch plan of a resolved configuration over a data set, and the trace it comes from.

    A run by gain takes more samples than its epochs, nobody knows how many: a trace whose step time is fitted to the
    epochs is then repeated as with `repeat`; any other plan must reach, and the run stops where it does not.
    """
    assert config.epochs and config.local_batch  # resolve() filled them in
    if config.plan is not None:
        plan = BatchPlan.read(Path(config.plan), local_batch=config.local_batch)
        if not by_gain:
            plan.for_epochs(samples, config.epochs)  # too short is an error now, not in the middle of the run
        return plan, None
    trace = load_trace(config.trace)
    policy = make_policy(config.policy, config.local_batch)
    offset = parse_seconds(config.offset)
    if config.step_time == "fit":
        step_time = fit_step_time(
            trace, policy, samples=samples, epochs=config.epochs, offset=offset, on_change=config.on_change
        )
    else:
        step_time = parse_seconds(config.step_time)
    if by_gain and not (config.repeat or config.step_time == "fit"):
        model = make_step_time(step_time)
        return BatchPlan.from_trace(trace, policy, model, offset=offset, on_change=config.on_change), trace
    plan = plan_for(
        trace,
        policy,
        make_step_time(step_time),
        samples=samples,
        epochs=config.epochs * (MAX_EPOCHS if by_gain else 1),
        offset=offset,
        repeat=config.repeat or by_gain,
        on_change=config.on_change,
    )
    return plan, trace


def check_measurable(config: RunConfig, plan: BatchPlan) -> None:
    """Refuse a plan in which no step has the two gradient pieces that telling noise from signal takes."""
    for run in plan.runs():
        share = -(-run.samples // run.workers)
        if len(pieces(run.samples, piece=min(share, config.piece or share))) > 1:
            return
    most = int(plan.samples.max())
    raise ConfigError(
        f"the rule {config.rule} measures the noise of the gradient, which takes steps of two pieces or more, but the "
        f"largest step has {most} samples in one: set piece to {max(1, most // 2)} or less (--piece), use more "
        f"workers, or a rule that measures nothing, such as linear or sqrt"
    )
