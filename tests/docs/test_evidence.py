"""What the pages of evidence rest on: studies that can be read, records that can be reported, the defect as it was."""

from __future__ import annotations

import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ebbflow.cli.main import app
from ebbflow.config import load_plugins
from ebbflow.moments.estimate import Moments
from ebbflow.record import read_record
from ebbflow.report.results import load_results
from ebbflow.report.tables import summarise
from ebbflow.rules.base import Rule, StepContext
from ebbflow.rules.registry import RULES, make_rule
from ebbflow.studies.study import load_study

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
PLUGIN = EVIDENCE / "andre" / "published_adascale.py"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rule]:
    """The rule of the study's plugin, which is forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))
    load_plugins([str(PLUGIN)])
    yield make_rule("adascale-published")
    for name in {name for name in sys.modules if name.startswith("ebbflow_plugin_")} - before:
        del sys.modules[name]


STUDIES = sorted(path.parent.name for path in EVIDENCE.glob("*/study.toml"))


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


@pytest.mark.parametrize("folder", STUDIES)
def test_every_result_of_the_report_stands_in_the_tables_of_the_page(folder: str, tmp_path: Path) -> None:
    records(folder, tmp_path)
    page = (EVIDENCE / f"{folder.split('-')[0]}.md").read_text()
    rows = " ".join(line for line in page.splitlines() if line.startswith("|")).replace("*", "")
    results = load_results(tmp_path)
    cells = summarise(results.arms, results.config).cells
    assert len(cells) >= 11
    for cell in cells:
        assert cell.mean is not None
        ways = [
            f" {100 * cell.mean:.{digits}f} " + (f"± {100 * cell.std:.{digits}f} " if cell.std is not None else "")
            for digits in (1, 2)
        ]
        assert any(way in rows for way in ways), f"{cell}: none of {ways}"


def convert(source: Path, target: Path, *options: str) -> None:
    assert CliRunner().invoke(app, ["trace", "convert", str(source), str(target), *options]).exit_code == 0


def test_the_defect_reads_noise_and_signal_as_code_that_keeps_the_last_sum_does() -> None:
    """Re-enacted: a piece is the difference to the sum before it, which is not cleared when a step begins."""
    random = np.random.default_rng(0)
    pieces, width, steps = 6, 40, 20_000
    mean = np.full(width, 0.5)  # mu2 = 10
    deviation = 0.6  # s2 = 40 x 0.36 = 14.4
    last = np.zeros(width)
    found = []
    for _ in range(steps):
        gradients = mean + deviation * random.standard_normal((pieces, width))
        total = 0.0
        summed = np.zeros(width)
        for gradient in gradients:
            summed = summed + gradient
            total += float(np.square(summed - last).sum())
            last = summed
        mean_sq = float(np.square(summed / pieces).sum())
        noise = (total - pieces * mean_sq) / (pieces - 1)
        found.append((noise, mean_sq - noise / pieces))
    s2, mu2 = 14.4, 10.0
    wrong_noise = s2 + pieces * ((pieces - 2) * mu2 + s2) / (pieces - 1)
    wrong_signal = (mu2 - s2) / (pieces - 1)
    averages, errors = np.mean(found[1:], axis=0), np.std(found[1:], axis=0) / np.sqrt(steps)
    assert abs(averages[0] - wrong_noise) < 4 * errors[0]
    assert abs(averages[1] - wrong_signal) < 4 * errors[1]


def test_the_gain_as_published(published: Rule) -> None:
    # Four pieces of the reference batch of 8, V = 8 so that s2 = 1, mu2 = 2. Read: 1 + 4 (2 x 2 + 1)/3 = 23/3 and
    # (2 - 1)/3 = 1/3, so the gain is 8/(23/12 + 4/12) = 32/9 of 4, where 3/(1/4 + 2) = 4/3 is right.
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
