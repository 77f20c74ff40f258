"""One step from the fleet to the record, on any engine; the position of a run, and its state."""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from ebbflow.core.memory import free_memory
from ebbflow.data.ledger import Assignment, Ledger
from ebbflow.engines.base import Engine, Gradients
from ebbflow.engines.batches import map_batch
from ebbflow.engines.replica_ranks import local_shard
from ebbflow.errors import CheckpointError, ConfigError, Diverged
from ebbflow.optim.ema import RunningStatistics, WeightAverage
from ebbflow.optim.rule_optimizer import RuleOptimizer
from ebbflow.plan.batch_plan import StepSize
from ebbflow.plan.growing import Growth
from ebbflow.plan.policies import Drop
from ebbflow.record import StepRow
from ebbflow.rules.rule import StepContext
from ebbflow.run.checkpoint import load_model

__all__ = ["Flow", "OpenStep", "Stateful", "check_loss", "states_of"]

_KEPT = ("snapshot", "unconfirmed", "branches")
"""The states that a flow keeps for its rule; they are part of its own."""
_PART_OF_MEMORY = 0.25
"""Largest part of the free memory of the host that one of them may take; there are three at most."""


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
        file = io.BytesIO()
        try:
            torch.save(map_batch(state, lambda value: None if isinstance(value, torch.Tensor) else value), file)
            torch.load(io.BytesIO(file.getbuffer()), weights_only=True)
        except Exception as error:  # what pickle and torch raise is of many kinds
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = named[1] if named else f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            raise ConfigError(
                f"the state of {name!r} among the extras has something that is not read back from a checkpoint, nor by "
                f"a replica that joins ({what}); let its state_dict() return tensors, numbers, texts and plain "
                f"containers of them: float(x) of a number of numpy, torch.from_numpy(x) of an array"
            ) from None
    return states


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step whose participants and samples are known and whose gradient is not."""

    size: StepSize
    assignment: Assignment
    batch: int
    """Samples in the step."""
    began: float
    measured: bool
    """Whether the rule uses what this step shows of noise and signal."""
    restore: ExitStack
    """Closed at the end of the step: puts back what was set for its duration."""


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
    """Batch-norm statistics, where their momentum follows the batch or a step may be skipped."""
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
    snapshot: Mapping[str, Any] | None = None
    """The state to which the run goes back if the rule asks for it; tensors are in the memory of the host."""
    unconfirmed: Mapping[str, Any] | None = None
    """A later state, kept in the same way, which takes the place of the snapshot once the rule confirms it."""
    branches: Mapping[str, Any] | None = None
    """While the rule compares branches: the state at their `start`, the `best` end so far, the end of the `last` one,
    which is being scored, all in the memory of the host; the `sum` of the weights of the present one and their
    `count`."""
    too_large: float = 0.0
    """Gigabytes of a state that the rule asked for since the last row, and that takes too much of the memory."""
    _told_too_large: bool = False
    on_gradients: Callable[[], None] | None = None
    """Called when the mean gradient of a committed step is in `.grad`, before the rule and the optimizer."""

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
            return self.close(step, self.engine.gradients(step.assignment, step.size))

    def open(self) -> OpenStep:
        """The first half of a step, up to the backward passes."""
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
        if self.step == 0 and self.snapshot is None and self.optimizer.rule.guards and self._fits():
            self.snapshot = self._kept_state()
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
        return OpenStep(size, assignment, batch, began, measured, restore)

    def close(self, step: OpenStep, gradients: Gradients) -> StepRow | None:
        """The second half of a step, after the backward passes."""
        return self.apply(step, gradients) if self.commit(step) else None

    def commit(self, step: OpenStep) -> bool:
        """Whether the step counts; if so, the mean gradient is in `.grad`, and `apply` follows."""
        with step.restore:  #                                            engines, moments: mean gradient, noise, signal
            committed = self.engine.commit()
        if not committed:  # an assignment that is not committed leaves no trace: its samples are assigned again
            self.wall_s += time.perf_counter() - step.began
        return committed

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
        if self.optimizer.rule.guards and (update.applied or diverged):
            reviewed = self._review(context, gradients.loss if update.applied else math.nan)
        if diverged and "given_back" not in reviewed:
            raise diverged
        if self.too_large:
            reviewed, self.too_large = {**reviewed, "too_large_gb": self.too_large}, 0.0
        self.wall_s += time.perf_counter() - step.began
        return StepRow(  #                                               record: what happened
            step=context.step,
            time_s=size.time_s,
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

    def _fits(self) -> bool:
        """Whether the present state may be kept in the memory of the host; if not, the rule does without from now on.

        How much memory is free differs between processes, which must decide alike: those of a group keep it, and only
        say that it is large.
        """
        free = free_memory()
        parts = (self.engine.model.state_dict(), self.optimizer.inner.state_dict()["state"])
        size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(parts))
        if free is None or size <= _PART_OF_MEMORY * free or self._told_too_large:
            return True
        self.too_large = size / 1e9
        if not self.engine.single_process:
            self._told_too_large = True
            return True
        self.optimizer.rule_unkept()
        self.snapshot = self.unconfirmed = self.branches = None
        return False

    def _kept_state(self) -> dict[str, Any]:
        """The present state, to be kept."""
        state = _in_host_memory({name: part for name, part in self.state_dict().items() if name not in _KEPT})
        return {**state, "known": self.engine.snapshot_taken()}

    def _review(self, context: StepContext, loss: float) -> dict[str, float]:
        """Do what the rule asks for after a step: keep the state, forget what was kept, or go back to it.

        Returns the samples that were given back, under the name that they have in the record. The steps go on counting,
        and so does the time: going back costs what was computed since.
        """
        verdict = self.optimizer.review(context, loss)
        kept = dict(self.branches or {})
        match verdict:
            case "snapshot" | "branch" if not self._fits():
                pass
            case "snapshot":
                self.snapshot, self.unconfirmed = self.unconfirmed or self.snapshot, self._kept_state()
            case "confirm":
                self.snapshot, self.unconfirmed = self.unconfirmed or self.snapshot, None
            case "release":
                self.snapshot = self.unconfirmed = self.branches = None
            case "restore" if self.snapshot is not None:
                self.unconfirmed = None
                return self._go_back(self.snapshot)
            case "branch":
                self.branches = {"start": self._kept_state()}
            case "average" | "score average" | "score":
                self._score(verdict, kept)
            case "next" | "lead":
                best = kept.pop("last") if verdict == "lead" else kept.get("best")
                self.branches = {"start": kept["start"], "best": best}
                return self._go_back(kept["start"])
            case "adopt" | "adopt last":
                self.branches = None
                return self._go_back(kept["best" if verdict == "adopt" else "last"])
        return {}

    def _score(self, verdict: str, kept: dict[str, Any]) -> None:
        """Add the weights to the average of a branch; at its end keep the state, and put the average in its place."""
        self.engine.sync()
        weights = dict(self.engine.model.named_parameters())
        if verdict != "score":
            summed = kept.get("sum") or {name: torch.zeros_like(weight) for name, weight in weights.items()}
            kept["sum"] = {name: summed[name].to(weight.device) + weight.detach() for name, weight in weights.items()}
            kept["count"] = kept.get("count", 0) + 1
        if verdict != "average":
            kept["last"] = self._kept_state()
        if verdict == "score average":
            summed, count = kept.pop("sum"), kept.pop("count")
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(summed[name] / count)
            if self.engine.replicated:
                self.engine.snapshot_loaded(kept["last"]["known"])
        self.branches = kept

    def _go_back(self, state: Mapping[str, Any]) -> dict[str, float]:
        """Go on from a state that was kept; what the rule has learned since goes on."""
        kept = (self.snapshot, self.unconfirmed, self.branches)
        step, wall_s, done = self.step, self.wall_s, self.ledger.total
        reviewed = self.optimizer.state_dict()["rule_state"]
        # A copy: torch's optimizers go on with the tensors that they load.
        self.load_state_dict(_in_host_memory(state), origin="the snapshot")
        self.optimizer.rule_restored(reviewed)
        (self.snapshot, self.unconfirmed, self.branches), self.step, self.wall_s = kept, step, wall_s
        self.engine.snapshot_loaded(state["known"])
        return {"given_back": float(done - self.ledger.total)}

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

    def state_dict(self, *, weights: bool = True) -> dict[str, Any]:
        """Everything at the last committed step, in plain containers that `torch.load(weights_only=True)` reads.

        Where replicas elsewhere apply the steps, model and optimizer of this process are brought up to date before.
        Without `weights`, what the caller keeps itself is left out: the model and the state of the inner optimizer.
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
            "step": self.step,
            "wall_s": self.wall_s,
        }
        if weights:
            state |= {name: kept for name in _KEPT if (kept := getattr(self, name)) is not None}
        if not weights:
            del optimizer["inner"]
            return state
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
        self.step = int(state["step"])
        self.wall_s = float(state["wall_s"])
        self.snapshot, self.unconfirmed, self.branches = (state.get(name) for name in _KEPT)
        if self.branches is None:
            self.optimizer.rule_interrupted()
        self.engine.load_state_dict(state.get("engine") or {})


def _in_host_memory(state: Any) -> Any:
    """A copy of a state in plain containers, whose tensors no step changes."""
    return map_batch(state, lambda value: value.detach().to("cpu", copy=True) if hasattr(value, "detach") else value)


def _tensors(state: Any) -> list[torch.Tensor]:
    """The tensors in a state; of a sharded one those of this rank."""
    found: list[torch.Tensor] = []
    map_batch(state, lambda value: found.append(local_shard(value)) if isinstance(value, torch.Tensor) else None)
    return found


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
