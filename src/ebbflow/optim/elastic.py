"""`ElasticOptimizer`: any torch optimizer, with a learning rate that follows the batch. `apply.py` applies the
scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ebbflow.core.spec import nearest
from ebbflow.data.sampler import ElasticSampler, MicroBatchInfo
from ebbflow.errors import CheckpointError, ConfigError, Diverged
from ebbflow.moments.estimate import Averages, Measurement, Moments
from ebbflow.moments.meters import HookMeter
from ebbflow.optim.apply import Applier, gradient_norm, scale_gradients
from ebbflow.optim.schedules import Schedule, TrainingProgress, make_schedule
from ebbflow.rules.rule import Rule, Scaling, StepContext, damp, make_rule

__all__ = ["ElasticOptimizer", "OnNonfinite", "Update"]

STATE_VERSION = 3

OnNonfinite = Literal["ignore", "skip", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one step of an `ElasticOptimizer` did."""

    lr_base: float
    """Base rate of the step, of the first parameter group."""
    lr: float
    """Rate that the step used; the mean over the layers if they differ; 0 if the step was skipped."""
    multiplier: float
    """Factor of the whole step relative to a step at the base rate, inside and outside the momentum together."""
    applied: bool = True
    """False if the gradient was not finite, so that nothing but the position has changed."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Values for the record."""
    scaling: Scaling = Scaling()
    """What the rule returned."""
    moments: Moments | None = None
    """The noise and signal that the rule was given."""


class ElasticOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, with a learning rate that follows the batch by a rule.

    In a plain training loop, with a sampler that provides the micro-batches of each step:

        sampler   = ElasticSampler(len(data), plan, local_batch=32)      # batch_sampler of the DataLoader
        optimizer = ElasticOptimizer(SGD(...), rule="adascale", base_batch=256, sampler=sampler)
        for x, y in loader:
            loss_fn(model(x), y).backward()      # the loss is the mean over the micro-batch
            optimizer.step()                     # accumulates; updates after the last micro-batch of a step
            optimizer.zero_grad()                # does nothing between the micro-batches of a step

    The gradient of a step is the mean over its *samples*, so that micro-batches are weighted by their sizes.
    Guarantees: the inner optimizer is called exactly once per step; parameter groups hold the base rate before and
    after every call; a step that fails or is skipped changes neither the state of the rule nor the averages of noise
    and signal; `state_dict` restores the inner optimizer, the rule, the averages, the position and the sampler at the
    last complete step. Limits: the loss must be a mean over the samples of the micro-batch; closures are not supported;
    gradients are combined within one process only (a sampler for rank r of R is for loops that combine gradients
    themselves).

    *Mixed precision.* Give the GradScaler to the constructor and call neither its `step` nor its `update`, since only a
    complete step may be unscaled:

        scaler.scale(loss_fn(model(x), y)).backward()
        optimizer.step()                         # unscales the complete step; skips it if a gradient is not finite

    The samples of a skipped step are consumed. *Clipping* between `backward` and `step` would clip micro-batches;
    `clip` limits the norm of the mean gradient of the step, after it was measured.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        rule: str | Rule = "linear",
        *,
        base_batch: int,
        sampler: ElasticSampler | None = None,
        schedule: str | Schedule | None = None,
        epochs: int | None = None,
        epoch_samples: int = 0,
        memory_steps: float = 1000.0,
        measure_every: int = 4,
        clip: float | None = None,
        on_nonfinite: OnNonfinite = "ignore",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Wrap an optimizer whose learning rates were tuned at `base_batch` samples.

        `schedule` sets the base rate as a function of progress; without one it is whatever the parameter groups hold,
        so that a torch LR scheduler works, too. `epochs` is the length of the run, for schedules that span it.
        `memory_steps` is the number of reference steps that the averages of noise and signal remember. After that many,
        at least one step in every `measure_every` is measured; with 1, every step is. `clip` is the largest norm of the
        mean gradient of a step. `on_nonfinite` says what happens if a gradient is NaN or infinite: the step is skipped
        ("skip"), `Diverged` is raised ("stop"), or nothing is checked, as in torch ("ignore"). With a scaler such steps
        are always skipped.
        """
        if base_batch < 1:
            raise ConfigError(f"base_batch is {base_batch}; expected the batch size at which the rate was tuned")
        if sampler is not None and sampler.world_size > 1:
            raise ConfigError(
                f"the sampler is for rank {sampler.rank} of {sampler.world_size}, but ElasticOptimizer combines the "
                f"gradients of one process; use a sampler with world_size=1"
            )
        for name, value in (("memory_steps", memory_steps), ("measure_every", measure_every), ("clip", clip)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; expected a number above 0")
        if on_nonfinite not in ("ignore", "skip", "stop"):
            raise ConfigError(f"on_nonfinite is {on_nonfinite!r}; {nearest(on_nonfinite, ['ignore', 'skip', 'stop'])}")
        self.inner = inner
        self.rule = make_rule(rule)
        self.base_batch = base_batch
        self.sampler = sampler
        self.schedule = make_schedule(schedule) if schedule is not None else None
        self.epoch_samples = epoch_samples or (sampler.samples if sampler is not None else 0)
        self.total_samples = (epochs or 0) * self.epoch_samples
        self.memory = memory_steps * base_batch
        self.measure_every = measure_every
        self.clip = clip
        self.on_nonfinite = on_nonfinite
        self.last: Update | None = None
        """What the latest complete step did."""
        self._applier = Applier(inner)
        self._check_rule()
        self._initial_lrs = [group["lr"] for group in inner.param_groups]
        self._rule_state = self.rule.init()
        self._averages = Averages()
        self._steps = 0
        self._samples = 0
        self._progress = 0.0  # reference steps that all steps together are worth, if the rule counts the gain
        self._accumulating = False
        self._scaler = scaler
        self._scale = 1.0  # loss scale of the current step's gradients
        self._meter = self._make_meter()
        super().__init__(inner.param_groups, inner.defaults)
        self._share_with_inner()

    def _share_with_inner(self) -> None:
        """Let both optimizers hold the same parameter groups and the same state."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def _check_rule(self) -> None:
        """Refuse a rule that the optimizer cannot follow, and find out whether the rule counts progress by gain.

        A rule is a pure function, so that it can be asked about a step that does not happen.
        """
        layers = len(self.layers) if "layers" in self.rule.needs else 0
        context = StepContext(
            step=0,
            batch=2 * self.base_batch,
            ref_batch=self.base_batch,
            samples=0,
            epoch_samples=self.epoch_samples or self.base_batch,
            total_samples=self.total_samples or self.base_batch,
            moments=Moments(noise=1.0, signal=1.0, layer_noise=(1.0,) * layers, layer_signal=(1.0,) * layers),
        )
        scaling, _ = self.rule.scale(context, self.rule.init())
        self._applier.check(scaling, self.rule)
        if layers:
            self._applier.check_layers(self.rule)
        self.by_gain = scaling.progress is not None
        """Whether the schedule and the end of the run follow the sum of the gains instead of the samples."""

    def _make_meter(self) -> HookMeter | None:
        if not self.rule.needs or self.sampler is None:
            return None
        layers = "layers" in self.rule.needs
        return HookMeter(self.layers if layers else self._applier.measurable, layers=layers)

    @property
    def layers(self) -> list[torch.nn.Parameter]:
        """The layers of layer-wise rules: the trainable tensors, in the order of the parameter groups."""
        return self._applier.layers

    @property
    def unfrozen(self) -> bool:
        """Whether a tensor is trained that was frozen when the optimizer was made, and is not among the layers."""
        return any(p.requires_grad for p in self._applier.frozen)

    @property
    def progress(self) -> float:
        """Progress of training in samples of the reference run, which the schedule follows."""
        return self._progress * self.base_batch if self.by_gain else float(self._samples)

    def due(self, batch: int) -> bool:
        """Whether an upcoming step of `batch` samples is to be measured; see `Averages.due`."""
        return bool(self.rule.needs) and self._averages.due(batch, memory=self.memory, every=self.measure_every)

    @property
    def finished(self) -> bool:
        """Whether progress has reached the length of the run; False for a run without an end."""
        enough = self.total_samples * (1 - 1e-9) if self.by_gain else self.total_samples  # sums of gains are rounded
        return 0 < enough <= self.progress

    # The step ---------------------------------------------------------------------------------------------------

    _step_supports_amp_scaling = True  # a GradScaler then calls step() without unscaling, and step() can refuse it

    def step(self, closure: Callable[[], float] | None = None, *, samples: int | None = None) -> None:  # type: ignore[override]
        """Accumulate the gradient of one micro-batch, and update after the last one of a step.

        Without a sampler every call is a whole step of `samples` samples.
        """
        if closure is not None:
            raise ConfigError("ElasticOptimizer.step takes no closure: call backward() before step()")
        if hasattr(self, "grad_scale"):
            raise ConfigError(
                "scaler.step(optimizer) would unscale every micro-batch of a step; pass scaler= to ElasticOptimizer, "
                "call optimizer.step(), and leave scaler.step and scaler.update out of the loop"
            )
        if self.sampler is None:
            if samples is None or samples < 1:
                raise ConfigError(f"step(samples={samples}): pass the step's samples, or sampler= to ElasticOptimizer")
            if self.rule.needs:
                raise ConfigError(
                    f"the rule {self.rule} measures the micro-batches of a step; pass the sampler that provides them "
                    f"to ElasticOptimizer (sampler=)"
                )
            self._complete(batch=samples, workers=1)
            return
        micro_batch = self.sampler.consume()
        if micro_batch.first and self._scaler is not None and self._meter is not None:
            self._scale = self._scaler.get_scale()
        if self._meter is not None:
            self._meter.close_micro_batch(micro_batch.size, scale=self._scale)
        self._accumulating = not micro_batch.last
        self._weigh(micro_batch)
        if micro_batch.last:
            self._complete(batch=micro_batch.batch, workers=micro_batch.workers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless a step is still accumulating its micro-batches."""
        if not self._accumulating:
            self.inner.zero_grad(set_to_none=set_to_none)

    def _weigh(self, micro_batch: MicroBatchInfo) -> None:
        """Scale `.grad` to sum(n_j g_j)/n_next, with n_next the size of the next micro-batch, and finally to the mean.

        Micro-batches of equal size need no work until the last one.
        """
        following = micro_batch.batch if micro_batch.next_size is None else micro_batch.next_size
        scale_gradients(self._applier.parameters, micro_batch.size / following)

    def _complete(self, *, batch: int, workers: int) -> None:
        """Update at the position that this optimizer has counted itself."""
        context = StepContext(
            step=self._steps,
            batch=batch,
            ref_batch=self.base_batch,
            samples=self._samples,
            workers=workers,
            epoch_samples=self.epoch_samples,
            total_samples=self.total_samples,
        )

        def update() -> None:
            if self._meter is None:
                self.update(context)
                return
            self.update(context, self._meter.finish(batch) if self._meter.on else None)
            self._meter.on = self.due(batch)  # assumes that the next step has the same size

        if self._scaler is None:
            update()
        elif not _UnscaledStep(self.param_groups, update).run(self._scaler):
            if self._meter is not None:
                self._meter.discard()
            self._skip(context)

    def update(self, context: StepContext, measurement: Measurement | None = None, norm: float | None = None) -> Update:
        """Take one step with the mean gradient in `.grad`: ask the rule, scale the rates, step, restore the rates.

        Engines call this directly, with the position of the ledger in the context. `norm` is the norm of the mean
        gradient, if the gradient itself is elsewhere.
        """
        stats: dict[str, float] = {}
        if self.clip is not None or self.on_nonfinite != "ignore":
            if norm is None:
                norm = gradient_norm(self._applier.parameters) if measurement is None else measurement.norm
            if not math.isfinite(norm) and self.on_nonfinite != "ignore":
                if self.on_nonfinite == "stop":
                    raise Diverged(f"the norm of the gradient is {norm} at step {context.step}")
                return self._skip(context)
            if self.clip is not None:
                stats = {"gradient_norm": norm, "clipped": float(norm > self.clip)}
                if norm > self.clip:
                    scale_gradients(self._applier.parameters, self.clip / norm)
        averages, moments = self._averages, None
        if self.rule.needs:
            if measurement is None:
                averages = averages.passed(context.batch)
            else:
                averages = averages.updated(measurement, memory=self.memory)
            moments = averages.moments()
            context = replace(context, moments=moments)
        scaling, rule_state = self.rule.scale(context, self._rule_state)
        if context.shortfall < 1:
            exponent = self._applier.noise_exponent
            scaling = damp(scaling, self.rule, context, self._rule_state, exponent=exponent)
        self._applier.check(scaling, self.rule)
        self._set_base_rates(context)
        with self._applier.scaled(scaling):
            self.inner.step()
        self._rule_state, self._averages = rule_state, averages
        if self.by_gain:
            self._progress += context.ratio if scaling.progress is None else scaling.progress
            stats["progress"] = self._progress
        lr = float(self.param_groups[0]["lr"])
        update = Update(
            lr_base=lr,
            lr=lr * math.fsum(scaling.layers) / len(scaling.layers),
            multiplier=scaling.multiplier,
            stats={**scaling.stats, **stats},
            scaling=scaling,
            moments=moments,
        )
        return self._advance(context, update)

    def _skip(self, context: StepContext) -> Update:
        self._set_base_rates(context)
        stats = {"skipped": 1.0} | ({"progress": self._progress} if self.by_gain else {})
        base = float(self.param_groups[0]["lr"])
        return self._advance(context, Update(lr_base=base, lr=0.0, multiplier=0.0, applied=False, stats=stats))

    def _advance(self, context: StepContext, update: Update) -> Update:
        self._steps = context.step + 1
        self._samples = context.samples + context.batch
        self.last = update
        return update

    def _set_base_rates(self, context: StepContext) -> None:
        if self.schedule is None:
            return
        factor = self.schedule.value(
            TrainingProgress(
                samples=self._progress * context.ref_batch if self.by_gain else context.samples,
                epoch_samples=context.epoch_samples,
                total_samples=context.total_samples,
                ref_batch=context.ref_batch,
            )
        )
        for group, initial in zip(self.param_groups, self._initial_lrs, strict=True):
            group["lr"] = initial * factor

    # State ------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as to any torch optimizer; its rate is the base rate.

        Refused after the first step of a layer-wise rule, whose averages belong to the layers that it had.
        """
        if "inner" not in self.__dict__ or getattr(self, "param_groups", None) is not self.inner.param_groups:
            super().add_param_group(param_group)  # torch's constructor passes the groups of the inner optimizer
            return
        if self._steps and "layers" in self.rule.needs:
            raise ConfigError(
                f"the rule {self.rule} follows each layer; add groups of parameters before the first step"
            )
        self.inner.add_param_group(param_group)
        self._initial_lrs.append(self.param_groups[-1]["lr"])
        self._applier.refresh()
        if self._meter is not None:
            self._meter.close()
            self._meter = self._make_meter()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last complete step, in plain containers that `torch.load(weights_only=True)` reads."""
        return {
            "version": STATE_VERSION,
            "inner": self.inner.state_dict(),
            "rule": str(self.rule),
            "rule_state": self._rule_state,
            "averages": self._averages.state(),
            "measuring": self._meter is None or self._meter.on,
            "beta_steps": list(self._applier.steps),
            "initial_lrs": list(self._initial_lrs),
            "base_batch": self.base_batch,
            "steps": self._steps,
            "samples": self._samples,
            "progress": self._progress,
            "sampler": self.sampler.state_dict() if self.sampler is not None else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a state of another version, rule or reference batch is refused."""
        for key, own in (("version", STATE_VERSION), ("rule", str(self.rule)), ("base_batch", self.base_batch)):
            if state_dict.get(key) != own:
                raise CheckpointError(
                    f"the optimizer state was saved with {key} {state_dict.get(key)!r}, this optimizer has {own!r}; "
                    f"create it with the saved one, or start anew"
                )
        averages = Averages.restore(state_dict["averages"])
        self.inner.load_state_dict(state_dict["inner"])
        self._share_with_inner()
        self._averages = averages
        self._rule_state = state_dict["rule_state"]
        self._initial_lrs = list(state_dict["initial_lrs"])
        first, second = state_dict["beta_steps"]
        self._applier.steps = (first, second)
        self._steps = state_dict["steps"]
        self._samples = state_dict["samples"]
        self._progress = state_dict["progress"]
        self._accumulating = False
        self.inner.zero_grad()  # gradients of an incomplete step belong to another position
        if self._meter is not None:
            self._meter.discard()
            self._meter.on = state_dict["measuring"]
        if self.sampler is not None and state_dict["sampler"] is not None:
            self.sampler.load_state_dict(state_dict["sampler"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle everything but the sampler and the scaler, which belong to a process.

        Torch's optimizers pickle their groups and states, which would lose the rule, the averages and the position.
        """
        settings = {
            "base_batch": self.base_batch,
            "schedule": self.schedule,
            "epochs": self.total_samples // self.epoch_samples if self.epoch_samples else None,
            "epoch_samples": self.epoch_samples,
            "memory_steps": self.memory / self.base_batch,
            "measure_every": self.measure_every,
            "clip": self.clip,
            "on_nonfinite": self.on_nonfinite,
        }
        state = {key: value for key, value in self.state_dict().items() if key not in ("inner", "sampler")}
        return _unpickled, (type(self), self.inner, self.rule, settings, state)

    def __repr__(self) -> str:
        return f"ElasticOptimizer({type(self.inner).__name__}, rule={str(self.rule)!r}, base_batch={self.base_batch})"


def _unpickled(
    kind: type[ElasticOptimizer],
    inner: torch.optim.Optimizer,
    rule: Rule,
    settings: dict[str, Any],
    state: dict[str, Any],
) -> ElasticOptimizer:
    optimizer = kind(inner, rule, **settings)
    optimizer.load_state_dict({**state, "inner": inner.state_dict(), "sampler": None})
    return optimizer


class _UnscaledStep:
    """Stands in for an optimizer: a GradScaler unscales the gradients of its groups and calls `step` if all are finite.

    This relies on nothing but the public behaviour of a scaler: the scale grows after steps and not after
    micro-batches, and a gradient that is not finite lowers it once.
    """

    def __init__(self, groups: list[dict[str, Any]], update: Callable[[], None]) -> None:
        self.param_groups = groups
        self._update = update
        self._called = False

    def step(self) -> None:
        """Called by the scaler after it has unscaled the gradients."""
        self._called = True
        self._update()

    def run(self, scaler: torch.amp.GradScaler) -> bool:
        """Step and adjust the scale; False if the step was skipped."""
        scaler.step(self)  # type: ignore[arg-type]
        scaler.update()
        return self._called
