"""The pages as Markdown: links and paths point to what is there, tables are whole, no merge was left half done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:src|tests|docs|examples|benchmarks|deploy)/[\w./-]+)`")
"""A path of the project in backticks; one with a word in capitals, as `rules/NAME.py`, stands for many."""


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names under which headings can be linked: lower case, words joined by hyphens, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_all_pages_are_looked_at() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "docs/design.md", "docs/evidence/lena.md", "docs/rules/lena.md"} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_path_of_a_page_leads_somewhere(page: Path) -> None:
    text = prose(page)
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        to = page.parent / file if file else page
        assert to.exists(), f"{page.name}: {target} is not there"
        if anchor:
            assert anchor in anchors(to), f"{page.name}: {target}: {to.name} has no such heading"
    for path in PATH.findall(text):
        assert "NAME" in path or (ROOT / path).exists(), f"{page.name}: {path} is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_both_sides_of_a_merge(page: Path) -> None:
    assert not re.findall(r"^(?:<{7}|={7}|>{7})(?: .*)?$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_of_a_table_has_the_columns_of_its_head_on_one_line(page: Path) -> None:
    columns = 0
    for line in prose(page).splitlines():
        bars = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (bars and columns) or (bars == columns and line.rstrip().endswith("|")), f"{page.name}: {line}"
        columns = bars
