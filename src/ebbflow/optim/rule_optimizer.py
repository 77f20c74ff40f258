"""`RuleOptimizer`: whole steps of any torch optimizer, with a learning rate that follows the batch by a rule.

Engines step it with the position of the ledger. `elastic.py` makes such steps from the micro-batches of a plain
training loop; `apply.py` applies the scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ebbflow.core.spec import nearest
from ebbflow.core.units import whole_number
from ebbflow.errors import CheckpointError, ConfigError, Diverged
from ebbflow.moments.estimate import Averages, Measurement, Moments
from ebbflow.moments.meters import why_unmeasurable
from ebbflow.optim.apply import Applier, gradient_norm, scale_gradients
from ebbflow.optim.schedules import Schedule, TrainingProgress, factor_of, make_schedule
from ebbflow.optim.step_slopes import StepSlopes
from ebbflow.rules.families import default_rule, name_of_optimizer, tell_default_rule
from ebbflow.rules.rule import (
    Rule,
    Scaling,
    State,
    StepContext,
    Verdict,
    checked,
    damp,
    make_rule,
    plain_numbers,
)  # fmt: skip

__all__ = ["OnNonfinite", "RuleOptimizer", "Update"]

STATE_VERSION = 4

_NOTES_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""What torch's schedulers add to the groups of an optimizer."""

OnNonfinite = Literal["ignore", "skip", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one step of a `RuleOptimizer` did."""

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


class RuleOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, with a learning rate that follows the batch by a rule; a step at a time, from its context.

    It guarantees for a step what `ElasticOptimizer` does, which is one: the rates before and after it, what a step that
    fails or is skipped leaves unchanged, and what `state_dict` restores.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        rule: str | Rule | None = None,
        *,
        base_batch: int,
        schedule: str | Schedule | None = None,
        epochs: int | None = None,
        epoch_samples: int = 0,
        memory_steps: float = 1000.0,
        measure_every: int = 4,
        clip: float | None = None,
        on_nonfinite: OnNonfinite = "ignore",
    ) -> None:
        """The arguments are those of `ElasticOptimizer`."""
        whole_number(base_batch, "base_batch, the batch at which the rate was tuned,")
        numbers: dict[str, Any] = {"memory_steps": memory_steps, "measure_every": measure_every, "clip": clip}
        for name, value in numbers.items():
            if value is not None and (isinstance(value, str) or not value > 0):
                raise ConfigError(f"{name} is {value!r}; expected a number above 0")
        if not any(group["params"] for group in inner.param_groups):
            raise ConfigError("the optimizer has no parameters; give it some of a model (are all of them frozen?)")
        if on_nonfinite not in ("ignore", "skip", "stop"):
            raise ConfigError(f"on_nonfinite is {on_nonfinite!r}; {nearest(on_nonfinite, ['ignore', 'skip', 'stop'])}")
        self.inner = inner
        self.base_batch = base_batch
        self.schedule = make_schedule(schedule) if schedule is not None else None
        self.epoch_samples = epoch_samples
        self.total_samples = (epochs or 0) * epoch_samples
        self.memory = memory_steps * base_batch
        self.measure_every = measure_every
        self.clip = clip
        self.on_nonfinite = on_nonfinite
        self.last: Update | None = None
        """What the latest complete step did."""
        self.updated = False
        """Whether the latest call completed a step and applied it."""
        self._applier = Applier(inner)
        named = make_rule(rule if rule is not None else self._default_rule())
        self.rule = named.suited(adaptive=self._applier.adaptive)
        self._check_rule()
        self._initial_lrs = [group["lr"] for group in inner.param_groups]
        self._rule_state = self.rule.init()
        self._averages = Averages()
        self._slopes = StepSlopes(self.layers)
        self._steps = 0
        self._samples = 0
        self._progress = 0.0  # reference steps that all steps together are worth, if the rule counts the gain
        self._rates_set: list[float] | None = None  # by the schedule, in the latest step
        super().__init__(inner.param_groups, inner.defaults)
        self._share_with_inner()

    def _share_with_inner(self) -> None:
        """Let both optimizers hold the same parameter groups and the same state."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def _default_rule(self) -> str:
        """The rule where none was named."""
        name = name_of_optimizer(type(self.inner))
        unmeasured = self._unmeasured() or why_unmeasurable(self.layers)
        return tell_default_rule(*default_rule(name, ends=self.total_samples > 0, unmeasured=unmeasured))

    def _unmeasured(self) -> str:
        """Why noise and signal cannot be measured, apart from the parameters; empty if they can."""
        return ""

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
            adaptive=self._applier.adaptive,
            moments=Moments(noise=1.0, signal=1.0, layer_noise=(1.0,) * layers, layer_signal=(1.0,) * layers),
        )
        scaling, state = checked(self.rule.scale(context, self.rule.init()), f"{self.rule}: scale()")
        self._applier.check(scaling, self.rule)
        if strange := _not_plain(plain_numbers(state)):
            raise ConfigError(
                f"the rule {self.rule} returned a state with a {strange}, which is not read back from a checkpoint; "
                f"keep numbers, texts and plain containers of them: x.tolist() of an array"
            )
        if layers:
            self._applier.check_layers(self.rule)
        self.by_gain = scaling.progress is not None
        """Whether the schedule and the end of the run follow the sum of the gains instead of the samples."""

    @property
    def layers(self) -> list[torch.nn.Parameter]:
        """The layers of layer-wise rules: the trainable tensors, in the order of the parameter groups."""
        return self._applier.layers

    @property
    def adaptive(self) -> bool:
        """Whether the optimizer divides gradients by their own size, as Adam does."""
        return self._applier.adaptive

    @property
    def unfrozen(self) -> bool:
        """Whether a tensor is trained that was frozen when the optimizer was made, and is not among the layers."""
        return any(p.requires_grad for p in self._applier.frozen)

    @property
    def progress(self) -> float:
        """Progress of training in samples of the reference run, which the schedule follows."""
        return self._progress * self.base_batch if self.by_gain else float(self._samples)

    @property
    def reference_steps(self) -> int:
        """Progress in whole steps at the reference batch: what a schedule that counts steps is to be asked for.

        It changes after updates only, by as many steps as the update is worth: none, one or several.
        """
        return int(self.progress / self.base_batch + 1e-6)  # sums of gains are rounded

    def due(self, batch: int) -> bool:
        """Whether an upcoming step of `batch` samples is to be measured; see `Averages.due`."""
        return bool(self.rule.needs) and self._averages.due(batch, memory=self.memory, every=self.measure_every)

    @property
    def finished(self) -> bool:
        """Whether progress has reached the length of the run; False for a run without an end."""
        enough = self.total_samples * (1 - 1e-9) if self.by_gain else self.total_samples  # sums of gains are rounded
        return 0 < enough <= self.progress

    # The step ---------------------------------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """Complete steps so far, including those that were skipped."""
        return self._steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad`; the gradients that a step under way has taken are kept elsewhere."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Call the hook before every update: it sees the inner optimizer, with the mean gradient in `.grad`."""
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Call the hook after every update: it sees the inner optimizer."""
        return self.inner.register_step_post_hook(hook)

    @property
    def follows_slopes(self) -> bool:
        """Whether the rule now wants to know the slopes along a step."""
        return self.rule.follows_slopes(self._rule_state)

    def slopes(self) -> tuple[float, float] | None:
        """The slopes along the latest step, if the rule wants to know them and the mean gradient is in `.grad`."""
        return self._slopes.measure() if self.follows_slopes else None

    @property
    def needs_norm(self) -> bool:
        """Whether every step needs the norm of the gradient, to clip it or to see whether it is finite."""
        return self.clip is not None or self.on_nonfinite != "ignore"

    def update(
        self,
        context: StepContext,
        measurement: Measurement | None = None,
        norm: float | None = None,
        slopes: tuple[float, float] | None = None,
    ) -> Update:
        """Take one step with the mean gradient in `.grad`: ask the rule, scale the rates, step, restore the rates.

        Engines call this directly, with the position of the ledger in the context. `norm` is the norm of the mean
        gradient and `slopes` what `slopes()` returned there, if the gradient itself is elsewhere.
        """
        follows = self.follows_slopes
        if follows and slopes is None:
            slopes = self._slopes.measure()
        clipped = 1.0
        stats: dict[str, float] = {}
        if self.needs_norm:
            if norm is None:
                norm = gradient_norm(self._applier.parameters) if measurement is None else measurement.norm
            if not math.isfinite(norm) and self.on_nonfinite != "ignore":
                if self.on_nonfinite == "stop":
                    raise Diverged(f"the norm of the gradient is {norm} at step {context.step}")
                return self.skip_step(context)
            clipped, stats = self._clip(norm)
        averages = self._averages_after(context.batch, measurement)
        moments = averages.moments() if self.rule.needs else None
        context = replace(context, adaptive=self._applier.adaptive, moments=moments, slopes=slopes if follows else None)
        scaling, rule_state = self._ask_rule(context)
        self._set_base_rates(context)
        if follows:
            self._slopes.begin()
        with self._applier.scaled(scaling):
            self._step_inner()
        self._rule_state, self._averages = rule_state, averages
        if self.follows_slopes:
            self._slopes.end(clipped=clipped)
        else:
            self._slopes.forget()
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

    def _clip(self, norm: float) -> tuple[float, dict[str, float]]:
        """Shorten the gradient, which is `norm` long, to the length allowed; the factor, and values for the record."""
        if self.clip is None:
            return 1.0, {}
        factor = 1.0
        if norm > self.clip:
            factor = self.clip / norm
            scale_gradients(self._applier.parameters, factor)
        return factor, {"gradient_norm": norm, "clipped": float(norm > self.clip)}

    def _averages_after(self, batch: int, measurement: Measurement | None) -> Averages:
        """The averages of noise and signal after a step of `batch` samples, which may not have been measured."""
        if not self.rule.needs:
            return self._averages
        if measurement is None:
            return self._averages.passed(batch)
        return self._averages.updated(measurement, memory=self.memory)

    def _ask_rule(self, context: StepContext) -> tuple[Scaling, State]:
        """What the rule returns for a step, smaller where the step lost samples, and the state of the rule after it."""
        scaling, rule_state = checked(self.rule.scale(context, self._rule_state), f"{self.rule}: scale()")
        if context.shortfall < 1:
            exponent = self._applier.noise_exponent
            scaling = damp(scaling, self.rule, context, self._rule_state, exponent=exponent)
        self._applier.check(scaling, self.rule)
        return scaling, rule_state

    def review(self, context: StepContext, loss: float) -> Verdict:
        """Ask a rule that guards what follows from the loss of the latest step; engines do, your own loops do not."""
        context = replace(context, adaptive=self._applier.adaptive)
        verdict, self._rule_state = self.rule.review(context, loss, self._rule_state)
        return verdict

    def rule_restored(self, reviewed: State) -> None:
        """Called when a snapshot was loaded because `review` asked for it; the rule keeps what it has learned.

        `reviewed`: the state of the rule before it was loaded.
        """
        self._rule_state = self.rule.after_restore(self._rule_state, reviewed)

    def rule_interrupted(self) -> None:
        """Called when the states that the rule had asked to keep were not saved with this one."""
        self._rule_state = self.rule.interrupted(self._rule_state)

    def rule_unkept(self) -> None:
        """Called when a state that the rule asked to keep is too large to be kept."""
        self._rule_state = self.rule.unkept(self._rule_state)

    def skip_step(self, context: StepContext) -> Update:
        """Count the samples of a step whose gradient is not used."""
        self._set_base_rates(context)
        stats = {"skipped": 1.0} | ({"progress": self._progress} if self.by_gain else {})
        base = float(self.param_groups[0]["lr"])
        return self._advance(context, Update(lr_base=base, lr=0.0, multiplier=0.0, applied=False, stats=stats))

    def _advance(self, context: StepContext, update: Update) -> Update:
        self._steps = context.step + 1
        self._samples = context.samples + context.batch
        self.last = update
        self.updated = update.applied
        return update

    def _set_base_rates(self, context: StepContext) -> None:
        if self.schedule is None:
            return
        self.check_schedule_alone()
        factor = factor_of(
            self.schedule,
            TrainingProgress(
                samples=self._progress * context.ref_batch if self.by_gain else context.samples,
                epoch_samples=context.epoch_samples,
                total_samples=context.total_samples,
                ref_batch=context.ref_batch,
            ),
        )
        for group, initial in zip(self.param_groups, self._initial_lrs, strict=True):
            group["lr"] = initial * factor
        self._rates_set = [float(rate) for rate in self._rates()]

    def check_schedule_alone(self) -> None:
        """Refuse rates that somebody else has set beside the schedule, such as a scheduler of torch.

        A constant scheduler, which transformers' Trainer cannot do without, sets the initial rates again."""
        if self.schedule is None or self._rates_set is None:
            return
        rates, initial = ([float(rate) for rate in found] for found in (self._rates(), self._initial_lrs))
        if rates not in (self._rates_set, initial):
            raise ConfigError(
                f"the learning rate is {rates[0]:g}, but the schedule {self.schedule} had set "
                f"{self._rates_set[0]:g}: use either schedule= or a scheduler of torch"
            )

    @property
    def initial_rates(self) -> list[Any]:
        """The learning rates of the parameter groups that the optimizer was made with, or restored."""
        return list(self._initial_lrs)

    def base_rates_changed(self) -> None:
        """Take the present rates of the parameter groups as those that the optimizer was made with."""
        self._initial_lrs, self._rates_set = self._rates(), None

    @property
    def rule_state(self) -> Any:
        """The state of the rule, in plain containers."""
        return plain_numbers(self._rule_state)

    def _rates(self) -> list[Any]:
        return [group["lr"] for group in self.param_groups]

    # State ------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as to any torch optimizer; its rate is the base rate.

        Refused after the first step of a layer-wise rule, whose averages belong to the layers that it had.
        """
        if self._under_construction:
            super().add_param_group(param_group)  # torch's constructor passes the groups of the inner optimizer
            return
        if self._steps and "layers" in self.rule.needs:
            raise ConfigError(
                f"the rule {self.rule} follows each layer; add groups of parameters before the first step"
            )
        self.inner.add_param_group(param_group)
        self._initial_lrs.append(self.param_groups[-1]["lr"])
        self._rates_set = None
        self._applier.refresh()
        self._slopes = StepSlopes(self.layers)

    @property
    def _under_construction(self) -> bool:
        return "inner" not in self.__dict__ or getattr(self, "param_groups", None) is not self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The state after the last complete step, in plain containers that `torch.load(weights_only=True)` reads."""
        return {
            "version": STATE_VERSION,
            "inner": self.inner.state_dict(),
            "rule": str(self.rule),
            "rule_state": self.rule_state,
            "averages": self._averages.state(),
            "slopes": self._slopes.state_dict(),
            "beta_steps": list(self._applier.steps),
            "initial_lrs": self.initial_rates,
            "base_batch": self.base_batch,
            "steps": self._steps,
            "samples": self._samples,
            "progress": self._progress,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a state of another version, rule or reference batch is refused."""
        if "version" not in state_dict and "param_groups" in state_dict:
            raise CheckpointError(
                f"the state is that of an optimizer of torch, without a position in the data: load it into the "
                f"{type(self.inner).__name__} before it is wrapped, and begin at the first sample"
            )
        if (version := state_dict.get("version")) != STATE_VERSION:
            raise CheckpointError(
                f"the optimizer state was saved by another version of ebbflow (version {version!r} of the state, this "
                f"one reads {STATE_VERSION}); go on with the ebbflow that saved it, or start anew"
            )
        for key, own in (("rule", str(self.rule)), ("base_batch", self.base_batch)):
            if state_dict.get(key) != own:
                raise CheckpointError(
                    f"the optimizer state was saved with {key} {state_dict.get(key)!r}, this optimizer has {own!r}; "
                    f"create it with the saved one, or start anew"
                )
        self._check_kind(state_dict["inner"])
        averages = Averages.restore(state_dict["averages"])
        try:
            self.inner.load_state_dict(state_dict["inner"])
        except ValueError as error:  # torch found other groups or tensors
            raise CheckpointError(
                f"the optimizer state does not fit this {type(self.inner).__name__}: {error}; create the optimizer "
                f"that was saved, with the same groups of parameters, or start anew"
            ) from error
        self._share_with_inner()
        self._averages = averages
        self._slopes.load_state_dict(state_dict.get("slopes"))
        self._rule_state = state_dict["rule_state"]
        self._initial_lrs = list(state_dict["initial_lrs"])
        first, second = state_dict["beta_steps"]
        self._applier.steps = (first, second)
        self._steps = state_dict["steps"]
        self._samples = state_dict["samples"]
        self._progress = state_dict["progress"]
        self._rates_set = None
        self.inner.zero_grad()  # gradients of an incomplete step belong to another position

    def _check_kind(self, inner: Mapping[str, Any]) -> None:
        """Refuse the state of an optimizer of another kind, which torch would load.

        Versions of torch add settings, and schedulers notes of their own. So two kinds are different if each has
        settings that the other lacks.
        """
        own, saved = (
            {name for group in groups for name in group if name != "params" and name not in _NOTES_OF_SCHEDULERS}
            for groups in (self.inner.param_groups, inner["param_groups"])
        )
        if own - saved and saved - own:
            raise CheckpointError(
                f"the optimizer state was saved with an optimizer that has {', '.join(sorted(saved - own))}, but "
                f"{type(self.inner).__name__} has {', '.join(sorted(own - saved))} instead; create the optimizer that "
                f"was saved, or start anew"
            )

    def _step_inner(self) -> None:
        try:
            self.inner.step()
        except RuntimeError as error:
            if "sparse" not in str(error).lower():
                raise
            name, said = type(self.inner).__name__, str(error).partition("\n")[0]
            if isinstance(self.inner, torch.optim.SparseAdam):
                measured = f", as those that the rule {self.rule} measures are" if self.rule.needs else ""
                raise ConfigError(
                    f"SparseAdam takes sparse gradients only, and one is dense{measured} ({said}); use adam, with "
                    f"sparse=False in the embeddings, or give SparseAdam nothing but embeddings with sparse=True and a "
                    f"rule that measures nothing, such as sqrt"
                ) from None
            raise ConfigError(
                f"{name} does not take the sparse gradients of this model ({said}); use sparse=False in the "
                f"embeddings, or an optimizer that takes them, such as sgd without weight decay"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle everything but what belongs to a process, such as a sampler.

        Torch's optimizers pickle their groups and states, which would lose the rule, the averages and the position.
        """
        state = {key: value for key, value in self.state_dict().items() if key not in ("inner", "sampler")}
        return _unpickled, (type(self), self.inner, self.rule, self._settings(), state)

    def _settings(self) -> dict[str, Any]:
        """The arguments of the constructor behind the rule."""
        return {
            "base_batch": self.base_batch,
            "schedule": self.schedule,
            "epochs": self.total_samples // self.epoch_samples if self.epoch_samples else None,
            "epoch_samples": self.epoch_samples,
            "memory_steps": self.memory / self.base_batch,
            "measure_every": self.measure_every,
            "clip": self.clip,
            "on_nonfinite": self.on_nonfinite,
        }

    def __repr__(self) -> str:
        name, inner = type(self).__name__, type(self.inner).__name__
        return f"{name}({inner}, rule={str(self.rule)!r}, base_batch={self.base_batch})"


def _not_plain(state: State) -> str:
    """The type of something in the state of a rule that JSON does not hold, if there is any."""
    if isinstance(state, dict):
        return next(filter(None, map(_not_plain, (*state.keys(), *state.values()))), "")
    if isinstance(state, list | tuple):
        return next(filter(None, map(_not_plain, state)), "")
    plain = state is None or type(state) in (bool, int, float, str)
    return "" if plain else f"{type(state).__module__}.{type(state).__name__}"


def _unpickled(
    kind: type[RuleOptimizer], inner: torch.optim.Optimizer, rule: Rule, settings: dict[str, Any], state: dict[str, Any]
) -> RuleOptimizer:
    optimizer = kind(inner, rule, **settings)
    optimizer.load_state_dict({**state, "inner": inner.state_dict(), "sampler": None})
    return optimizer
