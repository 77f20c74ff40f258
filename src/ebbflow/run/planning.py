"""From the settings of a run to its batch plan: read the trace, fit the step time, check the length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ebbflow.core.units import Seconds, parse_seconds
from ebbflow.core.wording import called
from ebbflow.data.ledger import largest_micro_batch, micro_batch_sizes
from ebbflow.errors import ConfigError
from ebbflow.plan import (
    BatchPlan,
    GrowingPolicy,
    fit_growing,
    fit_step_time,
    foresee,
    make_policy,
    make_step_time,
    plan_by_epochs,
    plan_for,
    plan_growing,
)
from ebbflow.plan.batch_plan import trace_from
from ebbflow.plan.policies import sizes_of
from ebbflow.rules.rule import Rule
from ebbflow.run.config import RunConfig
from ebbflow.traces import Trace
from ebbflow.traces import load as load_trace

__all__ = ["MAX_EPOCHS", "check_measurable", "epoch_time", "make_plan", "unmeasured_step", "unmeasured_trace"]

_MOST_PLANNED_EPOCHS = 100_000
"""The plan of a run is made before its first step, and takes up to a millisecond for each epoch."""
MAX_EPOCHS = 10
"""A run that counts gain may take this many times its epochs; one that takes more has too little gain ever to end."""


def epoch_time(step_time: str) -> Seconds | None:
    """The time that an epoch takes, of a step time that is given per epoch; None if it is given otherwise.

    >>> epoch_time("1h/ep"), epoch_time("0.6s"), epoch_time("fit")
    (3600.0, None, None)
    """
    time, slash, unit = step_time.partition("/")
    return parse_seconds(time) if slash and unit.strip() == "ep" else None


def make_plan(
    config: RunConfig, samples: int, *, by_gain: bool = False, guards: bool = False
) -> tuple[BatchPlan, Trace | None]:
    """The batch plan of a complete configuration over a data set of `samples` samples, and the trace it comes from.

    For a growing policy it is the plan of what the workers can do; how much of it a step takes is decided during
    training. A run that counts gain (`by_gain`), or whose rule may give steps back (`guards`), takes more steps than
    its epochs have, and how many is not known: a trace whose step time is fitted to the epochs, or given per epoch, is
    then repeated as with `repeat`. Any other plan is too short only if it does not reach the epochs: steps that were
    given back are taken beyond its end, with its last fleet. Where gain is counted it may turn out to be too short.
    """
    plan, trace = _make_plan(config, samples, by_gain=by_gain, guards=guards)
    return (plan.going_on() if guards and not by_gain else plan), trace


def _make_plan(config: RunConfig, samples: int, *, by_gain: bool, guards: bool) -> tuple[BatchPlan, Trace | None]:
    assert config.epochs  # resolve() filled it in
    if config.epochs > _MOST_PLANNED_EPOCHS:
        raise ConfigError(
            f"epochs is {config.epochs:,}; expected at most {_MOST_PLANNED_EPOCHS:,}, since all steps are planned "
            f"before the first: let an epoch be several passes over a small data set (torch.utils.data.ConcatDataset)"
        )
    if config.plan is not None:
        plan = _read_plan(config)
        if not by_gain:
            plan.for_epochs(samples, config.epochs)  # too short is an error now, not in the middle of the run
        return plan, None
    trace = load_trace(config.trace)
    policy = make_policy(config.policy, config.local_batch)
    epochs, repeat = _reach(config, by_gain=by_gain, guards=guards)
    by_epochs = epoch_time(config.step_time)
    if by_epochs is not None:
        if isinstance(policy, GrowingPolicy) or config.on_change != "finish":
            raise ConfigError(
                f"step_time is {config.step_time}, a time per epoch, which is for policies that follow the workers and "
                f"steps that finish; found policy {config.policy} and on_change {config.on_change}; give a step time"
            )
        plan = plan_by_epochs(
            trace,
            policy,
            by_epochs,
            samples=samples,
            epochs=epochs,
            offset=parse_seconds(config.offset),
            repeat=repeat,
        )
        return plan, trace
    offset = parse_seconds(config.offset)
    if by_gain and not repeat:  # how many steps it takes is not known: as many as the trace has
        model = make_step_time(parse_seconds(config.step_time))
        return BatchPlan.from_trace(trace, policy, model, offset=offset, on_change=config.on_change), trace
    if isinstance(policy, GrowingPolicy):
        return _growing_plan(config, trace, policy, samples, epochs=epochs, repeat=repeat), trace
    if config.step_time == "fit":
        step_time = fit_step_time(
            trace, policy, samples=samples, epochs=config.epochs, offset=offset, on_change=config.on_change
        )
    else:
        step_time = parse_seconds(config.step_time)
    plan = plan_for(
        trace,
        policy,
        make_step_time(step_time),
        samples=samples,
        epochs=epochs,
        offset=offset,
        repeat=repeat,
        on_change=config.on_change,
    )
    return plan, trace


def _reach(config: RunConfig, *, by_gain: bool, guards: bool) -> tuple[int, bool]:
    """How many epochs a plan must reach, and whether the trace is repeated for them."""
    assert config.epochs
    fitted = config.step_time == "fit" or epoch_time(config.step_time) is not None
    if by_gain:
        return config.epochs * MAX_EPOCHS, config.repeat or fitted
    if (fitted or config.repeat) and guards:
        # It goes back twice at most, each time from a quarter, and probes give back a twentieth.
        return config.epochs + 1 + config.epochs * 11 // 20, True
    return config.epochs, config.repeat


def _read_plan(config: RunConfig) -> BatchPlan:
    """The plan of a file of batches; settings about following a trace would have no effect, and are refused."""
    if config.plan is None or config.local_batch is None:
        raise ConfigError(f"the file {config.plan} has batches, and local_batch, the samples per worker, is missing")
    for name in ("policy", "offset", "on_change", "repeat"):
        value = getattr(config, name)
        if value != RunConfig.model_fields[name].default:
            raise ConfigError(
                f"{name} is {value!r}, but the steps are those of the file {config.plan}, whatever it says; leave it "
                f"out, or give a trace instead of the file"
            )
    step_time = 1.0 if config.step_time == "fit" else parse_seconds(config.step_time)
    return BatchPlan.read(config.plan, config.local_batch, step_time)


def _growing_plan(
    config: RunConfig, trace: Trace, policy: GrowingPolicy, samples: int, *, epochs: int, repeat: bool
) -> BatchPlan:
    """What the workers can do in each step, long enough for the steps that the policy will take."""
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
    return plan_growing(trace, policy, step_time, epochs=epochs, repeat=repeat, **fixed).capacity


def unmeasured_step(config: RunConfig, plan: BatchPlan, samples: int, policy: GrowingPolicy | None) -> int:
    """Samples of the largest step if all steps have a single micro-batch, so that noise and signal cannot be told
    apart; 0 if one has two.

    `policy`: the growing policy, if the batch grows; `plan` is then what the workers can do, and the steps are smaller.
    They are examined as far as they are known beforehand: a policy that grows only where it sees two micro-batches
    stays, without them, as it is foreseen.
    """
    if policy is not None and (policy.passive or policy.needs_two_micro_batches):
        assert config.epochs and config.ref_batch
        plan = foresee(policy, plan, samples=samples, epochs=config.epochs, ref_batch=config.ref_batch)
    return _one_micro_batch(config, ((run.workers, run.samples) for run in plan.runs()))


def unmeasured_trace(config: RunConfig, policy: GrowingPolicy | None) -> int:
    """As `unmeasured_step`, where the number of samples is not known: the largest step if no number of workers that the
    trace has makes two micro-batches.

    Always 0 for a growing `policy`, whose steps depend on the samples.
    """
    if policy is not None:
        return 0
    trace = trace_from(load_trace(config.trace), parse_seconds(config.offset))
    workers, samples = sizes_of(make_policy(config.policy, config.local_batch), trace.workers)
    return _one_micro_batch(config, zip(workers.tolist(), samples.tolist(), strict=True))


def _one_micro_batch(config: RunConfig, steps: Iterable[tuple[int, int]]) -> int:
    """Samples of the largest of these (workers, samples) if none has two micro-batches, else 0."""
    most = 0
    for workers, samples in steps:
        if not samples:
            continue
        largest = largest_micro_batch(workers=workers, samples=samples, limit=config.micro_batch)
        if len(micro_batch_sizes(samples, largest=largest)) > 1:
            return 0
        most = max(most, samples)
    return most


def check_measurable(
    config: RunConfig, plan: BatchPlan, samples: int, policy: GrowingPolicy | None, rule: Rule
) -> None:
    """Refuse a run whose rule or policy needs noise and signal and none of whose steps has two micro-batches."""
    if rule.needs:
        who, others = f"the rule {rule}", "a rule that measures nothing, such as linear or sqrt"
    elif policy is not None and policy.needs_two_micro_batches:
        who, others = f"the policy {policy}", "a policy that needs no noise, such as geo or ada"
    else:
        return
    most = unmeasured_step(config, plan, samples, policy)
    if not most:
        return
    more = "more workers" if policy is None else "a larger initial batch"
    raise ConfigError(
        f"{who} measures the noise of the gradient, which takes steps of two micro-batches or more, but the largest "
        f"step has {most} samples in one: give {called('micro_batch', max(1, most // 2))} or less, use {more}, "
        f"or {others}"
    )
