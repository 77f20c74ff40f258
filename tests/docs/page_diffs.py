"""The diffs on the pages: from a plain script to an example."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def without_diff(page: str, name: str) -> str:
    """The script of an example before the changes that a page shows."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.search(rf"\(\.\./examples/{name}\.py\).*?^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/{page} has no diff for {name}"
    script = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    script = re.sub(r" *# elastic.*$", "", script, flags=re.MULTILINE)
    for hunk in re.split(r"^@@.*\n", found[1], flags=re.MULTILINE):
        lines = [(line[:1], line[1:]) for line in hunk.splitlines()]
        after = "".join(f"{text}\n" for sign, text in lines if sign != "-")
        before = "".join(f"{text}\n" for sign, text in lines if sign != "+")
        assert script.count(after) == 1, f"not in examples/{name}.py:\n{after}"
        script = script.replace(after, before)
    return script


def changed_lines(page: str, name: str) -> tuple[int, int]:
    """How many lines an example adds to a plain script, and how many it removes, without comments and empty lines.

    The plain script is the example without the diff of the page and without the other lines that are marked, such as
    the import, which the page need not show.
    """
    script = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    after = [re.sub(r" *# elastic.*$", "", line) for line in script]
    marked = {plain for line, plain in zip(script, after, strict=True) if "  # elastic" in line}
    before = [line for line in without_diff(page, name).splitlines() if line not in marked]
    changes = [line for line in difflib.ndiff(before, after) if line[2:].strip() and line[2:].strip()[0] != "#"]
    return sum(line.startswith("+ ") for line in changes), sum(line.startswith("- ") for line in changes)
