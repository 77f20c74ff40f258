"""The simulated time of emulated trainings on the digits compared with the measured one, after `ebbflow profile`.

One machine computes for all workers, so the step model is that of emulated steps (`ebbflow profile --workers`). The
fleet of an emulated run follows the clock of its trace, at one step per second here, and not the real time: the number
of steps comes from the simulated plan, and the time of each from the step model. The times of all steps are compared,
without validations.

A busy machine is sometimes slower. Each case therefore has several short trainings, with a profile before and after
each; the benchmark prints the medians of the simulated time, of the measured time and of their ratio.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from ebbflow.plan import make_policy
from ebbflow.record import Run
from ebbflow.run import training
from ebbflow.run.config import RunConfig
from ebbflow.simulate import FlatPrice, Scenario, parse_step_time, simulate
from ebbflow.simulate.profiles import MeasuredStep, fit_steps
from ebbflow.studies.profiling import measure_workload
from ebbflow.traces import load

SIZES, FLEETS, LOCAL, SAMPLES = (16, 32), (2, 16), 32, 1437
CHANGING = "square(2, 16, period=20s, duration=1h)"
CASES = [("digits-mlp", "constant(8)", 150), ("digits-mlp", CHANGING, 150), ("digits-cnn", "constant(8)", 15),
         ("digits-cnn", CHANGING, 15)]  # fmt: skip
ROUNDS = 7


def step_seconds(run: Run) -> float:
    """Seconds of all steps, without the validations between them."""
    ends = {row.step + 1: row.wall_s for row in run.steps}
    between = [row for row in run.validations if row.step <= run.steps[-1].step]
    return run.steps[-1].wall_s - sum(row.wall_s - ends[row.step] for row in between)


def measure(workload: str) -> tuple[list[MeasuredStep], int | None]:
    return measure_workload(RunConfig(workload=workload), SIZES, FLEETS, steps=25)


def train(workload: str, trace: str, epochs: int) -> float:
    """Seconds of all steps."""
    config = RunConfig(
        workload=workload, rule="linear", trace=trace, epochs=epochs, local_batch=LOCAL, step_time="1s", repeat=True
    )
    with tempfile.TemporaryDirectory() as folder:
        return step_seconds(training.train(config, Path(folder), keep_weights=False))


def compare(workload: str, trace: str, epochs: int) -> list[tuple[float, float]]:
    """(simulated, measured) seconds of each training."""
    plan = simulate(
        Scenario(
            trace=load(trace), policy=make_policy("follow", LOCAL), model=parse_step_time("1s"), samples=SAMPLES,
            epochs=epochs, price=FlatPrice(0.0), repeat=True,
        )
    )  # fmt: skip
    found = []
    before, micro_batch = measure(workload)
    for _ in range(ROUNDS):
        measured = train(workload, trace, epochs)
        after, _ = measure(workload)
        fit = fit_steps([*before, *after], serial=True, micro_batch=micro_batch)
        seconds = fit.model.breakdown(plan.segments.workers[plan.runs.segments], plan.runs.sizes).total
        found.append((float((plan.runs.counts * seconds).sum()), measured))
        before = after
    return found


def main() -> None:
    print(f"{'workload':14}{'fleet':42}{'simulated, s':>14}{'measured, s':>14}{'ratio':>8}{'least to most':>16}")
    for workload, trace, epochs in CASES:
        found = compare(workload, trace, epochs)
        simulated, measured = (median(column) for column in zip(*found, strict=True))
        ratios = sorted(one / other for one, other in found)
        print(
            f"{workload:14}{trace:42}{simulated:>14.2f}{measured:>14.2f}{median(ratios):>8.2f}"
            f"{ratios[0]:>8.2f} to {ratios[-1]:.2f}"
        )
    print("to reach: 0.90 to 1.10")


if __name__ == "__main__":
    main()
