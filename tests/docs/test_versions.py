"""The version is the same wherever it is written."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import ebbflow

ROOT = Path(__file__).resolve().parents[2]


def test_changelog_and_citation_are_those_of_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d+\.\d+\.\d+)(?:, (\S+))?$", changes, re.MULTILINE)
    assert versions[0] == (ebbflow.__version__, str(citation["date-released"]))
    assert citation["version"] == ebbflow.__version__
    assert [version for version, _ in versions] == ["0.2.0", "0.1.0"]
