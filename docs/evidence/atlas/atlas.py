"""The atlas of rules: models x fleets x base rates x lengths, each with every fixed rule, `auto` and its ablations.

    python atlas.py run cpu --images CIFAR10 --text TEXT --out FOLDER [--jobs N] [--minutes M] [--seeds N]
    python atlas.py run gpu --images CIFAR10 --out FOLDER --set device=cuda --set precision=bf16
    python atlas.py collect FOLDER ... --to arms.json
    python regrets.py arms.json

`run` is a study: the same command continues where it was stopped; `--workloads`, `--lengths` and `--without` run a
part of it.
`collect` writes one row per finished run, which is all that `regrets.py` reads. The arms of the long runs are at the
same time the full-length runs with which `../choose/agreement.py` compares tournaments.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ebbflow.errors import RecordError
from ebbflow.record import Run, read_record
from ebbflow.rules.families import OptimizerFamily, candidate_rules
from ebbflow.studies.grid import Study, parse_study, with_settings
from ebbflow.studies.runner import ArmProgress, run_study

Length = Literal["short", "long"]
RATES = (0.25, 1.0, 4.0)
"""Factors of the base rate."""
AUTO: dict[Length, tuple[str, ...]] = {
    "short": ("auto", "auto(slopes=false)", "auto(guard=false)", "auto(ramp=0)", "auto(ramp=1)"),
    "long": ("auto", "auto(slopes=false)", "auto(probe=true)", "auto(probe=true, averaged=false)"),
}
"""The automatic rule and its variants: without the slopes in all runs, with other ramps and without the guard in the
short ones, with the probe in the long ones."""
PLUGIN = Path(__file__).with_name("atlas_workloads.py")


class Model(NamedTuple):
    """A workload and its base rate, tuned at the reference batch."""

    workload: str
    family: OptimizerFamily
    lr: float
    settings: dict[str, Any]
    text: bool = False
    """Whether it is trained on the text instead of the images."""


class Atlas(NamedTuple):
    """Which cells there are: every model on every fleet of a length, at every rate."""

    models: tuple[Model, ...]
    fleets: dict[Length, dict[str, str]]
    epochs: dict[Length, int]
    text_epochs: dict[Length, int]


# On eight workers a long run of the CPU has 5,500 steps, a short one 750 (the text: 5,380 and 490). The base rates are
# the best of 0.005, 0.01, 0.02, 0.04 (SGD) and 0.0005, 0.001, 0.002, 0.004 (AdamW) at the reference batch of 8, after
# three epochs (the text: two, and two layers), one seed.
_SMALL = {"ref_batch": 8, "local_batch": 8}
CPU = Atlas(
    models=(
        Model("atlas-cnn", "sgd", 0.02, _SMALL),
        Model("atlas-cnn(norm=false)", "sgd", 0.01, _SMALL),
        Model("atlas-mlp", "sgd", 0.01, _SMALL),
        Model("atlas-vit", "adam", 0.004, _SMALL),
        Model("shakespeare-gpt(context=32, layers=1, heads=2, width=32)", "adam", 0.004, _SMALL, text=True),
    ),
    fleets={
        "short": {
            "static 8": "constant(workers=8)",
            "static 32": "constant(workers=32)",
            "square": "square(low=2, high=32, period=1h, duration=6h)",
            "tpu trace": "gcp-tpuv2-2022-04(max_workers=32)",
            "x12 early": "0min:2 10min:24 20min:2 100min",
        },
        "long": {
            "static 8": "constant(workers=8)",
            "a100 trace": "gcp-a100-2022-05(max_workers=10)",
        },
    },
    epochs={"short": 3, "long": 22},
    text_epochs={"short": 1, "long": 11},
)

# The reference batch and rate of the short runs are those of the recipes; in the long ones, of 5,078 steps, they are
# those of ../andre.
_CUDA = {"compile": True}
GPU = Atlas(
    models=(
        Model("cifar10-resnet18", "sgd", 0.1, {"ref_batch": 128, "local_batch": 128, **_CUDA}),
        Model("cifar10-vgg11", "sgd", 0.05, {"ref_batch": 128, "local_batch": 128, **_CUDA}),
    ),
    fleets={
        "short": {"static 32": "constant(workers=32)", "a100 trace": "gcp-a100-2022-05(max_workers=16)"},
        "long": {},
    },
    epochs={"short": 12, "long": 13},
    text_epochs={"short": 1, "long": 1},
)
GPU_LONG = Atlas(
    models=(
        Model("cifar10-resnet18", "sgd", 0.00625, {"ref_batch": 16, "local_batch": 16, **_CUDA}),
        Model("cifar10-vgg11", "sgd", 0.00625, {"ref_batch": 16, "local_batch": 16, **_CUDA}),
    ),
    fleets={"short": {}, "long": {"static 8": "constant(workers=8)"}},
    epochs={"short": 12, "long": 13},
    text_epochs={"short": 1, "long": 1},
)
ATLASES = {"cpu": CPU, "gpu": GPU, "gpu-long": GPU_LONG}


@dataclass(frozen=True)
class ArmResult:
    """What the analysis needs of one run."""

    workload: str
    family: str
    fleet: str
    rate: float
    length: str
    half: str
    """development or report: thresholds may be chosen by looking at the first half only."""
    rule: str
    seed: int
    score: float | None
    """The last validation; None if the run diverged."""
    higher: bool
    """Whether a higher score is better: it is an accuracy, otherwise a loss in nats."""
    steps: int
    samples: int
    wall_s: float
    restores: int
    """How often the guard went back to a snapshot."""
    probes: int
    moves: int
    """How many probes changed the coefficient."""
    given_back: int
    """Samples that were computed and not kept, by the guard and by losing branches of probes."""


def label(fleet: str, rate: float, length: Length) -> str:
    """The name of a fleet, rate and length in the place of the trace of a study.

    >>> label("static 8", 0.25, "long")
    'static 8, x0.25, long'
    """
    return f"{fleet}, x{rate:g}, {length}"


def make_study(
    name: str, *, images: str, text: str = "", seeds: int = 1, given: tuple[str, ...] = (),
    workloads: tuple[str, ...] = (), only: tuple[Length, ...] = ("short", "long"), without: tuple[str, ...] = (),
) -> Study:  # fmt: skip
    """The study of an atlas, or of a part of it, as one grid whose traces are fleet, rate and length."""
    whole = ATLASES[name]
    atlas = whole._replace(models=tuple(one for one in whole.models if not workloads or one.workload in workloads))
    lengths = [length for length, fleets in atlas.fleets.items() if fleets and length in only]
    labels = {length: [label(fleet, rate, length) for fleet, rate in product(atlas.fleets[length], RATES)]
              for length in lengths}  # fmt: skip
    by_rate = {rate: [label(fleet, rate, length) for length in lengths for fleet in atlas.fleets[length]]
               for rate in RATES}  # fmt: skip
    override: list[dict[str, Any]] = []
    wanted: dict[str, set[tuple[str, str]]] = {}  # by rule, where it is run: workload and length
    for model in atlas.models:
        override.append({"workload": model.workload, "set": {**model.settings, "data": text if model.text else images}})
        for rate in RATES:
            lr = float(f"{model.lr * rate:.6g}")
            override.append({"workload": model.workload, "trace": by_rate[rate], "set": {"lr": lr}})
        for length in lengths:
            epochs = (atlas.text_epochs if model.text else atlas.epochs)[length]
            length_of = {"epochs": epochs, "validate_every": epochs}
            override.append({"workload": model.workload, "trace": labels[length], "set": length_of})
            for rule in (*candidate_rules(model.family, epochs=epochs), *AUTO[length]):
                if rule not in without:
                    wanted.setdefault(rule, set()).add((model.workload, length))
    skip = [
        {"rule": rule, "workload": model.workload, "trace": labels[length]}
        for rule, places in wanted.items() for model, length in product(atlas.models, lengths)
        if (model.workload, length) not in places
    ]  # fmt: skip
    steady = [name for length in lengths for name in labels[length] if name.startswith("static")]
    skip += [{"rule": rule, "trace": steady} for rule in wanted if rule.startswith("auto(ramp=") and steady]
    values = {
        "name": f"atlas-{name}",
        "workloads": [model.workload for model in atlas.models],
        "rules": list(wanted),
        "traces": {label(fleet, rate, length): trace for length in lengths
                   for fleet, trace in atlas.fleets[length].items() for rate in RATES},
        "seeds": seeds,
        "settings": {"plugins": [str(PLUGIN)]},
        "override": override,
        "skip": skip,
    }  # fmt: skip
    return with_settings(parse_study(values, source=f"atlas-{name}", folder=None), given)


def half(atlas: Atlas, workload: str, fleet: str, rate: float, length: Length) -> str:
    """The half of a cell: neighbours in each direction are in different halves, so both have everything."""
    place = (
        [model.workload for model in atlas.models].index(workload) + list(atlas.fleets[length]).index(fleet)
        + RATES.index(rate) + (length == "long")
    )  # fmt: skip
    return "report" if place % 2 else "development"


def result_of(run: Run, name: str) -> ArmResult:
    """One row from the record of a run."""
    config = run.header.config
    fleet, rate, length = config["trace"].split(", ")
    atlas, workload, factor = ATLASES[name], config["workload"], float(rate.removeprefix("x"))
    (family,) = {model.family for model in atlas.models if model.workload == workload}
    metric = config["metric"]
    finished = run.status == "finished" and bool(run.validations)
    stats = [row.stats for row in run.steps]
    return ArmResult(
        workload=workload, family=family, fleet=fleet, rate=factor, length=length,
        half=half(atlas, workload, fleet, factor, length),
        rule=config["rule"], seed=config["seed"],
        score=run.validations[-1].metrics[metric] if finished else None, higher=metric == "accuracy",
        steps=len(stats), samples=run.steps[-1].samples if stats else 0,
        wall_s=run.steps[-1].wall_s if stats else 0.0,
        restores=sum("given_back" in one and "probe" not in one for one in stats),
        probes=sum("probed" in one for one in stats),
        moves=sum(one.get("probed", 0.0) not in (0.0, 1.0) for one in stats),
        given_back=int(sum(one.get("given_back", 0.0) for one in stats)),
    )  # fmt: skip


def collect(folder: Path) -> list[ArmResult]:
    """The rows of all runs of a study that have ended."""
    name = json.loads((folder / "study.json").read_text(encoding="utf-8"))["config"]["name"].removeprefix("atlas-")
    found = []
    for path in sorted(folder.glob("arms/*/record.jsonl")):
        try:
            run = read_record(path)
        except RecordError:  # it was just begun
            continue
        if run.status in ("finished", "diverged"):
            found.append(result_of(run, name))
    return found


def _run(asked: argparse.Namespace) -> None:
    study = make_study(
        asked.atlas, images=str(asked.images.resolve()), text=str((asked.text or asked.images).resolve()),
        seeds=asked.seeds, given=tuple(asked.given), workloads=tuple(asked.workloads), only=tuple(asked.lengths),
        without=tuple(asked.without),
    )  # fmt: skip
    began, done, total = time.monotonic(), 0, len(study.arms())

    def show(progress: ArmProgress) -> None:
        nonlocal done
        if progress.what not in ("started", "moved"):
            done += 1
            print(f"{time.monotonic() - began:6.0f} s {done}/{total} {progress.what} {progress.arm} {progress.text}",
                  flush=True)  # fmt: skip

    run_study(
        study, asked.out, jobs=asked.jobs, on_progress=show,
        should_stop=lambda: time.monotonic() - began > 60 * asked.minutes,
    )  # fmt: skip


def main() -> None:
    """Run an atlas, or collect what was run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run")
    run.add_argument("atlas", choices=list(ATLASES))
    run.add_argument("--images", type=Path, required=True)
    run.add_argument("--text", type=Path)
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--workloads", nargs="+", default=[])
    run.add_argument("--lengths", nargs="+", choices=["short", "long"], default=["short", "long"])
    run.add_argument("--without", nargs="+", default=[], metavar="RULE", help="Rules that are left out.")
    run.add_argument("--seeds", type=int, default=1)
    run.add_argument("--jobs", type=int)
    run.add_argument("--minutes", type=float, default=float("inf"))
    run.add_argument("--set", dest="given", action="append", default=[], metavar="NAME=VALUE")
    rows = commands.add_parser("collect")
    rows.add_argument("folders", type=Path, nargs="+")
    rows.add_argument("--to", type=Path, required=True)
    asked = parser.parse_args()
    if asked.command == "run":
        _run(asked)
        return
    found = [asdict(one) for folder in asked.folders for one in collect(folder)]
    asked.to.write_text("[" + ",\n ".join(json.dumps(one) for one in found) + "]\n", encoding="utf-8")
    print(f"{len(found)} runs in {asked.to}")


if __name__ == "__main__":
    main()
