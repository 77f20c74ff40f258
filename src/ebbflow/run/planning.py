"""From the settings of a run to its batch plan: the trace is read, the step time fitted, the length checked."""

from __future__ import annotations

from typing import Any

from ebbflow.core.units import parse_seconds
from ebbflow.data.ledger import largest_micro_batch, micro_batch_sizes
from ebbflow.errors import ConfigError
from ebbflow.plan import (
    BatchPlan,
    GrowingPolicy,
    Growth,
    fit_growing,
    fit_step_time,
    foresee,
    make_policy,
    make_step_time,
    plan_for,
    plan_growing,
)
from ebbflow.rules.rule import make_rule
from ebbflow.run.config import RunConfig
from ebbflow.traces import Trace
from ebbflow.traces import load as load_trace

__all__ = ["MAX_EPOCHS", "check_measurable", "foresee_steps", "make_growth", "make_plan"]

MAX_EPOCHS = 10
"""A run by gain may take so many times its epochs; one that would take more has too little gain ever to end."""


def make_plan(config: RunConfig, samples: int, *, by_gain: bool = False) -> tuple[BatchPlan, Trace | None]:
    """The batch plan of a resolved configuration over a data set, and the trace it comes from.

    Of a growing policy it is the plan of what the workers can do; what steps take of it is decided on the way.

    A run by gain takes more samples than its epochs, nobody knows how many: a trace whose step time is fitted to the
    epochs is then repeated as with `repeat`; any other plan must reach, and the run stops where it does not.
    """
    assert config.epochs and config.local_batch  # resolve() filled them in
    if config.plan is not None:
        plan = _read_plan(config)
        if not by_gain:
            plan.for_epochs(samples, config.epochs)  # too short is an error now, not in the middle of the run
        return plan, None
    trace = load_trace(config.trace)
    policy = make_policy(config.policy, config.local_batch)
    if isinstance(policy, GrowingPolicy):
        return _growing_plan(config, trace, policy, samples, by_gain=by_gain), trace
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


def _read_plan(config: RunConfig) -> BatchPlan:
    """The plan of a file of batches; what says how a trace is followed would have no effect, and is refused."""
    assert config.plan is not None and config.local_batch
    for name in ("policy", "offset", "on_change", "repeat"):
        value = getattr(config, name)
        if value != getattr(RunConfig, name):
            raise ConfigError(
                f"{name} is {value!r}, but the steps are those of the file {config.plan}, whatever it says; leave it "
                f"out, or give a trace instead of the file"
            )
    step_time = 1.0 if config.step_time == "fit" else parse_seconds(config.step_time)
    return BatchPlan.read(config.plan, config.local_batch, step_time)


def _growing_plan(config: RunConfig, trace: Trace, policy: GrowingPolicy, samples: int, *, by_gain: bool) -> BatchPlan:
    """What the workers can do in each step, long enough for what the policy will make of it."""
    assert config.epochs and config.ref_batch
    fixed: dict[str, Any] = {
        "samples": samples,
        "ref_batch": config.ref_batch,
        "offset": parse_seconds(config.offset),
        "on_change": config.on_change,
    }
    if config.step_time == "fit":
        step_time = fit_growing(trace, policy, epochs=config.epochs, **fixed)
    else:
        step_time = parse_seconds(config.step_time)
    epochs = config.epochs * (MAX_EPOCHS if by_gain else 1)
    return plan_growing(trace, policy, step_time, epochs=epochs, repeat=config.repeat or by_gain, **fixed).capacity


def foresee_steps(config: RunConfig, samples: int) -> BatchPlan:
    """The steps of a run as far as they can be told beforehand: of a growing policy `make_plan` gives the workers'."""
    plan, _ = make_plan(config, samples)
    growth = make_growth(config, samples)
    if growth is None:
        return plan
    assert config.epochs and config.ref_batch
    return foresee(growth.policy, plan, samples=samples, epochs=config.epochs, ref_batch=config.ref_batch)


def make_growth(config: RunConfig, samples: int) -> Growth | None:
    """The growing policy of a resolved configuration at its beginning; None if its policy is another kind."""
    assert config.ref_batch
    if config.plan is not None:
        return None
    policy = make_policy(config.policy, config.local_batch)
    return (
        Growth(policy, ref_batch=config.ref_batch, epoch_samples=samples) if isinstance(policy, GrowingPolicy) else None
    )


def check_measurable(config: RunConfig, plan: BatchPlan, samples: int) -> None:
    """Refuse a run whose rule or policy tells noise from signal, and none of whose steps has the two micro-batches it
    takes.

    Of a growing policy `plan` is what the workers can do. Its steps are smaller, and are looked at where they can be
    told: a policy that only two micro-batches make grow stays, without them, as it is foreseen.
    """
    growth = make_growth(config, samples)
    policy = growth.policy if growth is not None else None
    if make_rule(config.rule).needs:
        who, others = f"the rule {config.rule}", "a rule that measures nothing, such as linear or sqrt"
    elif policy is not None and policy.needs_two_micro_batches:
        who, others = f"the policy {config.policy}", "a policy that needs no noise, such as geo or ada"
    else:
        return
    if policy is not None and (policy.passive or policy.needs_two_micro_batches):
        assert config.epochs and config.ref_batch
        plan = foresee(policy, plan, samples=samples, epochs=config.epochs, ref_batch=config.ref_batch)
    for run in plan.runs():
        largest = largest_micro_batch(workers=run.workers, samples=run.samples, limit=config.micro_batch)
        if len(micro_batch_sizes(run.samples, largest=largest)) > 1:
            return
    most = int(plan.samples.max())
    more = "more workers" if policy is None else "a larger initial batch"
    raise ConfigError(
        f"{who} measures the noise of the gradient, which takes steps of two micro-batches or more, but the largest "
        f"step has {most} samples in one: set micro_batch to {max(1, most // 2)} or less (--micro-batch), use {more}, "
        f"or {others}"
    )
