"""The scripts of docs/integrations.md: their diffs, and that they run with and without what is elastic."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest

from docs.page_diffs import without_diff

pytestmark = pytest.mark.slow  # all of it together: it imports the frameworks

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_diff_on_the_page_leads_from_a_plain_script_to_the_example(name: str, tmp_path: Path) -> None:
    """What the page adds is in the example; without it, and with what the page removes, a plain script runs."""
    if importlib.util.find_spec(SCRIPTS[name]) is None:
        pytest.skip(f"{SCRIPTS[name]} is not installed")
    plain: dict[str, Any] = {"__name__": name}
    exec(compile(without_diff("integrations.md", name), name, "exec"), plain)
    settings = SHORT[name] | ({} if name == "lightning_transformer" else {"folder": str(tmp_path)})
    plain["main"](**settings)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](**settings)


def test_the_diff_for_ray_leads_from_a_script_to_the_example() -> None:
    """It is not run here: starting a Ray takes long. test_ray_groups.py runs the example."""
    assert "ebbflow" not in without_diff("integrations.md", "ray_train").partition("from ebbflow")[2].partition("\n")[2]
