"""The pages as a site: it can be built without a warning, and a broken link is one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("material", reason="the site needs mkdocs-material")

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration of the site, with a copy of the pages."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    pages = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("*.xz"))
    for archive in ROOT.glob("docs/**/*.xz"):  # large; links to them only need to find something
        (pages / archive.relative_to(ROOT / "docs")).touch()
    return load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(pages), site_dir=str(tmp_path / "site"))


def test_the_site_is_built_without_warnings_and_has_every_page(config: Any, tmp_path: Path) -> None:
    build(config)  # raises Abort after a warning: a page outside of the navigation, a link that leads nowhere
    site = tmp_path / "site"
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in ROOT.glob("docs/**/*.md")}
    assert {str(page).replace("README", "index") for page in pages} <= {
        str(path.relative_to(site)) for path in site.glob("**/*.html")
    }
    front = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="guide.html"' in front
    assert 'href="examples/' in (site / "own-loops.html").read_text(encoding="utf-8")
    assert "fonts.googleapis" not in front  # nothing is loaded from elsewhere


@pytest.mark.parametrize("link", ["[x](nowhere.md)", "[x](glossary.md#no-such-heading)"])
def test_a_link_that_leads_nowhere_is_an_error(config: Any, link: str) -> None:
    page = Path(config.docs_dir) / "guide.md"
    page.write_text(f"{page.read_text(encoding='utf-8')}\n\n{link}\n", encoding="utf-8")
    with pytest.raises(Abort):
        build(config)
