"""The layers that docs/design.md draws are those that import-linter enforces."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
LAYERS: list[str] = next(contract for contract in CONTRACTS if contract["type"] == "layers")["layers"]
WITHOUT_TORCH: list[str] = next(c for c in CONTRACTS if c.get("forbidden_modules") == ["torch"])["source_modules"]
NO_LAYER = {"__init__", "__main__", "_version", "sklearn", "py", "__pycache__"}
"""Modules that only re-export names or start the command."""


def table() -> list[tuple[list[str], str]]:
    """The packages of each row of the table of layers, and what it says about torch."""
    section = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## Packages and layers")[2]
    rows = re.findall(r"^\| (`.*?) \|.*\| (\w+) \|$", section.partition("\n## ")[0], flags=re.MULTILINE)
    return [(re.findall(r"`(\w+)`", cell), torch) for cell, torch in rows]


def test_the_table_of_layers_is_the_one_that_is_enforced() -> None:
    assert [" | ".join(f"ebbflow.{name}" for name in packages) for packages, _ in table()] == LAYERS


def test_every_package_has_a_layer() -> None:
    found = {path.stem for path in (ROOT / "src" / "ebbflow").iterdir()} - NO_LAYER
    assert found == {name for packages, _ in table() for name in packages}


def test_the_table_says_who_imports_torch() -> None:
    for packages, torch in table():
        kinds = set()
        for name in packages:
            whole = f"ebbflow.{name}" in WITHOUT_TORCH
            some = any(module.startswith(f"ebbflow.{name}.") for module in WITHOUT_TORCH)
            kinds.add("no" if whole else "partly" if some else "yes")
        assert torch == (kinds.pop() if len(kinds) == 1 else "partly"), packages


def test_the_page_names_every_function_that_registers_an_extension() -> None:
    import ebbflow

    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for name in ebbflow.__all__:
        assert not name.startswith("register_") or f"| `{name}` |" in page
