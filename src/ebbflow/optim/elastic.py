"""The step: scales what the rule says, steps the inner optimizer, puts everything back.

This is the only place in Ebbflow that writes parameter groups. Rates are scaled for the duration of one step and then
restored, also when the step raises, so a user's LR scheduler, checkpoint and log see the base rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ebbflow.data.sampler import ElasticSampler, Piece
from ebbflow.errors import CheckpointError, ConfigError
from ebbflow.optim.schedules import Progress, Schedule, make_schedule
from ebbflow.rules.base import Rule, Scaling, StepContext
from ebbflow.rules.registry import make_rule

__all__ = ["ElasticOptimizer", "Update"]

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one step did to the rate."""

    lr_base: float
    """Rate of the schedule at the reference batch (first parameter group)."""
    lr: float
    """Rate that the step used."""
    multiplier: float
    stats: Mapping[str, float]


class ElasticOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, with its rate following the batch by a rule.

    In a plain training loop, with a sampler that deals out the pieces of each step:

        sampler   = ElasticSampler(len(data), plan, local_batch=32)      # batch_sampler of the DataLoader
        optimizer = ElasticOptimizer(SGD(...), rule="linear", base_batch=256, sampler=sampler)
        for x, y in loader:
            loss_fn(model(x), y).backward()      # the loss is the mean over the piece
            optimizer.step()                     # accumulates, or updates when the step's last piece is in
            optimizer.zero_grad()                # does nothing between the pieces of a step

    The gradient of a step is the mean over its *samples*: pieces of different sizes get the weight they deserve.
    Guarantees: the inner optimizer sees exactly one call a step; parameter groups hold the base rate before and after
    every call; `state_dict` restores the inner optimizer, the rule, the position and the sampler at the last complete
    step. Limits: the loss must be a mean over the samples of the piece; closures are not supported; gradients are
    combined within one process only (a sampler for rank r of R is for loops that combine gradients themselves).
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
    ) -> None:
        """Wrap an optimizer whose learning rates were tuned at `base_batch` samples.

        `schedule` sets the base rate as a function of progress; without one it is whatever the parameter groups hold,
        so an LR scheduler of torch works too. `epochs` is the length of the run, needed by schedules that span it.
        """
        if base_batch < 1:
            raise ConfigError(f"base_batch is {base_batch}; expected the batch size at which the rate was tuned")
        if sampler is not None and sampler.world_size > 1:
            raise ConfigError(
                f"the sampler deals out the pieces of rank {sampler.rank} of {sampler.world_size}, but "
                f"ElasticOptimizer combines the gradients of one process; use a sampler with world_size=1"
            )
        self.inner = inner
        self.rule = make_rule(rule)
        self.base_batch = base_batch
        self.sampler = sampler
        self.schedule = make_schedule(schedule) if schedule is not None else None
        self.epoch_samples = epoch_samples or (sampler.samples if sampler is not None else 0)
        self.total_samples = (epochs or 0) * self.epoch_samples
        self._initial_lrs = [group["lr"] for group in inner.param_groups]
        self._rule_state = self.rule.init()
        self._steps = 0
        self._samples = 0
        self._accumulating = False
        super().__init__(inner.param_groups, inner.defaults)
        self._share_with_inner()

    def _share_with_inner(self) -> None:
        """One set of parameter groups and one state, held by both optimizers."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    # The step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None, *, samples: int | None = None) -> None:  # type: ignore[override]
        """Take the gradient of one piece; update when it was the last one of its step.

        Without a sampler every call is a whole step, of the given number of samples.
        """
        if closure is not None:
            raise ConfigError("ElasticOptimizer.step takes no closure: call backward() before step()")
        if self.sampler is None:
            if samples is None:
                raise ConfigError("how large was this step? Pass sampler= to ElasticOptimizer, or samples= to step()")
            self._update_own(batch=samples, workers=1)
            return
        piece = self.sampler.consume()
        self._accumulating = not piece.last
        self._weigh(piece)
        if piece.last:
            self._update_own(batch=piece.batch, workers=piece.workers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless a step is still collecting its pieces."""
        if not self._accumulating:
            self.inner.zero_grad(set_to_none=set_to_none)

    def _weigh(self, piece: Piece) -> None:
        """Keep sum(n_j g_j)/n_next in .grad, where n_next is the size of the piece to come, and the mean at the end.

        Pieces of equal size need no work until the last one.
        """
        factor = piece.size / (piece.batch if piece.next_size is None else piece.next_size)
        if factor != 1.0:
            self._scale_gradients(factor)

    def _scale_gradients(self, factor: float) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _update_own(self, *, batch: int, workers: int) -> None:
        """Update with the position that this optimizer keeps itself."""
        self.update(
            StepContext(
                step=self._steps,
                batch=batch,
                ref_batch=self.base_batch,
                samples=self._samples,
                workers=workers,
                epoch_samples=self.epoch_samples,
                total_samples=self.total_samples,
            )
        )

    def update(self, context: StepContext) -> Update:
        """One optimizer step with the mean gradient in `.grad`: the rule, the rates, the inner step, all put back.

        Engines call this directly, with the position of the ledger in the context.
        """
        self._set_base_rates(context)
        scaling, self._rule_state = self.rule.scale(context, self._rule_state)
        lr_base = float(self.param_groups[0]["lr"])
        with self._scaled(scaling):
            lr = float(self.param_groups[0]["lr"])
            self.inner.step()
        self._steps = context.step + 1
        self._samples = context.samples + context.batch
        return Update(lr_base=lr_base, lr=lr, multiplier=scaling.lr, stats=scaling.stats)

    def _set_base_rates(self, context: StepContext) -> None:
        if self.schedule is None:
            return
        factor = self.schedule.value(
            Progress(
                samples=context.samples,
                epoch_samples=context.epoch_samples,
                total_samples=context.total_samples,
                ref_batch=context.ref_batch,
            )
        )
        for group, initial in zip(self.param_groups, self._initial_lrs, strict=True):
            group["lr"] = initial * factor

    @contextmanager
    def _scaled(self, scaling: Scaling) -> Iterator[None]:
        before = [group["lr"] for group in self.param_groups]
        if scaling.gradient != 1.0:
            self._scale_gradients(scaling.gradient)
        try:
            for group, lr in zip(self.param_groups, before, strict=True):
                group["lr"] = lr * scaling.lr
            yield
        finally:
            for group, lr in zip(self.param_groups, before, strict=True):
                group["lr"] = lr

    # State ------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as with any torch optimizer; its rate counts as the base rate."""
        if "inner" in self.__dict__ and hasattr(self, "param_groups") and self.param_groups is self.inner.param_groups:
            self.inner.add_param_group(param_group)
            self._initial_lrs.append(self.param_groups[-1]["lr"])
        else:  # torch's own constructor, which registers the groups that the inner optimizer has already
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Everything at the last complete step; plain containers, so `torch.load(weights_only=True)` reads it."""
        return {
            "version": STATE_VERSION,
            "inner": self.inner.state_dict(),
            "rule": str(self.rule),
            "rule_state": self._rule_state,
            "initial_lrs": list(self._initial_lrs),
            "base_batch": self.base_batch,
            "steps": self._steps,
            "samples": self._samples,
            "sampler": self.sampler.state_dict() if self.sampler is not None else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` saved; a state of another rule or reference batch is refused."""
        for key, own in (("rule", str(self.rule)), ("base_batch", self.base_batch)):
            if state_dict.get(key) != own:
                raise CheckpointError(
                    f"the optimizer state was saved with {key} {state_dict.get(key)!r}, this optimizer has {own!r}; "
                    f"create it with the saved one, or start anew"
                )
        self.inner.load_state_dict(state_dict["inner"])
        self._share_with_inner()
        self._rule_state = state_dict["rule_state"]
        self._initial_lrs = list(state_dict["initial_lrs"])
        self._steps = state_dict["steps"]
        self._samples = state_dict["samples"]
        self._accumulating = False
        if self.sampler is not None and state_dict["sampler"] is not None:
            self.sampler.load_state_dict(state_dict["sampler"])

    def __repr__(self) -> str:
        return f"ElasticOptimizer({type(self.inner).__name__}, rule={str(self.rule)!r}, base_batch={self.base_batch})"
