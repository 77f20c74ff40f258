"""10^7 steps over 10^5 changes: a simulation compared with a plain loop over the steps; a search over 10,000 settings.

The loop makes one step at a time; it is run for a thousandth of the steps, and its time is scaled. The largest fleet is
100,000 workers for a month.
"""

from __future__ import annotations

import resource
import time

import numpy as np

from ebbflow.core.units import Seconds
from ebbflow.plan import make_policy
from ebbflow.simulate import ComputeAndNetwork, FlatPrice, Scenario, Simulation, parse_step_time, simulate
from ebbflow.simulate.recovery import RECOVERIES
from ebbflow.simulate.search import Setting, outcomes
from ebbflow.simulate.step_models import Ring, StepModel
from ebbflow.traces import Trace, load
from plan_speed import best_of

CHANGES, STEPS, STEP_S, LOCAL = 100_000, 10_000_000, 0.6, 128


def trace_of(changes: int, end: float, low: int, high: int) -> Trace:
    rng = np.random.default_rng(0)
    times = np.append(0.0, np.sort(rng.uniform(1, end - 1, changes)))
    return Trace(
        times, np.arange(changes + 1) % 2 * (high - low) // 2 + rng.integers(low, (low + high) // 2, changes + 1), end
    )


def scenario(trace: Trace, model: StepModel, recovery: str, *, share: float = 0.98) -> Scenario:
    """A hundred epochs that nearly fill the trace."""
    samples = int(trace.integral() / STEP_S * LOCAL * share / 100)
    return Scenario(
        trace=trace, policy=make_policy("follow", LOCAL), model=model, samples=samples, epochs=100,
        price=FlatPrice(1.0), recovery=RECOVERIES.make(recovery), repeat=True,
    )  # fmt: skip


def loop(trace: Trace, steps: int) -> tuple[float, float]:
    """Time and worker-seconds of this many steps, one at a time."""
    times, workers = trace.times.tolist(), trace.workers.tolist()
    now = spent = 0.0
    position = samples = 0
    for _ in range(steps):
        while position + 1 < len(times) and times[position + 1] <= now:
            position += 1
        samples += workers[position] * LOCAL
        spent += workers[position] * STEP_S
        now += STEP_S
    return now, spent


def figures(found: Simulation) -> object:
    """All aggregates, computed anew, since a simulation caches them."""
    fresh = Simulation(**{name: getattr(found, name) for name in Simulation.__dataclass_fields__})
    return fresh.as_json()


def main() -> None:
    trace = trace_of(CHANGES, STEPS * STEP_S, 20, 36)
    constant = parse_step_time(f"{STEP_S}s")
    parts = ComputeAndNetwork(
        per_step=Seconds(0.05), per_sample=Seconds(0.004), network=Ring(102.0, 25.0, Seconds(5e-5))
    )
    month = trace_of(CHANGES, 30 * 86400.0, 60_000, 100_000)
    cases = {
        "constant step time, no costs of changes": scenario(trace, constant, "ideal"),
        "constant step time, steps lost": scenario(trace, constant, "step(detect=1s, join=1s)", share=0.93),
        "computing and network, steps lost": scenario(trace, parts, "step(detect=1s, join=1s)", share=0.9),
        "computing and network, steps finished": scenario(trace, parts, "ideal", share=0.9),
        "checkpoints and restarts": scenario(trace, constant, "checkpoint(every=20s, write=1s, restart=5s)", share=0.5),
        "100,000 workers for a month": scenario(month, constant, "step(detect=1s, join=1s)", share=0.9),
    }
    plain = best_of(3, lambda: loop(trace, STEPS // 1000)) * 1000
    print(f"{CHANGES:,} changes, about {STEPS:,} steps")
    print(f"{'':42}{'steps':>13}{'ms':>9}{'figures, ms':>13}{'times faster':>14}")
    for name, one in cases.items():
        found = simulate(one)
        seconds, aggregates = best_of(5, lambda one=one: simulate(one)), best_of(5, lambda found=found: figures(found))
        print(f"{name:42}{found.steps:>13,}{seconds * 1e3:>9.1f}{aggregates * 1e3:>13.1f}{plain / seconds:>14,.0f}")
    print(f"{'plain loop over the steps':42}{STEPS:>13,}{plain * 1e3:>9.0f}")
    print("to reach: 50 ms, 5 ms for the figures")
    search()
    print(f"memory at most: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB (to reach: 500)")


def search() -> None:
    """90 epochs of ImageNet on an imitated trace: 50 fleets x 200 local batches."""
    one = Scenario(
        trace=load("gcp-a100-like(seed=1)"), policy=make_policy("follow", LOCAL), model=parse_step_time("0.6s"),
        samples=1_281_167, epochs=90, price=FlatPrice(0.744), repeat=True, noise_scale=8000.0, ref_batch=256,
    )  # fmt: skip
    settings = [Setting(max_workers=w, local_batch=b, policy="follow") for w in range(7, 57) for b in range(1, 201)]
    begin = time.perf_counter()
    found = sum(1 for _ in outcomes(one, settings))
    seconds = time.perf_counter() - begin
    print(f"whatif over {found:,} settings: {seconds:.1f} s, {seconds / found * 1e3:.2f} ms each")


if __name__ == "__main__":
    main()
