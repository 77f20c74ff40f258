"""The published traces that come with the package: their content, their parts, and that they are in a wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib import resources
from pathlib import Path

import pytest

from ebbflow.errors import TraceError
from ebbflow.traces import load, read, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "hours", "least", "mean", "most", "changes", "area"),
    [
        # As the traces' collection describes the complete files, and their sampled sums: 63 s and 30 s per sample.
        ("gcp-a100-2022-05(stop=13545s)", 3.76, 0, 46.4, 56, 48, 174.7),
        ("gcp-tpuv2-2022-04", 16.12, 24, 74.7, 120, 97, 1203.3),
        # Without the last 441 s, seven samples, 174.7 accelerator-hours lose 48 to 15 workers for 63 s, then none.
        ("gcp-a100-2022-05", 3.64, 29, 47.9, 56, 46, 174.4),
    ],
)
def test_the_figures_are_those_of_the_published_files(
    name: str, hours: float, least: int, mean: float, most: int, changes: int, area: float
) -> None:
    found = load(name).stats()
    assert (found.min, found.max, found.changes) == (least, most, changes)
    assert found.duration_s / 3600 == pytest.approx(hours, abs=0.005)
    assert found.mean == pytest.approx(mean, abs=0.05)
    assert found.accelerator_hours == pytest.approx(area, abs=0.05)


@pytest.mark.parametrize(
    ("name", "raw"),
    [("gcp-a100-2022-05(stop=13545s)", "raw_eth_a100"), ("gcp-tpuv2-2022-04", "gcp_tpuv2-8_cores_2022-04")],
)
def test_they_equal_the_files_that_their_author_published(name: str, raw: str, shared: Path) -> None:
    assert load(name) == read(shared / "traces" / f"{raw}.csv")


def test_a_part_is_what_converting_the_file_would_write(tmp_path: Path) -> None:
    write(load("gcp-tpuv2-2022-04(start=212min, stop=487min)"), tmp_path / "part.csv")
    whole = load("gcp-tpuv2-2022-04")
    assert read(tmp_path / "part.csv") == whole.slice(212 * 60.0, 487 * 60.0)  # type: ignore[arg-type]
    # 24 to 88 cores there; 88 -> 22 is a quarter of each, exactly, since a machine has 8.
    quarter = load("gcp-tpuv2-2022-04(start=212min, stop=487min, max_workers=22)")
    assert (4 * quarter.workers).tolist() == read(tmp_path / "part.csv").workers.tolist()
    with pytest.raises(TraceError, match="covers 0 to 13545 s"):
        load("gcp-a100-2022-05(stop=5h)")


@pytest.mark.process
def test_a_wheel_contains_the_traces_and_their_licence(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, "dist"], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        for entry in resources.files("ebbflow.traces").joinpath("published").iterdir():
            assert packed.read(f"ebbflow/traces/published/{entry.name}") == entry.read_bytes()
        assert sum(name.endswith("published/LICENCE") and ".dist-info/licenses/" in name for name in names) == 1
        assert "Copyright (c) 2022 Joel André" in packed.read("ebbflow/traces/published/LICENCE").decode()
        assert b"License-Expression: Apache-2.0 AND BSD-3-Clause" in packed.read(
            next(name for name in names if name.endswith(".dist-info/METADATA"))
        )
        assert any(name.startswith("ebbflow/studies/recipes/") for name in names)
