"""What a framework's loop sees of a session: an optimizer that applies its steps, and a scheduler that follows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ebbflow.core.spec import nearest
from ebbflow.engines.base import ENGINES
from ebbflow.errors import CheckpointError, ConfigError
from ebbflow.optim.rule_optimizer import RuleOptimizer
from ebbflow.record import StepRow
from ebbflow.run.session import Session, SessionStep

__all__ = ["ReferenceSteps", "SessionOptimizer", "refuse_settings"]


class SessionOptimizer(torch.optim.Optimizer):
    """The optimizer of a framework's loop: `step` applies the step of a session whose gradient is in `.grad`.

    The framework sees the base rates in the parameter groups, and one update per step, so that its scheduler, its
    clipping and its GradScaler do what they do in an ordinary loop. The rate is multiplied inside of `step` only.
    `state_dict` holds everything but the weights, which the framework saves itself: the inner optimizer, the rule and
    its averages, and the position in the data. It does not depend on the number of processes.
    """

    def __init__(self, inner: torch.optim.Optimizer, *, scaled: bool = False) -> None:
        """`inner`: the optimizer that the session steps. `begin` follows before the first step.

        `scaled`: a GradScaler calls `step`; it does so for steps that overflow, too, whose samples count.
        """
        self.inner = inner
        self.session: Session | None = None
        self.combined: SessionStep | None = None
        """The step whose gradient is in `.grad`; None where the session has ended before it was complete."""
        self.row: StepRow | None = None
        """What the latest step did."""
        self._saved: dict[str, Any] | None = None
        self._step_supports_amp_scaling = scaled  # read by GradScaler

    def begin(self, session: Session) -> None:
        """Step this session from now on, from the state that was loaded before, if any."""
        self.session = session
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self.load_state_dict(saved)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the wrapped optimizer, with the base rates."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the wrapped optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self.inner.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure, which computes the gradient of a step, and apply the step."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        step, self.combined = self.combined, None
        if step is None:
            return result
        loss_scale = getattr(self, "grad_scale", None)  # set by a GradScaler that has not unscaled the gradients
        if loss_scale is not None:
            for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.div_(loss_scale)
        self.row = step.apply()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing happens: every step of a session begins without gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights, at the last complete step, in plain containers."""
        if self.session is None:
            return {}
        return {name: value for name, value in self.session.flow.state_dict().items() if name not in ("model", "rng")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, with any number of processes; a state of other data is refused."""
        if "ledger" not in state_dict:
            raise CheckpointError(
                "the checkpoint has an optimizer, but no position in the data: it was saved by a script without "
                "Ebbflow; load its weights into the model, and begin without the checkpoint"
            )
        if self.session is None:
            self._saved = state_dict
        else:
            self.session.flow.load_state_dict(state_dict, origin="the checkpoint")

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Call the hook before every update: it sees the wrapped optimizer."""
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Call the hook after every update: it sees the wrapped optimizer."""
        return self.inner.register_step_post_hook(hook)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the wrapped optimizer."""
        self.inner.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"SessionOptimizer({self.inner!r})"


class ReferenceSteps:
    """An LR scheduler of torch that counts reference steps: one for every `base_batch` samples of progress.

    The loop calls `step` after every update, as before, or after every micro-batch. Whether updates had many samples
    or few, the base rate is the same function of the samples as in a run at the reference batch: it does not depend on
    the history of the fleet, and a replica that joins late has the rate of the others. With `every`, it is a step of
    the scheduler for so many reference steps. A scheduler that is stepped less often than the optimizer is refused.
    """

    def __init__(self, scheduler: Any, optimizer: SessionOptimizer | RuleOptimizer, *, every: int = 1) -> None:
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._every = every
        self._unseen = _Updates()
        optimizer.register_step_post_hook(self._unseen)

    def step(self, *arguments: Any) -> None:
        """Bring the scheduler to the present progress."""
        updates, self._unseen.number = self._unseen.number, 0
        if updates > 1:
            raise ConfigError(
                f"the scheduler was stepped once for {updates} updates of the optimizer, as one that counts epochs is, "
                f"but it counts reference steps, and would take those of all {updates} updates at once; step it after "
                f"every optimizer.step(), or, if it counts epochs, do not give it to prepare (Lightning: set its "
                f"interval to 'epoch')"
            )
        scheduler, elastic = self._scheduler, self._optimizer
        if isinstance(elastic, SessionOptimizer):
            assert elastic.session is not None, "a step came before"
            elastic = elastic.session.flow.optimizer
        due = elastic.reference_steps // self._every
        if scheduler.last_epoch > due:  # the rule went back to a snapshot
            scheduler.last_epoch = max(0, due - 1)
        while scheduler.last_epoch < due:
            scheduler.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scheduler; updates before that do not count any more."""
        self._scheduler.load_state_dict(state_dict)
        self._unseen.number = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class _Updates:
    """How often an optimizer has updated, as a hook of it; loading a state does not count, nor does a skipped step.

    It refers to nothing, since a cycle of references would keep the optimizer and the model alive.
    """

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, *_: Any) -> None:
        self.number += 1


def refuse_settings(settings: dict[str, Any], instead: dict[str, str]) -> None:
    """Refuse settings of a session that the framework has itself, `instead` of which something is set there, and an
    engine that is neither "live" nor one of a session."""
    for name, other in instead.items():
        if name in settings:
            raise ConfigError(f"{name} is given for the session, but the framework has it: set {other} instead")
    engine = settings.get("engine", "live")
    if isinstance(engine, str) and engine != "live" and engine not in ENGINES:
        raise ConfigError(f"engine is {engine!r}; {nearest(engine, [*ENGINES.names(), 'live'])}")
