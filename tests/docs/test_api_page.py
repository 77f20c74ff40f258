"""The API reference is what the docstrings say."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_api_reference_is_up_to_date() -> None:
    expected = runpy.run_path(str(DOCS / "generate_api.py"))["page"]()
    assert (DOCS / "api.md").read_text(encoding="utf-8") == expected, "run make docs"


def test_every_public_name_and_every_setting_is_on_the_page() -> None:
    import ebbflow

    page = (DOCS / "api.md").read_text(encoding="utf-8")
    for name in set(ebbflow.__all__) - {"__version__"}:
        assert f"### ebbflow.{name}\n" in page
    for name in ebbflow.RunConfig.model_fields:
        assert f"| `{name}` |" in page
