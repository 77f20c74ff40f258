"""What the pages of evidence rest on: studies that can be read, records that can be reported, the defect as it was."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import sys
import tarfile
import tomllib
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ebbflow.cli.main import app
from ebbflow.core.plugins import load_plugins
from ebbflow.engines.emulated.fused import cut_into_passes
from ebbflow.moments.estimate import Moments
from ebbflow.report.clocks import make_clocks, read_clocks
from ebbflow.report.results import ArmResult, Results, load_results
from ebbflow.report.summary import Cell, summarise
from ebbflow.rules.noise_rules import gain
from ebbflow.rules.rule import RULES, Rule, StepContext, make_rule
from ebbflow.run.assemble import resolve
from ebbflow.run.planning import make_plan
from ebbflow.simulate.scenario import ScenarioSettings
from ebbflow.studies.grid import check_arms, load_study
from ebbflow.studies.scaling import scaled

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
PLUGIN = EVIDENCE / "andre" / "published_adascale.py"


@pytest.fixture
def published(forget_plugins: None) -> Rule:
    """The rule of the study's plugin, which is forgotten after the test."""
    load_plugins([str(PLUGIN)])
    return make_rule("adascale-published")


STUDIES = sorted(path.parent.name for path in EVIDENCE.glob("*/records.tar.xz"))
UPCOMING = sorted({path.parent.name for path in EVIDENCE.glob("*/study.toml")} - {*STUDIES})
"""Studies whose runs are still to be made; their pages say so."""


def with_traces(folder: str, tmp_path: Path) -> Path:
    """The folder of a study; for those on files of published traces, a copy that has them."""
    if not folder.startswith("andre"):
        return EVIDENCE / folder
    for name in {"andre", folder}:
        shutil.copytree(EVIDENCE / name, tmp_path / name)
    home = tmp_path / "andre"
    convert("gcp-a100-2022-05", home / "gpu.csv")
    convert("gcp-tpuv2-2022-04", home / "tpu.csv", "--start", "212min", "--stop", "487min")
    return tmp_path / folder


RECIPE_FOLDERS = {folder: folder.removesuffix("-100") for folder in (*STUDIES, *UPCOMING) if folder.startswith("lena")}
"""Folders with runs of a recipe: its name, and the number of epochs where there are two."""


@pytest.mark.parametrize("recipe", sorted({*RECIPE_FOLDERS.values()}))
def test_the_page_of_recipes_says_no_only_of_what_was_not_run(recipe: str) -> None:
    page = (EVIDENCE.parent / "recipes.md").read_text(encoding="utf-8")
    (said,) = re.findall(rf"^\|.*\| `{recipe}`[^|]*\| (.*) \|$", page, flags=re.MULTILINE)
    run = any(name == recipe and folder in STUDIES for folder, name in RECIPE_FOLDERS.items())
    assert ("](evidence/lena.md)" in said) if run else (said == "no")


@pytest.mark.parametrize("name", ["cells.toml", "digits.toml"])
def test_the_cells_that_compare_choices_with_full_length_runs_can_be_run(name: str) -> None:
    script = runpy.run_path(str(EVIDENCE / "choose" / "agreement.py"))
    cells = tomllib.loads((EVIDENCE / "choose" / name).read_text(encoding="utf-8"))["cell"]
    for cell in cells:
        study = script["full_study"](cell, 1, [])
        assert len(study.arms()) == 12
        check_arms(study.arms())
    assert len({cell["name"] for cell in cells}) == len(cells) == {"cells.toml": 8, "digits.toml": 4}[name]


def test_choices_are_within_a_point_of_the_best_candidate_for_a_fifth_of_the_cost_as_the_page_says() -> None:
    script = runpy.run_path(str(EVIDENCE / "choose" / "agreement.py"))
    rows = json.loads((EVIDENCE / "choose" / "agreement.json").read_text(encoding="utf-8"))
    assert len(rows) == 8
    for row in rows:
        full = row["full"]
        assert len(full) == 12 and row["best_score"] == max(full.values())
        assert row["regret"] == pytest.approx(row["best_score"] - full[row["chosen"]]) and row["regret"] < 0.01
        assert row["share_of_epochs"] <= 0.2
    page = (EVIDENCE.parent / "choose.md").read_text(encoding="utf-8")
    assert script["table"](rows) in page


@pytest.mark.parametrize("folder", UPCOMING)
def test_a_study_that_is_still_to_be_run_can_be(folder: str, tmp_path: Path, forget_plugins: None) -> None:
    study = load_study(str(with_traces(folder, tmp_path) / "study.toml"))
    check_arms(study.arms())
    assert scaled(study, 0.1).arms()


def test_the_study_of_micro_batches_measures_2_8_and_32_of_them() -> None:
    for arm in load_study(str(EVIDENCE / "pieces" / "study.toml")).arms():
        passes = cut_into_passes([128] * 32, samples=arm.config.fused_batch or 0, at_least=2)
        assert arm.config.label == f"{len(passes)} micro-batches"


def test_batch_norm_s_study_has_steps_of_512_samples() -> None:
    for arm in load_study(str(EVIDENCE / "batch-norm" / "study.toml")).arms():
        config = resolve(arm.config)
        step = make_plan(config, 50_000)[0].at(0)
        assert (step.samples, f"{step.samples // step.workers} samples") == (512, config.label)


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """The results of a study from its unpacked rows, read once for all tests."""

    @cache
    def unpacked(folder: str) -> Results:
        home = tmp_path_factory.mktemp(folder)
        with tarfile.open(EVIDENCE / folder / "records.tar.xz") as packed:
            packed.extractall(home, filter="data")
        for path in home.glob("arms/*/record.jsonl"):
            assert '"/' not in path.read_text(), "a path of the machine that it was made on"
        return load_results(home)

    return unpacked


def finished(results: Results) -> list[ArmResult]:
    """The arms that have a record. The page says which of a study are still to be run."""
    return [arm for arm in results.arms if arm.status != "missing"]


@pytest.mark.parametrize("folder", STUDIES)
def test_the_records_can_be_read_and_name_no_machine(folder: str, evidence: Callable[[str], Results]) -> None:
    found = finished(evidence(folder))
    assert len(found) >= 4
    for arm in found:
        assert (arm.status, arm.damage) == ("finished", "")
        assert arm.steps


@pytest.mark.parametrize("folder", STUDIES)
def test_the_study_finds_its_runs_again(folder: str, tmp_path: Path, evidence: Callable[[str], Results]) -> None:
    """Runs are known by what they compute: these were made before settings that exist now, and on another machine."""
    arms = {arm.id: arm.config for arm in load_study(str(with_traces(folder, tmp_path) / "study.toml")).arms()}
    for arm in finished(evidence(folder)):
        config = arms[arm.id]
        assert arm.header is not None
        recorded = arm.header.config
        assert (config.rule, config.label, config.seed) == tuple(recorded[key] for key in ("rule", "trace", "seed"))


HOLT = {"128": "128", "640": "640", "3.2k": "3,200", "16k": "16,000", "5.1k (*2)": "5,120"}
BATCHES = {f"batch {batch}": f"{batch:,}" for batch in (128, 1024, 2048, 4096, 8192, 16384)}
WARMUPS = {
    "": "no warm-up", "warmup(2.75ep)": "fixed warm-up", "warmup(5.5ep, start=0)": "fixed warm-up",
    "statewarmup(0.05)": "state-aware warm-up",
    "statewarmup(0.05, by=multiplier)": "state-aware warm-up",
}  # fmt: skip


def place(folder: str, cell: Cell | ArmResult) -> tuple[str, str, str]:
    """Where the result stands on its page: the corner of the table, how the row begins, the column."""
    if folder == "andre":
        corner = {"cifar10-resnet18": "ResNet-18", "cifar10-vgg11": "VGG-11, no batch norm"}[cell.workload]
        row = {"static": "static", "gpu": "GPU trace", "tpu": "TPU trace"}[cell.trace]
        column = {
            "linear+warmup(0.67ep)": "linear", "sqrt+warmup(0.67ep)": "root", "adascale+warmup(0.67ep)": "AdaScale",
            "dynamic+warmup(0.67ep)": "dynamic", "adascale+statewarmup(0.05)": "AdaScale, state warm-up",
            "adascale-published+warmup(0.67ep)": "AdaScale as published",
        }[cell.rule]  # fmt: skip
        return corner, row, column
    if folder in ("andre-long", "andre-models"):
        model = {"cifar10-resnet18": "ResNet-18", "cifar10-resnet50": "ResNet-50", "cifar10-vgg16": "VGG-16"}[
            cell.workload
        ]
        row = {"static": "static", "gpu": "GPU trace", "tpu": "TPU trace"}[cell.trace]
        name, _, warmup = cell.rule.partition("+")
        column = {"linear": "linear", "sqrt": "root", "adascale": "AdaScale"}[name]
        epochs = {"andre-long": 48, "andre-models": 12}[folder]
        return f"{model}, {epochs} epochs", row, column + (", state warm-up" if warmup.startswith("state") else "")
    if folder == "batch-norm":
        return (
            "batch norm over",
            cell.trace,
            {"linear": "linear", "sqrt": "root"}.get(cell.rule.split("+")[0], "AdaScale"),
        )
    if folder == "dynamic-late":
        row = {"static 1x": "1 worker", "x12 early": "x12 from epoch 5", "x12 late": "x12 from epoch 15"}[cell.trace]
        return "fleet that stays", row, {"linear+inside": "eq. 13"}.get(cell.rule, cell.rule)
    if folder == "dynamic":
        row = {"static 1x": "1 worker", "x12 early": "x12 in epochs 5", "x12 late": "x12 in epochs 14"}.get(
            cell.trace, "random"
        )
        names = {"constant": "fixed mini-batch", "linear+inside": "eq. 13"}
        return "fleet", row, names.get(cell.rule, cell.rule)
    if folder.startswith("lena-table1"):
        names = {"constant": "no rule", "linear": "linear, warm-up", "adascale": "AdaScale", "lena": "LENA"}
        corner = "samples per step, 100 epochs" if folder.endswith("100") else "samples per step"
        return corner, BATCHES[cell.trace], names[cell.rule.partition("+")[0]]
    if folder == "lena-table3-100":
        alpha = cell.rule.removeprefix("lena+statewarmup(0.0").rstrip(")")
        return "LENA's warm-up, 100 epochs", BATCHES[cell.trace], f"{alpha} %"
    if folder == "holt":
        return "largest batch", HOLT[cell.trace], "accuracy"
    if folder.startswith("small"):
        return place_of_small(folder, cell)
    rule, _, warmup = cell.rule.partition("+")
    row = {"linear": "linear", "adascale": "AdaScale", "lena": "LENA"}[rule]
    return f"{BATCHES[cell.trace]} samples per step{', 100 epochs' * folder.endswith('100')}", row, WARMUPS[warmup]


def place_of_small(folder: str, cell: Cell | ArmResult) -> tuple[str, str, str]:
    """The same for the studies of small networks."""
    rule, _, warmup = cell.rule.partition("+")
    if folder == "small-pieces":
        column = {"warmup(0.3ep, start=0)": "AdaScale, fixed warm-up", "statewarmup(0.05)": "AdaScale"}[warmup]
        return "noise and signal from", cell.trace, "LENA" if rule == "lena" else column
    if folder == "small-cores":
        model = {"atlas-cnn": "with batch norm", "atlas-cnn(norm=false)": "without batch norm"}[cell.workload]
        row = {"static": "static", "gpu": "GPU trace", "tpu": "TPU trace"}[cell.trace]
        column = {
            "linear": "linear", "adascale": "AdaScale", "adascale-on-cores": "as published, eight cores",
            "adascale-on-cores(cores=1)": "as published, one process",
        }[rule]  # fmt: skip
        return model, row, column
    if folder == "small-alpha":
        return "LENA with", cell.trace, warmup.removeprefix("statewarmup(0.0").rstrip(")") + " %" if warmup else "none"
    return "largest batch", cell.trace, "accuracy"


def tables(page: str) -> dict[str, list[dict[str, str]]]:
    """By its corner, the rows of every table of a page, by column; "" is the row's own name. Bold is taken off."""
    found = {}
    for block in re.findall(r"(?:^\|.*\|\n)+", page.replace("*", ""), flags=re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found[head[0]] = [dict(zip(["", *head[1:]], row, strict=True)) for row in rows]
    return found


def test_the_updates_of_holt_and_sievert_s_runs_are_those_on_the_page(evidence: Callable[[str], Results]) -> None:
    page = tables((EVIDENCE / "holt.md").read_text())["largest batch"]
    for arm in finished(evidence("holt")):
        (row,) = [row for row in page if row[""].startswith(HOLT[arm.trace])]
        assert (row["updates"], row["epochs"]) == (f"{arm.steps:,}", f"{arm.epochs[-1]:.0f}")


def test_the_simulated_minutes_of_holt_and_sievert_s_runs_are_those_on_the_page(
    evidence: Callable[[str], Results],
) -> None:
    """By the step models of the commands on the page; in brackets stands what the page of costs has of the paper."""
    text = (EVIDENCE / "holt.md").read_text()
    updates, minutes = tables(text)["largest batch"], tables(text)["minutes, by largest batch"]
    columns = {"centralized": "centralized", "moderate": "54 Gb/s", "fast": "800 Gb/s"}
    models = re.findall(r'--compute-sample (\S+)|--network "(\S+)=(affine.*?)"', text)
    assert [name for _, name, _ in models if name] == ["moderate", "fast", "centralized"]
    compute = ""
    for sample, name, network in models:
        if sample:
            compute = sample
            continue
        clocks = make_clocks(ScenarioSettings(samples=1, epochs=1, compute_sample=compute), [f"{name}={network}"])
        results = read_clocks(evidence("holt"), clocks)
        for cell in summarise(results.arms, results.config, targets=["0.9"]).cells:
            (row,) = [row for row in minutes if row[""].startswith(HOLT[cell.trace])]
            assert row[columns[name]].split(" (")[0] == f"{cell.simulated_s[name] / 60:.1f}"
            (to_target,) = cell.targets
            assert to_target.as_json()["simulated"][name]["mean"] / 60 == pytest.approx(
                float(row[f"{columns[name]}, to 90 %"]), abs=0.05
            )
            assert f"{to_target.mean('updates'):,.0f}" in text
    published = (EVIDENCE / "costs.md").read_text()
    for row, ours in zip(minutes, updates, strict=True):
        theirs = [re.findall(r"\((.*)\)", row[column])[0] for column in columns.values()]
        assert re.search(rf"\| {ours['updates']} \| " + r".*\| ".join(rf"{number} / " for number in theirs), published)


def test_epochs_and_updates_to_85_percent_on_lenas_page_are_those_of_the_rows(
    evidence: Callable[[str], Results],
) -> None:
    """Means over the two seeds, "never" where no run gets there."""
    page = tables((EVIDENCE / "lena.md").read_text())["samples per step, until 85 %"]
    results = evidence("lena-table1-100")
    cells = [cell for cell in summarise(results.arms, results.config, targets=["0.85"]).cells if cell.values]
    assert len(cells) == sum(bool(value) for row in page for value in [*row.values()][1:]) == 16
    for cell in cells:
        _, batch, column = place("lena-table1-100", cell)
        (row,) = [row for row in page if row[""].startswith(batch)]
        (to_target,) = cell.targets
        assert to_target.reached in (0, 2)
        reached = [to_target.mean(name) for name in ("epochs", "updates")]
        assert row[column] == ("never" if None in reached else ", ".join(f"{mean:,.0f}" for mean in reached))


@pytest.mark.parametrize("folder", STUDIES)
def test_every_result_of_the_report_stands_in_its_place_on_the_page(
    folder: str, evidence: Callable[[str], Results]
) -> None:
    """Two digits after the point in LENA's Table 1, else one; in brackets what the paper has."""
    page = tables((EVIDENCE / f"{'andre' if folder == 'batch-norm' else folder.split('-')[0]}.md").read_text())
    results = evidence(folder)
    cells = [cell for cell in summarise(results.arms, results.config).cells if cell.values]
    assert len(cells) >= 4
    digits = 2 if folder == "lena-table1" else 1
    for cell in cells:
        corner, beginning, column = place(folder, cell)
        (row,) = [row for row in page[corner] if row[""].startswith(beginning)]
        assert cell.mean is not None
        expected = f"{100 * cell.mean:.{digits}f}"
        if cell.std is not None:
            expected += f" ± {100 * cell.std:.{digits}f}"
        if cell.published is not None:
            expected += f" ({100 * cell.published:.{digits}f})"
        assert row[column] == expected, f"{corner}, {row['']}, {column}"


def test_the_gains_of_the_defect_on_the_page_are_those_of_the_rows(evidence: Callable[[str], Results]) -> None:
    """As read on eight cores, and what noise and signal of the same steps give: a worker's 8 samples are 4 pieces."""
    arms = [arm for arm in finished(evidence("small-cores")) if "norm=false" in arm.workload and arm.trace == "static"]

    def means(rule: str, begin: float, end: float) -> dict[str, float]:
        found: dict[str, list[float]] = {"read": [], "reference of 8": [], "reference of a piece": []}
        names = ("gain", "noise", "signal", "batch", "workers")
        for arm in (arm for arm in arms if arm.rule == f"{rule}+warmup(0.3ep)"):
            for i, row in enumerate(zip(*(arm.columns[name].tolist() for name in names), strict=True)):
                read, noise, signal, batch, workers = row
                if begin <= i / arm.steps < end and math.isfinite(read):
                    pieces = 4 * workers
                    piece = batch / pieces
                    found["read"].append(read)
                    found["reference of 8"].append(gain(noise / 8, signal, batch / 8))
                    found["reference of a piece"].append(piece / 8 * gain(noise / piece, signal, pieces))
        return {name: float(np.mean(values)) for name, values in found.items()}

    table = tables((EVIDENCE / "small.md").read_text())["gain without batch norm, part of the steps"]
    for row, (begin, end) in zip(table, [(0.06, 0.15), (0.3, 0.6), (0.6, 1.0)], strict=True):
        published, own = means("adascale-on-cores", begin, end), means("adascale", begin, end)
        assert own["read"] == pytest.approx(own["reference of 8"])
        assert [*row.values()][1:] == [f"{value:.1f}" for value in (*published.values(), own["read"])]


@pytest.mark.parametrize(
    ("length", "batch"),
    [
        *(("", batch) for batch in ("1,024", "8,192", "16,384")),
        *((", 100 epochs", batch) for batch in ("1,024", "2,048", "4,096", "8,192", "16,384")),
    ],
)
def test_what_lenas_tables_have_in_common_is_the_same_in_both(length: str, batch: str) -> None:
    """Table 2 takes three of its nine combinations from Table 1, with one digit after the point.

    Where its other rows have two seeds, it takes the deviation, too.
    """
    page = tables((EVIDENCE / "lena.md").read_text())
    first = {row[""]: row for row in page[f"samples per step{length}"]}
    taken = {
        "linear, warm-up": ("linear", "fixed warm-up"),
        "AdaScale": ("AdaScale", "no warm-up"),
        "LENA": ("LENA", "state-aware warm-up"),
    }
    second = {row[""]: row for row in page[f"{batch} samples per step{length}"]}
    for column, (rule, warmup) in taken.items():
        numbers = (Decimal(number).quantize(Decimal("0.1")) for number in re.findall(r"[\d.]+", first[batch][column]))
        ours, deviation, paper = numbers
        seeds = f" ± {deviation}" if "±" in second["linear"]["no warm-up"] else ""
        assert second[rule][warmup] == f"{ours}{seeds} ({paper})"


def test_the_largest_losses_of_the_first_steps_on_lenas_page_are_those_of_the_rows(
    evidence: Callable[[str], Results],
) -> None:
    """In the first twentieth of a run; combinations without a row have at most a twentieth more than the first loss."""
    table = tables((EVIDENCE / "lena.md").read_text())["largest loss, first and second seed"]
    rows = {row[""]: row for row in table}
    seen = set()
    for arm in (arm for folder in ("lena-table1-100", "lena-table2-100") for arm in finished(evidence(folder))):
        if arm.rule == "constant":
            continue
        _, rule, warmup = place("lena-table2-100", arm)
        losses = arm.columns["loss"]
        largest = losses[: arm.steps // 20].max()
        name = f"{rule}, {warmup}"
        if name not in rows:
            assert largest <= 1.05 * losses[0]
            continue
        seen.add(name)
        assert rows[name][BATCHES[arm.trace]].split(", ")[arm.seed] == f"{largest:.{1 if largest < 9.95 else 0}f}"
    assert seen == {*rows}


@pytest.mark.parametrize("batch", ["8,192", "16,384"])
def test_lenas_table_3_has_the_other_ends_of_its_rows_from_the_tables_before(batch: str) -> None:
    """No warm-up from Table 2 and 5 % from Table 1, without the deviations: the rest of the row is one seed."""
    page = tables((EVIDENCE / "lena.md").read_text())
    (row,) = [row for row in page["LENA's warm-up, 100 epochs"] if row[""].startswith(batch)]
    (first,) = [row for row in page["samples per step, 100 epochs"] if row[""] == batch]
    second = {row[""]: row for row in page[f"{batch} samples per step, 100 epochs"]}
    assert row["none"] == re.sub(r" ± [\d.]+", "", second["LENA"]["no warm-up"])
    assert row["5 %"] == re.sub(r" ± [\d.]+", "", first["LENA"])


@pytest.mark.parametrize("batch", ["8,192", "16,384"])
def test_the_ends_of_the_warm_up_in_lenas_table_3_are_those_of_the_rows(
    batch: str, evidence: Callable[[str], Results]
) -> None:
    """The epoch, counted from one, at whose end half of the layers and the last one have ended it, by seed."""
    page = tables((EVIDENCE / "lena.md").read_text())["the epoch in which it ends"]
    half, last = ({key: value.split(", ") for key, value in row.items()} for row in page if row[""].startswith(batch))
    arms = [
        arm
        for folder in ("lena-table1-100", "lena-table3-100")
        for arm in finished(evidence(folder))
        if BATCHES[arm.trace] == batch and arm.rule.startswith("lena+")
    ]
    assert len(arms) == 6
    for arm in arms:
        warming, epochs = arm.columns["warming"], arm.columns["epoch"].astype(int) + 1
        alpha = f"{arm.rule.removeprefix('lena+statewarmup(0.0').rstrip(')')} %"
        assert warming[0] == 62
        assert half[alpha][arm.seed] == str(epochs[warming <= 31][0])
        assert last[alpha][arm.seed] == (str(epochs[warming > 0][-1]) if warming[-1] == 0 else "not")


def convert(source: str, target: Path, *options: str) -> None:
    assert CliRunner().invoke(app, ["trace", "convert", source, str(target), *options]).exit_code == 0


def test_the_defect_reads_noise_and_signal_as_code_that_keeps_the_last_sum_does() -> None:
    """Re-enacted: a micro-batch is the difference to the sum before it, which is not cleared when a step begins."""
    random = np.random.default_rng(0)
    micro_batches, width, steps = 6, 40, 20_000
    mean = np.full(width, 0.5)  # mu2 = 10
    deviation = 0.6  # s2 = 40 x 0.36 = 14.4
    last = np.zeros(width)
    found = []
    for _ in range(steps):
        gradients = mean + deviation * random.standard_normal((micro_batches, width))
        total = 0.0
        summed = np.zeros(width)
        for gradient in gradients:
            summed = summed + gradient
            total += float(np.square(summed - last).sum())
            last = summed
        mean_sq = float(np.square(summed / micro_batches).sum())
        noise = (total - micro_batches * mean_sq) / (micro_batches - 1)
        found.append((noise, mean_sq - noise / micro_batches))
    s2, mu2 = 14.4, 10.0
    wrong_noise = s2 + micro_batches * ((micro_batches - 2) * mu2 + s2) / (micro_batches - 1)
    wrong_signal = (mu2 - s2) / (micro_batches - 1)
    averages, errors = np.mean(found[1:], axis=0), np.std(found[1:], axis=0) / np.sqrt(steps)
    assert abs(averages[0] - wrong_noise) < 4 * errors[0]
    assert abs(averages[1] - wrong_signal) < 4 * errors[1]


def test_the_gain_as_published(published: Rule) -> None:
    # Four micro-batches of the reference batch of 8, V = 8 so that s2 = 1, mu2 = 2. Read: 1 + 4 (2 x 2 + 1)/3 = 23/3
    # and (2 - 1)/3 = 1/3, so the gain is 8/(23/12 + 4/12) = 32/9 of 4, where 3/(1/4 + 2) = 4/3 is right.
    moments = Moments(noise=8.0, signal=2.0)
    context = StepContext(step=0, batch=32, ref_batch=8, samples=0, workers=4, moments=moments)
    first, state = published.scale(context, published.init())
    assert first.lr == pytest.approx(32 / 9)
    adascale = make_rule("adascale")
    right, _ = adascale.scale(context, adascale.init())
    assert right.lr == pytest.approx(4 / 3)
    # Twice the workers: the average is halved, and 8/1000 of a right observation are mixed in at a scale of 8.
    # s2 = 1 + 8 (6 x 2 + 1)/7 = 111/7 is read, times 0.992/2 + 0.008 = 0.504; mu2 = 1/7.
    later, _ = published.scale(
        StepContext(step=1, batch=64, ref_batch=8, samples=32, workers=8, moments=moments), state
    )
    noise = 0.504 * 111 / 7
    assert later.lr == pytest.approx((noise + 1 / 7) / (noise / 8 + 1 / 7))


ON_CORES = EVIDENCE / "andre-cores" / "published_on_cores.py"


def read_on_cores(pieces: int, cores: int, s2: float, mu2: float, *, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Re-enacted: means and standard errors of the variance and squared norm that the code reads, clipping aside."""
    random = np.random.default_rng(0)
    width = 60
    deviation, mean = np.sqrt(s2 / width), np.sqrt(mu2 / width)
    last = np.zeros((cores, width))
    found = []
    for _ in range(steps):
        gradients = mean + deviation * random.standard_normal((pieces, width))
        total = 0.0
        for core in range(cores):
            summed = np.zeros(width)
            for gradient in gradients[core::cores]:
                summed = summed + gradient
                total += float(np.square(summed - last[core]).sum())
                last[core] = summed
        mean_sq = float(np.square(gradients.mean(axis=0)).sum())
        noise = (total - pieces * mean_sq) / (pieces - 1)
        found.append((noise, mean_sq - noise / pieces))
    return np.mean(found[1:], axis=0), np.std(found[1:], axis=0) / np.sqrt(steps)


@pytest.mark.parametrize(("pieces", "cores"), [(32, 1), (32, 8), (36, 8)])  # 36: four cores have five pieces
def test_what_cores_read_that_keep_their_own_last_sum(pieces: int, cores: int, forget_plugins: None) -> None:
    load_plugins([str(ON_CORES)])
    misread = sys.modules[RULES.entry("adascale-on-cores").make.__module__].misread
    found, errors = read_on_cores(pieces, cores, 10.0, 1.0, steps=2000)
    each, more = divmod(pieces, cores)
    added = (cores - more) * each * ((each - 2) + 10) + more * (each + 1) * ((each - 1) + 10)  # n((n - 2) mu2 + s2)
    assert abs(found[0] - (10 + added / (pieces - 1))) < 4 * errors[0]
    assert abs(found[1] - (1 - added / pieces / (pieces - 1))) < 4 * errors[1]
    s2, mu2 = misread(10.0, 1.0, pieces=pieces, cores=cores)
    assert s2 == pytest.approx(10 + added / (pieces - 1))
    assert mu2 == pytest.approx(max(0.0, 1 - added / pieces / (pieces - 1)))


def test_the_gain_as_published_on_one_core_and_on_eight(forget_plugins: None) -> None:
    # 32 pieces of the reference batch of 8 from 32 workers, s2 = 10, mu2 = 1 (V = 80). True: 11/(10/32 + 1) = 8.38.
    # Eight cores have n = 4 pieces each: D = 32 (2 + 10) = 384, read are 10 + 384/31 = 22.39 and 1 - 12/31 = 0.613,
    # whose sum is 23; s2/K + mu2, the squared norm of the mean gradient, stays as it was, 1.3125: 23/1.3125 = 17.52.
    # One core has 32: D = 32 (30 + 10), read is 10 + 1280/31, and mu2 = 1 - 40/31 < 0: all noise, the gain is 32.
    load_plugins([str(ON_CORES)])
    context = StepContext(
        step=0, batch=256, ref_batch=8, samples=0, workers=32, moments=Moments(noise=80.0, signal=1.0)
    )

    def multiplier(text: str) -> float | tuple[float, ...]:
        rule = make_rule(f"adascale-on-cores({text})")
        return rule.scale(context, rule.init())[0].lr

    assert multiplier("pieces=1, memory=false") == pytest.approx(11 / 1.3125)
    assert multiplier("pieces=1, cores=8") == pytest.approx(23 / 1.3125)
    assert multiplier("pieces=1, cores=1") == pytest.approx(32)
    # Without defects and with pieces of the reference batch it is AdaScale.
    assert multiplier("pieces=1, memory=false, rescaling=false") == pytest.approx(
        make_rule("adascale").scale(context, make_rule("adascale").init())[0].lr
    )
    # Four pieces of 2 per worker: K = 128, s2 = 40, the gain of 128 pieces is 41/1.3125, times 2/8 for the rate.
    assert multiplier("pieces=4, memory=false") == pytest.approx(41 / 1.3125 / 4)


@pytest.mark.parametrize(("scale", "part"), [(256, "0.56"), (1_000, "0.82"), (10_000, "0.98")])
@pytest.mark.parametrize("workers", [2, 29, 64])
def test_a_reference_of_32_samples_lowers_the_rate_as_the_page_of_recipes_says(
    scale: int, part: str, workers: int, forget_plugins: None
) -> None:
    """With the noise scale phi, in samples: 32/256 of the gain from 32 is (phi + 32)/(phi + 256) of that from 256."""
    load_plugins([str(ON_CORES)])
    context = StepContext(
        step=0, batch=128 * workers, ref_batch=256, samples=0, workers=workers,
        moments=Moments(noise=float(scale), signal=1.0),
    )  # fmt: skip
    theirs, ours = (
        rule.scale(context, rule.init())[0].lr
        for rule in (make_rule("adascale-on-cores(memory=false, rescaling=false)"), make_rule("adascale"))
    )
    assert isinstance(theirs, float) and isinstance(ours, float)
    assert theirs / ours == pytest.approx((scale + 32) / (scale + 256))
    assert f"{theirs / ours:.2f}" == part
    page = (EVIDENCE.parent / "recipes.md").read_text()
    assert re.search(rf"\b{re.escape(part)} (of it )?at (a noise scale of )?{scale:,}", " ".join(page.split()))


def test_a_change_of_the_scale_multiplies_the_variance_as_published(forget_plugins: None) -> None:
    # As above, without memory, from 32 pieces to 64: the average 10 counts 0.936 x 1/2 + 0.064 = 0.532 times.
    load_plugins([str(ON_CORES)])
    rule = make_rule("adascale-on-cores(pieces=1, memory=false)")
    moments = Moments(noise=80.0, signal=1.0)
    _, state = rule.scale(
        StepContext(step=0, batch=256, ref_batch=8, samples=0, workers=32, moments=moments), rule.init()
    )
    later, _ = rule.scale(StepContext(step=1, batch=512, ref_batch=8, samples=256, workers=64, moments=moments), state)
    assert later.lr == pytest.approx((5.32 + 1) / (5.32 / 64 + 1))
