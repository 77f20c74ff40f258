"""A study on disk, written as engines write it, with numbers that can be checked by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ebbflow.record import End, Event, Header, RecordWriter, StepRow, ValidationRow

TRACES: dict[str, dict[str, Any]] = {
    "static": {"name": "static", "times": [0.0], "workers": [8], "end": 4800.0},
    "gpu": {
        "name": "gcp-a100-like",
        "times": [0.0, 240.0, 500.0, 700.0, 760.0, 1200.0, 1500.0, 1900.0],
        "workers": [12, 24, 16, 0, 8, 20, 28, 14],
        "end": 2400.0,
    },
}
RULES = ("constant", "sqrt", "linear+warmup(2ep)")
EPOCHS, EPOCH_SAMPLES, LOCAL_BATCH, REF_BATCH = 9, 1437, 8, 64


def _workers(trace: dict[str, Any], time: float) -> int:
    return [w for t, w in zip(trace["times"], trace["workers"], strict=True) if t <= time][-1]


def _multiplier(rule: str, ratio: float, progress: float) -> float:
    if rule.startswith("linear"):
        return 1 + (ratio - 1) * min(1.0, progress / 2)
    return math.sqrt(ratio) if rule == "sqrt" else 1.0


def write_record(
    path: Path,
    *,
    last: Sequence[float | None],
    workload: str = "digits-mlp",
    trace: str = "static",
    rule: str = "constant",
    seed: int = 0,
    metric: str = "accuracy",
    status: str | None = "finished",
    text: str = "",
    until: int = EPOCHS,
    stats: Callable[[float], dict[str, float]] = lambda progress: {},
) -> Path:
    """A record of `until` epochs whose last validations are `last`; status None: it stops without an end."""
    shape = TRACES[trace]
    header = Header(
        config={
            "workload": workload,
            "trace": trace,
            "trace_text": shape["name"],
            "rule": rule,
            "seed": seed,
            "epochs": EPOCHS,
            "ref_batch": REF_BATCH,
            "local_batch": LOCAL_BATCH,
            "policy": "follow",
            "step_time": "fit",
            "metric": metric,
            "higher_is_better": metric == "accuracy",
        },
        trace=shape,
        versions={"python": "3.11.2", "ebbflow": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
        command=f"ebbflow train {workload} --rule '{rule}'",
        git_commit="0123456789abcdef0123456789abcdef01234567",
        created=f"2025-01-0{1 + seed}T10:00:00+00:00",
        device="cpu",
    )
    final = next((value for value in reversed(last) if value is not None), 0.5)
    start = 0.1 if metric == "accuracy" else 2.5
    with RecordWriter(path) as record:
        record.write(header)
        step, samples, time = 0, 0, 0.0
        for epoch in range(until):
            while samples < (epoch + 1) * EPOCH_SAMPLES:
                time = 760.0 if trace == "gpu" and 700 <= time < 760 else time
                workers = _workers(shape, time)
                batch = min(workers * LOCAL_BATCH, (epoch + 1) * EPOCH_SAMPLES - samples)
                samples += batch
                progress = samples / EPOCH_SAMPLES
                rate = 0.1 * 0.5 ** int(progress / 4)
                multiplier = _multiplier(rule, batch / REF_BATCH, progress)
                loss = 2.3 * math.exp(-0.5 * progress) + 0.05 + 0.02 * math.sin(3.7 * step + seed)
                row = StepRow(
                    step=step, time_s=time, wall_s=0.01 * (step + 1), epoch=epoch, samples=samples, workers=workers,
                    batch=batch, micro_batches=workers, lr_base=rate, lr=rate * multiplier, multiplier=multiplier,
                    loss=None if status == "diverged" and epoch == until - 1 else loss, stats=stats(progress),
                )  # fmt: skip
                record.write(row)
                step, time = step + 1, time + 13.0
            left = until - epoch - 1
            if left < len(last):
                value = last[len(last) - 1 - left]
            else:
                value = final + (start - final) * math.exp(-0.9 * (epoch + 1))
            record.write(
                ValidationRow(
                    step=step, epoch=float(epoch + 1), samples=samples, time_s=time, wall_s=0.01 * step,
                    metrics={metric: value},
                )
            )  # fmt: skip
        if status is not None:
            record.write(Event(step=step, what="resumed", text="from a checkpoint"))
            record.write(End(status=status, steps=step, samples=samples, wall_s=0.01 * step, text=text))  # type: ignore[arg-type]
    return path


def write_study(folder: Path) -> Path:
    """Two workloads x two traces x three rules x two seeds, with everything that can go wrong.

    digits-mlp, gpu: linear has a run that diverged and one whose last line is cut; sqrt has one that failed.
    tiny-gpt (lower is better) has no record for seed 1 of constant on gpu.
    """
    finals = {
        ("digits-mlp", "static"): {"constant": (0.95, 0.97), "sqrt": (0.95, 0.97), "linear+warmup(2ep)": (0.95, 0.97)},
        ("digits-mlp", "gpu"): {"constant": (0.90, 0.92), "sqrt": (0.96, 0.98), "linear+warmup(2ep)": (0.94, 0.94)},
        ("tiny-gpt", "static"): {"constant": (1.50, 1.52), "sqrt": (1.50, 1.51), "linear+warmup(2ep)": (1.49, 1.52)},
        ("tiny-gpt", "gpu"): {"constant": (1.70, 1.71), "sqrt": (1.55, 1.57), "linear+warmup(2ep)": (1.60, 1.64)},
    }
    config = {
        "name": "Which rule for a fleet that breathes?",
        "workloads": ["digits-mlp", "tiny-gpt"],
        "traces": {name: trace["name"] for name, trace in TRACES.items()},
        "rules": list(RULES),
        "seeds": [0, 1],
    }
    folder.mkdir(parents=True, exist_ok=True)
    body = {"version": 1, "command": "ebbflow study fleet.toml --out fleet", "config": config}
    (folder / "study.json").write_text(json.dumps(body))
    for (workload, trace), rules in finals.items():
        for rule, values in rules.items():
            for seed, value in enumerate(values):
                arm = f"{workload}_{trace}_{rule.replace('(', '-').strip(')')}_s{seed}"
                path = folder / "arms" / arm / "record.jsonl"
                options: dict[str, Any] = {}
                broken = False
                if (workload, trace, seed) == ("digits-mlp", "gpu", 1):
                    if rule.startswith("linear"):
                        options = {"status": "diverged", "text": "the loss is not a finite number", "until": 4}
                    elif rule == "sqrt":
                        options = {"status": "failed", "text": "RuntimeError: <out of memory> & more", "until": 5}
                if (workload, trace, rule, seed) == ("tiny-gpt", "gpu", "constant", 1):
                    continue
                if (workload, trace, seed) == ("tiny-gpt", "gpu", 1) and rule == "sqrt":
                    options, broken = {"status": None, "until": 5}, True
                metric = "accuracy" if workload == "digits-mlp" else "loss"
                spread = 0.01 if metric == "accuracy" else 0.0
                last: tuple[float | None, ...] = (value - spread, value, value + spread)
                if options.get("status") == "diverged":
                    last = (0.62, 0.31, None)
                write_record(
                    path, last=last, workload=workload, trace=trace, rule=rule, seed=seed, metric=metric, **options
                )
                if broken:
                    with path.open("a") as record:
                        record.write('{"kind":"step","step":99,"ti')
    return folder


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study of `write_study`; tests must not change it."""
    return write_study(tmp_path_factory.mktemp("report") / "fleet")
