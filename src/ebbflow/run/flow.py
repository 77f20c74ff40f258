"""One step from the fleet to the record, on any engine; the position of a run, and its state."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from ebbflow.data.ledger import Assignment, Ledger
from ebbflow.engines.base import Engine, Gradients
from ebbflow.engines.batches import map_batch
from ebbflow.errors import CheckpointError, ConfigError, Diverged
from ebbflow.optim.ema import RunningStatistics, WeightAverage
from ebbflow.optim.rule_optimizer import RuleOptimizer
from ebbflow.plan.batch_plan import StepSize
from ebbflow.plan.growing import Growth
from ebbflow.plan.policies import Drop
from ebbflow.record import StepRow
from ebbflow.rules.rule import StepContext
from ebbflow.run.checkpoint import load_model, unreadable_part
from ebbflow.run.kept_states import KeptStates

__all__ = ["Flow", "OpenStep", "Stateful", "check_loss", "states_of"]


class Stateful(Protocol):
    """Whatever else belongs to the state of a script: a scheduler, a second optimizer, a counter."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, texts and plain containers of them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore what `state_dict` described."""


def states_of(extras: Mapping[str, Stateful]) -> dict[str, Any]:
    """The states of what else belongs to a script; ConfigError for one that could be saved and not be read back."""
    states = {name: extra.state_dict() for name, extra in extras.items()}
    for name, state in states.items():
        if what := unreadable_part(state):
            raise ConfigError(
                f"the state of {name!r} among the extras has something that is not read back from a checkpoint, nor by "
                f"a replica that joins ({what}); let its state_dict() return tensors, numbers, texts and plain "
                f"containers of them: float(x) of a number of numpy, torch.from_numpy(x) of an array"
            )
    return states


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step whose participants and samples are known and whose gradient is not."""

    size: StepSize
    assignment: Assignment
    batch: int
    """Samples in the step."""
    began: float
    """When the step was asked for, by `time.perf_counter`."""
    started: float
    """When its participants were there."""
    measured: bool
    """Whether the rule uses what this step shows of noise and signal."""
    restore: ExitStack
    """Closed at the end of the step: puts back what was set for its duration."""


class _BeforeStep:
    """What a script may change while a step is under way, as it was before: the extras, and the rates they set.

    A scheduler that the loop steps before the step is complete would otherwise count a step that was lost. Extras whose
    state has tensors are left alone, since a copy in every step would be expensive.
    """

    def __init__(self, extras: Mapping[str, Stateful], groups: list[dict[str, Any]]) -> None:
        self._extras = [
            (extra, state) for extra in extras.values() if (state := _copied(extra.state_dict())) is not None
        ]
        self._groups = groups
        self._settings = [_settings(group) for group in groups] if self._extras else []

    def put_back(self) -> None:
        """Let everything be as it was before the step."""
        for extra, state in self._extras:
            extra.load_state_dict(state)
        for group, settings in zip(self._groups, self._settings, strict=False):
            for name, value in settings.items():
                if isinstance(value, torch.Tensor):  # the optimizer may have it in a graph
                    group[name].copy_(value)
                else:
                    group[name] = value


def _copied(state: dict[str, Any]) -> dict[str, Any] | None:
    """A copy of a state without tensors; None if it has any."""
    tensors: list[Any] = []
    map_batch(state, lambda value: tensors.append(value) if isinstance(value, torch.Tensor) else None)
    return None if tensors else copy.deepcopy(state)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group: its rate and the like."""
    own = {name: value for name, value in group.items() if name != "params"}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in own.items()}


@dataclass
class Flow:
    """The parts of a run that meet in a step, and its position."""

    engine: Engine
    optimizer: RuleOptimizer
    ledger: Ledger
    step: int = 0
    total_samples: int = 0
    """Samples in the whole run; 0 if it has no end."""
    wall_s: float = 0.0
    """Seconds of computing so far; resumed runs go on counting."""
    statistics: RunningStatistics | None = None
    """Batch-norm statistics and other buffers, where momentum follows the batch or a step may be skipped."""
    average: WeightAverage | None = None
    growth: Growth | None = None
    """The growing policy and its state, if the batch grows."""
    drop: Drop | None = None
    """The policy by which steps drop the samples of absent workers, if they do."""
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    """What else belongs to the state, by name: saved, restored and put back with it."""
    max_steps: int = 0
    """The run ends after this many steps, if not before; 0 stands for no limit."""
    planned_steps: int | None = None
    """Steps of the plan, where a run that gives steps back goes on beyond its end; None: there is no such end."""
    kept: KeptStates = field(default_factory=KeptStates)
    """The states that are kept for the rule; they are part of its own."""
    on_gradients: Callable[[], None] | None = None
    """Called when the mean gradient of a committed step is in `.grad`, before the rule and the optimizer."""
    incomplete: bool = False
    """Whether a step was committed and its row is not in the record yet: this state must not be saved, since it may be
    half of the one before and half of the one after."""
    validation_due: tuple[int, float] | None = None
    """Samples and time at a step that ended an epoch, until the model is evaluated; a run that goes on makes up for
    it."""
    _before: _BeforeStep | None = field(default=None, init=False, repr=False)
    """While a step is open: what it may have changed apart from the engine."""

    def __post_init__(self) -> None:
        if self.average is not None and self.engine.replicated:
            raise ConfigError(
                "a moving average of the weights (ema) is kept in the process that has the weights, and here replicas "
                "elsewhere have them; use transport='centralized', or no average"
            )

    # One step -----------------------------------------------------------------------------------------------------

    def run_step(self) -> StepRow | None:
        """One step from the fleet to the record; None if it was lost, and then nothing has happened.

        A step that is skipped because its gradient is not finite has happened: its samples count. It leaves no trace in
        weights, buffers, rule and averages, and its row has `skipped` among its stats.
        """
        step = self.open()
        with step.restore:
            try:
                gradients = self.engine.gradients(step.assignment, step.size)
            except BaseException:
                self.abandon()
                raise
            return self.close(step, gradients)

    def open(self) -> OpenStep:
        """The first half of a step, up to the backward passes; one that was left open is given up."""
        self.abandon()
        began = time.perf_counter()
        measures = bool(self.optimizer.rule.needs) or self.growth is not None
        if self.optimizer.unfrozen and (measures or not self.engine.single_process):
            raise ConfigError(
                "a tensor is trained that was frozen when the optimizer was made; engines measure and add up the "
                "gradients of the tensors that were trained then: unfreeze it before, or begin a new run"
            )
        if self.growth is not None:
            self.engine.request(self.growth.useful)
        size = self.engine.participants(self.step)  #                    traces, plan: who, and how much
        started = time.perf_counter()
        if self.step == 0:
            self.kept.begin(self)
        if self.growth is not None:
            size = self.growth.allow(size)
        if self.drop is not None:
            trained, dropped = self.drop.split(size.workers)
            size = replace(size, samples=trained, dropped=dropped)
        assignment = self.ledger.assign(size.samples, size.dropped)  #   data: which samples
        batch = assignment.batch
        measured = self.growth is not None or self.optimizer.due(batch)
        self.engine.measure(measured)
        restore = ExitStack()
        if self.statistics is not None:
            restore.enter_context(self.statistics.step(batch, self.optimizer.base_batch))
        self._before = _BeforeStep(self.extras, self.optimizer.inner.param_groups)
        return OpenStep(size, assignment, batch, began, started, measured, restore)

    def close(self, step: OpenStep, gradients: Gradients) -> StepRow | None:
        """The second half of a step, after the backward passes."""
        return self.apply(step, gradients) if self.commit(step) else None

    def commit(self, step: OpenStep) -> bool:
        """Whether the step counts; if so, the mean gradient is in `.grad`, and `apply` follows."""
        before, self._before = self._before, None
        self.incomplete = True
        with step.restore:  #                                            engines, moments: mean gradient, noise, signal
            committed = self.engine.commit()
        if not committed:  # an assignment that is not committed leaves no trace: its samples are assigned again
            if before is not None:
                before.put_back()
            self.incomplete = False
            self.wall_s += time.perf_counter() - step.began
        return committed

    def abandon(self) -> None:
        """Give up the open step, if there is one: nothing of it has happened."""
        before, self._before = self._before, None
        if before is not None:
            self.engine.abandon()
            before.put_back()

    def apply(self, step: OpenStep, gradients: Gradients) -> StepRow:
        """Take a committed step with the gradient in `.grad`."""
        size, assignment, batch = step.size, step.assignment, step.batch
        context = StepContext(
            step=self.step,
            batch=batch,
            ref_batch=self.optimizer.base_batch,
            samples=self.ledger.total,
            workers=size.workers,
            epoch_samples=self.ledger.samples,
            total_samples=self.total_samples,
            shortfall=size.shortfall,
            dropped=assignment.dropped,
        )
        measurement = gradients.measurement if step.measured else None
        if measurement is None and step.measured and self.optimizer.rule.needs:
            raise ConfigError(
                f"the rule {self.optimizer.rule} needs the noise of the gradient, and this engine measures nothing; "
                f"make the engine with needs=optimizer.rule.needs"
            )
        if self.on_gradients is not None:
            self.on_gradients()
        diverged: Diverged | None = None
        try:
            update = self.optimizer.update(  #                           rules, optim: the step
                context, measurement, norm=gradients.norm, slopes=gradients.slopes
            )
        except Diverged as error:
            if not self.optimizer.rule.guards:
                raise
            diverged, update = error, self.optimizer.skip_step(context)
        else:
            self.engine.applied(context)
        if update.applied and self.average is not None:
            self.average.update(context.ratio)
        if not update.applied and self.statistics is not None:
            self.statistics.undo()
        in_epoch = self.ledger.dropped + assignment.dropped
        drops = {"dropped": assignment.dropped, "dropped_in_epoch": in_epoch} if in_epoch else {}
        self.ledger = self.ledger.commit(assignment)
        done = self.ledger.total
        self.step += 1
        if self.growth is not None:
            seconds = gradients.seconds if gradients.seconds is not None else size.duration_s or None
            self.growth.observe(batch=batch, workers=size.workers, seconds=seconds, **_observations(gradients))
        reviewed: dict[str, float] = {}
        if self.optimizer.rule.guards:
            if update.applied or diverged:
                reviewed = self.kept.review(self, context, gradients.loss if update.applied else math.nan)
            reviewed |= self.kept.take_notes()
        if diverged and "given_back" not in reviewed:
            raise diverged
        if "given_back" not in reviewed and (self.ledger.position == 0 or self.finished):
            self.validation_due = (done, size.time_s)
        now = time.perf_counter()
        self.wall_s += now - step.began
        return StepRow(  #                                               record: what happened
            step=context.step,
            time_s=size.time_s,
            duration_s=size.duration_s or round(now - step.started, 6),
            wall_s=round(self.wall_s, 6),
            epoch=assignment.epoch,
            samples=done,
            workers=size.workers,
            batch=context.batch,
            micro_batches=gradients.micro_batches,
            lr_base=update.lr_base,
            lr=update.lr,
            multiplier=update.multiplier,
            loss=gradients.loss,
            stats={**(self.growth.stats if self.growth is not None else {}), **update.stats, **drops, **reviewed},
        )

    def go_back(self, state: Mapping[str, Any]) -> float:
        """Go on from a state that was kept for the rule; the samples that are given back.

        The steps go on counting, and so does the time: going back costs what was computed since.
        """
        step, wall_s, done = self.step, self.wall_s, self.ledger.total
        self.load_state_dict(state, origin="the snapshot")
        self.step, self.wall_s = step, wall_s
        return float(done - self.ledger.total)

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or `max_steps`, or all the gain where the rule counts that; False without an
        end."""
        if 0 < self.max_steps <= self.step:
            return True
        if self.optimizer.by_gain and self.optimizer.total_samples:
            return self.optimizer.finished
        return 0 < self.total_samples <= self.ledger.total

    # State --------------------------------------------------------------------------------------------------------

    def state_dict(self, *, weights: bool = True, kept: bool = True) -> dict[str, Any]:
        """Everything at the last committed step, in plain containers that `torch.load(weights_only=True)` reads.

        Where replicas elsewhere apply the steps, model and optimizer of this process are brought up to date before.
        Without `weights`, what the caller keeps itself is left out: the model, the state of the inner optimizer and the
        states that are kept for the rule. Without `kept`, only the latter are.
        """
        self.engine.sync()
        optimizer = self.optimizer.state_dict()
        state: dict[str, Any] = {
            "optimizer": optimizer,
            "average": self.average.state_dict() if self.average is not None else None,
            "growth": self.growth.state_dict() if self.growth is not None else None,
            "engine": self.engine.state_dict(),
            "ledger": self.ledger.state(),
            "extras": states_of(self.extras),
            "validation_due": list(self.validation_due) if self.validation_due is not None else None,
            "step": self.step,
            "wall_s": self.wall_s,
        }
        if not weights:
            del optimizer["inner"]
            return state
        if kept:
            state |= self.kept.state_dict()
        return {"model": self.engine.model.state_dict(), **state, "rng": torch.get_rng_state()}

    def load_state_dict(
        self, state: Mapping[str, Any], *, origin: str = "the saved state", strict: bool = True
    ) -> None:
        """Go on where `state_dict` was taken; `origin` names the state in errors.

        A state of another model, rule, policy or data set is a CheckpointError. With `strict=False` a rule or policy
        that has changed begins anew, data of another size continue with the saved epoch, and the rest goes on."""
        extras = state.get("extras") or {}
        if strict and (missing := sorted(self.extras.keys() - extras.keys())):
            raise CheckpointError(
                f"{origin} has no state of {', '.join(missing)} among its extras; leave them out, or start anew"
            )
        if "model" in state:
            load_model(self.engine.model, state["model"], origin)
            torch.set_rng_state(state["rng"])
        optimizer = {"inner": self.optimizer.inner.state_dict(), **state["optimizer"]}
        forgiven = () if strict else (CheckpointError,)
        with suppress(*forgiven):
            self.optimizer.load_state_dict(optimizer)
        if self.growth is not None and (strict or state["growth"] is not None):
            with suppress(*forgiven):
                self.growth.load_state_dict(state["growth"])
        if self.average is not None and state.get("average") is not None:
            self.average.load_state_dict(state["average"])
        try:
            self.ledger = Ledger.restore(state["ledger"], samples=self.ledger.samples)
        except CheckpointError:
            if strict:
                raise
            self.ledger = Ledger(samples=self.ledger.samples, epoch=int(state["ledger"]["epoch"]))
        for name in self.extras.keys() & extras.keys():
            self.extras[name].load_state_dict(extras[name])
        due = state.get("validation_due")
        self.validation_due = (int(due[0]), float(due[1])) if due is not None else None
        self.step = int(state["step"])
        self.wall_s = float(state["wall_s"])
        self.kept.load_state_dict(state)
        if self.kept.branches is None:
            self.optimizer.rule_interrupted()
        self.engine.load_state_dict(state.get("engine") or {})


def _observations(gradients: Gradients) -> dict[str, float]:
    """What a step shows to a growing policy; only finite numbers."""
    shown = {"loss": gradients.loss}
    measured = gradients.measurement
    if measured is not None:
        shown["norm_sq"] = math.fsum(measured.sq_mean)
        if measured.micro_batches > 1:
            noise, signal = measured.estimate()
            shown |= {"noise": math.fsum(noise), "signal": math.fsum(signal)}
    return {name: value for name, value in shown.items() if math.isfinite(value)}


def check_loss(row: StepRow) -> None:
    """Raise Diverged if the loss of a step is not a finite number; a skipped step and one taken back do not count."""
    if "skipped" in row.stats or "given_back" in row.stats or (row.loss is not None and math.isfinite(row.loss)):
        return
    raise Diverged(f"the training loss is {row.loss} at step {row.step} (epoch {row.epoch}, rate {row.lr:g})")
