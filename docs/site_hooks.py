"""What mkdocs needs to make the site of the same pages that are read in the repository: see `mkdocs.yml`.

The front page is README.md; CONTRIBUTING.md, CHANGELOG.md and the programs of `examples` become pages, and links that
lead out of `docs` lead to these. `folder/*` in the navigation stands for all pages of the folder.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the repository's root and the pages that they become."""

EXAMPLES = {f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted(ROOT.glob("examples/*.py"))}
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write the pages of a folder in place of `folder/*`, its README first."""

    def listed(entry: Any) -> Any:
        if isinstance(entry, list):
            return [listed(item) for item in entry]
        if isinstance(entry, dict):
            return {title: listed(item) for title, item in entry.items()}
        if not entry.endswith("/*"):
            return entry
        if entry == "examples/*":
            return list(EXAMPLES.values())
        folder = ROOT / "docs" / entry.removesuffix("/*")
        return [f"{folder.name}/{path.name}" for path in sorted(folder.glob("*.md"), key=_readme_first)]

    config.nav = listed(config.nav)
    return config


def _readme_first(path: Path) -> tuple[bool, str]:
    return path.name != "README.md", path.name


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files outside of `docs`."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for source, page in EXAMPLES.items():
        code = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=f"# {source}\n\n```python\n{code}```\n"))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page, which are paths in the repository, lead to pages of the site."""
    uri = page.file.src_uri
    source = next((name for name, made in PAGES.items() if made == uri), f"docs/{uri}")

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        if (ROOT / path).is_dir():
            path += "/README.md"
        to = PAGES.get(path) or EXAMPLES.get(path) or path.removeprefix("docs/")
        return posixpath.relpath(to, posixpath.dirname(uri) or ".")

    parts = CODE.split(markdown)  # code blocks are the odd ones
    return "".join(part if number % 2 else LINK.sub(target, part) for number, part in enumerate(parts))
