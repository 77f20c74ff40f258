"""The wheel: it holds what a run reads, and trains and reports where the source is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="building a wheel needs the package build")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, source]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("ebbflow-*.whl")
    return path


def test_it_holds_recipes_traces_pages_and_licences(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, pattern in (("studies/recipes", "*.toml"), ("traces/published", "*"), ("report", "*.[hcj]*s*")):
        expected = {f"ebbflow/{folder}/{path.name}" for path in (ROOT / "src" / "ebbflow" / folder).glob(pattern)}
        assert expected - {f"ebbflow/{folder}/__pycache__"} <= names
    assert sum("licen" in name.lower() for name in names) >= 2


def test_it_trains_and_reports_without_the_source(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", home, wheel]
    subprocess.run(command, check=True, timeout=120)
    environment = {**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import ebbflow; print(ebbflow.__file__)").startswith(str(home))
    out = run("-m", "ebbflow", "study", "demo", "--seeds", "1", "--scale", "0.1", "--out", "demo")
    assert "adascale" in out
    assert (tmp_path / "demo" / "report" / "index.html").exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_make_dist_installs_into_a_clean_environment_and_runs_the_demo() -> None:
    """Builds below `build` in the project's folder, where make leaves its results."""
    subprocess.run(["make", "dist"], cwd=ROOT, check=True, timeout=1700)
