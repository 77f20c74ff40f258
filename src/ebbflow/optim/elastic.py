"""`ElasticOptimizer`: the steps of a `RuleOptimizer` from the micro-batches of a plain training loop."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch

from ebbflow.core.choices import read_choice
from ebbflow.core.spec import nearest
from ebbflow.core.trackers import Tracker, check_tracker, open_tracker, tracked_numbers
from ebbflow.data.sampler import ElasticSampler, MicroBatchInfo
from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Measurement
from ebbflow.moments.meters import HookMeter
from ebbflow.optim.across_ranks import AcrossRanks, StepTotals, without_sync
from ebbflow.optim.open_gradients import OpenGradients, UnscaledStep, WatchedGradients
from ebbflow.optim.rule_optimizer import OnNonfinite, RuleOptimizer, Update
from ebbflow.optim.schedules import Schedule
from ebbflow.rules.chosen import check_choice
from ebbflow.rules.families import name_of_optimizer
from ebbflow.rules.rule import Rule, StepContext

__all__ = ["ElasticOptimizer", "StopRequest", "multiply_rates"]

_LOG = logging.getLogger(__name__)

_CHANGING = ("rule_state", "slopes")  # parts of the state that do not have the same keys after every step
_PLACE = re.compile(r" at 0x[0-9a-f]+|, device='[a-z]+:\d+'")
"""Where an object or a tensor lies, which its text may say: it differs from rank to rank."""
_FIRST_STEPS = 4  # in which gradients are compared by value, since collectives change them without torch's counter


class StopRequest(Protocol):
    """Says whether this process was asked to stop, such as `StopSignal` and `PreemptionNotice`."""

    requested: bool


def multiply_rates(optimizer: torch.optim.Optimizer, first: float) -> None:
    """Multiply the rates of all parameter groups by the factor that makes that of the first group `first`."""
    before = float(optimizer.param_groups[0]["lr"])
    if not before > 0:
        raise ConfigError(f"the optimizer's rate is {before:g}; expected one above 0, which can be multiplied")
    for group in optimizer.param_groups:
        group["lr"] = first if float(group["lr"]) == before else float(group["lr"]) * (first / before)


class ElasticOptimizer(RuleOptimizer):
    """Any torch optimizer, with a learning rate that follows the batch by a rule.

    In a plain training loop, with a sampler that provides the micro-batches of each step:

        sampler   = ElasticSampler(len(data), plan, local_batch=32)      # batch_sampler of the DataLoader
        optimizer = ElasticOptimizer(SGD(...), rule="adascale", base_batch=256, sampler=sampler)
        for x, y in loader:
            loss_fn(model(x), y).backward()      # the loss is the mean over the micro-batch
            optimizer.step()                     # takes the gradient; updates after the last micro-batch of a step
            optimizer.zero_grad()
            if optimizer.updated:
                scheduler.step()                 # whatever belongs to an update: schedulers, averages, logging

    The gradient of a step is the mean over its *samples*, so that micro-batches are weighted by their sizes; for a mean
    over something else, such as tokens, `step(weight=tokens)` says how much of it a micro-batch has. Gradients of a
    step under way are kept outside of `.grad`, so that `zero_grad` of model or optimizer loses nothing.

    Guarantees: the inner optimizer is called exactly once per step, with its step hooks; parameter groups hold the base
    rate before and after every call; a step that fails or is skipped changes neither the state of the rule nor the
    averages of noise and signal; `state_dict` restores the inner optimizer, the rule, the averages, the position and
    the sampler at the last complete step. A ConfigError says what to do instead of: a `step()` without a gradient;
    gradients that were changed between `backward` and `step` (by `clip_grad_norm_`, for example) where a step has
    several micro-batches; learning rates that were changed in the middle of a step; a loop that takes more or fewer
    micro-batches than it steps (see `ElasticSampler`); one of several optimizers of a sampler that is not
    stepped. Limits: `reduction` must say whether the loss is a mean or a sum; closures are called once.

    *Several ranks* of `torch.distributed`, as torchrun starts them: the sampler gives each rank its micro-batches, and
    the gradients, their noise and signal are combined over all ranks after the last micro-batch of a step, weighted by
    samples (or `weight`), so that all ranks apply the same step as one process would. Give a DistributedDataParallel as
    `model=`: it then combines nothing itself. The state is the same on all ranks, and may be loaded by any number of
    them, with `torch.save` and `torch.load` or as a `Stateful` of `torch.distributed.checkpoint`. `stop_requested` is
    the same on all ranks, too. Sharded parameters, sparse gradients and `accumulation` are refused.

    *Accumulation of your own.* With `accumulation=k`, `step()` is called after every k micro-batches, whose losses were
    divided by k; the k count equally. Steps of the plan must have a multiple of k micro-batches (a plan of local batch
    k * n and a sampler of local_batch=n), except at the end of an epoch. *Several optimizers* may share
    a sampler, if each of them steps for every micro-batch. A bad micro-batch is left out by `skip()`.

    *Mixed precision.* Give the GradScaler to the constructor and call neither its `step` nor its `update`, since only a
    complete step may be unscaled:

        scaler.scale(loss_fn(model(x), y)).backward()
        optimizer.step()                         # unscales the complete step; skips it if a gradient is not finite

    The samples of a skipped step are consumed. *Clipping* between `backward` and `step` would clip micro-batches, and
    is refused; `clip` limits the norm of the mean gradient of the step, after it was measured.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        rule: str | Rule | None = None,
        *,
        base_batch: int,
        sampler: ElasticSampler | None = None,
        model: torch.nn.Module | None = None,
        stop: StopRequest | None = None,
        tracker: str | Tracker | None = None,
        schedule: str | Schedule | None = None,
        epochs: int | None = None,
        epoch_samples: int = 0,
        memory_steps: float = 1000.0,
        measure_every: int = 4,
        clip: float | None = None,
        on_nonfinite: OnNonfinite = "ignore",
        scaler: torch.amp.GradScaler | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        accumulation: int = 1,
    ) -> None:
        """Wrap an optimizer whose learning rates were tuned at `base_batch` samples.

        Without a `rule`, SGD and its relatives follow adascale+statewarmup(0.05), all other optimizers
        sqrt+statewarmup(0.05, by=multiplier). SGD follows the latter, too, where nothing can be measured: without a
        sampler, with `accumulation`, or if every step has one micro-batch. Without `epochs` there is no warm-up. Each
        of these is logged, and `rule` says what is used.

        `schedule` sets the base rate as a function of progress; without one it is whatever the parameter groups hold,
        so that a torch LR scheduler works, too. `epochs` is the length of the run, for schedules that span it.
        `memory_steps` is the number of reference steps that the averages of noise and signal remember. After that many,
        at least one step in every `measure_every` is measured; with 1, every step is. `clip` is the largest norm of the
        mean gradient of a step. `on_nonfinite` says what happens if a gradient is NaN or infinite: the step is skipped
        ("skip"), `Diverged` is raised ("stop"), or nothing is checked, as in torch ("ignore"). With a scaler such steps
        are always skipped. `reduction` says whether the loss of a micro-batch is the mean or the sum over its samples.
        `model` is needed if it is or has a DistributedDataParallel, which must not combine gradients. `stop` is asked
        after every step whether this process is to stop; `stop_requested` then says it on all ranks. `tracker`:
        tensorboard, wandb or mlflow, or several with commas, to which rank 0 sends every step; they write into the
        folder `runs`, or into the one that is named: `tensorboard(logs)`.
        """
        if not accumulation > 0:
            raise ConfigError(f"accumulation is {accumulation}; expected a number above 0")
        if reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction is {reduction!r}; {nearest(str(reduction), ['mean', 'sum'])}")
        if sampler is None and (reduction, accumulation) != ("mean", 1):
            raise ConfigError(
                f"reduction is {reduction!r} and accumulation is {accumulation}, but without a sampler every call of "
                f"step() takes the mean gradient of a whole step; divide the loss by its samples, or pass sampler="
            )
        self.sampler = sampler
        self.reduction = reduction
        self.accumulation = accumulation
        self.micro_batch: MicroBatchInfo | None = None
        """The micro-batch of the latest call of `step` or `skip`; its `size` says how many of its samples count."""
        self.stop_requested = False
        """Whether `stop` asked any rank to stop before the latest complete step; the same on all ranks."""
        super().__init__(
            inner,
            rule,
            base_batch=base_batch,
            schedule=schedule,
            epochs=epochs,
            epoch_samples=epoch_samples or (sampler.samples if sampler is not None else 0),
            memory_steps=memory_steps,
            measure_every=measure_every,
            clip=clip,
            on_nonfinite=on_nonfinite,
        )
        self._open = OpenGradients()
        self._begins = True  # whether no micro-batch was taken since the optimizer was made or its state loaded
        self._scaler = scaler
        self._scale = 1.0  # loss scale of the current step's gradients
        self._stop = stop
        if isinstance(tracker, str):
            check_tracker(tracker)
        self._tracker = tracker if sampler is None or sampler.rank == 0 else None
        self._model = model
        self._without_sync = without_sync(model) if sampler is not None else []
        self._meter = self._make_meter()
        self._ranks = self._across_ranks()
        if self._meter is not None and accumulation > 1:
            raise ConfigError(
                f"the rule {self.rule} measures every micro-batch; call step() after each of them, without "
                f"accumulation, or use a rule that measures nothing, such as sqrt"
            )
        self._watched: WatchedGradients | None = None
        if sampler is not None:
            self._watched = WatchedGradients(self._applier.parameters)
            own = {id(parameter) for parameter in self._applier.parameters}
            sampler.attach(self, replaces=lambda other: not own.isdisjoint(map(id, other._applier.parameters)))

    @classmethod
    def from_choice(
        cls, path: Path | str, inner: torch.optim.Optimizer, *, base_batch: int | None = None, **options: Any
    ) -> Self:
        """Wrap an optimizer with the rule and the base rate that `ebbflow choose` wrote into `choice.toml`.

        The rates of all parameter groups are multiplied by one factor, so that the first is that of the choice.
        `base_batch` is by default the reference batch of the choice. All other arguments are those of the constructor;
        a `rule` among them is used instead of the chosen one, which is logged, and so is a choice that is the fallback,
        or of another reference batch. A choice for an optimizer of another family is a ConfigError.
        """
        choice = read_choice(path)
        batch = base_batch if base_batch is not None else choice.source.get("ref_batch")
        if batch is None:
            raise ConfigError(f"{path} has no ref_batch in [source]; give base_batch=")
        if "rule" in options:
            _LOG.warning("the rule %s was given and is used instead of %s of %s", options["rule"], choice.rule, path)
        kind = type(inner)
        for text in check_choice(
            choice, origin=str(path), optimizer=kind.__name__, named=name_of_optimizer(kind), ref_batch=batch
        ):
            _LOG.warning("%s: %s", path, text)
        multiply_rates(inner, choice.lr)
        return cls(inner, options.pop("rule", choice.rule), base_batch=batch, **options)

    def _unmeasured(self) -> str:
        if self.sampler is None:
            return "nothing is measured without a sampler"
        if self.accumulation > 1:
            return "with accumulation no single micro-batch can be measured"
        if not self.sampler.several_micro_batches:
            return "all steps have one micro-batch, in which no noise is seen (a smaller local_batch makes two)"
        return ""

    def _make_meter(self) -> HookMeter | None:
        if not self.rule.needs or self.sampler is None:
            return None
        layers = "layers" in self.rule.needs
        trained = layers or self.sampler.world_size > 1
        return HookMeter(self.layers if trained else self._applier.measurable, layers=layers)

    def _across_ranks(self) -> AcrossRanks | None:
        if self.sampler is None or self.sampler.world_size == 1:
            return None
        if self.accumulation > 1:
            raise ConfigError(
                f"accumulation is {self.accumulation}, but with {self.sampler.world_size} ranks step() takes each "
                f"micro-batch by itself, since ranks may have different numbers of them; leave accumulation out, and "
                f"call step() after every micro-batch"
            )
        return AcrossRanks(
            self.layers, sampler=self.sampler, model=self._model, meter=self._meter, settings=self._compared()
        )

    def _compared(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        assert self.sampler is not None
        settings = self._settings() | {"rule": self.rule, "optimizer": type(self.inner).__name__}
        settings |= {"a scaler": self._scaler is not None}
        for number, group in enumerate(self.param_groups):
            for name, value in group.items():
                plain = value.tolist() if isinstance(value, torch.Tensor) else value
                if name != "params" and isinstance(plain, int | float | tuple | list | str):
                    settings[f"{name} of group {number}"] = plain
        shapes = hashlib.sha256(str([(tuple(p.shape), p.dtype) for p in self.layers]).encode()).hexdigest()
        settings["trained parameters"] = f"{len(self.layers)} tensors, shapes {shapes[:8]}"
        said = {name: str(value) for name, value in settings.items()} | self.sampler.described()
        return {name: _PLACE.sub("", value) for name, value in said.items()}

    _step_supports_amp_scaling = True  # a GradScaler then calls step() without unscaling, and step() can refuse it

    def step(
        self, closure: Callable[[], Any] | None = None, *, samples: int | None = None, weight: float | None = None
    ) -> Any:
        """Take the gradient of one micro-batch, and update after the last one of a step.

        A `closure` is called once, before anything else, and its result returned. `weight`: how much the micro-batch
        counts in the mean of the step, for example its tokens; by default its samples. Without a sampler every call is
        a whole step of `samples` samples.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if hasattr(self, "grad_scale"):
            raise ConfigError(
                "scaler.step(optimizer) would unscale every micro-batch of a step; pass scaler= to ElasticOptimizer, "
                "call optimizer.step(), and leave scaler.step and scaler.update out of the loop"
            )
        self.updated = False
        if self.sampler is not None:
            self._take(weight)
            return result
        if weight is not None:
            raise ConfigError(
                f"step(weight={weight:g}): without a sampler every call is a whole step, in which there is nothing to "
                f"weigh; divide the loss by what it is to be the mean of, or pass sampler= to ElasticOptimizer"
            )
        if samples is None or samples < 1:
            raise ConfigError(f"step(samples={samples}): pass the step's samples, or sampler= to ElasticOptimizer")
        if self.rule.needs:
            raise ConfigError(
                f"the rule {self.rule} measures the micro-batches of a step; pass the sampler that provides them "
                f"to ElasticOptimizer (sampler=)"
            )
        self._complete(batch=samples, workers=1)
        return result

    def skip(self) -> None:
        """Leave out one micro-batch, for which `step` is not called: its samples count as seen, and train nothing.

        The step is then the mean over its other micro-batches; a step without any other changes nothing.
        """
        if self.sampler is None:
            raise ConfigError("skip() leaves out a micro-batch of a sampler; pass sampler= to ElasticOptimizer")
        self.updated = False
        self._begin_micro_batch(self.sampler.peek(self))
        self._clear()
        if self._watched is not None:
            self._watched.forget()
        if self._meter is not None:
            self._meter.drop_micro_batch()
        self.micro_batch = micro_batch = self.sampler.consume(self)
        if micro_batch.last:
            self._finish(micro_batch)

    def _take(self, weight: float | None) -> None:
        """Take the gradient out of `.grad`, as that of one micro-batch, or of `accumulation` of them."""
        assert self.sampler is not None
        if weight is not None and not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"step(weight={weight}): expected how much the micro-batch counts, such as its tokens")
        gradients = {p: p.grad for p in self._applier.parameters if p.grad is not None}
        if not gradients:
            raise ConfigError(
                "step() was called, but there is no gradient: call backward() before, and zero_grad() after it or "
                "before backward(); where a micro-batch is left out, call skip() instead of step()"
            )
        self._begin_micro_batch(self.sampler.peek(self))
        if self._begins:
            self._begins = False
            self._tell_another_position()
        self.micro_batch, taken, samples = micro_batch, _, _ = self._consume()
        self._check_gradients(alone=micro_batch.count == taken)
        weight = float(samples) if weight is None or not samples else weight  # a repeated micro-batch has no samples
        if weight:
            # A sum over tokens, weighted by tokens, is divided by them: the weight is what the mean is taken over.
            factor = 1.0 / weight if self.reduction == "sum" else self.accumulation / taken
            if self._meter is not None:
                scale = self._scale if self._ranks is None else 1.0  # gradients are unscaled after they were combined
                self._meter.close_micro_batch(weight, scale=scale / factor)
            self._open.add(gradients, factor=factor, weight=weight, samples=samples)
        else:
            self._open.samples += samples
            if self._meter is not None:
                self._meter.drop_micro_batch()
        if micro_batch.last:
            self._finish(micro_batch)
        else:
            self._clear()

    def _tell_another_position(self) -> None:
        """Warn where the optimizer does not begin at the sample at which the sampler is."""
        assert self.sampler is not None
        if self.sampler.position != self._samples:
            _LOG.warning(
                "the sampler is at sample %s of the training and this optimizer at sample %s, from which its schedule, "
                "its warm-up and `finished` count; to continue a run, load the state of the ElasticOptimizer that was "
                "saved with it: it has the position of the sampler, too",
                f"{self.sampler.position:,}", f"{self._samples:,}",
            )  # fmt: skip

    def _begin_micro_batch(self, micro_batch: MicroBatchInfo) -> None:
        """Look at what must not change within a step: before each micro-batch, one that is left out, too."""
        if micro_batch.first and self._scaler is not None and self._meter is not None:
            self._scale = self._scaler.get_scale()
        # Nothing is known of the rates, either, in a step that another optimizer began with this sampler.
        self._check_rates(first=micro_batch.first or not self._open.rates)

    def _check_gradients(self, *, alone: bool) -> None:
        """Refuse gradients that were changed, unless the step has this micro-batch alone."""
        assert self._watched is not None
        if self._ranks is None:
            # Torch counts no change where a scaler unscales; a scaler waits for the device in every step anyway.
            thoroughly = self._scaler is not None and (alone or self._steps < _FIRST_STEPS)
            if alone and self._scaler is None:
                self._watched.forget()
            elif self._watched.changed(thoroughly=thoroughly):
                raise ConfigError(
                    "the gradients were changed between backward() and step(), as clip_grad_norm_ and unscale_ do; "
                    "that would change every micro-batch of the step instead of their mean; and with a scaler, step() "
                    "unscales the gradient itself. Give clip= (and scaler=) "
                    "to ElasticOptimizer instead (transformers: max_grad_norm=0; Lightning: no gradient_clip_val), "
                    "or change the mean gradient in a hook of register_step_pre_hook. DistributedDataParallel changes "
                    "them, too: give it as model="
                )
            return
        if self.unfrozen:
            raise ConfigError(
                "a parameter is trained that was frozen when the optimizer was made, so that its gradient would not be "
                "combined over the ranks; make a new optimizer"
            )
        if self._watched.changed(thoroughly=self._steps < _FIRST_STEPS):
            raise ConfigError(
                "the gradients were changed between backward() and step(), but they are combined over the ranks in "
                "step(). DistributedDataParallel changes them: give it to ElasticOptimizer as model=. So does "
                "clip_grad_norm_: give clip= (and scaler=) to ElasticOptimizer instead"
            )

    def _consume(self) -> tuple[MicroBatchInfo, int, int]:
        """The last micro-batch whose gradient is in `.grad`, how many there are, and their samples."""
        assert self.sampler is not None
        micro_batch = self.sampler.consume(self)
        taken, samples = 1, micro_batch.size
        while taken < self.accumulation and not micro_batch.last:
            micro_batch = self.sampler.consume(self)
            taken, samples = taken + 1, samples + micro_batch.size
        if taken < self.accumulation and micro_batch.start + micro_batch.size < self.sampler.samples:
            raise ConfigError(
                f"step() is called after every {self.accumulation} micro-batches, but a step of the plan has "
                f"{micro_batch.count}, which is no multiple; make the plan with a local batch of {self.accumulation} "
                f"times that of the sampler, or call step() after every micro-batch, without accumulation"
            )
        return micro_batch, taken, samples

    def _clear(self) -> None:
        for parameter in self._applier.parameters:
            parameter.grad = None

    def _check_rates(self, *, first: bool) -> None:
        """Refuse rates that somebody else has changed where nobody may."""
        rates = [float(rate) for rate in self._rates()]
        if first:
            self._open.rates = rates
            self.check_schedule_alone()
        elif rates != self._open.rates:
            raise ConfigError(
                f"the learning rate was changed from {self._open.rates[0]:g} to {rates[0]:g} in the middle of a step, "
                f"so that it would follow the micro-batches; step schedulers only `if optimizer.updated:`, or give "
                f"schedule= to ElasticOptimizer instead"
            )

    def _finish(self, micro_batch: MicroBatchInfo) -> None:
        """Complete the step with what its micro-batches have given."""
        taken, self._open = self._open, OpenGradients()
        stop = self._stop is not None and self._stop.requested
        step = StepTotals(weight=taken.weight, samples=taken.samples, stop=stop)
        if self._ranks is not None:
            step = self._ranks.agree(step)
        self.stop_requested = step.stop
        self._clear()  # a last micro-batch that does not count may have given gradients to further parameters
        if not step.weight > 0:
            self.skip_step(self._context(batch=micro_batch.batch, workers=micro_batch.workers))
            return
        if taken.weight > 0:
            taken.put_back()
        elif self._scaler is not None:  # of which nothing was asked if this rank left out all of its micro-batches
            self._scaler.scale(torch.zeros((), device=self._applier.parameters[0].device))
        self._complete(batch=step.samples, workers=micro_batch.workers, measure=self._measure(taken.weight, step))
        self._samples += micro_batch.batch - step.samples
        if self._ranks is not None:
            self._ranks.share_buffers()

    def _measure(self, own: float, step: StepTotals) -> Callable[[], Measurement | None]:
        """Combine the mean gradient in `.grad` over the ranks; the result measures the step, once it is unscaled."""
        meter, ranks = self._meter, self._ranks
        if ranks is None:
            return lambda: None if meter is None or not meter.on else replace(meter.finish(own), batch=step.samples)
        found = ranks.combine(weight=own, total=step.weight)
        if found is not None:
            square = self._scale**2
            mean_sq, sq_mean = (tuple(number / square for number in of) for of in (found.mean_sq, found.sq_mean))
            found = replace(found, batch=step.samples, mean_sq=mean_sq, sq_mean=sq_mean)
        return lambda: found

    def _context(self, *, batch: int, workers: int) -> StepContext:
        """A step at the position that this optimizer has counted itself."""
        return StepContext(
            step=self._steps,
            batch=batch,
            ref_batch=self.base_batch,
            samples=self._samples,
            workers=workers,
            epoch_samples=self.epoch_samples,
            total_samples=self.total_samples,
        )

    def _complete(self, *, batch: int, workers: int, measure: Callable[[], Measurement | None] = lambda: None) -> None:
        """Update with the mean gradient in `.grad`; `measure` is called after a scaler has unscaled it."""
        context = self._context(batch=batch, workers=workers)

        def update() -> None:
            self.update(context, measure())
            if self._meter is not None:
                self._meter.on = self.due(batch)  # assumes that the next step has the same size

        if self._scaler is None:
            update()
        elif not UnscaledStep(self.param_groups, update).run(self._scaler):
            if self._meter is not None:
                self._meter.discard()
            self.skip_step(context)

    def _advance(self, context: StepContext, update: Update) -> Update:
        super()._advance(context, update)
        if self._tracker is not None:
            self._track(context, update)
        return update

    def _track(self, context: StepContext, update: Update) -> None:
        """Send what a step did to the tracker, which is opened at the first one of this process."""
        if isinstance(self._tracker, str):
            name, step = str(self.rule), context.step
            self._tracker = open_tracker(self._tracker, "runs", name=name, step=step, several_runs=True)
            weakref.finalize(self, self._tracker.close)
            self._tracker.settings({"rule": str(self.rule), "base_batch": self.base_batch})
            if context.step:
                self._tracker.event(context.step, "resumed", f"after {context.samples} samples")
        assert self._tracker is not None
        rates = {"lr": update.lr, "lr_base": update.lr_base, "samples": self._samples}
        shown = tracked_numbers(
            workers=context.workers,
            batch=context.batch,
            ref_batch=context.ref_batch,
            multiplier=update.multiplier,
            stats=update.stats,
        )
        self._tracker.scalars(context.step, rates | shown)
        if not update.applied:
            self._tracker.event(context.step, "skipped step", "its gradient was not finite")

    # State ------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as to any torch optimizer; its rate is the base rate.

        Refused after the first step of a layer-wise rule, whose averages belong to the layers that it had.
        """
        made = not self._under_construction
        super().add_param_group(param_group)
        if made:
            if self._meter is not None:
                self._meter.close()
                self._meter = self._make_meter()
            self._ranks = self._across_ranks()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last complete step, in plain containers that `torch.load(weights_only=True)` reads.

        `torch.distributed.checkpoint` loads into the state of an optimizer that has not stepped yet, and only what it
        finds there, all of which must have been saved. With a sampler, a state therefore has all tensors of the inner
        optimizer: of a parameter that never had a gradient, what one step without gradients makes of them. `fresh` are
        the numbers of these parameters, by which `load_state_dict` knows that they mean nothing.
        """
        state = super().state_dict() | {
            "fresh": self._without_state() if self.sampler is not None else (),
            "measuring": self._meter is None or self._meter.on,
            "sampler": self.sampler.state_dict() if self.sampler is not None else None,
        }
        if state["fresh"]:
            inner = state["inner"]
            state["inner"] = {**inner, "state": {**inner["state"], **_states_after_a_step(self.inner, state["fresh"])}}
        if self.sampler is not None:
            # Tuples, since their keys may change from step to step, and those of a dictionary must not.
            state |= {name: (state[name],) for name in _CHANGING}
        return state

    def _without_state(self) -> tuple[int, ...]:
        """The numbers of trained parameters of which the inner optimizer has no state, though it has one of others."""
        if self._steps and not any(self.inner.state.values()):
            return ()  # as SGD without momentum
        parameters = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        return tuple(i for i, one in enumerate(parameters) if one.requires_grad and not self.inner.state.get(one))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a state of another version, rule or reference batch is refused."""
        saved = dict(state_dict)
        if fresh := saved.get("fresh"):
            # An earlier version saved True: none of the states means anything.
            states = {} if fresh is True else saved["inner"]["state"]
            known = {number: state for number, state in states.items() if number not in fresh}
            saved["inner"] = {**saved["inner"], "state": known}
        saved |= {name: saved[name][0] for name in _CHANGING if isinstance(saved.get(name), tuple)}
        if self.sampler is not None and saved.get("sampler") is not None:
            self.sampler.check_state(saved["sampler"])  # what is refused changes nothing
        super().load_state_dict(saved)
        self._open, self._begins = OpenGradients(), True
        if self._meter is not None:
            self._meter.discard()
            self._meter.on = saved.get("measuring", True)
        if self.sampler is not None and saved.get("sampler") is not None:
            self.sampler.load_state_dict(saved["sampler"])

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"reduction": self.reduction, "accumulation": self.accumulation}


def _states_after_a_step(inner: torch.optim.Optimizer, numbers: Collection[int]) -> dict[int, Any]:
    """What a step with gradients of zero makes of parameters that have no state, by their numbers in a state."""
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    kept: dict[int, Any] = {id(one): one for number, one in enumerate(parameters) if number not in numbers}
    stepped = copy.deepcopy(inner, {**kept, id(inner.state): defaultdict(dict)})
    copies = [parameter for group in stepped.param_groups for parameter in group["params"]]
    for group in stepped.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in kept]
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    stepped.param_groups = [group for group in stepped.param_groups if group["params"]]
    stepped.step()
    return {number: stepped.state[copies[number]] for number in numbers if copies[number] in stepped.state}
