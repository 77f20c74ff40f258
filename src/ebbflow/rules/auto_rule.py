"""The rule `auto`: nothing to tune. It begins as the best fixed rule of the optimizer's family, and undoes damage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ebbflow.core.spec import param
from ebbflow.errors import SpecError
from ebbflow.rules.modifiers import Ramp
from ebbflow.rules.noise_rules import noise_stats, whole_gain
from ebbflow.rules.rule import Rule, Scaling, State, StepContext, Verdict, register_rule

__all__ = ["Auto"]

_WARM_UP = 0.05  # part of the reference run that the steps of the warm-up are worth
_ENDLESS = 20_000  # reference steps that a run without an end is taken to have
_GUARDED = 0.05  # part of the run in which damage is looked for
_SNAPSHOT_EVERY = 0.01  # part of the run between snapshots, as long as it is guarded
_TOO_HIGH = 1.1  # of the loss of the first step
_DEVIATIONS = 3.0
_FEW = 3  # differences of losses


@register_rule(
    "auto",
    cite="our own; not yet compared with fixed rules",
    needs={"moments"},
    exempt={
        "identity": "warms up from zero at the reference batch, too",
        "no less than the base rate": "warms up from zero",
    },
)
@dataclass(frozen=True)
class Auto(Rule):
    """m = min(S, c r), with r the measured gain, or c sqrt(S) where the optimizer normalises the gradient.

    S = B/B0, r is the gain of AdaScale, and the coefficient c begins at 1 and never exceeds it.

    Warm-up: from zero, until the steps so far are worth 5 % of the reference run: in gain for SGD, in sqrt(S) for the
    others, so that it takes longer the larger the batch. It ends after a quarter of the run at the latest (`limit`).
    After an increase of the batch the multiplier climbs as with the modifier `ramp`.

    Guard: until the steps are worth twice the warm-up, and for at least 5 % of the samples, a step whose loss is not
    finite, or is more than 1.1 times that of the first step and three standard deviations above it, is taken for damage
    (of the first four steps, one of more than twice that loss). The run then goes back to its last snapshot, with half
    the coefficient and twice the warm-up; the samples since the snapshot are given back and trained on again. This
    happens at most `restores` times. Snapshots are taken before the first step and after every hundredth of the run, as
    long as the loss is below that of the first step, and kept in the memory of the host. The deviation is that between
    the losses of consecutive steps. In a loop of your own around `ElasticOptimizer`, which does not see the loss,
    nothing is guarded.

    A run without an end is taken to have 20,000 reference steps.

    Suits: a first run on a model that nobody has tuned for large batches. How it compares with fixed rules is still to
    be measured; until then it is not the default.
    """

    limit: float = param(0.25, doc="longest warm-up, as a part of the run, 0 to 1")
    restores: int = param(2, doc="how often the run may go back to a snapshot; 0 is no guard")

    def __post_init__(self) -> None:
        if not 0 <= self.limit <= 1:
            raise SpecError(f"auto: limit is {self.limit:g}; expected 0 (no warm-up) to 1 (the whole run)")
        if self.restores < 0:
            raise SpecError(f"auto: restores is {self.restores}; expected 0 or more")

    @property
    def guards(self) -> bool:
        """Whether the run may go back to a snapshot."""
        return self.restores > 0

    def init(self) -> State:
        """The coefficient, the warm-up, the ramp, and what the guard has seen."""
        return {
            "coefficient": 1.0, "warm_up": 1.0, "worth": 0.0, "ramp": None, "restored": 0, "guarded": self.guards,
            "first_loss": None, "last_loss": None, "differences": 0, "squares": 0.0, "snapshots": 0,
        }  # fmt: skip

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """Rate, ramp, warm-up, in this order."""
        gain = whole_gain(context)
        root = math.sqrt(context.ratio)
        most, fixed = (root, root) if context.adaptive else (context.ratio, gain)
        scaling = Scaling(lr=min(most, state["coefficient"] * fixed))
        scaling, ramp = Ramp().modify(context, scaling, state["ramp"])
        worth = state["worth"] + fixed
        done = self._warmed(context, state["warm_up"], worth)
        stats = {"gain": gain, "coefficient": state["coefficient"], "warming": float(done < 1)}
        scaling = scaling.map_lr(lambda m: m * done).with_stats(**stats, **noise_stats(context.moments))
        return scaling, {**state, "worth": worth, "ramp": ramp}

    def _warmed(self, context: StepContext, length: float, worth: float) -> float:
        """Which part of the rate the warm-up allows."""
        total = _total(context)
        by_worth = worth / (_WARM_UP * length * total / context.ref_batch)
        by_limit = (context.samples + context.batch) / (self.limit * total) if self.limit else 1.0
        return min(1.0, max(by_worth, by_limit))

    def review(self, context: StepContext, loss: float, state: State) -> tuple[Verdict, State]:
        """Go back after damage, keep a snapshot where there is none yet, and stop looking after 5 % of the samples."""
        if not state["guarded"]:
            return "release", state
        part = (context.samples + context.batch) / _total(context)
        first = state["first_loss"]
        if first is None:
            new = {**state, "first_loss": loss, "last_loss": loss}
            return ("continue", new) if math.isfinite(loss) else ("continue", {**new, "guarded": False})
        if self._damaged(loss, state):
            restored = state["restored"] + 1
            return "restore", {
                **state,
                "coefficient": state["coefficient"] / 2,
                "warm_up": state["warm_up"] * 2,
                "restored": restored,
                "guarded": restored < self.restores,
            }
        if part >= _GUARDED and self._warmed(context, 2 * state["warm_up"], state["worth"]) == 1:
            return "release", {**state, "guarded": False}
        seen = {
            "last_loss": loss,
            "differences": state["differences"] + 1,
            "squares": state["squares"] + (loss - state["last_loss"]) ** 2,
        }
        due = int(part / _SNAPSHOT_EVERY)
        if due > state["snapshots"] and loss < first:
            return "snapshot", {**state, **seen, "snapshots": due}
        return "continue", {**state, **seen}

    def _damaged(self, loss: float, state: dict[str, Any]) -> bool:
        if not math.isfinite(loss):
            return True
        first, count = float(state["first_loss"]), state["differences"]
        if count < _FEW:  # how much the loss scatters is not known yet, and the rate is still close to zero
            return loss > first + abs(first)
        # The differences of consecutive losses do not see a trend; their variance is twice that of a loss.
        deviation = math.sqrt(state["squares"] / count / 2)
        return loss > max(first + (_TOO_HIGH - 1) * abs(first), first + _DEVIATIONS * deviation)

    def after_restore(self, snapshot: State, state: State) -> State:
        """What was learned from the damage goes on, the rest is as it was at the snapshot."""
        kept = ("coefficient", "warm_up", "restored", "guarded", "first_loss")
        last = state["first_loss"] if snapshot["last_loss"] is None else snapshot["last_loss"]
        return {**snapshot, "last_loss": last, **{name: state[name] for name in kept}}


def _total(context: StepContext) -> float:
    return context.total_samples or _ENDLESS * context.ref_batch
