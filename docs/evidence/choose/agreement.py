"""Does `ebbflow choose` find what full-length runs find? For each cell: all candidates to their end, then a tournament.

    python agreement.py cells.toml --out FOLDER [--cells NAME ...] [--set NAME=VALUE ...]

A cell is a workload, a trace and settings. All candidates are trained for all epochs, with `--seeds` seeds; then a
tournament has a fifth of that, for one seed, as its budget. Regret is the score of the best candidate at full length
minus that of the chosen one, both as means over the seeds. Everything is resumable: the same command continues, and
`agreement.json` in the folder has a row for each cell that is done.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

from ebbflow import workloads
from ebbflow.record import read_record
from ebbflow.rules.families import candidate_rules, optimizer_family
from ebbflow.studies.choosing import RATES, choose
from ebbflow.studies.grid import Study, parse_study, with_settings
from ebbflow.studies.runner import run_study

SHARE = 0.2
"""Budget of the tournament, as a part of training all candidates to their end once."""


def full_study(cell: dict[str, Any], seeds: int, given: list[str]) -> Study:
    """All candidates of a cell at full length; the factor of the base rate stands in the place of the trace."""
    recipe, settings = workloads.recipe(cell["workload"]), dict(cell.get("settings", {}))
    epochs, lr = settings.get("epochs", recipe.epochs), settings.pop("lr", recipe.lr)
    family = optimizer_family(settings.get("optimizer", recipe.optimizer))
    values = {
        "name": cell["name"],
        "workloads": [cell["workload"]],
        "rules": list(candidate_rules(family, epochs=epochs)),
        "traces": {f"x{rate:g}": cell["trace"] for rate in RATES},
        "seeds": seeds,
        "settings": {"validate_every": epochs, "epochs": epochs, **settings},
        "override": [{"trace": f"x{rate:g}", "set": {"lr": float(f"{lr * rate:.6g}")}} for rate in RATES],
    }
    return with_settings(parse_study(values, source=cell["name"], folder=None), given)


def full_scores(study: Study, folder: Path) -> dict[str, float | None]:
    """By rule and factor of the base rate, the mean of the last validation over the seeds; None if a run diverged."""
    runs: dict[str, list[float | None]] = {}
    for arm in study.arms():
        run = read_record(folder / "arms" / arm.id / "record.jsonl")
        name, finished = run.header.config["metric"], run.status == "finished"
        score = run.validations[-1].metrics[name] if finished and run.validations else None
        runs.setdefault(f"{arm.config.rule} {arm.config.label}", []).append(score)
    return {key: None if None in found else fmean(one for one in found if one is not None)
            for key, found in runs.items()}  # fmt: skip


def run_cell(cell: dict[str, Any], out: Path, *, seeds: int, jobs: int | None, given: list[str]) -> dict[str, Any]:
    """The full-length runs of a cell, then its tournament, as one row."""
    study, folder = full_study(cell, seeds, given), out / cell["name"]
    clock = folder / "seconds.json"
    folder.mkdir(parents=True, exist_ok=True)
    before = json.loads(clock.read_text())["full_s"] if clock.exists() else 0.0
    began = time.monotonic()
    run_study(study, folder / "full", jobs=jobs)
    full_s = before + time.monotonic() - began  # a command that was killed before this line is not counted
    clock.write_text(json.dumps({"full_s": full_s}))
    scores = full_scores(study, folder / "full")
    settings = {**study.settings}
    plugins = tuple(settings.pop("plugins", ()))
    lr = cell.get("settings", {}).get("lr", workloads.recipe(cell["workload"]).lr)
    settings.pop("validate_every")
    chosen = choose(
        cell["workload"], trace=cell["trace"], budget=f"{100 * SHARE:g}%", out=folder / "choose",
        jobs=jobs, lr=lr, plugins=plugins, **settings,
    )  # fmt: skip
    higher = chosen.answer["higher_is_better"]
    sound = {key: score for key, score in scores.items() if score is not None}
    best = (max if higher else min)(sound, key=lambda key: sound[key])
    picked = f"{chosen.choice.rule} x{chosen.answer['rate']:g}"
    own = scores.get(picked)
    return {
        "cell": cell["name"],
        "best": best,
        "chosen": picked,
        "best_score": sound[best],
        "chosen_score": own,
        "regret": None if own is None else (sound[best] - own) * (1 if higher else -1),
        "decided_by": chosen.choice.decided_by,
        "full_s": full_s,
        "choose_s": chosen.answer["cost"]["wall_s"],
        "share_of_epochs": chosen.answer["cost"]["share"],
        "full": scores,
        "ranking": chosen.answer["ranking"],
    }


def main() -> None:
    """Run the cells of a file, one after another."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--set", dest="given", action="append", default=[], metavar="NAME=VALUE")
    asked = parser.parse_args()
    cells = tomllib.loads(asked.file.read_text(encoding="utf-8"))["cell"]
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "agreement.json"
    rows = {row["cell"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    for cell in cells:
        if cell["name"] in rows or (asked.cells and cell["name"] not in asked.cells):
            continue
        row = run_cell(cell, asked.out, seeds=asked.seeds, jobs=asked.jobs, given=asked.given)
        rows[row["cell"]] = row
        path.write_text(json.dumps([*rows.values()], indent=1) + "\n", encoding="utf-8")
        print(f"{row['cell']}: chosen {row['chosen']} {row['chosen_score']}, best {row['best']} {row['best_score']}, "
              f"regret {row['regret']}, {row['choose_s']:.0f} s of {row['full_s']:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
