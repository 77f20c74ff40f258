"""Python code on the pages: all of it compiles, and the program on the page about Dask runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PYTHON = re.compile(r"^```python.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "api.md"], ids=lambda page: page.name)
def test_the_python_code_of_a_page_compiles(page: Path) -> None:
    for block in PYTHON.findall(page.read_text(encoding="utf-8")):
        compile(block, page.name, "exec")


@pytest.mark.process
@pytest.mark.timeout(120)
def test_the_programs_of_the_page_about_dask_run(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    policy, program = PYTHON.findall((ROOT / "docs" / "dask.md").read_text(encoding="utf-8"))
    (tmp_path / "policy.py").write_text(f"{policy}\n\nprint(Doubling(every=10, initial=8))\n", encoding="utf-8")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    # Epochs of 2,000 samples: 63 steps of 32; 31 steps of 64, since two workers can do no more, and one of 16, twice.
    # That is 127. Until the second worker is there, which may take a while, steps are of 32: at most 189.
    steps = {f"{count} steps" for count in range(127, 190)}
    for name, expected in (("policy.py", {"doubling(10, initial=8)"}), ("program.py", steps)):
        result = subprocess.run(
            [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] in expected


def test_the_code_of_the_page_for_people_in_a_hurry_runs() -> None:
    (program,) = PYTHON.findall((ROOT / "docs" / "which-rule.md").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(compile(program, "which-rule.md", "exec"), names)
    assert str(names["optimizer"].rule) == "adascale+statewarmup(0.05)"
