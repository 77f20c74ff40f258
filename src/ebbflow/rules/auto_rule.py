"""The rule `auto`: nothing to tune. It begins as the best fixed rule of the optimizer's family, and undoes damage."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
_STEEP = 0.0  # part of the slope that is left after a step, above which the steps may be longer than the fixed rule's
_BEYOND = -0.15  # part below which the steps are long enough, however short they are
_LEAST, _MOST = 0.125, 4.0  # levels at which a warm-up may end because of the slopes
_VERY_STEEP = 0.5  # part of the slope that is left above which a warm-up with Adam is twice as fast
_MEMORY_STEPS = 10  # steps that the average of the slopes remembers, at least
_MEMORY = 1 / 150  # the same, as a part of the run
_TOO_HIGH = 1.2  # of the loss of the first step
_DEVIATIONS = 3.0
_FEW = 3  # differences of losses
_RESTORES = 2  # how often the guard may go back
_PROBES_AT = (0.25, 0.4, 0.6, 0.8)  # parts of the run
_BRANCH = 60  # steps of a branch; the weights of the second half are averaged
_SCORED = 2048  # samples on which a branch is scored, at least
_SCORES = 8  # steps in which it is scored, at least
_FACTORS = (1.0, 0.5, 2.0)  # of the coefficient, the present one first
_COST = 0.05  # most samples that probes may give back, as a part of the run
_BETTER = 0.01  # of the loss


@register_rule(
    "auto",
    cite="our own; compared with fixed rules in docs/evidence/atlas.md",
    needs={"moments"},
    exempt={
        "identity": "warms up from zero at the reference batch, too",
        "no less than the base rate": "warms up from zero",
    },
)
@dataclass(frozen=True)
class Auto(Rule):
    """m = min(S, c r), with r the measured gain, or c sqrt(S) where the optimizer normalises the gradient.

    S = B/B0 and r is the gain of AdaScale. The coefficient c begins at 1. With Adam and similar optimizers nothing is
    measured.

    Warm-up: a level, by which m is multiplied, rises from zero, and reaches 1 when the steps so far are worth 5 % of
    the reference run: in gain for SGD, in sqrt(S) for the others, so that it takes longer the larger the batch. It
    takes a quarter of the run at the most (`limit`). After an increase of the batch by which the multiplier grows k
    times, it climbs as with the modifier `ramp`, over 8k steps.

    Slopes: the base rate may be wrong, and where the level ends corrects it. Every gradient also shows how steep the
    loss still is at the end of the step before, along that step. The slopes where the steps end, divided by those where
    they begin, both summed over the last ten steps or 1/150 of the run, say which part of the slope is left: near 1 if
    the steps are much too short, 0 if they end where the loss is lowest on their way, negative if they go beyond it.
    For the first quarter of the run, as long as more than nothing is left the level goes on rising, above 1 in
    proportion to itself, and up to 4, also beyond m = S. Once less than -0.15 was left, it stays what it is, from 1/8
    on, until more than nothing is left. With Adam and similar optimizers it goes on rising then, up to 1, at half the
    speed: steps that go beyond the lowest loss on their way cost little there, and short ones cost more. While more
    than half is left, it rises twice as fast there. All this takes no further samples, and one copy of the weights.
    Where the weights are held in shards, the level stays 1.

    Guard: until the steps are worth twice the warm-up, and for at least 5 % of the samples, a step whose loss is not
    finite, or is more than 1.2 times that of the first step and three standard deviations above it, is taken for damage
    (of the first four steps, one of more than twice that loss). The run then goes back to its last snapshot, with half
    the coefficient and twice the warm-up; the samples since the snapshot are given back and trained on again. This
    happens at most twice. Snapshots are taken before the first step and after every hundredth of the run, as long as
    the loss is below that of the first step. The loss of a step is that before its update, so one is gone back to only
    once a later loss below that of the first step has confirmed it; until then the one before is kept, too, both in the
    memory of the host. The deviation is that between the losses of consecutive steps. In a loop of your own around
    `ElasticOptimizer`, which does not see the loss, nothing is guarded or probed.

    Probe (`probe=true`): at 25, 40, 60 and 80 % of the samples, once warm-up and guard are over, 60 steps are trained
    three times from the same state, with c, c/2 and 2c. A branch always has 60 steps, however long the run and however
    large the steps are. Each branch is scored by its loss on the samples that follow, 2,048 or more in eight steps or
    more, with the mean of its last 30 weights and without training on them. Another coefficient than c wins only if its
    loss is lower by 1 % and by two standard errors of the paired differences. The run goes on from the end of the
    winning branch; everything else is given back. Probes give back at most 5 % of the run's samples in all, so that a
    run of fewer than about 3,000 steps has none. A probe needs an epoch that is longer than it, and it is abandoned,
    and c kept, when the number of workers changes. Its states are kept in the memory of the host, three at most. It is
    not the default: in the long runs of the atlas it gave back up to 4 % of the samples and was worth nothing.

    Where a state is larger than a quarter of the free memory of the host, nothing is guarded or probed from then on,
    and the record says so. Processes that train together must decide alike: there it is only said.

    A run without an end is taken to have 20,000 reference steps, and has no probes.

    Suits: a first run on a model that nobody has tuned for large batches, above all with SGD and where the base rate is
    a guess.
    """

    limit: float = param(0.25, doc="longest warm-up, as a part of the run, 0 to 1")
    slopes: bool = param(True, doc="whether the slopes along the steps say where the warm-up ends")
    guard: bool = param(True, doc="whether early damage is undone")
    probe: bool = param(False, doc="whether long runs compare coefficients")
    averaged: bool = param(True, doc="whether a probe scores averaged weights, or the last ones")
    lower: bool = param(True, doc="whether a probe tries c/2, too, or only 2c")
    ramp: float = param(8.0, doc="steps of the ramp after an increase, per unit of its factor; 0: none")

    def __post_init__(self) -> None:
        if not 0 <= self.limit <= 1:
            raise SpecError(f"auto: limit is {self.limit:g}; expected 0 (no warm-up) to 1 (the whole run)")
        if not 0 <= self.ramp < math.inf:
            raise SpecError(f"auto: ramp is {self.ramp:g}; expected 0 (no ramp) or steps per unit of the increase")

    def suited(self, *, adaptive: bool) -> Rule:
        """The rate of an optimizer that normalises the gradient does not depend on the noise: nothing is measured."""
        if not adaptive:
            return self
        unmeasured = replace(self)
        object.__setattr__(unmeasured, "needs", frozenset())
        return unmeasured

    def follows_slopes(self, state: State) -> bool:
        """As long as the warm-up lasts."""
        return self.slopes and bool(state["rising"])

    @property
    def guards(self) -> bool:
        """Whether the run may go back to an earlier state."""
        return self.guard or self.probe

    def init(self) -> State:
        """The coefficient, the warm-up, the ramp, and what the guard has seen."""
        return {
            "coefficient": 1.0, "warm_up": 1.0, "worth": 0.0, "fixed": 1.0, "ramp": None, "restored": 0,
            "level": None, "rising": True, "held": False, "slopes": [0.0, 0.0, 0],
            "guarded": self.guard, "first_loss": None, "last_loss": None, "differences": 0, "squares": 0.0,
            "snapshots": 0, "unconfirmed": False, "probe": None, "probes": 0, "given_back": 0, "probed": None,
        }  # fmt: skip

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """Rate, ramp, warm-up, in this order; zero where a branch is scored, so that nothing is learned then."""
        stats: dict[str, float] = {}
        if context.adaptive:
            fixed = math.sqrt(context.ratio)
        else:
            fixed = whole_gain(context)
            stats = {"gain": fixed, **noise_stats(context.moments)}
        scaling = Scaling(lr=_limited(context, state["coefficient"] * fixed))
        ramp = state["ramp"]
        if self.ramp:
            scaling, ramp = Ramp(self.ramp).modify(context, scaling, ramp)
        worth = state["worth"] + fixed
        risen = self._risen(context, worth, state)
        level = risen["level"]
        stats |= {"coefficient": state["coefficient"], "level": level, "warming": float(risen["rising"])}
        if risen["rising"] and (left := _slope_left(context, risen["slopes"])) is not None:
            stats["slope_left"] = left
        if state["probed"] is not None:
            stats["probed"] = state["probed"]
        if state["probe"] is not None:
            stats["probe"] = float(state["probe"]["branch"] + 1)
            level = 0.0 if state["probe"]["steps"] >= _BRANCH else level
        scaling = scaling.map_lr(lambda m: m * level).with_stats(**stats)
        return scaling, {**state, **risen, "worth": worth, "fixed": fixed, "ramp": ramp, "probed": None}

    def _risen(self, context: StepContext, worth: float, state: dict[str, Any]) -> dict[str, Any]:
        """The level that the warm-up has reached with a step, and what it depends on."""
        level, held, slopes = state["level"], state["held"], state["slopes"]
        if not state["rising"]:
            return {"level": level, "rising": False}
        if not self.limit:
            return {"level": 1.0, "rising": False}
        done = context.samples + context.batch
        slopes = _remembered(context, slopes)
        before = self._warmed(context, state["warm_up"], state["worth"], context.samples)
        rise = self._warmed(context, state["warm_up"], worth, done) - before
        level = min(1.0, before) if level is None else level  # above 0 where a run changes to this rule
        left = _slope_left(context, slopes)
        if left is None:
            level = min(1.0, level + rise) if level < 1 else level
        else:
            steep = left > _STEEP
            held = not steep and (held or left < _BEYOND)
            if steep:
                faster = 2.0 if context.adaptive and left > _VERY_STEEP else 1.0
                level = min(_MOST, level + rise * max(1.0, level) * faster)
            elif level < _LEAST or not held:
                level = max(level, min(1.0, level + rise))
            elif context.adaptive:
                level = max(level, min(1.0, level + rise / 2))
        return {"level": level, "held": held, "slopes": slopes, "rising": done < self.limit * _total(context)}

    def _warmed(self, context: StepContext, length: float, worth: float, samples: int) -> float:
        """How far the warm-up is, of 1, after steps that are worth so much and have had so many samples."""
        total = _total(context)
        by_worth = worth / (_WARM_UP * length * total / context.ref_batch)
        return max(by_worth, samples / (self.limit * total) if self.limit else 1.0)

    def review(self, context: StepContext, loss: float, state: State) -> tuple[Verdict, State]:
        """Go back after damage and keep snapshots, as long as the run is guarded; then probe."""
        if state["probe"] is not None:
            return self._probing(context, loss, state)
        if not state["guarded"]:
            return self._unguarded(context, state)
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
                "guarded": restored < _RESTORES,
            }
        done = context.samples + context.batch
        if part >= _GUARDED and self._warmed(context, 2 * state["warm_up"], state["worth"], done) >= 1:
            return "release", {**state, "guarded": False}
        seen = {
            "last_loss": loss,
            "differences": state["differences"] + 1,
            "squares": state["squares"] + (loss - state["last_loss"]) ** 2,
        }
        due = int(part / _SNAPSHOT_EVERY)
        # This loss is that of the weights before the update: it says nothing about a snapshot of the present ones.
        if due > state["snapshots"] and loss < first:
            return "snapshot", {**state, **seen, "snapshots": due, "unconfirmed": True}
        if state["unconfirmed"] and loss < first:
            return "confirm", {**state, **seen, "unconfirmed": False}
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

    # The probe ----------------------------------------------------------------------------------------------------

    def _unguarded(self, context: StepContext, state: State) -> tuple[Verdict, State]:
        """Begin a probe where one is due."""
        total, done, index = context.total_samples, context.samples + context.batch, state["probes"]
        if not (self.probe and total) or index >= len(_PROBES_AT) or done < _PROBES_AT[index] * total:
            return "release", state
        epoch = context.epoch_samples
        if epoch and done % epoch == 0:
            return "release", state  # the last step of an epoch is smaller than those of the probe would be
        if state["rising"]:
            return "release", state
        base = state["coefficient"]
        tried = [factor for factor in _FACTORS if self.lower or factor >= 1]
        rates = {_limited(context, base * factor * state["fixed"]): factor for factor in reversed(tried)}
        factors = [factor for factor in tried if factor in rates.values()]  # those that make a difference
        steps = max(_SCORES, math.ceil(_SCORED / context.batch))
        branch = (_BRANCH + steps) * context.batch
        cost = ((len(factors) - 1) * _BRANCH + len(factors) * steps) * context.batch
        if len(factors) < 2 or state["given_back"] + cost > _COST * total or (epoch and branch > epoch):
            return "release", {**state, "probes": index + 1}
        if epoch and done % epoch + branch >= epoch:
            return "release", state  # it would not fit into the rest of this epoch
        return "branch", {
            **state,
            "probe": {
                "branch": 0, "steps": 0, "factors": factors, "base": base, "workers": context.workers, "scores": steps,
                "losses": [[] for _ in factors],
            },
        }  # fmt: skip

    def _probing(self, context: StepContext, loss: float, state: State) -> tuple[Verdict, State]:
        """One step further in a probe."""
        probe = state["probe"]
        branch, steps = probe["branch"], probe["steps"] + 1
        now = {**state, "probe": {**probe, "steps": steps}, "given_back": state["given_back"] + context.batch}
        if context.workers != probe["workers"]:
            return self._abandoned(now)
        if not math.isfinite(loss):
            return self._ended(now, [math.inf]) if branch else self._abandoned(now)
        if steps == _BRANCH:
            return ("score average" if self.averaged else "score"), now
        if steps < _BRANCH:
            return ("average" if self.averaged and steps > _BRANCH // 2 else "continue"), now
        losses = [*probe["losses"][branch], loss]
        now["probe"]["losses"] = [*probe["losses"][:branch], losses, *probe["losses"][branch + 1 :]]
        return self._ended(now, losses) if len(losses) == probe["scores"] else ("continue", now)

    def _ended(self, state: State, losses: list[float]) -> tuple[Verdict, State]:
        """What follows the last step of a branch: the next one, or the end of the probe."""
        probe = state["probe"]
        branch, factors = probe["branch"], probe["factors"]
        found = [*probe["losses"][:branch], losses]
        best = _winner(found)
        if branch + 1 < len(factors):
            following = {
                **probe, "branch": branch + 1, "steps": 0, "losses": [*found, *probe["losses"][branch + 1 :]],
            }  # fmt: skip
            coefficient = probe["base"] * factors[branch + 1]
            return ("next" if best < branch else "lead"), {**state, "probe": following, "coefficient": coefficient}
        return ("adopt" if best < branch else "adopt last"), self._decided(state, factors[best])

    def _abandoned(self, state: State) -> tuple[Verdict, State]:
        """Go on with the coefficient of before, from where its branch ended, or is."""
        probe = state["probe"]
        if probe["branch"]:
            return "adopt", self._decided(state, 1.0, probed=0.0)
        return ("adopt last" if probe["steps"] > _BRANCH else "release"), self._decided(state, 1.0, probed=0.0)

    def _decided(self, state: State, factor: float, *, probed: float | None = None) -> State:
        return {
            **state, "probe": None, "probes": state["probes"] + 1, "coefficient": state["probe"]["base"] * factor,
            "probed": factor if probed is None else probed,
        }  # fmt: skip

    def interrupted(self, state: State) -> State:
        """Without its probe, whose states were lost."""
        return state if state["probe"] is None else self._decided(state, 1.0, probed=0.0)

    def unkept(self, state: State) -> State:
        """Without guard and probes."""
        return {**state, "guarded": False, "unconfirmed": False, "probe": None, "probes": len(_PROBES_AT)}

    def after_restore(self, snapshot: State, state: State) -> State:
        """What was learned from the damage or the probe goes on, the rest is as it was at the snapshot."""
        kept = (
            "coefficient", "warm_up", "restored", "guarded", "first_loss", "probe", "probes", "given_back", "probed",
        )  # fmt: skip
        last = state["first_loss"] if snapshot["last_loss"] is None else snapshot["last_loss"]
        level = snapshot["level"]
        if level is not None:
            level *= snapshot["warm_up"] / state["warm_up"]  # a longer warm-up has come less far
        gone_on = {name: state[name] for name in kept}
        return {**snapshot, "last_loss": last, "level": level, "unconfirmed": False, **gone_on}


def _remembered(context: StepContext, slopes: list[Any]) -> list[Any]:
    """The averages of the slopes with those along the step before this one: where it began, where it ended, steps."""
    began, ended, count = slopes
    if context.slopes is None or not all(map(math.isfinite, context.slopes)):
        return slopes
    kept = 1 - 1 / _memory(context)
    return [began * kept + context.slopes[0], ended * kept + context.slopes[1], count + 1]


def _slope_left(context: StepContext, slopes: list[Any]) -> float | None:
    """Which part of the slope is left at the end of a step; None as long as too few steps say it.

    1: the steps are much too short; 0: they end where the loss is lowest on their way; below 0: they go beyond.
    """
    began, ended, count = slopes
    return ended / began if count >= _memory(context) / 2 and began < 0 else None


def _memory(context: StepContext) -> float:
    return max(_MEMORY_STEPS, _MEMORY * _total(context) / context.batch)


def _limited(context: StepContext, multiplier: float) -> float:
    """At most S; below the reference batch at most what the family has there."""
    most = max(context.ratio, math.sqrt(context.ratio)) if context.adaptive else context.ratio
    return min(most, multiplier)


def _winner(losses: list[list[float]]) -> int:
    """The branch to go on with: the first, unless the losses of another are lower by 1 % and two standard errors.

    >>> first = [2.0, 2.2]
    >>> _winner([first, [1.9, 2.1], [1.8, 2.0]]), _winner([first, [1.9, 2.3]]), _winner([first, [math.inf]])
    (2, 0, 0)
    """
    first = losses[0]
    best, most = 0, 0.0
    for branch, others in enumerate(losses[1:], start=1):
        if len(others) < len(first):
            continue
        gains = [a - b for a, b in zip(first, others, strict=True)]
        mean = math.fsum(gains) / len(gains)
        spread = math.sqrt(math.fsum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1) / len(gains))
        if mean > max(most, _BETTER * abs(math.fsum(first)) / len(first), 2 * spread):
            best, most = branch, mean
    return best


def _total(context: StepContext) -> float:
    return context.total_samples or _ENDLESS * context.ref_batch
