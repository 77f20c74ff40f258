"""A trace with 10^5 changes to 10^7 step sizes: a plan beside a plain Python loop over the steps.

The loop is what published code does (one entry a step); it is run on a hundredth of the steps and scaled, since all
steps cost it the same. The expansion of the plan to an array of 10^7 numbers is shown for completeness: training asks
a plan step by step and never needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.traces.availability import Trace

CHANGES, STEPS, STEP_S = 100_000, 10_000_000, 0.6


def best_of(repeats: int, function: Callable[[], object]) -> float:
    """Seconds of the fastest call: the one that nothing else disturbed."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def loop(trace: Trace, steps: int) -> list[int]:
    """The same batches, one step at a time."""
    times, workers = trace.times.tolist(), trace.workers.tolist()
    batches, position = [], 0
    for step in range(steps):
        now = step * STEP_S
        while position + 1 < len(times) and times[position + 1] <= now:
            position += 1
        batches.append(workers[position] * 128)
    return batches


def main() -> None:
    rng = np.random.default_rng(0)
    end = STEPS * STEP_S
    times = np.append(0.0, np.sort(rng.uniform(1, end - 1, CHANGES)))
    trace = Trace(times, np.arange(CHANGES + 1) % 2 * 8 + rng.integers(20, 28, CHANGES + 1), end)

    def make() -> BatchPlan:
        return BatchPlan.from_trace(trace, "follow(128)", STEP_S)

    plan = make()
    assert plan.steps == STEPS
    share = STEPS // 100
    assert plan.batches(0, share).tolist() == loop(trace, share)
    plain = best_of(3, lambda: loop(trace, share)) * 100
    rows = [
        ("plan, constant step time", best_of(20, make)),
        ("plan, then all 10^7 sizes as an array", best_of(5, lambda: make().batches())),
        ("plan, step time by workers, lose", best_of(10, lambda: by_workers(trace, "lose"))),
        ("plan, step time by workers, finish", best_of(5, lambda: by_workers(trace, "finish"))),
        ("plain loop over the steps", plain),
    ]
    print(f"{CHANGES:,} changes to {STEPS:,} steps ({len(plan.first):,} runs)")
    print(f"{'':40}{'ms':>10}{'times faster':>15}")
    for name, seconds in rows:
        print(f"{name:40}{seconds * 1e3:>10.1f}{plain / seconds:>15,.0f}")
    print("to reach: 10 ms for the plan")


def by_workers(trace: Trace, on_change: str) -> BatchPlan:
    """An event-driven plan: more workers make a step a little slower."""
    return BatchPlan.from_trace(trace, "follow(128)", {1: 0.5, 40: 0.7}, on_change=on_change)


if __name__ == "__main__":
    main()
