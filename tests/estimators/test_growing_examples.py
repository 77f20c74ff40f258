"""The examples and the page of the estimators, run as a reader would run them."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def rows(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The rows of the table that an example prints."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()[1:]


def test_the_example_of_holt_and_sievert_grows_its_batch_five_fold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # 100 samples: 25 updates an epoch with 4 for four epochs, 5 with 20 for four, 1 with 100 for two.
    table = [line.split() for line in rows("adadamp_regressor.py", monkeypatch=monkeypatch, capsys=capsys)]
    assert [int(row[1]) for row in table] == [4] * 4 + [20] * 4 + [100] * 2
    assert [int(row[2]) for row in table] == [25, 50, 75, 100, 105, 110, 115, 120, 121, 122]


def test_the_study_of_a_growing_batch_counts_its_updates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # 1,347 samples: ceil(1347/16) = 85 updates an epoch; nothing has grown yet after one.
    arguments = ("--epochs", "1", "--seeds", "1")
    table = rows("growing_batch.py", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert [line.split()[:2] for line in table] == [["constant", "85"], ["rate/5", "85"], ["batch*5", "85"]]


def test_the_code_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = PYTHON.findall((ROOT / "docs" / "estimators.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "estimators.md", "exec"), names)
