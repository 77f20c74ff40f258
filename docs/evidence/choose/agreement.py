"""Does `ebbflow choose` find what full-length runs find? For each cell: all candidates to their end, then a tournament.

    python agreement.py cells.toml --out FOLDER [--cells NAME ...] [--set NAME=VALUE ...]
    python agreement.py atlas --arms arms.json --images CIFAR10 --out FOLDER [--at-once N] [--jobs N]

The second form takes its full-length runs from the atlas of rules (`../atlas/atlas.py collect`): its cells are the
models and fleets of the long runs on images, whose three base rates and four fixed rules are the twelve candidates.

A cell is a workload, a trace and settings. All candidates are trained for all epochs, with `--seeds` seeds; then a
tournament has a fifth of that, for one seed, as its budget. Regret is the score of the best candidate at full length
minus that of the chosen one, both as means over the seeds. Everything is resumable: the same command continues, and
`agreement.json` in the folder has a row for each cell that is done.
"""

from __future__ import annotations

import argparse
import json
import runpy
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from ebbflow import workloads
from ebbflow.record import read_record
from ebbflow.rules.families import candidate_rules, optimizer_family
from ebbflow.studies.choosing import RATES, choose
from ebbflow.studies.grid import Study, parse_study, with_settings
from ebbflow.studies.runner import run_study

ATLAS = Path(__file__).parents[1] / "atlas" / "atlas.py"
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
    return _means(runs)


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
    settings = {**study.settings}
    settings.pop("validate_every")
    settings["lr"] = cell.get("settings", {}).get("lr", workloads.recipe(cell["workload"]).lr)
    scores = full_scores(study, folder / "full")
    return compare(cell, settings, scores, full_s, folder / "choose", jobs=jobs)


def atlas_cells(images: Path) -> list[dict[str, Any]]:
    """The models and fleets of the atlas's long runs on images, each as a cell with the settings of its runs."""
    atlas = runpy.run_path(str(ATLAS))
    cpu = atlas["CPU"]
    settings = {"data": str(images), "plugins": (str(atlas["PLUGIN"]),), "epochs": cpu.epochs["long"]}
    return [
        {
            "name": f"{model.workload}, {fleet}", "workload": model.workload, "fleet": fleet, "trace": trace,
            "settings": {**settings, **model.settings, "lr": model.lr},
        }
        for model in cpu.models if not model.text for fleet, trace in cpu.fleets["long"].items()
    ]  # fmt: skip


def atlas_scores(rows: list[dict[str, Any]], cell: dict[str, Any]) -> tuple[dict[str, float | None], float]:
    """By rule and factor of the base rate, the mean score in the atlas, and the seconds of one seed; without `auto`."""
    runs: dict[str, list[float | None]] = {}
    seconds = 0.0
    for row in rows:
        own = (row["workload"], row["fleet"], row["length"]) == (cell["workload"], cell["fleet"], "long")
        if own and not row["rule"].startswith("auto"):
            runs.setdefault(f"{row['rule']} x{row['rate']:g}", []).append(row["score"])
            seconds += row["wall_s"] if row["seed"] == 0 else 0.0
    return _means(runs), seconds


def run_atlas_cell(cell: dict[str, Any], out: Path, *, rows: list[dict[str, Any]], jobs: int | None) -> dict[str, Any]:
    """The tournament of a cell of the atlas, as one row."""
    scores, full_s = atlas_scores(rows, cell)
    return compare(cell, cell["settings"], scores, full_s, out / cell["name"] / "choose", jobs=jobs)


def compare(
    cell: dict[str, Any], settings: dict[str, Any], scores: dict[str, float | None], full_s: float, folder: Path, *,
    jobs: int | None,
) -> dict[str, Any]:  # fmt: skip
    """A tournament, and how far its choice is behind the best candidate at full length."""
    chosen = choose(
        cell["workload"], trace=cell["trace"], budget=f"{100 * SHARE:g}%", out=folder, jobs=jobs,
        **{**settings, "plugins": tuple(settings.get("plugins", ()))},
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


def _means(runs: dict[str, list[float | None]]) -> dict[str, float | None]:
    return {key: None if None in found else fmean(one for one in found if one is not None)
            for key, found in runs.items()}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """One line per cell as Markdown, for accuracies: what was chosen, and how far it is behind the best candidate."""
    head = "cell", "chosen", "best at full length", "regret, points", "of a random candidate", "of the worst", "cost"
    lines = [f"| {' | '.join(head)} |", "|:--|:--|:--" + "|--:" * 4 + "|"]
    for row in rows:
        behind = [row["best_score"] - score for score in row["full"].values() if score is not None]
        numbers = (100 * value for value in (row["regret"], fmean(behind), max(behind)))
        lines.append(
            f"| {row['cell']} | `{row['chosen']}` | `{row['best']}` | "
            + " | ".join(f"{number:.1f}" for number in numbers)
            + f" | {row['share_of_epochs']:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the cells of a file, one after another, or those of the atlas, several at once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="A file of cells, or atlas.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--arms", type=Path, nargs="*", default=[])
    parser.add_argument("--images", type=Path, default=Path())
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--set", dest="given", action="append", default=[], metavar="NAME=VALUE")
    asked = parser.parse_args()
    if asked.file == Path("atlas"):
        arms = [row for path in asked.arms for row in json.loads(path.read_text(encoding="utf-8"))]
        cells = [cell for cell in atlas_cells(asked.images.resolve()) if len(atlas_scores(arms, cell)[0]) == 12]
        run = partial(run_atlas_cell, out=asked.out, rows=arms, jobs=asked.jobs)
    else:
        cells = tomllib.loads(asked.file.read_text(encoding="utf-8"))["cell"]
        run = partial(run_cell, out=asked.out, seeds=asked.seeds, jobs=asked.jobs, given=asked.given)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "agreement.json"
    rows = {row["cell"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    waiting = [cell for cell in cells if cell["name"] not in rows and (not asked.cells or cell["name"] in asked.cells)]
    with ProcessPoolExecutor(asked.at_once, mp_context=get_context("spawn")) as pool:
        for row in map(run, waiting) if asked.at_once == 1 else pool.map(run, waiting):
            rows[row["cell"]] = row
            path.write_text(json.dumps([*rows.values()], indent=1) + "\n", encoding="utf-8")
            print(f"{row['cell']}: chosen {row['chosen']} {row['chosen_score']}, best {row['best']} "
                  f"{row['best_score']}, regret {row['regret']}, {row['share_of_epochs']:.0%} of the epochs, "
                  f"{row['choose_s']:.0f} s", flush=True)  # fmt: skip
    print(table([*rows.values()]))


if __name__ == "__main__":
    main()
