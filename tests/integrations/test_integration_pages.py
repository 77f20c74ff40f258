"""The scripts of docs/integrations.md: their diffs, and that they run with and without what is elastic."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # all of it together: it imports the frameworks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
SCRIPTS = {
    "transformers_trainer": "transformers",
    "lightning_transformer": "lightning",
    "accelerate_loop": "accelerate",
}
SHORT: dict[str, dict[str, Any]] = {
    "transformers_trainer": {"samples": 60, "num_train_epochs": 1},
    "lightning_transformer": {"samples": 60, "max_epochs": 1},
    "accelerate_loop": {"epochs": 1},
}


def diff_of(name: str) -> str:
    found = re.search(rf"\(\.\./examples/{name}\.py\).*?^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/integrations.md has no diff for {name}"
    return found[1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_diff_on_the_page_leads_from_a_plain_script_to_the_example(name: str, tmp_path: Path) -> None:
    """What the page adds is in the example; without it, and with what the page removes, a plain script runs."""
    if importlib.util.find_spec(SCRIPTS[name]) is None:
        pytest.skip(f"{SCRIPTS[name]} is not installed")
    plain: dict[str, Any] = {"__name__": name}
    exec(compile(without_diff(name), name, "exec"), plain)
    settings = SHORT[name] | ({} if name == "lightning_transformer" else {"folder": str(tmp_path)})
    plain["main"](**settings)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](**settings)


def test_the_diff_for_ray_leads_from_a_script_to_the_example() -> None:
    """It is not run here: starting a Ray takes long. test_ray_groups.py runs the example."""
    assert "ebbflow" not in without_diff("ray_train").partition("from ebbflow")[2].partition("\n")[2]


def without_diff(name: str) -> str:
    """The script of an example before the changes that the page shows."""
    script = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    script = re.sub(r" *# elastic.*$", "", script, flags=re.MULTILINE)
    for hunk in re.split(r"^@@.*\n", diff_of(name), flags=re.MULTILINE):
        lines = [(line[:1], line[1:]) for line in hunk.splitlines()]
        after = "".join(f"{text}\n" for sign, text in lines if sign != "-")
        before = "".join(f"{text}\n" for sign, text in lines if sign != "+")
        assert script.count(after) == 1, f"not in examples/{name}.py:\n{after}"
        script = script.replace(after, before)
    return script
