"""What the pages of evidence rest on: studies that can be read, records that can be reported, the defect as it was."""

from __future__ import annotations

import re
import shutil
import tarfile
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ebbflow.cli.main import app
from ebbflow.core.plugins import load_plugins
from ebbflow.moments.estimate import Moments
from ebbflow.record import read_record
from ebbflow.report.results import load_results
from ebbflow.report.summary import Cell, summarise
from ebbflow.rules.rule import Rule, StepContext, make_rule
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


@pytest.mark.parametrize("folder", UPCOMING)
def test_a_study_that_is_still_to_be_run_can_be(folder: str, forget_plugins: None) -> None:
    study = load_study(str(EVIDENCE / folder / "study.toml"))
    check_arms(study.arms())
    assert scaled(study, 0.1).arms()


def records(folder: str, to: Path) -> list[Path]:
    with tarfile.open(EVIDENCE / folder / "records.tar.xz") as packed:
        packed.extractall(to, filter="data")
    return sorted(to.glob("arms/*/record.jsonl"))


@pytest.mark.parametrize("folder", STUDIES)
def test_the_records_can_be_read_and_name_no_machine(folder: str, tmp_path: Path) -> None:
    found = records(folder, tmp_path)
    assert len(found) >= 9
    for path in found:
        assert read_record(path).steps
        assert '"/' not in path.read_text(), "a path of the machine that it was made on"


@pytest.mark.parametrize("folder", STUDIES)
def test_the_study_finds_its_runs_again(folder: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Runs are known by what they compute: these were made before settings that exist now, and on another machine."""
    home = EVIDENCE / folder
    if folder == "andre":  # its traces are not part of Ebbflow
        traces = request.getfixturevalue("shared") / "traces"
        home = shutil.copytree(home, tmp_path / "andre")
        convert(traces / "gcp_a100_2022-05.csv", home / "gpu.csv", "--stop", "13104s")
        convert(traces / "gcp_tpuv2-8_cores_2022-04.csv", home / "tpu.csv", "--start", "212min", "--stop", "487min")
    arms = {arm.id: arm.config for arm in load_study(str(home / "study.toml")).arms()}
    found = records(folder, tmp_path / "out")
    assert {path.parent.name for path in found} == set(arms)
    for path in found:
        config, record = arms[path.parent.name], read_record(path)
        recorded = record.header.config
        assert (config.rule, config.label, config.seed) == tuple(recorded[key] for key in ("rule", "trace", "seed"))
        assert record.status == "finished"


BATCHES = {f"batch {batch}": f"{batch:,}" for batch in (1024, 2048, 4096, 8192, 16384)}
WARMUPS = {
    "": "no warm-up", "warmup(2.75ep)": "fixed warm-up", "statewarmup(0.05)": "state-aware warm-up",
    "statewarmup(0.05, by=multiplier)": "state-aware warm-up",
}  # fmt: skip


def place(folder: str, cell: Cell) -> tuple[str, str, str]:
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
    if folder == "dynamic":
        row = {"static 1x": "1 worker", "x12 early": "x12 in epochs 5", "x12 late": "x12 in epochs 14"}.get(
            cell.trace, "random"
        )
        names = {"constant": "fixed mini-batch", "linear+inside": "eq. 13"}
        return "fleet", row, names.get(cell.rule, cell.rule)
    if folder == "lena-table1":
        names = {"linear": "linear, warm-up", "adascale": "AdaScale", "lena": "LENA"}
        return "samples per step", BATCHES[cell.trace], names[cell.rule.partition("+")[0]]
    rule, _, warmup = cell.rule.partition("+")
    row = {"linear": "linear", "adascale": "AdaScale", "lena": "LENA"}[rule]
    return f"{BATCHES[cell.trace]} samples per step", row, WARMUPS[warmup]


def tables(page: str) -> dict[str, list[dict[str, str]]]:
    """By its corner, the rows of every table of a page, by column; "" is the row's own name. Bold is taken off."""
    found = {}
    for block in re.findall(r"(?:^\|.*\|\n)+", page.replace("*", ""), flags=re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found[head[0]] = [dict(zip(["", *head[1:]], row, strict=True)) for row in rows]
    return found


@pytest.mark.parametrize("folder", STUDIES)
def test_every_result_of_the_report_stands_in_its_place_on_the_page(folder: str, tmp_path: Path) -> None:
    """Two digits after the point in LENA's Table 1, else one; in brackets what the paper has."""
    records(folder, tmp_path)
    page = tables((EVIDENCE / f"{folder.split('-')[0]}.md").read_text())
    results = load_results(tmp_path)
    cells = summarise(results.arms, results.config).cells
    assert len(cells) >= 11
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


def test_what_lenas_tables_have_in_common_is_the_same_in_both() -> None:
    """Table 2 takes three of its nine combinations from Table 1, with a digit less."""
    page = tables((EVIDENCE / "lena.md").read_text())
    first = {row[""]: row for row in page["samples per step"]}
    taken = {
        "linear, warm-up": ("linear", "fixed warm-up"),
        "AdaScale": ("AdaScale", "no warm-up"),
        "LENA": ("LENA", "state-aware warm-up"),
    }
    for batch in ("1,024", "8,192", "16,384"):
        second = {row[""]: row for row in page[f"{batch} samples per step"]}
        for column, (rule, warmup) in taken.items():
            ours, paper = (Decimal(number) for number in re.findall(r"[\d.]+(?= ±|\))", first[batch][column]))
            tenth = Decimal("0.1")
            assert second[rule][warmup] == f"{ours.quantize(tenth)} ({paper.quantize(tenth)})"


def convert(source: Path, target: Path, *options: str) -> None:
    assert CliRunner().invoke(app, ["trace", "convert", str(source), str(target), *options]).exit_code == 0


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
