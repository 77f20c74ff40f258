"""How many steps an epoch takes: the arithmetic of `BatchPlan.for_epochs`, and the rule for an epoch's last steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ebbflow.errors import PlanError

__all__ = ["SampleCount", "cut_step"]

Ints = npt.NDArray[np.int64]


def cut_step(requested: int, remaining: int) -> int:
    """Samples that a step takes when it wants `requested` and the epoch has `remaining` left.

    Normally the smaller of the two, so that an epoch ends with a smaller step. One lone sample is never left for the
    last step, since it has no variance, which batch norm needs: a step of three or more takes one less, a step of two
    takes the third, too. Who asks for steps of one sample gets them.

    >>> [cut_step(8, n) for n in (20, 8, 5, 9)], cut_step(2, 3), cut_step(1, 2)
    ([8, 8, 5, 7], 3, 1)
    """
    if requested == 1 or remaining - requested != 1:
        return min(requested, remaining)
    return requested - 1 if requested >= 3 else remaining


@dataclass(frozen=True)
class SampleCount:
    """Planned samples as a function of the step, and back. Beyond the last run's end that run goes on for ever."""

    first: Ints
    """Number of each run's first step."""
    samples: Ints
    """Samples of each of the run's steps."""

    @cached_property
    def _before(self) -> Ints:
        return np.append(0, np.cumsum(self.samples[:-1] * np.diff(self.first)))

    def before(self, step: int) -> int:
        """Planned samples of all steps before this one."""
        run = int(np.searchsorted(self.first, step, side="right")) - 1
        return int(self._before[run]) + (step - int(self.first[run])) * int(self.samples[run])

    def steps_until(self, samples: int) -> int:
        """Steps after which at least so many samples are planned."""
        run = max(int(np.searchsorted(self._before, samples, side="left")) - 1, 0)
        missing = samples - int(self._before[run])
        return int(self.first[run]) + -(-missing // int(self.samples[run]))

    def first_cut(self, step: int, samples: int) -> int:
        """The first step that may differ from the plan by `cut_step`, when an epoch has so many samples from `step` on.

        Only the last two steps can: any step before them leaves at least two samples.
        """
        return max(step, self.steps_until(self.before(step) + samples) - 2)

    def epoch_end(self, step: int, samples: int) -> int:
        """The step after the last one of an epoch that begins with `step`, each step as `cut_step` has it."""
        target = self.before(step) + samples
        step = self.first_cut(step, samples)
        remaining = target - self.before(step)
        while remaining:
            remaining -= cut_step(self.before(step + 1) - self.before(step), remaining)
            step += 1
        return step

    def epochs(self, samples: int, epochs: int, *, cut: bool, limit: int | None) -> tuple[float, int]:
        """(epochs reached, steps taken) when there are at most `epochs` and at most `limit` steps.

        Too few steps give a number of epochs below `epochs`, and then all `limit` steps.
        """
        if samples < 1 or epochs < 1:
            raise PlanError(f"{epochs} epochs of {samples} samples are no training; expected at least one of each")
        if not cut:
            steps = self.steps_until(samples * epochs)
            if limit is None or steps <= limit:
                return epochs, steps
            return min(self.before(limit) / (samples * epochs), _ALMOST) * epochs, limit
        done = step = 0
        while done < epochs:
            end = self.epoch_end(step, samples)
            if limit is not None and end > limit:
                part = (self.before(limit) - self.before(step)) / samples
                return done + min(part, _ALMOST), limit
            done, step = done + 1, end
        return done, step


_ALMOST = 1 - 1e-9
