"""The simulated time of live replays on loopback compared with the measured one, after `ebbflow profile --from`.

Real replicas are started and killed as a trace says. The records of a replay of one trace give the step model and what
a loss and a gain cost. With them a training on a second trace is simulated, and then replayed. Both times run from the
launch to the last committed step.

    waiting      a pause of 30 ms and 1 ms per sample stands for a device that each replica has for itself
    digits-mlp   all replicas compute on the cores of this machine

How long a replica takes to start depends on the load of the machine and is not simulated: the simulated fleet is that
of the replay, with each replica from its first step on. On shared cores, replicas that start and other programs slow
down those that train, which no simulation can know. Steps are therefore measured in a replay before and in one after
the training.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.live.accounting import read_account
from ebbflow.plan import make_policy
from ebbflow.record import Run, read_record
from ebbflow.simulate import FlatPrice, Scenario, simulate
from ebbflow.simulate.profiles import MeasuredStep, fit_steps, measured_steps
from ebbflow.simulate.recovery import StepRecovery
from ebbflow.studies.profiling import live_records, live_recovery
from ebbflow.traces import Trace, load

LOCAL, SAMPLES = 32, 1442
KNOWN = "0s:3 18s:2 24s:1 28s:2 42s"
PLAYED = "0s:2 16s:1 20s:3 42s:2 48s:1 54s:2 1h"
CASES = {"waiting": 32, "digits-mlp": 200}
"""Epochs of the training."""


def replica(epochs: int) -> None:
    """A training that waits instead of computing."""
    import torch
    from torch.nn.functional import mse_loss

    import ebbflow.live

    class Data:
        def __len__(self) -> int:
            return SAMPLES

        def batch(self, indices: Any, *, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.ones(len(indices), 8), torch.zeros(len(indices), 1)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ebbflow.live.join(model, optimizer, Data(), local_batch=LOCAL, base_batch=LOCAL, epochs=epochs) as fleet:
        for step in fleet:
            for x, y in step:
                time.sleep(0.03 + 0.001 * len(x))
                step.backward(mse_loss(model(x), y))


def replay(case: str, trace: str, epochs: int, folder: Path, *more: str) -> None:
    """Play a trace to its end, or to the end of the training."""
    training = [__file__, "--replica", str(epochs)]
    if case != "waiting":
        training = ["--workload", case, "--rule", "linear", "--local-batch", str(LOCAL), "--epochs", str(epochs)]
    options = ["--leaver", "newest", "--out", str(folder), "--json", *more]
    command = [sys.executable, "-m", "ebbflow", "replay", trace, *options, *training]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"the replay of {trace} ended with {done.returncode}:\n{done.stderr[-2000:]}")


# -- what the files of a replay contain --------------------------------------------------------------------------------


def launched(folder: Path) -> float:
    return float(json.loads((folder / "fleet.json").read_text())["time"])


def status(record: Path) -> dict[str, Any]:
    """The final status of a replica."""
    return dict(json.loads((record.parent / "status.json").read_text()))


def survivor(folder: Path) -> tuple[Run, float]:
    """A replica that took part from the first step to the last, and its end in seconds from the launch.

    Its rows have one clock; those of a replica that was killed and restarted do not.
    """
    for path in live_records(folder):
        run, said = read_record(path), status(path)
        if said["state"] == "finished" and run.steps[0].step == 0:
            return run, said["time"] - launched(folder)
    raise SystemExit(f"no replica of {folder} took part from the first step to the last")


def joins_s(folder: Path) -> list[float]:
    """When replicas committed their first steps, in seconds from the launch."""
    run, end = survivor(folder)
    wall = {row.step: row.wall_s for row in run.steps}
    begun = end - run.steps[-1].wall_s
    gains = [change.step for change in read_account(folder).changes for _ in range(change.after - change.before)]
    return sorted(begun + wall[step] for step in [0] * run.steps[0].workers + gains)


def fleet_of(folder: Path, trace: str) -> Trace:
    """The replicas over time: each from its first step on, until the trace takes it away."""
    played = load(trace)
    lost = -np.minimum(np.diff(played.workers), 0)
    ends = np.repeat(played.times[1:], lost).tolist()
    changes = sorted([(0.0, 0), *((time, 1) for time in joins_s(folder)), *((time, -1) for time in ends)])
    times, counts = np.array([time for time, _ in changes]), np.cumsum([count for _, count in changes])
    last = np.append(times[1:] > times[:-1], True)  # of several changes at the same time
    return Trace(times[last], counts[last], played.end)


def known(case: str) -> tuple[list[MeasuredStep], StepRecovery]:
    """The time of steps in a replay, and what changes cost."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "job"
        replay(case, KNOWN, 10**6, folder)
        recovery = live_recovery(folder)
        assert recovery is not None
        return [one for path in live_records(folder) for one in measured_steps(read_record(path))], recovery


def compare(case: str, epochs: int) -> tuple[StepRecovery, float, float]:
    """(what changes cost, simulated seconds, measured seconds)."""
    before, recovery = known(case)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "job"
        replay(case, PLAYED, epochs, folder, "--finish")
        fleet, (_, measured) = fleet_of(folder, PLAYED), survivor(folder)
    after, _ = known(case)
    model = fit_steps([*before, *after]).model
    found = simulate(
        Scenario(
            trace=fleet, policy=make_policy("follow", LOCAL), model=model, samples=SAMPLES, epochs=epochs,
            price=FlatPrice(0.0), recovery=recovery,
        )
    )  # fmt: skip
    return recovery, found.time_s, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, help="one of the trainings alone")
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica is not None:
        return replica(arguments.replica)
    print(f"{KNOWN} tells of {PLAYED}")
    print(f"{'training':12}{'a loss':>9}{'a gain':>9}{'simulated, s':>14}{'measured, s':>13}{'ratio':>7}")
    for case, epochs in CASES.items():
        if arguments.case in (None, case):
            cost, simulated, measured = compare(case, epochs)
            print(
                f"{case:12}{cost.detect:>8.2f}s{cost.join:>8.2f}s{simulated:>14.1f}{measured:>13.1f}"
                f"{simulated / measured:>7.2f}"
            )
    print("to reach: 0.90 to 1.10")
    return None


if __name__ == "__main__":
    main()
