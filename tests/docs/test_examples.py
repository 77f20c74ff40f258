from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*command: str | Path) -> str:
    result = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def final_accuracy(output: str) -> float:
    return float(re.findall(r"accuracy (\S+)", output)[-1])


def test_two_changed_lines_make_a_script_elastic_and_both_learn() -> None:
    plain, elastic = ((EXAMPLES / name).read_text().splitlines() for name in ("plain.py", "elastic.py"))
    changed = [
        line
        for line in difflib.unified_diff(plain, elastic, lineterm="", n=0)
        if line[0] in "+-" and line[:3] not in ("+++", "---") and line[1:].strip() and "import" not in line
    ]
    assert [line.split(" ")[0] for line in changed] == ["-sampler", "-optimizer", "+sampler", "+optimizer"]
    assert final_accuracy(run(EXAMPLES / "plain.py")) > 0.95
    assert final_accuracy(run(EXAMPLES / "elastic.py")) > 0.9


def test_a_new_rule_in_ten_lines_is_used_from_the_command_line(tmp_path: Path) -> None:
    source = (EXAMPLES / "own_rule.py").read_text()
    code = [line for line in source.partition('"""\n\nfrom')[2].splitlines() if line.strip()]
    assert len(code) <= 10
    plugin = ("--plugin", EXAMPLES / "own_rule.py")
    run(
        "-m",
        "ebbflow",
        "train",
        "digits-mlp",
        *plugin,
        "--rule",
        "cuberoot",
        "--epochs",
        "1",
        "--out",
        tmp_path / "run",
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "record.jsonl").read_text().splitlines()]
    step = next(row for row in rows if row["kind"] == "step")
    assert step["multiplier"] == (step["batch"] / 32) ** (1 / 3)
