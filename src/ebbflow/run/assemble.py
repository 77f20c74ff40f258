"""From settings and a task to the flow that trains it. Every front end builds its run here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ebbflow import workloads
from ebbflow.core.spec import nearest
from ebbflow.core.trackers import Tracker, check_tracker, open_tracker
from ebbflow.core.units import parse_seconds
from ebbflow.core.wording import called
from ebbflow.data.ledger import Ledger
from ebbflow.engines import emulated
from ebbflow.engines.base import ENGINES, Engine, EngineMaker, EngineParts
from ebbflow.engines.emulated import Ranks
from ebbflow.errors import ConfigError, UnitError
from ebbflow.moments.meters import why_unmeasurable
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.optim.ema import RunningStatistics, WeightAverage
from ebbflow.optim.optimizers import build_optimizer, name_of_text
from ebbflow.optim.rule_optimizer import RuleOptimizer
from ebbflow.optim.schedules import Schedule, make_schedule
from ebbflow.plan import BatchPlan, GrowingPolicy, Growth, make_policy
from ebbflow.plan.policies import Drop, Policy
from ebbflow.record import RowTracker
from ebbflow.rules.families import default_rule, name_of_optimizer, optimizer_family, tell_default_rule
from ebbflow.rules.rule import Rule, make_rule
from ebbflow.run.checkpoint import check_extra_state
from ebbflow.run.config import RunConfig, recipe_settings, settings_of
from ebbflow.run.flow import Flow
from ebbflow.run.planning import check_measurable, make_plan, unmeasured_step
from ebbflow.traces import load as load_trace
from ebbflow.workloads import Task
from ebbflow.workloads.sources import EvenSubset

__all__ = [
    "assemble",
    "check_names",
    "default_rule_of",
    "engine_maker",
    "loader_workers",
    "make_evaluate",
    "make_optimizer",
    "make_tracker",
    "resolve",
    "with_rule",
]

_ = emulated  # importing it registers the engines loop, fused and auto


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with everything that was left open filled in from the workload's recipe."""
    recipe = workloads.recipe(config.workload)
    filled = {name: getattr(recipe, name) for name in recipe_settings() if getattr(config, name) is None}
    label = config.label or (Path(config.plan).stem if config.plan else config.trace)
    return config.replace(**filled, label=label)


def engine_maker(name: str) -> EngineMaker:
    """The engine of this name: loop, fused, auto, or one that a plugin registered."""
    if name not in ENGINES:
        raise ConfigError(f"engine is {name!r}; {nearest(name, ENGINES.names())}")
    return cast(EngineMaker, ENGINES.entry(name).make)


def check_names(configs: Sequence[RunConfig]) -> None:
    """Refuse runs with an engine, tracker, optimizer, schedule, rule, policy, trace or time that cannot be made.

    It reads no data, so that a typo is reported before a data set is read. The plugins must have been loaded.
    """

    def texts(name: str) -> set[str]:
        return {getattr(config, name) for config in configs} - {None}

    for engine in texts("engine"):
        engine_maker(engine)
    for tracker in texts("tracker"):
        check_tracker(tracker)
    for optimizer in texts("optimizer"):
        build_optimizer(optimizer, [torch.nn.Parameter(torch.zeros(1, 1))], lr=1.0)
    for schedule in texts("schedule"):
        make_schedule(schedule)
    for name, words in (("step_time", {"fit"}), ("offset", set())):
        for text in texts(name) - words:
            try:
                parse_seconds(text.removesuffix("/ep") if name == "step_time" else text)
            except UnitError as error:
                raise UnitError(f"{name}: {error}") from None
    for rule in texts("rule"):
        make_rule(rule)
    for policy in texts("policy"):
        make_policy(policy, local_batch=1)
    for trace in {config.trace for config in configs if config.plan is None}:
        load_trace(trace)


def with_rule(
    config: RunConfig,
    task: Task,
    given: torch.optim.Optimizer | None = None,
    *,
    engine: EngineMaker | None = None,
    planned: bool = True,
) -> RunConfig:
    """The configuration with the rule that is used: that of a given RuleOptimizer, the named one, or the default.

    The default depends on the optimizer, and on whether the `engine` measures noise and signal; see `default_rule`.
    `planned`: whether the steps follow a plan, which says if any of them has two micro-batches; where the fleet itself
    decides, that is not known, and taken for granted.
    """
    if isinstance(given, RuleOptimizer):
        return _with_settings_of(given, config)
    if config.rule is not None:
        return config
    assert given is not None or config.optimizer is not None  # resolve() filled it in
    name = name_of_optimizer(type(given)) if given is not None else name_of_text(str(config.optimizer))
    trained = [parameter for parameter in task.model.parameters() if parameter.requires_grad]

    def one_micro_batch(growing: GrowingPolicy | None) -> int:
        if not planned or config.epochs is None:
            return 0
        plan, _ = make_plan(config, len(task.train))
        return unmeasured_step(config, plan, len(task.train), growing)

    rule = default_rule_of(config, name, trained=trained, engine=engine, one_micro_batch=one_micro_batch)
    return config.replace(rule=tell_default_rule(*rule))


def _with_settings_of(optimizer: RuleOptimizer, config: RunConfig) -> RunConfig:
    """The configuration with what a given RuleOptimizer has settled; ConfigError where the two contradict."""
    schedule = make_schedule(config.schedule) if config.schedule is not None else None
    rule = make_rule(config.rule) if config.rule is not None else None
    asked = {  # by the settings, in the form that the optimizer has
        "rule": None if rule is None else str(rule.suited(adaptive=optimizer.adaptive)),
        "ref_batch": config.ref_batch, "schedule": None if schedule is None else str(schedule), "clip": config.clip,
        "memory_steps": config.memory_steps, "measure_every": config.measure_every,
        "on_nonfinite": config.on_nonfinite,
    }  # fmt: skip
    settled: dict[str, Any] = {
        "rule": str(optimizer.rule),
        "ref_batch": optimizer.base_batch,
        "schedule": str(optimizer.schedule) if optimizer.schedule is not None else None,
        "clip": optimizer.clip,
        "memory_steps": optimizer.memory / optimizer.base_batch,
        "measure_every": optimizer.measure_every,
        # A run would go on, and save what nobody can go on from.
        "on_nonfinite": config.on_nonfinite if optimizer.on_nonfinite == "ignore" else optimizer.on_nonfinite,
    }
    for name, value in settled.items():
        if asked[name] not in (value, RunConfig.model_fields[name].default):
            known = {own: theirs for theirs, own in settings_of("session").items()}.get(name, name)
            raise ConfigError(
                f"{known} is {getattr(config, name)!r}, but the {type(optimizer).__name__} was made with "
                f"{known}={value!r}, by which it goes; give it to the optimizer alone"
            )
    return config.replace(**settled)


def why_never_measured(batch_norm: str, trained: Sequence[torch.nn.Parameter]) -> str:
    """Why noise and signal are not measured in any step, in words; empty if they may be."""
    if batch_norm == "sync":
        return "synchronised batch norm computes a step in one micro-batch, in which no noise is seen"
    return why_unmeasurable(trained) if trained else ""


def default_rule_of(
    config: RunConfig,
    optimizer: str,
    *,
    trained: Sequence[torch.nn.Parameter] | None = None,
    engine: EngineMaker | None = None,
    one_micro_batch: Callable[[GrowingPolicy | None], int] = lambda growing: 0,
    unmeasured: str = "",
) -> tuple[str, str]:
    """What `default_rule` says about a run with these settings: a rule that it can be trained with.

    `trained`: the parameters, if they are known. `one_micro_batch`: asked where it matters for the samples of
    the largest step if all steps have a single micro-batch; 0: one has two. `unmeasured`: why noise and signal are not
    measured, if that is known.
    """
    policy = make_policy(config.policy, config.local_batch) if config.plan is None else None
    grows = isinstance(policy, GrowingPolicy) and policy.damps
    if optimizer_family(optimizer) == "sgd" and not grows and not unmeasured:  # others measure nothing
        unmeasured = why_never_measured(config.batch_norm, trained or ())
        if engine is not None and not getattr(engine, "measures", False):
            unmeasured = "the engine is not registered as one that measures the noise of the gradient (measures=True)"
        elif not unmeasured and (most := one_micro_batch(policy if isinstance(policy, GrowingPolicy) else None)):
            unmeasured = (
                f"all steps have one micro-batch, in which no noise is seen "
                f"({called('micro_batch', max(1, most // 2))} or less makes two)"
            )
    return default_rule(optimizer, ends=config.epochs is not None, grows=grows, unmeasured=unmeasured)


def make_optimizer(
    config: RunConfig,
    task: Task,
    given: torch.optim.Optimizer | None = None,
    *,
    rule: str | Rule | None = None,
    schedule: str | Schedule | None = None,
) -> RuleOptimizer:
    """The optimizer of a run: the given one, or the one that the settings name; its rate follows the batch.

    `rule`, `schedule`: objects instead of the texts of the settings, of which `with_rule` has filled in the rule.
    """
    if isinstance(given, ElasticOptimizer) and given.sampler is not None:
        raise ConfigError(
            "the ElasticOptimizer has a sampler of its own, but here the engine assigns the samples; make it "
            "without sampler="
        )
    if isinstance(given, RuleOptimizer):
        given.on_nonfinite = config.on_nonfinite
        return given
    if config.ref_batch is None:
        raise ConfigError("base_batch is missing: at how many samples per step was the optimizer's rate tuned?")
    if given is None:
        assert config.optimizer is not None and config.lr is not None  # resolve() filled them in
        given = build_optimizer(config.optimizer, task.model, lr=config.lr)
    return RuleOptimizer(
        given,
        rule if rule is not None else config.rule,
        base_batch=config.ref_batch,
        schedule=schedule if schedule is not None else config.schedule,
        epochs=config.epochs,
        epoch_samples=len(task.train),
        memory_steps=config.memory_steps,
        measure_every=config.measure_every,
        clip=config.clip,
        on_nonfinite=config.on_nonfinite,
    )


def assemble(
    config: RunConfig,
    task: Task,
    engine: EngineMaker,
    *,
    optimizer: RuleOptimizer | None = None,
    plan: BatchPlan | None = None,
    policy: Policy | None = None,
    ranks: Ranks | None = None,
    on_event: Callable[[str, str], None] = lambda what, text: None,
) -> Flow:
    """The flow of a run: optimizer, growing policy, engine and ledger, made from the settings.

    `optimizer`: the one that the settings describe, unless given. `plan`: workers and samples of each step, where the
    fleet does not decide. `policy`: an object instead of the text of the settings.
    """
    check_extra_state(task.model)  # now, and not at the first checkpoint
    samples = len(task.train)
    optimizer = optimizer if optimizer is not None else make_optimizer(config, task)
    if policy is None and config.plan is None:
        policy = make_policy(config.policy, config.local_batch)
    growth = None
    if isinstance(policy, GrowingPolicy):
        growth = Growth(policy, ref_batch=optimizer.base_batch, epoch_samples=samples)
    needs = optimizer.rule.needs | (growth.policy.needs if growth is not None else frozenset())
    if needs and plan is not None:
        check_measurable(config, plan, samples, growth.policy if growth is not None else None, optimizer.rule)
    made: Any = engine(
        EngineParts(
            model=task.model,
            fetch=partial(task.train.batch, train=True),
            loss=task.loss,
            samples=samples,
            plan=plan,
            seed=config.seed,
            needs=needs,
            parameters=optimizer.layers,
            optimizer=optimizer,
            config=config,
            ranks=ranks,
            on_event=on_event,
        )
    )
    if not isinstance(made, Engine):
        raise ConfigError(f"the function of the engine {config.engine!r} returned {made!r}; expected an Engine")
    if isinstance(task.train, workloads.DatasetSource):
        task.train.prefetch_from(made.upcoming)
    skips = optimizer.on_nonfinite == "skip"
    statistics = None
    if skips or config.bn_follows_batch:
        statistics = RunningStatistics(task.model, follow=config.bn_follows_batch, undoable=skips)
    return Flow(
        made,
        optimizer,
        Ledger(samples=samples),
        total_samples=(config.epochs or 0) * samples,
        planned_steps=plan.steps if plan is not None and plan.goes_on else None,
        statistics=statistics,
        average=WeightAverage(task.model, config.ema) if config.ema is not None else None,
        growth=growth,
        drop=policy if isinstance(policy, Drop) else None,
    )


def make_tracker(
    config: RunConfig,
    folder: Path,
    *,
    ref_batch: int,
    step: Callable[[], int],
    when: Callable[[], bool] = lambda: True,
) -> RowTracker | None:
    """The tracker that the settings name, for the record of a run in its folder; None if they name none.

    `step`: the number of the step at which the tracker is opened. `when`: whether this process sends a row.
    """
    if config.tracker is None:
        return None
    text, name = config.tracker, f"{config.workload} {config.rule}"
    check_tracker(text)  # now, and not at the first row

    def make() -> Tracker:
        tracker = open_tracker(text, folder, name=name, step=step())
        tracker.settings(config.as_dict())
        return tracker

    return RowTracker(make, ref_batch=ref_batch, when=when)


def loader_workers(config: RunConfig) -> int:
    """Processes that prefetch for this one; torchrun says how many of its ranks share the machine."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    filled = config.with_loader_workers(cores=len(os.sched_getaffinity(0)), processes=ranks)
    assert filled.loader_workers is not None
    return filled.loader_workers


def make_evaluate(task: Task, train_scores: int) -> Callable[[], dict[str, float]]:
    """What a validation of a task measures: its scores, and those of so many training samples as train_accuracy, ...

    The training samples are the same every time, spread evenly over the training set. They are not augmented by the
    source; a data set that augments by itself still does. ConfigError if a score is no mean over samples: a validation
    metric, such as mAP, belongs to the validation samples as they are, with all their annotations.
    """
    if train_scores and task.validation is not None:
        raise ConfigError(
            f"train_scores is {train_scores}, but {task.require_recipe().metric!r} is computed on the whole validation "
            f"set and not on training samples; leave train_scores out"
        )
    source = EvenSubset(task.train, train_scores)

    def evaluate() -> dict[str, float]:
        found = task.evaluate(task.model)
        if train_scores:
            found |= {f"train_{name}": value for name, value in task.evaluate(task.model, source).items()}
        return found

    return evaluate
